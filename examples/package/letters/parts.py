"""A reward function and a sink."""

from lachesis import Sink


def vowels(completions, **columns):
    return [sum(text.count(vowel) for vowel in "aeiou") / 8 for text in map(str, completions)]


class Notes(Sink):
    """Writes a line for each step into `notes` in the run's directory."""

    def __init__(self, run_dir):
        self.path = run_dir / "notes"

    def write(self, record):
        with self.path.open("a") as notes:
            notes.write(f"step {record.step}\n")
