"""The wire protocol of the rollout API, over a real connection.

What both servers have in common runs against ours and against the original; the expected replies were written down
from it.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.original import needs_original, original
from tests.ports import free_port
from tests.unit.plugins.atropos.api.processes import ENVIRONMENT, REGISTRATION, Server, marks, ours, scored
from tests.waiting import LONG_S, until

KEYS = [
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
]  # fmt: skip


@pytest.fixture(scope="module", params=["ours", pytest.param("original", marks=needs_original)])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cwd = tmp_path_factory.mktemp(request.param)
    with ours(cwd) if request.param == "ours" else original(cwd) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ours(tmp_path_factory.mktemp("plain")) as server:
        yield server


@pytest.fixture
def any_api(either: Server) -> Server:
    """Ours or the original, reset."""
    # The original forgets a queue only where there was one, and what it had from before stays until it is used.
    either.register()
    assert either.http.get("/reset_data").text == "Reset successful"
    return either


@pytest.fixture
def api(plain: Server) -> Server:
    """Ours, reset."""
    plain.http.get("/reset_data")
    return plain


class TestWhatBothDo:
    """The same requests, the same replies."""

    def test_root(self, any_api: Server) -> None:
        assert any_api.get("/") == {"message": "AtroposLib API"}

    def test_trainer_registers(self, any_api: Server) -> None:
        answer = any_api.register()
        assert set(answer) == {"uuid"} and answer["uuid"].bit_length() > 64
        assert any_api.get("/info") == {"batch_size": 8, "max_token_len": 512}
        assert any_api.get("/wandb_info") == {"group": "group", "project": "project"}
        assert any_api.get("/status") == {"current_step": 0, "queue_size": 0}
        assert any_api.register()["uuid"] != answer["uuid"]

    def test_environments_wait_until_the_trainer_polls(self, any_api: Server) -> None:
        any_api.register(starting_step=7)
        assert any_api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
        assert any_api.get("/batch") == {"batch": None}
        assert any_api.post("/register-env", ENVIRONMENT) == {
            "status": "success", "env_id": 0, "wandb_name": "env_0", "checkpoint_dir": "/checkpoints",
            "starting_step": 7, "checkpoint_interval": 10, "num_steps": 100,
        }  # fmt: skip
        assert any_api.post("/register-env", ENVIRONMENT)["wandb_name"] == "env_1"
        assert any_api.post("/register-env", ENVIRONMENT | {"desired_name": "b"})["wandb_name"] == "b_0"

    def test_batch_carries_every_key_and_value(self, any_api: Server) -> None:
        any_api.start(batch_size=2)
        full = scored(
            2, mark=5, advantages=[[0.5, -1.0, 2.5]] * 2, ref_logprobs=[[-0.1, -0.2, -0.3]] * 2,
            messages=[[{"role": "user", "content": "héllo ✓", "reward": None}]] * 2,
            generation_params={"temperature": 0.7}, overrides=[{"set_advantage_to_zero": True}, {}],
            group_overrides={"sft": True}, images=["a", None], distill_token_ids=[[[1, 2]] * 3] * 2,
            distill_logprobs=[[[-0.5, -1.5]] * 3] * 2,
        )  # fmt: skip
        assert any_api.post("/scored_data", full) == {"status": "received"}
        assert any_api.get("/latest_example") == full
        assert any_api.get("/status") == {"current_step": 0, "queue_size": 1}
        (group,) = any_api.get("/batch")["batch"]
        assert group == full and list(group) == KEYS
        assert any_api.get("/status") == {"current_step": 1, "queue_size": 0}
        bare = {name: full[name] for name in ("tokens", "masks", "scores")}
        any_api.post("/scored_data", bare | {"unknown": 1})
        assert any_api.get("/batch")["batch"] == [dict.fromkeys(KEYS) | bare]

    def test_values_are_coerced(self, any_api: Server) -> None:
        any_api.start(batch_size=1)
        odd = {
            "tokens": [["3", 2.0, True]],
            "masks": [[1, 2, 3]],
            "scores": [1],
            "inference_logprobs": [["-0.5", 0, 1]],
        }
        any_api.post("/scored_data", odd)
        text = any_api.http.get("/batch").text
        assert (
            '"tokens":[[3,2,1]]' in text
            and '"scores":[1.0]' in text
            and '"inference_logprobs":[[-0.5,0.0,1.0]]' in text
        )

    def test_ragged_groups_are_accepted(self, any_api: Server) -> None:
        any_api.start(batch_size=2)
        ragged = {"tokens": [[1, 2], [3]], "masks": [[1]], "scores": [], "inference_logprobs": [[1.0]]}
        assert any_api.post("/scored_data", ragged) == {"status": "received"}
        assert marks(any_api.get("/batch")["batch"]) == [1]

    def test_batches_are_of_whole_groups(self, any_api: Server) -> None:
        any_api.start(batch_size=8)
        for mark in range(3):
            any_api.post("/scored_data", scored(4, mark=mark))
        assert any_api.get("/status")["queue_size"] == 3
        assert marks(any_api.get("/batch")["batch"]) == [0, 1]
        assert any_api.get("/batch") == {"batch": None}

    def test_mixed_sizes_fill_a_batch(self, any_api: Server) -> None:
        any_api.start(batch_size=16)
        for mark, size in enumerate((8, 4, 2, 2)):
            any_api.post("/scored_data", scored(size, mark=mark))
        any_api.post("/scored_data", scored(4, mark=4))
        for mark in (5, 6):
            any_api.post("/scored_data", scored(2, mark=mark))
        batch = any_api.get("/batch")["batch"]
        assert sum(len(group["tokens"]) for group in batch) == 16
        assert marks(batch)[:2] == [0, 1]

    def test_list_of_groups(self, any_api: Server) -> None:
        any_api.start(batch_size=8)
        env_id = any_api.register_env(group_size=4)
        whole = [scored(4, mark=mark, env_id=env_id) for mark in range(2)]
        assert any_api.post("/scored_data_list", whole) == {"status": "received", "groups_processed": 2}
        mixed = [scored(1, mark=2, env_id=env_id), scored(4, mark=3, env_id=env_id), scored(2, mark=4, env_id=env_id)]
        assert any_api.post("/scored_data_list", mixed) == {
            "status": "received", "groups_processed": 3, "buffered": 2, "last_buffer_size": 3,
        }  # fmt: skip
        assert any_api.get("/status")["queue_size"] == 3

    def test_small_groups_are_buffered_until_they_make_one(self, any_api: Server) -> None:
        any_api.start(batch_size=4)
        env_id = any_api.register_env(group_size=4)
        sizes = [(3, 3), (2, 5), (2, 3)]
        for mark, (size, buffered) in enumerate(sizes):
            answer = any_api.post("/scored_data", scored(size, mark=mark, env_id=env_id))
            assert answer == {"status": "buffered", "buffer_size": buffered}
        assert any_api.get("/status")["queue_size"] == 2
        # Greedily, 3 and then nothing fits; the pair of twos that adds up leaves, the three stays.
        assert marks(any_api.get("/batch")["batch"]) == [1, 2]
        answer = any_api.post("/scored_data", scored(1, mark=3, env_id=env_id))
        assert answer == {"status": "buffered", "buffer_size": 0}
        assert any_api.get("/status")["queue_size"] == 2

    def test_unknown_environments_bypass_the_buffer(self, any_api: Server) -> None:
        any_api.start(batch_size=4)
        assert any_api.post("/scored_data", scored(3, env_id=99)) == {"status": "received"}

    def test_status_env(self, any_api: Server) -> None:
        any_api.start(batch_size=16)
        first = any_api.register_env(weight=1.0)
        second = any_api.register_env(weight=3.0, min_batch_allocation=0.25, group_size=2)
        for _ in range(3):
            any_api.post("/scored_data", scored(4, env_id=first))
        for _ in range(5):
            any_api.post("/scored_data", scored(2, env_id=second))
        any_api.post("/scored_data", scored(2))
        status = any_api.get("/status-env", {"env_id": first})
        # Own 12; of the other's 10, packed to 12, all beyond its minimum of 4; of nobody's 2, packed to 4, all.
        assert status == {
            "current_step": 0, "queue_size": (12 + 8 + 4) // 4, "unallocated_fraction": 0.75, "self_queue_size": 3,
            "max_group_size": 4, "env_weight": 0.25,
        }  # fmt: skip
        status = any_api.get("/status-env", {"env_id": second})
        assert (status["queue_size"], status["self_queue_size"], status["env_weight"]) == ((10 + 12 + 4) // 2, 5, 0.75)

    def test_disconnected_environments_no_longer_count(self, any_api: Server) -> None:
        any_api.start()
        first, second = any_api.register_env(), any_api.register_env(min_batch_allocation=0.5)
        assert any_api.get("/status-env", {"env_id": first})["unallocated_fraction"] == 0.5
        assert any_api.post("/disconnect-env", {"env_id": second}) == {"status": "success"}
        status = any_api.get("/status-env", {"env_id": first})
        assert (status["unallocated_fraction"], status["env_weight"]) == (1.0, 1.0)
        answer = any_api.post("/disconnect-env", {"env_id": 7})
        assert set(answer) == {"status", "error"} and answer["status"] == "failure"

    def test_minimums_come_first(self, any_api: Server) -> None:
        any_api.start(batch_size=8)
        plenty, owed = any_api.register_env(), any_api.register_env(min_batch_allocation=0.5)
        for mark in range(4):
            any_api.post("/scored_data", scored(4, mark=mark, env_id=plenty))
        assert any_api.get("/batch") == {"batch": None}
        any_api.post("/scored_data", scored(4, mark=9, env_id=owed))
        assert sorted(marks(any_api.get("/batch")["batch"])) == [0, 9]
        assert any_api.get("/batch") == {"batch": None}

    def test_gzipped_requests_and_replies(self, any_api: Server) -> None:
        any_api.start(batch_size=2)
        group = scored(2, mark=11, length=400)
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        packed = gzip.compress(json.dumps(group).encode())
        reply = any_api.http.post("/scored_data", content=packed, headers=headers)
        assert reply.json() == {"status": "received"}
        assert any_api.get("/batch")["batch"][0]["tokens"] == group["tokens"]
        reply = any_api.http.post("/scored_data", content=b"not gzip", headers=headers)
        assert (reply.status_code, reply.text) == (400, "Invalid gzip payload")

    def test_faults_name_the_place(self, any_api: Server) -> None:
        reply = any_api.http.post("/register", json={**REGISTRATION, "batch_size": "many"})
        fault = reply.json()["detail"][0]
        assert reply.status_code == 422 and {"type", "loc", "msg", "input"} <= set(fault)
        assert fault["loc"] == ["body", "batch_size"] and fault["input"] == "many"
        reply = any_api.http.post("/scored_data", json={**scored(2), "tokens": [[1, 2], [3, "x"]]})
        assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body", "tokens", 1, 1])
        reply = any_api.http.get("/status-env?env_id=0")
        assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body"])
        message = [[{"role": "user"}]]
        reply = any_api.http.post("/scored_data", json={**scored(1), "messages": message})
        assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body", "messages"])

    def test_unknown_paths_and_methods(self, any_api: Server) -> None:
        assert (any_api.http.get("/nothing").status_code, any_api.http.get("/nothing").json()) == (
            404, {"detail": "Not Found"},
        )  # fmt: skip
        assert any_api.http.post("/batch").status_code == 405
        assert any_api.http.post("/batch").json() == {"detail": "Method Not Allowed"}
        assert any_api.http.head("/batch").status_code == 405

    def test_reset_forgets_the_queue(self, any_api: Server) -> None:
        any_api.start()
        any_api.post("/scored_data", scored(4))
        any_api.http.get("/reset_data")
        assert any_api.get("/info")["batch_size"] == -1
        assert any_api.get("/status") == {"current_step": 0, "queue_size": 0}
        assert any_api.get("/wandb_info") == {"group": None, "project": None}

    def test_nothing_is_lost_or_altered(self, any_api: Server) -> None:
        chance = random.Random(0)
        any_api.start(batch_size=16)
        sent = []
        for number in range(24):
            size, length = chance.choice([4, 8]), chance.randrange(1, 40)
            logprobs = [
                [chance.uniform(-20, 0) * 10 ** chance.randrange(-9, 1) for _ in range(length)] for _ in range(size)
            ]
            sent.append(
                scored(size, mark=number, length=length, inference_logprobs=logprobs, scores=logprobs[0][:size])
            )
            any_api.post("/scored_data", sent[-1])
        got: list[Any] = []
        while (batch := any_api.get("/batch")["batch"]) is not None:
            assert sum(len(group["tokens"]) for group in batch) == 16
            got += batch
        assert len(got) >= 20
        for group in got:
            expected = sent[group["tokens"][0][0]]
            assert {name: group[name] for name in expected} == expected


class TestTrapsOfTheOriginal:
    """Where the original trips its clients, ours does not."""

    def test_unregistered(self, api: Server) -> None:
        message = "Trainer not registered. Call /register first."
        assert api.get("/batch") == {"status": "error", "message": message, "batch": []}
        assert api.get("/info") == {"batch_size": -1, "max_token_len": -1}
        empty = api.get("/latest_example")
        absent = {"overrides", "group_overrides", "env_id", "distill_token_ids", "distill_logprobs"}
        assert empty == {name: [] for name in KEYS if name not in absent}

    def test_a_post_before_registration_is_kept(self, api: Server) -> None:
        assert api.post("/scored_data", scored(8, mark=1)) == {"status": "received"}
        api.register()
        assert api.get("/info") == {"batch_size": 8, "max_token_len": 512}
        assert marks(api.get("/batch")["batch"]) == [1]

    def test_oldest_batch_first_and_a_step_for_each_delivery(self, api: Server) -> None:
        api.start()
        for mark in range(6):
            api.post("/scored_data", scored(4, mark=mark))
        for step in range(3):
            assert api.get("/status") == {"current_step": step, "queue_size": 6 - 2 * step}
            assert marks(api.get("/batch")["batch"]) == [2 * step, 2 * step + 1]

    def test_registering_again_goes_on(self, api: Server) -> None:
        api.start()
        for mark in range(4):
            api.post("/scored_data", scored(4, mark=mark))
        api.get("/batch")
        env_id = api.register_env()
        api.register(batch_size=4, num_steps=7)
        assert api.get("/info")["batch_size"] == 4
        assert api.get("/status") == {"current_step": 1, "queue_size": 2}
        assert marks(api.get("/batch")["batch"]) == [2]
        assert api.get("/status-env", {"env_id": env_id})["current_step"] == 2

    @pytest.mark.parametrize(
        ("sizes", "batch_size"),
        [
            ((8, 8, 4, 4), 12), ((4, 6, 4, 6), 10), ((3, 3, 5, 5), 8), ((3, 1), 4), ((100, 4, 4), 8), ((3, 3, 3), 8),
            ((0, 4, 4), 8),
        ],
    )  # fmt: skip
    def test_mixes_that_would_deadlock(self, api: Server, sizes: tuple[int, ...], batch_size: int) -> None:
        api.start(batch_size=batch_size)
        for mark, size in enumerate(sizes):
            api.post("/scored_data", scored(size, mark=mark + 1))
        got: list[int] = []
        while (batch := api.get("/batch")["batch"]) is not None:
            got += marks(batch)
        left = sum(sizes) - sum(sizes[mark - 1] for mark in got)
        assert got and len(set(got)) == len(got) and left < batch_size

    def test_a_group_larger_than_its_environments(self, api: Server) -> None:
        api.start()
        env_id = api.register_env(group_size=2)
        assert api.post("/scored_data", scored(8, mark=3, env_id=env_id)) == {"status": "received"}
        assert marks(api.get("/batch")["batch"]) == [3]

    def test_groups_of_nobody_fill_batches_with_minimums(self, api: Server) -> None:
        api.start()
        env_id = api.register_env(min_batch_allocation=0.5)
        api.post("/scored_data", scored(4, mark=1))
        api.post("/scored_data", scored(4, mark=2, env_id=env_id))
        assert marks(api.get("/batch")["batch"]) == [2, 1]

    def test_unknown_environments_get_an_answer(self, api: Server) -> None:
        api.start()
        for env_id in (0, -1):
            reply = api.http.request("GET", "/status-env", json={"env_id": env_id})
            assert reply.status_code == 404 and "register again" in reply.json()["detail"]
        env_id = api.register_env(weight=0.0)
        assert api.get("/status-env", {"env_id": env_id})["env_weight"] == 0.01

    def test_reset_is_a_fresh_start(self, api: Server) -> None:
        api.start()
        api.register_env()
        api.post("/scored_data", scored(4))
        api.http.get("/reset_data")
        assert api.get("/info") == {"batch_size": -1, "max_token_len": -1}
        assert api.get("/latest_example")["tokens"] == []
        assert api.get("/batch")["status"] == "error"
        assert api.post("/register-env", ENVIRONMENT) == {"status": "wait for trainer to start"}
        api.start()
        assert api.register_env() == 0

    @pytest.mark.parametrize(
        ("body", "place"),
        [
            (b'{"tokens":[[1]],"masks":[[1]],"scores":[NaN]}', ["scores", 0]),
            (b'{"tokens":[[1]],"masks":[[1]],"scores":[0],"ref_logprobs":[[0,-Infinity]]}', ["ref_logprobs", 0, 1]),
            (b'{"tokens":[[1]],"masks":[[1]],"scores":[1e999]}', ["scores", 0]),
            (b'{"tokens":[[1]],"masks":[[1]],"scores":[1],"images":{"a":[1,NaN]}}', ["images", "a", 1]),
            (b'{"tokens":[[1]],"masks":[[1],[2,3', []),
            (b'{"tokens":[[1]],"masks":[[1.5]],"scores":[1]}', ["masks", 0, 0]),
            (b'{"tokens":[[1]],"scores":[1]}', ["masks"]),
            (b"[1, 2]", []),
            (b"", []),
        ],
    )  # fmt: skip
    def test_bad_input_leaves_no_trace(self, api: Server, body: bytes, place: list[Any]) -> None:
        api.start(batch_size=1)
        reply = api.http.post("/scored_data", content=body)
        assert (reply.status_code, reply.json()["detail"][0]["loc"]) == (422, ["body", *place])
        listed = api.http.post("/scored_data_list", content=b"[" + body + b"," + body + b"]")
        assert listed.status_code == 422
        if place and body.endswith(b"}"):
            assert listed.json()["detail"][0]["loc"] == ["body", 0, *place]
        assert api.get("/status") == {"current_step": 0, "queue_size": 0}
        assert api.get("/latest_example")["tokens"] == []
        assert api.get("/batch") == {"batch": None}

    def test_a_long_post_holds_nobody_up(self, api: Server) -> None:
        api.start(batch_size=4)
        long = json.dumps(scored(4, mark=1, length=300_000)).encode()
        assert len(long) > 5 << 20
        status: list[int] = []
        post = threading.Thread(
            target=lambda: status.append(
                httpx.post(f"{api.http.base_url}/scored_data", content=long, timeout=LONG_S).status_code
            )
        )
        post.start()
        slowest = 0.0
        while post.is_alive():
            start = time.monotonic()
            api.get("/status")
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.02)
        post.join()
        assert status == [200] and marks(api.get("/batch")["batch"]) == [1]
        assert slowest < 1.0

    def test_requests_without_groups_are_short(self, api: Server) -> None:
        reply = api.http.post("/register", content=b"[" + b" " * (1 << 20) + b"]")
        assert (reply.status_code, reply.json()["detail"]) == (413, "the body is longer than 1 MiB")

    def test_a_wrong_group_of_a_list_keeps_no_other_out(self, api: Server) -> None:
        api.start(batch_size=2)
        wrong = scored(1) | {"scores": ["high"]}
        reply = api.post("/scored_data_list", [scored(1, mark=1), wrong, {"tokens": []}, scored(1, mark=2)])
        assert (reply["groups_processed"], reply["refused"]) == (2, 2)
        assert [entry["index"] for entry in reply["reasons"]] == [1, 2]
        assert "valid number" in reply["reasons"][0]["reason"] and "scores[0]" in reply["reasons"][0]["reason"]
        assert "masks" in reply["reasons"][1]["reason"]
        assert marks(api.get("/batch")["batch"]) == [1, 2]

    def test_truncated_gzip(self, api: Server) -> None:
        packed = gzip.compress(json.dumps(scored(2)).encode())
        reply = api.http.post("/scored_data", content=packed[:-9], headers={"Content-Encoding": "gzip"})
        assert reply.status_code == 400 and reply.text.startswith("Invalid gzip payload: it ends early")
        assert api.get("/status")["queue_size"] == 0

    def test_a_batch_for_a_client_that_left_is_kept(self, api: Server) -> None:
        api.start(batch_size=8)
        api.post("/scored_data", scored(8, mark=1, length=100_000))
        with socket.create_connection(("127.0.0.1", api.port)) as impatient:
            impatient.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            impatient.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n")
            impatient.recv(1024)
        until(lambda: api.get("/status")["current_step"] == 0)
        assert marks(api.get("/batch")["batch"]) == [1]
        assert api.get("/status")["current_step"] == 1


class TestAcknowledgement:
    """Lachesis's trainer gets back what it did not acknowledge; others notice nothing."""

    @staticmethod
    def fetch(api: Server, uuid: int, holds: str | None = None) -> dict[str, Any]:
        headers = {"X-Lachesis-Trainer": str(uuid)} | ({} if holds is None else {"X-Lachesis-Holds": holds})
        return api.get("/batch", headers=headers)

    def test_lost_replies_are_repeated(self, api: Server) -> None:
        answer = api.register(acknowledge=True)
        assert answer["ack_timeout_s"] == 600 and answer["outstanding"] == [] and answer["current_step"] == 0
        uuid = answer["uuid"]
        assert self.fetch(api, uuid) == {"batch": None, "waiting": "0 of 8 sequences are queued"}
        for mark in range(3):
            api.post("/scored_data", scored(8, mark=mark))
        first = self.fetch(api, uuid, "")
        assert (first["batch_id"], first["deliveries"], marks(first["batch"])) == (0, 1, [0])
        again = self.fetch(api, uuid, "")
        assert (again["batch_id"], again["deliveries"], marks(again["batch"])) == (0, 2, [0])
        second = self.fetch(api, uuid, "0")
        assert (second["batch_id"], marks(second["batch"])) == (1, [1])
        done = api.post("/batch/ack", {"uuid": uuid, "batch_ids": [0, 5]})
        assert done == {"status": "success", "acknowledged": [0], "unknown": [5], "outstanding": [1]}
        assert api.get("/status")["current_step"] == 2

    def test_a_trainer_that_comes_back_goes_on(self, api: Server) -> None:
        uuid = api.register(acknowledge=True)["uuid"]
        for mark in range(3):
            api.post("/scored_data", scored(8, mark=mark))
        assert [self.fetch(api, uuid)["batch_id"] for _ in range(2)] == [0, 1]
        answer = api.register(acknowledge=True)
        assert answer["outstanding"] == [0, 1] and answer["current_step"] == 2
        late = api.http.get("/batch", headers={"X-Lachesis-Trainer": str(uuid)})
        assert late.status_code == 409
        api.post("/batch/ack", {"uuid": answer["uuid"], "batch_ids": [0]})
        assert [self.fetch(api, answer["uuid"])["batch_id"] for _ in range(2)] == [1, 2]
        assert self.fetch(api, answer["uuid"])["batch"] is None

    def test_deadline(self, tmp_path: Path) -> None:
        limit = 2.0  # longer than a busy machine lets the trainer wait between two of its calls
        with ours(tmp_path, ack_timeout_s=limit) as api:
            uuid = api.register(acknowledge=True)["uuid"]
            api.post("/scored_data", scored(8, mark=1))
            renewed = begun = time.monotonic()
            assert self.fetch(api, uuid)["batch_id"] == 0
            # Others get new batches only, and a trainer that says what it holds keeps it.
            while time.monotonic() < begun + 1.2 * limit:
                renewed = time.monotonic()
                assert api.get("/batch") == {"batch": None}
                assert self.fetch(api, uuid, "0")["batch"] is None
                time.sleep(0.1)
            while (again := self.fetch(api, uuid))["batch"] is None:
                assert time.monotonic() < renewed + LONG_S
                time.sleep(0.02)
            assert time.monotonic() - renewed >= limit
            assert (again["batch_id"], again["deliveries"]) == (0, 2)


