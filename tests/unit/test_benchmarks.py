"""What the benchmarks compute from what they measure; measuring itself takes minutes and is not tested here."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lachesis.config.rules import check
from tests.paths import BENCHMARKS

# Where a step of a run spent its time: 0.1 s of waiting in an asynchronous one, whose generation ran beside it.
STEP = {
    "step_time": 1.0, "data_fetch_time": 0.1, "train_time": 0.6, "sync_time": 0.2, "transfer_time": 0.05,
    "proof_time": 0.03, "generation_time": 0.7, "reward_time": 0.02, "staleness": 1.0,
}  # fmt: skip


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setitem(sys.modules, name, module)  # where dataclasses look for it
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def overlap_table() -> ModuleType:
    return load("overlap_table")


def alone(module: ModuleType, prompts: int, generation: float, training: float):
    return module.Alone(prompts=prompts, generation=generation, training=training)


class TestOverlap:
    def test_a_run_is_split_into_parts_that_add_up_to_its_steps(self, overlap_table: ModuleType):
        found = overlap_table.split([STEP, STEP | {"step_time": 1.2, "staleness": 0.0}])
        assert found.step == pytest.approx(1.1)
        assert found.optimizer == pytest.approx(0.12)
        assert found.staleness == 0.5
        parts = (found.waiting, found.training, found.optimizer, found.transfer, found.proof, found.rest)
        assert sum(parts) == pytest.approx(found.step), "generation and rewards stand beside them"

    def test_a_step_is_compared_with_the_longer_of_the_two(self, overlap_table: ModuleType):
        measured = overlap_table.split([STEP])
        pair = alone(overlap_table, 8, 0.8, 0.5)
        assert (pair.longer, pair.balance) == (0.8, pytest.approx(0.625))
        one = overlap_table.Round(alone=pair, both=pair, synchronous=measured, asynchronous=measured, load=0.5)
        assert one.ratio == pytest.approx(1.25)

    @pytest.mark.parametrize(
        ("generation", "training", "expected"),
        [(1.0, 0.5, 16), (0.5, 1.0, 4)],
        ids=["generation is longer: more prompts", "training is longer: fewer"],
    )
    def test_after_one_measurement_the_batch_is_doubled_or_halved(
        self, overlap_table: ModuleType, generation: float, training: float, expected: int
    ):
        assert overlap_table.next_prompts([alone(overlap_table, 8, generation, training)], most=100) == expected

    def test_after_two_it_is_where_both_lines_meet(self, overlap_table: ModuleType):
        def measured(prompts: int):
            return alone(overlap_table, prompts, 0.6 + 0.01 * prompts, 0.04 * prompts)  # they meet at 20

        assert overlap_table.next_prompts([measured(8), measured(16)], most=100) == 20
        assert overlap_table.next_prompts([measured(8), measured(16)], most=18) == 18

    def test_noise_leads_neither_to_no_prompts_nor_to_a_thousand(self, overlap_table: ModuleType):
        before, last = alone(overlap_table, 8, 1.0, 0.5), alone(overlap_table, 16, 1.0, 0.51)
        assert overlap_table.next_prompts([before, last], most=1000) == 64, "four times as many at most"
        rising = [alone(overlap_table, 2, 0.5, 1.0), alone(overlap_table, 1, 0.5, 1.1)]
        assert overlap_table.next_prompts(rising, most=1000) == 1

    def test_the_table_has_medians_and_says_where_the_two_are_not_alike(self, overlap_table: ModuleType):
        pair = alone(overlap_table, 8, 0.8, 0.5)
        rounds = [
            overlap_table.Round(
                alone=pair,
                both=alone(overlap_table, 8, 0.88, 0.6),
                synchronous=overlap_table.split([STEP | {"step_time": step + 0.6}]),
                asynchronous=overlap_table.split([STEP | {"step_time": step}]),
                load=0.3,
            )
            for step in (0.84, 0.8, 2.0)
        ]
        text = overlap_table.table(rounds, what="two cores")
        assert "| a step | 1.440 | **0.840** |" in text
        assert "its own two | 2.000 | 1.167 |" in text, "0.7 s of generation, 0.6 + 0.12 s of training"
        assert "| 1.050 (1.000 to 2.500) |" in text
        assert "the shorter is 0.62 of the longer" in text
        assert "The machine itself allows 1.100" in text


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--bridge", "broadcast", "--ahead", "2"],
        ["--engine", "vllm"],
        ["--engine", "vllm", "--devices", "1", "--bridge", "broadcast", "--cores", "0", "1"],
    ],
    ids=["embedded", "embedded, broadcast", "vllm", "vllm on another GPU"],
)
def test_overlap_measures_runs_that_could_be_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
):
    script = load("overlap")
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--size", "small", "--work", str(tmp_path), *words])
    options = script.read_options()
    monkeypatch.setattr(script, "write_model", lambda directory, **options: None)
    bench = script.Bench(script.configuration(options), side=None, policy=None, rewarder=None, problems=[])
    alone, ahead = bench.with_prompts(4), bench.with_prompts(4, ahead=options.ahead)
    assert (alone.batch.prompts_per_step, alone.pipeline.async_prefetch) == (4, False)
    assert (ahead.pipeline.async_prefetch, ahead.pipeline.prefetch_depth) == (True, options.ahead)
    for config in (alone, ahead):
        check(config)
    assert config.bridge.kind == options.bridge
    assert config.adapter.kind == ("lora" if "lora" in options.bridge else "none")
    assert len((tmp_path / "problems.jsonl").read_text().splitlines()) == 512


def test_our_side_of_the_quickstart_alone_needs_no_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    module = load("quickstart_vs_trl")

    def no_trl(*arguments: Any, **options: Any):
        raise AssertionError("TRL was asked for")

    def trained(plan: Any, *, threads: int):
        steps = [module.Step(1.0 + number, 0.5, 0.25, 0.5, 1e-4, 512, 5120, 2048, 4000) for number in range(plan.steps)]
        return module.Run(plan, steps, {0: 0.5, plan.steps: 0.75})

    monkeypatch.setattr(module, "WORK", tmp_path)
    monkeypatch.setattr(module, "trl_python", no_trl)
    monkeypatch.setattr(module, "TrlRunner", no_trl)
    monkeypatch.setattr(module, "load_function", lambda spec: lambda path: None)
    monkeypatch.setattr(module, "run_lachesis", trained)
    monkeypatch.setattr(sys, "argv", ["quickstart_vs_trl.py", "--only", "Lachesis", "--steps", "4", "--seeds", "0"])
    module.main()
    said = capsys.readouterr().out
    assert "| s a step: median (quartiles) | 3.500 (3.250 to 3.750) |" in said
    assert "| held-out accuracy at the end | 0.750 |" in said
    assert "rows a forward pass" not in said


class TestTimeToReward:
    @pytest.fixture(scope="class")
    def module(self) -> ModuleType:
        return load("time_to_reward")

    def test_the_working_carries_and_its_answer_is_rewarded(self, module: ModuleType):
        (row,) = module.problems(digits=5, count=1, seed=0)
        assert module.worked(12345, 99999, digits=5) == "5+9+0=14;4+9+1=14;3+9+1=13;2+9+1=12;1+9+1=11;112344"
        scope: dict[str, Any] = {}
        exec(module.REWARD, scope)
        texts = [row["worked"], [{"role": "assistant", "content": row["worked"]}], row["worked"] + "0", ""]
        assert scope["right"](texts, [row["answer"]] * 4) == [1.0, 1.0, 0.0, 0.0]

    def test_the_time_is_that_of_the_first_evaluation_that_found_the_target(self, module: ModuleType):
        ours = module.Course("Lachesis", 0, [10.0, 11.0, 12.0], [1.0, 2.0, 3.0], {0: 0.1, 2: 0.85, 3: 0.9})
        trl = [
            module.Course("TRL", seed, [30.0, 31.0, 33.0], [3.0, 4.0, 6.0], {0: 0.1, 3: end})
            for seed, end in ((0, 0.9), (1, 0.8), (2, 0.3))
        ]
        assert (ours.reached(0.8, with_start=True), ours.reached(0.8, with_start=False)) == (11.0, 2.0)
        text = module.table([ours, *trl], target=0.8)
        assert "| TRL | 2 | not reached | not reached | 0.100 | 0.300 |" in text
        assert "with start-up: 3.00" in text and "without: 3.00" in text

    def test_graphs_are_for_as_many_sequences_as_a_server_has(self, module: ModuleType):
        options = argparse.Namespace(prompts=64, ahead=1, engines=3)  # 1,024 sequences, 342 at a server
        flags = module.engine_flags(options)
        graphs = json.loads(flags[flags.index("--compilation-config") + 1])
        assert flags[flags.index("--max-num-seqs") + 1] == "384" == str(graphs["cudagraph_capture_sizes"][-1])

    def trial(self, module: ModuleType, *, rows: list[int], seconds: dict[int, float]) -> tuple[int, list[tuple]]:
        """What is chosen where each number of rows takes so long, those not named failing, and what was tried."""
        tried = []

        class Runner:
            def seconds(self, plan: Any, *, rows: int, threads: int) -> float:
                tried.append((rows, plan.steps, plan.directory.name))
                if rows not in seconds:
                    raise SystemExit("out of memory")
                return seconds[rows]

        options = argparse.Namespace(trl_rows=rows, steps=100, threads=2, work=Path("work"))
        return module.fastest_rows(module.Plan(options, "TRL", 1), Runner()), tried

    def test_the_fastest_batch_of_trls_is_found_in_a_few_steps(self, module: ModuleType):
        chosen, tried = self.trial(module, rows=[128, 256, 512], seconds={128: 2.0, 256: 1.5})
        assert chosen == 256, "512 do not fit"
        assert tried == [(128, 6, "trl-128-rows-1"), (256, 6, "trl-256-rows-1"), (512, 6, "trl-512-rows-1")]

    def test_one_batch_is_taken_as_it_is_and_none_that_runs_is_an_end(self, module: ModuleType):
        assert self.trial(module, rows=[512], seconds={}) == (512, [])
        with pytest.raises(SystemExit, match="none of --trl-rows 128 256"):
            self.trial(module, rows=[128, 256], seconds={})


class TestKernelTimes:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "matrix products"),
            ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", "matrix products"),
            ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
            ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
            ("triton_red_fused__to_copy_abs_amax_1", "fused by the compiler: sums, largest values"),
            ("triton_poi_fused_mul_silu_3", "fused by the compiler: elementwise"),
            ("Memcpy DtoD (Device -> Device)", "copies"),
            ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "all others"),
        ],
    )
    def test_a_kernel_is_of_a_kind_by_its_name(self, kernel_times: ModuleType, name: str, kind: str):
        assert kernel_times.Kernel(name=name, seconds=1.0, calls=1).kind == kind

    def test_what_ran_in_a_step_is_found_and_summed_up(self, kernel_times: ModuleType):
        left, right = torch.ones(64, 64), torch.ones(64, 64)

        def step() -> None:
            for _ in range(3):
                left @ right
            left.clone()

        kernels = kernel_times.kernels_of(step, device=torch.device("cpu"))
        assert {one.name: one.calls for one in kernels}["aten::mm"] == 3
        assert [one.seconds for one in kernels] == sorted((one.seconds for one in kernels), reverse=True)
        lines = kernel_times.table(kernels, seconds=0.5).splitlines()
        assert "in a step of 0.500 s" in lines[0]
        (products,) = [line for line in lines if line.startswith("| matrix products |")]
        assert products.endswith("| 3 |") and any(line.startswith("| - `aten::mm` |") for line in lines)

    def test_kernels_of_a_trace_are_those_on_the_gpu(self, kernel_times: ModuleType, tmp_path: Path):
        def event(name: str, category: str, begins: float, lasts: float) -> dict[str, Any]:
            return {"ph": "X", "cat": category, "name": name, "ts": begins, "dur": lasts}

        on_gpu = [
            event("nvjet_a", "kernel", 1e6, 2e5), event("Memset (Device)", "gpu_memset", 1.9e6, 1e5),
            event("nvjet_a", "kernel", 1.5e6, 3e5),
        ]  # fmt: skip
        others = [event("aten::mm", "cpu_op", 0.0, 5e6), {"ph": "M", "name": "process_name", "pid": 1}]
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*others, *on_gpu]}))
        kernels, span = kernel_times.kernels_in(tmp_path / "trace.json")
        assert [(one.name, round(one.seconds, 6), one.calls) for one in kernels] == [
            ("nvjet_a", 0.5, 2), ("Memset (Device)", 0.1, 1),
        ]  # fmt: skip
        assert span == pytest.approx(1.0)
        (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": others}))
        with pytest.raises(ValueError, match="nothing ran on a GPU"):
            kernel_times.kernels_in(tmp_path / "trace.json")


@pytest.fixture(scope="module")
def kernel_times() -> ModuleType:
    return load("kernel_times")
