from __future__ import annotations

import json

import pytest

from lachesis.common.errors import CheckpointError, ConfigError, DataError
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.rollouts.datasets import PromptStream, split_eval
from lachesis.rollouts.datasets.curriculum import PassRates


def numbered(count: int) -> list[Prompt]:
    return [Prompt(id=str(i), token_ids=(i,), text=f"{i}", columns={"answer": i}) for i in range(count)]


def ids(prompts: list[Prompt]) -> list[int]:
    return [int(prompt.id) for prompt in prompts]


class TestSplit:
    def test_the_parts_are_disjoint_complete_and_random(self):
        training, held_out = split_eval(numbered(100), 20, seed=1)
        assert len(held_out) == 20
        assert sorted(ids(training) + ids(held_out)) == list(range(100))
        assert ids(training) == sorted(ids(training))
        assert ids(held_out) not in (list(range(80, 100)), list(range(20)))

    def test_the_seed_decides(self):
        assert split_eval(numbered(50), 10, seed=1) == split_eval(numbered(50), 10, seed=1)
        assert split_eval(numbered(50), 10, seed=1) != split_eval(numbered(50), 10, seed=2)

    def test_nothing_held_out(self):
        assert split_eval(numbered(5), 0, seed=0) == (numbered(5), [])

    @pytest.mark.parametrize(("share", "count"), [(0.1, 2), (0.5, 10), (0.001, 1)])
    def test_a_share_of_the_rows(self, share, count):
        training, held_out = split_eval(numbered(20), share, seed=0)
        assert (len(training), len(held_out)) == (20 - count, count)

    @pytest.mark.parametrize("size", [-1, 1.5, -0.1])
    def test_what_is_neither_a_count_nor_a_share(self, size):
        with pytest.raises(ConfigError, match="eval_size"):
            split_eval(numbered(5), size, seed=0)

    def test_a_follow_up_goes_where_its_row_goes(self):
        problems = [Prompt(id=name, token_ids=(1,), text=name) for i in range(20) for name in (f"{i}", f"{i}+1")]
        training, held_out = split_eval(problems, 5, seed=3)
        assert len(held_out) == 10
        rows = [{problem.id.split("+")[0] for problem in part} for part in (training, held_out)]
        assert not rows[0] & rows[1]

    def test_nothing_left_to_train_on(self):
        with pytest.raises(DataError, match=r"data\.eval_size is 5, but there are only 5"):
            split_eval(numbered(5), 5, seed=0)


class TestStream:
    def test_every_epoch_has_every_prompt_in_an_order_of_its_own(self):
        stream = PromptStream(numbered(20), seed=3)
        first, second = ids(stream.take(20)), ids(stream.take(20))
        assert sorted(first) == sorted(second) == list(range(20))
        assert first != second
        assert first != list(range(20))
        assert stream.epoch == 1

    def test_the_seed_decides(self):
        def order(seed: int) -> list[int]:
            return ids(PromptStream(numbered(20), seed=seed).take(40))

        assert order(3) == order(3)
        assert order(3) != order(4)

    def test_the_size_of_the_bites_does_not_matter(self):
        whole = ids(PromptStream(numbered(7), seed=0).take(30))
        stream = PromptStream(numbered(7), seed=0)
        assert [n for size in (1, 9, 3, 17) for n in ids(stream.take(size))] == whole

    def test_without_shuffling_the_order_is_the_files(self):
        assert ids(PromptStream(numbered(3), seed=0, shuffle=False).take(7)) == [0, 1, 2, 0, 1, 2, 0]

    @pytest.mark.parametrize("taken", [0, 4, 7, 16])
    def test_resume_is_exact(self, taken):
        stream = PromptStream(numbered(7), seed=0)
        stream.put_back(stream.take(taken)[-2:])
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = PromptStream(numbered(7), seed=0)
        resumed.take(3)
        resumed.load_state_dict(state)
        assert ids(resumed.take(25)) == ids(stream.take(25))

    def test_what_is_put_back_comes_first_in_its_order(self):
        stream = PromptStream(numbered(5), seed=0, shuffle=False)
        taken = stream.take(3)
        stream.put_back(taken[1:])
        stream.put_back(taken[:1])
        assert ids(stream.take(1)) == [0]
        assert ids(stream.take(4)) == [1, 2, 3, 4]

    def test_a_strange_prompt_is_not_taken_back(self):
        stream = PromptStream(numbered(5), seed=0)
        with pytest.raises(DataError, match="'77'"):
            stream.put_back([*numbered(2), Prompt(id="77", token_ids=(1,), text="x")])
        assert stream.state_dict()["front"] == []

    def test_another_dataset_is_refused(self):
        state = PromptStream(numbered(5), seed=0).state_dict()
        for other in (numbered(6), numbered(5)[::-1], [*numbered(4), Prompt("4", (9,), "nine")]):
            with pytest.raises(CheckpointError, match="dataset"):
                PromptStream(other, seed=0).load_state_dict(state)

    def test_prompts_that_make_no_stream(self):
        with pytest.raises(DataError, match="no prompts"):
            PromptStream([], seed=0)
        with pytest.raises(DataError, match="the same id"):
            PromptStream([*numbered(2), *numbered(1)], seed=0)

    def test_its_columns(self):
        assert PromptStream(numbered(2), seed=0).columns == {"answer"}


class TestPassRates:
    @staticmethod
    def stream() -> PromptStream:
        return PromptStream(numbered(300), seed=0, rates=PassRates(seed=3))

    @staticmethod
    def noted(stream: PromptStream, prompts: list[Prompt]) -> None:
        """The model solves the first hundred always, the next never, and the others half of the time."""
        for prompt in prompts:
            number = int(prompt.id)
            rewards = (1.0, 1.0) if number < 100 else (0.0, 0.0) if number < 200 else (1.0, 0.0)
            samples = tuple(Sample((1,), (2,), (-0.1,), "stop", VersionSpan(0, 0), reward=reward) for reward in rewards)
            stream.note(Group(prompt=prompt, samples=samples))

    def test_what_is_solved_sometimes_is_sampled_and_the_rest_now_and_then(self):
        stream = self.stream()
        first = stream.take(300)
        assert len(set(ids(first))) == 300  # nothing is known yet
        assert stream.skipped == 0
        self.noted(stream, first)
        second: list[Prompt] = []
        while stream.epoch < 2:
            second += stream.take(1)
        second = second[:-1]
        middle = [number for number in ids(second) if number >= 200]
        assert sorted(middle) == list(range(200, 300))
        assert 8 <= len(second) - len(middle) <= 34  # a tenth of two hundred
        assert len(second) + stream.skipped >= 300

    def test_a_rate_follows_the_model(self):
        rates = PassRates(seed=0)
        rates.note("a", [1.0, 1.0])
        rates.note("a", [0.0, 0.0])
        rates.note("a", [0.9, 1.5])
        assert rates.state_dict() == {"a": 0.5}
        rates.note("b", [])
        assert rates.wants("b", epoch=0)

    def test_a_stream_goes_on_as_it_would_have(self):
        stream = self.stream()
        self.noted(stream, stream.take(350))
        state = json.loads(json.dumps(stream.state_dict()))
        resumed = self.stream()
        resumed.load_state_dict(state)
        assert ids(resumed.take(200)) == ids(stream.take(200))