def test_limits_are_answered_with_429_and_shown(tmp_path: Path) -> None:
    with ours(tmp_path, max_queued_tokens=100, max_body_mb=0.01) as api:
        api.start()
        env_id = api.register_env()
        for _ in range(2):
            api.post("/scored_data", scored(4, env_id=env_id, length=10))
        reply = api.http.post("/scored_data", json=scored(4, env_id=env_id, length=10))
        assert reply.status_code == 429 and int(reply.headers["Retry-After"]) >= 1
        assert "80 of at most 100 tokens" in reply.json()["detail"]
        status = api.get("/status-env", {"env_id": env_id})
        assert (status["queued_tokens"], status["max_queued_tokens"]) == (80, 100)
        assert api.get("/status") == {
            "current_step": 0, "queue_size": 2, "queued_tokens": 80, "max_queued_tokens": 100,
        }  # fmt: skip
        assert api.http.post("/scored_data", json=scored(4, length=26)).status_code == 413
        assert len(api.get("/batch")["batch"]) == 2
        api.post("/scored_data", scored(4, env_id=env_id, length=10))

        reply = api.http.post("/scored_data", content=b" " * 11_000)
        assert reply.status_code == 413 and "MiB" in reply.json()["detail"]
        bomb = gzip.compress(b" " * (50 << 20))
        assert len(bomb) > 10_000
        reply = api.http.post("/scored_data", content=bomb[:9_000], headers={"Content-Encoding": "gzip"})
        assert reply.status_code == 413
        assert api.get("/status")["queue_size"] == 1


