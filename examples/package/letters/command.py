"""The command `lachesis alphabet`."""

from lachesis.cli.base import app, console


@app.command("alphabet")
def alphabet(upper: bool = False) -> None:
    """Print the letters."""
    console.print("ABCD" if upper else "abcd")
