from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lachesis.common.errors import ConfigError, DeadlineExceeded, RewardError, StopRequested
from lachesis.common.types import Group, Prompt, Sample, VersionSpan
from lachesis.process.workers import receive_message
from lachesis.rollouts.rewards import attempts
from lachesis.rollouts.rewards.functions import RewardCall
from lachesis.rollouts.rewards.rewarder import NamedReward, Rewarder, Scored, load_rewards
from lachesis.rollouts.rewards.runners import ImportPath, RewardWorkers
from tests.waiting import LONG_S, until

MODULE = """
import asyncio, os, signal, sys, threading, time

def texts(completions):
    return [completion[0]["content"] for completion in completions]

def good(completions, answer, **_):
    return [float(text == right) for text, right in zip(texts(completions), answer)]

async def later(completions):
    await asyncio.sleep(0)
    return [None if text == "x" else 2.0 for text in texts(completions)]

def by_alarm(completions):
    class Late(Exception):
        pass
    def ring(*_):
        raise Late
    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(600)
    except Late:
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)

def who(completions, log_extra, log_metric, trainer_state):
    log_extra("pid", [os.getpid()] * len(completions))
    log_metric("step", trainer_state.global_step)
    log_metric("size", len(completions))
    return [0.0] * len(completions)

def loaded(completions, log_extra):
    heavy = ("httpx", "numpy", "pydantic", "lachesis.plugins.sandbox", "lachesis.rollouts.datasets")
    log_extra("heavy", [[name for name in heavy if name in sys.modules]] * len(completions))
    return [0.0] * len(completions)

def noisy(completions):
    print("to standard output", flush=True)
    os.write(1, b"and to its descriptor\\n")
    return [1.0] * len(completions)

def forks(completions):
    child = os.fork() == 0
    if not child:
        os.wait()  # the child has returned before
    if child and "x" in texts(completions):
        sys.exit(3)
    return [len(text) + 100.0 * child for text in texts(completions)]

def on_x(what):
    def function(completions):
        if "x" in texts(completions):
            what()
        return [1.0] * len(completions)
    return function

def raise_key(): raise KeyError("no number")
raises = on_x(raise_key)
exits = on_x(lambda: os._exit(3))
crashes = on_x(lambda: os.kill(os.getpid(), signal.SIGSEGV))
def hang():
    open(__file__ + ".hangs", "w").close()
    time.sleep(600)
hangs = on_x(hang)
leaves = on_x(lambda: sys.exit(1))
def bad(completions): return [float("nan") if text == "x" else 1.0 for text in texts(completions)]
def short(completions): return [1.0 for text in texts(completions) if text != "x"]
def unsendable(completions, log_extra):
    log_extra("f", [threading.Lock()] * len(completions))
    return [1.0] * len(completions)
class Verdict: pass
def unreadable(completions, log_extra):
    log_extra("verdict", [Verdict()] * len(completions))
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("rewards")
    (directory / "remote_rewards.py").write_text(MODULE)
    return directory


FUNCTIONS = ("good", "later", "by_alarm", "who", "noisy", "raises", "exits", "crashes", "hangs", "leaves", "bad",
             "short", "unsendable", "unreadable", "loaded", "forks")  # fmt: skip


@pytest.fixture(scope="module")
def workers(directory) -> Iterator[RewardWorkers]:
    workers = RewardWorkers([ImportPath(f"remote_rewards.py:{name}", directory) for name in FUNCTIONS], count=2)
    yield workers
    workers.close()


@pytest.fixture
def score(directory, workers, monkeypatch):
    """Score with one function, in the processes of this module."""
    monkeypatch.setattr("lachesis.rollouts.rewards.rewarder.RewardWorkers", lambda *_, **__: Shared(workers))

    def score(name: str, groups: list[Group] | None = None, **options: Any) -> Scored:
        shared = [NamedReward(one, ImportPath(f"remote_rewards.py:{one}", directory)) for one in FUNCTIONS]
        rewarder = Rewarder(shared, timeout_s=options.pop("timeout_s", LONG_S), num_workers=2)
        rewarder._functions = (rewarder._functions[FUNCTIONS.index(name)],)
        rewarder._weights = (1.0,)
        rewarder.report_step(7)
        return rewarder.score(sums() if groups is None else groups, **options)

    return score


@pytest.fixture
def patient(directory, monkeypatch):
    """A call is given up because it hangs, not because the machine is slow."""
    mark = directory / "remote_rewards.py.hangs"

    def patient_receive(link: socket.socket, *, end: float) -> bytes:
        link.settimeout(0.01)
        while True:
            try:
                link.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                if not mark.exists():
                    continue
                mark.unlink()
                raise
            return receive_message(link, end=time.monotonic() + LONG_S)

    monkeypatch.setattr("lachesis.process.workers.receive_message", patient_receive)


class Shared:
    """The workers of the module, which no test closes."""

    def __init__(self, workers: RewardWorkers) -> None:
        self.count, self.signatures, self.run = workers.count, workers.signatures, workers.run


def group(prompt_id: str, *texts: str, **columns: Any) -> Group:
    samples = [Sample((1,), (5,), (-0.5,), "stop", VersionSpan(0, 0), text=text) for text in texts]
    return Group(Prompt(id=prompt_id, token_ids=(1,), text="p", columns=columns), tuple(samples))


def sums() -> list[Group]:
    return [group("0", "3", "4", answer="3"), group("1", "9", "x", answer="9"), group("2", "1", "2", answer="2")]


def rewards(scored: Scored) -> dict[str, tuple[float | None, ...]]:
    return {group.prompt.id: group.rewards for group in scored.groups}


class TestGoodCalls:
    def test_groups_go_to_several_processes_and_come_back_in_order(self, score):
        assert rewards(score("good")) == {"0": (1.0, 0.0), "1": (1.0, 0.0), "2": (0.0, 1.0)}
        scored = score("who")
        pids = [set(extra["pid"]) for extra in scored.extras]
        assert all(len(of_group) == 1 for of_group in pids), "a group is in one process"
        assert len(set.union(*pids)) == 2
        assert os.getpid() not in set.union(*pids)
        assert scored.metrics == {"step": 7.0, "size": 3.0}

    def test_a_process_imports_nothing_that_its_functions_do_not_ask_for(self, score):
        assert [extra["heavy"] for extra in score("loaded").extras] == [[[], []]] * 3

    def test_processes_are_kept(self, score):
        first, second = (score("who").extras for _ in range(2))
        assert first == second

    def test_coroutines_and_abstaining(self, score):
        assert rewards(score("later"))["1"] == (2.0, None)

    def test_alarms_ring(self, score):
        assert rewards(score("by_alarm", sums()[:1])) == {"0": (1.0, 1.0)}

    def test_what_functions_print_does_no_harm(self, score):
        assert rewards(score("noisy"))["2"] == (1.0, 1.0)

    def test_a_process_that_it_forks_and_that_returns_or_exits_answers_nothing(self, score):
        assert rewards(score("forks", [group("0", "ab", "x")])) == {"0": (2.0, 1.0)}
        assert rewards(score("forks", [group("0", "abc", "")])) == {"0": (3.0, 0.0)}

    def test_more_processes_than_groups(self, score):
        assert rewards(score("good", sums()[:1])) == {"0": (1.0, 0.0)}

    def test_columns_are_checked_without_an_import_here(self, score):
        with pytest.raises(RewardError, match="'good' needs 'answer'"):
            score("good", [group("0", "a", anwser="a")])
        assert not [name for name in sys.modules if "remote_rewards" in name]

    def test_threads_take_turns(self, workers):
        call = RewardCall({"completions": [[{"content": "1"}]], "answer": ["1"]}, 1)
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.extend(workers.run(0, [call], timeout_s=LONG_S))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answer.values for answer in answers] == [[1.0]] * 4


BAD = {
    "raises": r"raised KeyError: 'no number' \(remote_rewards\.py:\d+\) on completion 2 of 2 of prompt '1' "
    r"\(answer='9'\): 'x'",
    "exits": r"ended its process \(ended with exit code 3\) on completion 2 of 2 of prompt '1'",
    "crashes": r"ended its process \(was killed by SIGSEGV\) on completion 2 of 2 of prompt '1'",
    "leaves": r"raised SystemExit: 1 \(remote_rewards\.py:\d+\) on completion 2 of 2 of prompt '1'",
    "hangs": r"did not return within 0\.3 s on the 2 completions of prompt '1'",
    "bad": r"returned nan as a reward on completion 2 of 2 of prompt '1'",
    "short": r"returned 1 rewards for 2 completions on the 2 completions of prompt '1'",
}


@pytest.mark.parametrize(("name", "message"), BAD.items())
class TestFailures:
    def test_the_sample_is_named_the_group_dropped_and_the_others_kept(self, score, patient, name, message):
        scored = score(name, on_error="drop_group", timeout_s=0.3)
        assert rewards(scored) == {"0": (1.0, 1.0), "2": (1.0, 1.0)}
        assert (scored.dropped, len(scored.errors)) == (1, 1)
        with pytest.raises(RewardError, match=f"reward function '{name}' {message}"):
            raise scored.errors[0]


class TestOtherFailures:
    def test_the_policy_fail_raises(self, score):
        with pytest.raises(RewardError, match="SIGSEGV"):
            score("crashes", on_error="fail")

    def test_what_cannot_leave_the_process(self, score):
        with pytest.raises(RewardError, match="logged a value that cannot be sent from its process"):
            score("unsendable", sums()[:1])

    def test_what_cannot_be_read_where_it_arrives(self, score, monkeypatch):
        with pytest.raises(RewardError, match=r"logged a value that cannot be sent from its process .*No module named"):
            score("unreadable", sums()[:1])
        there = types.ModuleType("only_here")
        monkeypatch.setitem(sys.modules, "only_here", there)
        there.Answer = type("Answer", (), {"__module__": "only_here"})
        with pytest.raises(RewardError, match=r"has arguments that cannot be sent .*No module named 'only_here'"):
            score("good", [group("0", "a", answer=there.Answer())])
        assert rewards(score("good")) == {"0": (1.0, 0.0), "1": (1.0, 0.0), "2": (0.0, 1.0)}

    def test_what_cannot_enter_it(self, score):
        with pytest.raises(RewardError, match="has arguments that cannot be sent") as caught:
            score("good", [group("0", "a", answer=threading.Lock())])
        assert "rewards.num_workers" in caught.value.remedy

    def test_an_interrupt_leaves_no_stale_answer(self, workers, monkeypatch):
        def interrupted(*_, **__):
            raise KeyboardInterrupt

        call = RewardCall({"completions": [[{"content": "1"}]], "answer": ["2"]}, 1)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("lachesis.process.workers.receive_message", interrupted)
            workers.run(0, [call], timeout_s=LONG_S)
        right = RewardCall({"completions": [[{"content": "1"}]], "answer": ["1"]}, 1)
        assert workers.run(0, [right], timeout_s=LONG_S)[0].values == [1.0]

    def test_an_interrupt_while_they_start_leaves_none_half_started(self, workers, monkeypatch):
        def interrupted(*_, **__):
            raise KeyboardInterrupt

        right = RewardCall({"completions": [[{"content": "1"}]], "answer": ["1"]}, 1)
        workers.close()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("lachesis.process.workers.receive_message", interrupted)
            workers.run(0, [right, right], timeout_s=LONG_S)
        assert [answer.values for answer in workers.run(0, [right, right], timeout_s=LONG_S)] == [[1.0], [1.0]]


class TestLife:
    def test_an_import_that_fails_is_an_error_of_the_configuration(self, tmp_path):
        (tmp_path / "broken.py").write_text("import lachesis_not_installed")
        with pytest.raises(ConfigError, match=r"No module named 'lachesis_not_installed' \(broken\.py:1\)"):
            RewardWorkers([ImportPath("broken.py:f", tmp_path)], count=1).wait(LONG_S)

    def test_one_that_ends_the_process_too(self, tmp_path):
        (tmp_path / "broken.py").write_text("import os\nos._exit(4)")
        with pytest.raises(RewardError, match=r"exit code 4.*while it imported"):
            RewardWorkers([ImportPath("broken.py:f", tmp_path)], count=1).wait(LONG_S)

    def test_one_that_takes_too_long(self, tmp_path):
        (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)")
        with pytest.raises(DeadlineExceeded, match=r"start of 1 reward workers took longer than 0\.05 s"):
            RewardWorkers([ImportPath("slow.py:f", tmp_path)], count=1, start_s=0.05).wait(LONG_S)

    def test_functions_that_nobody_has_given_a_process_get_one(self, directory):
        """And run on a thread of this one where a value of theirs cannot go there."""
        specs = ["remote_rewards.py:who", "remote_rewards.py:good"]
        rewarder = Rewarder(load_rewards(specs, directory, num_workers=None), num_workers=None)
        try:
            scored = rewarder.score([group("0", "a", answer="a")])
            assert scored.extras[0]["pid"] != [os.getpid()]
            lock = threading.Lock()
            assert rewards(rewarder.score([group("0", "a", answer=lock)])) == {"0": (0.0,)}
            assert rewarder.score([group("0", "a", answer="a")]).extras[0]["pid"] != [os.getpid()]
        finally:
            rewarder.close()
            for name in [name for name in sys.modules if "remote_rewards" in name]:
                del sys.modules[name]

    def test_the_end_lets_functions_write_what_they_have(self, tmp_path):
        (tmp_path / "ends.py").write_text(
            "import atexit\nlog = open(__file__ + '.log', 'w')\natexit.register(log.write, 'end')\n"
            "def f(completions):\n    log.write('called ')\n    return [0.0] * len(completions)\n"
        )
        rewarder = Rewarder(load_rewards(["ends.py:f"], tmp_path, num_workers=None), num_workers=None)
        rewarder.score([group("0", "a")])
        rewarder.close()
        assert (tmp_path / "ends.py.log").read_text() == "called end"

    def test_a_traceback_comes_with_the_error(self, score):
        with pytest.raises(RewardError) as caught:
            score("raises", sums()[1:2])
        assert "remote_rewards.py" in str(caught.value.__cause__) and "Traceback" in str(caught.value.__cause__)

    def test_closing_ends_them_and_may_be_repeated(self, directory):
        rewarder = Rewarder(load_rewards(["remote_rewards.py:who"], directory, num_workers=1), num_workers=1)
        (extra,) = rewarder.score([group("0", "a")]).extras
        rewarder.close()
        rewarder.close()
        with pytest.raises(ProcessLookupError):
            os.kill(extra["pid"][0], 0)

    def test_a_stop_ends_a_call_that_hangs(self, directory, monkeypatch):
        monkeypatch.setattr(attempts, "_STOP_GRACE_S", 0.1)
        functions = load_rewards(["remote_rewards.py:hangs"], directory, num_workers=1)
        mark = directory / "remote_rewards.py.hangs"
        rewarder = Rewarder(functions, num_workers=1, timeout_s=600, stop_requested=mark.exists)
        pids = rewarder._workers.pool.pids
        started = time.monotonic()
        with pytest.raises(StopRequested, match="while it waited for reward functions"):
            rewarder.score([group("0", "x")])
        rewarder.close()
        mark.unlink()
        assert time.monotonic() - started < 60
        assert not any(map(_alive, pids))

    def test_they_end_with_the_trainer_in_the_middle_of_a_call(self, directory):
        program = textwrap.dedent(f"""
            import os, signal, threading
            from pathlib import Path
            from lachesis.rollouts.rewards.functions import RewardCall
            from lachesis.rollouts.rewards.runners import ImportPath, RewardWorkers
            workers = RewardWorkers([ImportPath("remote_rewards.py:hangs", Path({str(directory)!r}))], count=1)
            print(workers.pool.pids[0], flush=True)
            threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
            workers.run(0, [RewardCall({{"completions": [[{{"content": "x"}}]]}}, 1)], timeout_s=600)
        """)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG_S)
        pid = int(done.stdout)
        until(lambda: not _alive(pid))


def _alive(pid: int) -> bool:
    """Running; an orphan that nobody has reaped yet is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