def test_strict_sets_aside_what_no_trainer_could_use(tmp_path: Path) -> None:
    with ours(tmp_path, strict=True) as api:
        api.start()
        env_id = api.register_env()
        sound = scored(4, mark=1, env_id=env_id)
        assert api.post("/scored_data", sound) == {"status": "received"}
        bad = {
            "scores has 3 entries, tokens has 4": {"scores": [1.0] * 3},
            "masks[0] has 2 entries, tokens[0] has 3": {"masks": [[1, 2]] * 4},
            "inference_logprobs[0] has 1 entry, tokens[0] has 3": {"inference_logprobs": [[-1.0]] * 4},
            "inference_logprobs[0][2] is 1.0, which is not a logprob, where the mask trains": {
                "inference_logprobs": [[1.0, -0.5, 1.0]] * 4
            },
            "env_id 12 was never registered": {"env_id": 12},
        }
        for reason, change in bad.items():
            assert api.post("/scored_data", sound | change) == {"status": "set_aside", "reason": reason}
        answer = api.post("/scored_data_list", [sound | {"tokens": []}, scored(4, mark=2, env_id=env_id)])
        assert answer == {
            "status": "received", "groups_processed": 2, "set_aside": 1,
            "reasons": [{"index": 0, "reason": "tokens is empty"}],
        }  # fmt: skip
        assert api.get("/status") == {"current_step": 0, "queue_size": 2, "set_aside": 6}
        assert marks(api.get("/batch")["batch"]) == [1, 2] and api.get("/batch") == {"batch": None}
        kept = api.get("/set_aside")
        assert kept["count"] == 6 and [misfit["reason"] for misfit in kept["last"]][:5] == list(bad)
        assert kept["last"][0]["group"]["scores"] == [1.0] * 3 and kept["last"][0]["environment"] == "env_0"


