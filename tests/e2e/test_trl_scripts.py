"""TRL's scripts, and two that do what its examples do, with their import changed and a tiny model.

TRL's package has a script for GRPO and one for RLOO; its examples are run where ``TRL_CHECKOUT`` names a clone of its
repository. What they would download lies in the directory in which they run, under the hub's names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lachesis.run.library import load
from tests import pictures, warm
from tests.e2e.trl_script import TRL
from tests.long import long_but
from tests.paths import DATA, ROOT, SOURCE
from tests.tiny import tiny_model

MODEL = "Qwen/Qwen3-0.6B"
SHORTLY = ("--per_device_train_batch_size", "4", "--num_generations", "4", "--logging_steps", "1")
NAMED = ("--model_name_or_path", MODEL, "--output_dir", "out", *SHORTLY)
PICTURES = ("--model_name_or_path", "HuggingFaceTB/SmolVLM2-2.2B-Instruct", "--output_dir", "out", *SHORTLY)
LORA = ("--use_peft", "--lora_target_modules", "q_proj", "v_proj")
# Those of TRL's examples that train by groups and need neither a server nor a package beside TRL, with their words.
EXAMPLES = {
    "grpo_2048": (),
    "grpo_agent": NAMED,
    "grpo_continuous_batching": (*NAMED, "--use_peft", "--log_completions"),
    "grpo_vlm": (*PICTURES, *LORA, "--dtype", "float32"),
    "gspo": (*NAMED, *LORA, "--importance_sampling_level", "sequence", "--epsilon", "3e-4"),
    "gspo_vlm": (*PICTURES, *LORA, "--dtype", "float32", "--importance_sampling_level", "sequence"),
}
CHECKOUT = os.environ.get("TRL_CHECKOUT", "")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory to run in."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_of_bytes()
    torch.manual_seed(0)
    fields = {"vocab_size": len(tokenizer), "eos_token_id": 2, "bos_token_id": None, "max_position_embeddings": 8192}
    for name in (MODEL, "Qwen/Qwen3-4B"):
        tiny_model("qwen3", **fields).save_pretrained(name)
        tokenizer.save_pretrained(name)
    pictures.save(Path("HuggingFaceTB/SmolVLM2-2.2B-Instruct"))
    sums = [(f"What is {n} + {n}?", str(2 * n)) for n in range(80)]
    asked = [{"prompt": [{"role": "user", "content": ask}], "solution": f"${right}$"} for ask, right in sums[:16]]
    put("trl-lib/DeepMath-103K", "default", train=asked, test=asked[:4])
    words = [{"question": ask, "answer": f"So it is.\n#### {right}"} for ask, right in sums[:8]]
    put("openai/gsm8k", "main", train=words)
    problems = [{"problem": ask, "solution": f"$\\boxed{{{right}}}$", "messages": []} for ask, right in sums]
    put("AI-MO/NuminaMath-TIR", "default", train=problems, test=problems)
    put("qgallouedec/biogrid", "default", train=[{"Alt IDs Interactor A": "a"}])
    genes = [{"question": f"Does the gene {letter} interact?", "answer": "Yes"} for letter in "ABCD"]
    put("qgallouedec/biogrid_qa", "default", train=genes)
    seen = [{"problem": "what colour", "solution": "$1$", "image": pictures.picture("red")}] * 120
    put("lmms-lab/multimodal-open-r1-8k-verified", "default", train=seen)
    return tmp_path


def tokenizer_of_bytes() -> PreTrainedTokenizerFast:
    """A token a byte, and Qwen3's special tokens and chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((*SPECIALS, *letters))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS[:3]))
    found = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIALS[2], pad_token=SPECIALS[0])
    found.chat_template = (TRL / "trl" / "chat_templates" / "qwen3.jinja").read_text()
    return found


def put(name: str, config: str, **splits: list[dict[str, Any]]) -> None:
    """Write a dataset where `load_dataset(name, config)` finds it without a hub."""
    files = "".join(f"  - split: {split}\n    path: {split}.parquet\n" for split in splits)
    Path(name).mkdir(parents=True)
    Path(name, "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n")
    for split, rows in splits.items():
        Dataset.from_list(rows).to_parquet(Path(name, f"{split}.parquet"))


def run(script: Path, *words: str) -> str:
    """Run a script with its import changed, and return what it said."""
    paths = os.pathsep.join([str(SOURCE), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_DATASETS_CACHE": "cache", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.e2e.trl_script", str(script), *words]
    with open("log", "wb") as log:
        process = warm.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        status = process.wait(timeout=240)
    said = Path("log").read_text()
    assert status == 0, said[-3000:]
    return said


def check(directory: Path) -> None:
    """Both steps were trained."""
    steps = load(directory).log.steps
    assert [step.step for step in steps] == [1, 2] and all("reward" in step.values for step in steps)


needs_trl = pytest.mark.skipif(not TRL.is_dir(), reason="`make trl` installs it")


@needs_trl
@pytest.mark.parametrize(
    "script",
    long_but(
        ["grpo", "rloo"],
        short=["grpo"],
        why="test_trls_own_scripts_train_with_their_command_lines[grpo]: another script, with the same command line",
    ),
)
def test_trls_own_scripts_train_with_their_command_lines(hub: Path, script: str):
    (hub / "mine.py").write_text("def ones(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    names = ("accuracy_reward", "think_format_reward", "get_soft_overlong_punishment", "mine.ones")
    further = ("--dataset_name", "trl-lib/DeepMath-103K", "--eval_strategy", "steps", "--eval_steps", "1")
    said = run(TRL / "trl" / "scripts" / f"{script}.py", *NAMED, *further, "--reward_funcs", *names)
    check(hub / "out")
    assert "Training completed." in said and "Model saved to out." in said
    assert "step 2/2" in said
    AutoModelForCausalLM.from_pretrained("out")
    assert len(load(hub / "out").log.evaluations) >= 2


@needs_trl
@pytest.mark.parametrize(("script", "words"), [("agent", (*NAMED, "--use_peft")), ("game", ())])
def test_scripts_of_the_kinds_of_trls_examples_train(hub: Path, script: str, words: tuple[str, ...]):
    further = ("--dataset_name", "openai/gsm8k", "--dataset_config", "main") if words else ()
    run(DATA / "trl" / f"{script}.py", *words, *further)
    place = hub / ("out" if words else script)
    check(place)
    assert (place / "adapter_config.json").is_file()


@needs_trl
@pytest.mark.skipif(not CHECKOUT, reason="TRL_CHECKOUT names no clone of TRL's repository")
@pytest.mark.parametrize("script", EXAMPLES)
def test_trls_examples_train(hub: Path, script: str):
    run(Path(CHECKOUT, "examples", "scripts", f"{script}.py"), *EXAMPLES[script])
    check(hub / ("out" if EXAMPLES[script] else "trainer_output"))