class TestStateDirectory:
    """What was answered for survives."""

    def test_kill_and_restart(self, tmp_path: Path) -> None:
        state = tmp_path / "state"
        with ours(tmp_path, state_dir=state_dir(state)) as api:
            uuid = api.register(acknowledge=True)["uuid"]
            api.get("/batch")
            env_id = api.register_env(group_size=4, min_batch_allocation=0.25)
            for mark in range(6):
                api.post("/scored_data", scored(4, mark=mark, env_id=env_id))
            packed = gzip.compress(json.dumps(scored(8, mark=6)).encode())
            api.http.post("/scored_data", content=packed, headers={"Content-Encoding": "gzip"})
            assert api.post("/scored_data", scored(3, mark=7, env_id=env_id))["status"] == "buffered"
            headers = {"X-Lachesis-Trainer": str(uuid), "X-Lachesis-Holds": ""}
            assert marks(api.get("/batch")["batch"]) == [0, 1]
            assert marks(api.get("/batch", headers=headers)["batch"]) == [2, 3]
            before = api.get("/status"), api.get("/status-env", {"env_id": env_id}), api.get("/info")
            api.kill()
        with ours(tmp_path, state_dir=state_dir(state)) as api:
            after = api.get("/status"), api.get("/status-env", {"env_id": env_id}), api.get("/info")
            assert after == before
            assert api.post("/register-env", ENVIRONMENT)["wandb_name"] == "env_1"
            again = api.get("/batch", headers=headers)
            assert (again["batch_id"], marks(again["batch"])) == (1, [2, 3])
            api.post("/batch/ack", {"uuid": uuid, "batch_ids": [1]})
            assert api.post("/scored_data", scored(1, mark=8, env_id=env_id))["buffer_size"] == 0
            api.kill()
        with ours(tmp_path, state_dir=state_dir(state)) as api:
            # 3 and 1 wait for more of their environment, which owes a part of each batch; so 8 of nobody's wait too.
            assert marks(api.get("/batch", headers=headers)["batch"]) == [4, 5]
            waiting = api.get("/batch", headers=headers | {"X-Lachesis-Holds": "2"})
            assert waiting["batch"] is None and waiting["waiting"].startswith("12 of 8 sequences are queued in groups")
            api.post("/disconnect-env", {"env_id": env_id})
            assert marks(api.get("/batch")["batch"]) == [6]

    def test_killed_in_the_middle_of_posts(self, tmp_path: Path) -> None:
        """Every group that was answered for is there once, whenever the process died; retries double nothing."""
        state, answered, tried = tmp_path / "state", set(), 0
        for attempt in range(3):
            with ours(tmp_path, state_dir=state_dir(state)) as api:
                # Counted in posts, so that as many are made on a slow machine; when within a post it dies is chance.
                begun, killer = tried, threading.Timer(0.005 * attempt, api.process.kill)
                try:
                    while True:
                        if tried == begun + 12:
                            killer.start()
                        key = {"Idempotency-Key": f"post-{tried}"}
                        api.post("/scored_data", scored(1, mark=tried, length=500), key)
                        answered.add(tried)
                        tried += 1
                except httpx.TransportError:
                    pass
                killer.join()
                api.process.wait(timeout=LONG_S)
        with ours(tmp_path, state_dir=state_dir(state)) as api:
            api.post("/scored_data", scored(1, mark=tried, length=500), {"Idempotency-Key": f"post-{tried}"})
            api.register(batch_size=1)
            got = []
            while (batch := api.get("/batch")["batch"]) is not None:
                got += marks(batch)
        assert got == [*sorted(answered), tried] and len(answered) > 20

    def test_every_group_is_trained_on_once_whatever_dies(self, tmp_path: Path) -> None:
        """An environment that repeats its posts, a trainer that acknowledges, and a server killed under both."""
        port, posts, stop = free_port(), 400, threading.Event()
        trained: dict[int, list[int]] = {}

        def keep_trying(call: Callable[[], Any]) -> Any:
            while not stop.is_set():
                try:
                    return call()
                except httpx.TransportError:
                    time.sleep(0.02)
            return None

        def environment() -> None:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as http:
                for mark in range(posts):
                    group, key = scored(4, mark=mark, length=200), {"Idempotency-Key": str(mark)}
                    keep_trying(lambda group=group, key=key: http.post("/scored_data", json=group, headers=key))

        def trainer(uuid: int) -> None:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as http:
                while not stop.is_set() and len(trained) < posts // 2:
                    headers = {"X-Lachesis-Trainer": str(uuid), "X-Lachesis-Holds": ""}
                    reply = keep_trying(lambda headers=headers: http.get("/batch", headers=headers))
                    if reply is None or reply.json()["batch"] is None:
                        time.sleep(0.01)
                        continue
                    batch = reply.json()
                    trained.setdefault(batch["batch_id"], marks(batch["batch"]))
                    done = {"uuid": uuid, "batch_ids": [batch["batch_id"]]}
                    keep_trying(lambda done=done: http.post("/batch/ack", json=done))

        options = {"port": port, "state_dir": state_dir(tmp_path / "state")}
        with ours(tmp_path, **options) as api:
            uuid = api.register(acknowledge=True)["uuid"]
            threads = [threading.Thread(target=environment), threading.Thread(target=trainer, args=(uuid,))]
            for thread in threads:
                thread.start()
            time.sleep(0.3)
            api.kill()
        try:
            for moment in (0.25, 0.35, None):
                with ours(tmp_path, **options) as api:
                    time.sleep(moment or 0)
                    for thread in threads if moment is None else ():
                        thread.join(timeout=120)
                    api.kill()
        finally:
            stop.set()
        assert sorted(mark for batch in trained.values() for mark in batch) == list(range(posts))

    def test_reset_and_second_server(self, tmp_path: Path) -> None:
        state = tmp_path / "state"
        with ours(tmp_path, state_dir=state_dir(state)) as api:
            api.start()
            api.post("/scored_data", scored(8))
            api.http.get("/reset_data")
            api.post("/scored_data", scored(8, mark=4))
            with pytest.raises(AssertionError, match="did not start"), ours(tmp_path, state_dir=state_dir(state)):
                pass
            api.kill()
        with ours(tmp_path, state_dir=state_dir(state)) as api:
            assert api.get("/info")["batch_size"] == -1
            api.register()
            assert marks(api.get("/batch")["batch"]) == [4]


def state_dir(path: Path) -> Any:
    return _AsCode(path)


class _AsCode:
    """A path that is written as code which makes it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"Path({str(self._path)!r})"


def test_other_web_pages_are_kept_out(api: Server) -> None:
    api.start()
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert api.http.get("/reset_data", headers=foreign).status_code == 403
    assert api.http.post("/scored_data", json=scored(8), headers={"Origin": "http://example.com"}).status_code == 403
    rebound = {"Sec-Fetch-Site": "same-origin", "Host": "evil.example", "Origin": "http://evil.example"}
    assert api.http.post("/scored_data", json=scored(8), headers=rebound).status_code == 403
    own = {"Sec-Fetch-Site": "same-origin", "Origin": f"http://127.0.0.1:{api.port}"}
    assert api.http.get("/status", headers=own).json() == {"current_step": 0, "queue_size": 0}


def test_health_and_overview(api: Server) -> None:
    api.start()
    env_id = api.register_env(desired_name='a"b\\')
    api.post("/scored_data", scored(4, env_id=env_id))
    assert api.get("/healthz") == {"status": "ok"}
    (environment,) = api.get("/overview")["environments"]
    assert (environment["name"], environment["queued"], environment["score"]) == ('a"b\\_0', 4, 0.5)
