"""Whether files of other trainers are taken as they stand: each is planned, and trains two steps on a tiny model.

Run ``python benchmarks/public_files.py FOLDER [--table]``. Replaced are the model, the data and the engine alone, and
rewards that are in no file of theirs; steps are two (``--smoke``). The files are not part of this repository;
docs/public-files.md says where they are from.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import time
from pathlib import Path

import torch
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from lachesis.common.errors import LachesisError
from lachesis.config.load import LoadedConfig, load_config
from lachesis.config.paths import is_model_spec
from lachesis.config.plan import plan
from lachesis.config.rules import check
from lachesis.config.schema import EmbeddedEngineConfig, InProcessBridgeConfig, LachesisConfig
from lachesis.config.schema.rollouts import NAMED_REWARDS
from lachesis.config.trial import trial
from lachesis.run.train import train

CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
ROW = {
    "prompt": "1 + 1?",
    "solution": "$2$",
    "answer": "2",
    "answers": ["assert True"],
    "verification_info": {"language": "python", "test_cases": []},
    "target": 2,
    "nums": [1, 1],
}


def write_model(directory: Path) -> None:
    """A model of any context that ends a completion soon: most of the probability is its end token's."""
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID, "tie_word_embeddings": False}
    config = Qwen2Config(vocab_size=VOCAB_SIZE, num_hidden_layers=2, max_position_embeddings=1 << 18, **shape, **ends)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 10.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[EOS_ID, 0] = 1.0
    model.save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(directory)


def replaced(loaded: LoadedConfig, work: Path) -> LoadedConfig:
    """The same with the tiny model, its own problems and the embedded engine."""
    config = loaded.config
    model = config.model.model_copy(
        update={
            "path": str(work / "model"),
            **dict.fromkeys(("tokenizer", "revision", "chat_template", "pad_token")),
            "special_tokens": {},
            "quantization": "none",
            "device": "cpu",
            "compile": "off",
        }
    )
    data = config.data.model_copy(
        update={
            "path": str(work / "rows.jsonl"),
            **dict.fromkeys(("name", "transform", "prepared_path", "eval_path", "eval_split")),
            **{"split": "train", "more": [], "prompt_column": "prompt", "format": "auto", "eval_size": 0},
        }
    )
    functions = [_reward(spec, work) for spec in config.rewards.functions]
    rewards = config.rewards.model_copy(update={"functions": functions})
    changes = {"model": model, "data": data, "rewards": rewards}
    changes |= {"engine": EmbeddedEngineConfig(), "bridge": InProcessBridgeConfig()}
    run = config.run.model_copy(update={"dir": str(work / "runs"), "name": f"run-{time.monotonic_ns()}"})
    evaluation = config.evaluation.model_copy(update={"every_steps": 0})
    given = LoadedConfig(
        LachesisConfig(**{**dict(config), **changes, "run": run, "evaluation": evaluation}), work, loaded.dialect
    )
    return trial(given)


def _reward(spec: object, work: Path) -> object:
    """Theirs, or where it is a model or in no file that is here a stand-in under a name of its own."""
    name = spec["function"] if isinstance(spec, dict) else str(spec)
    if name in NAMED_REWARDS:
        return spec
    label = "".join(letter if letter.isalnum() else "_" for letter in name)
    kind = "a model" if is_model_spec(name) else "a function"
    file = work / "stand_in.py"
    known = file.read_text() if file.exists() else "import random\n"
    if f"def r_{label}(" not in known:
        body = f"    # for {kind}\n    return [random.random() for _ in completions]\n"
        file.write_text(f"{known}def r_{label}(completions, **_):\n{body}")
    return f"{file}:r_{label}"


def result_of(file: Path, work: Path) -> str:
    """``unchanged``, or why not."""
    try:
        loaded = load_config(file)
        changed = replaced(loaded, work)
        check(changed.config)
        plan(changed.config)
        summary = train(changed, resume=False, overwrite=True)
        return "unchanged" if summary.steps == 2 else f"{summary.steps} steps"
    except LachesisError as error:
        return " ".join(error.message.replace(str(file), "").split())[:160]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(folder: Path) -> None:
    logging.disable(logging.WARNING)
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml"))
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_model(work / "model")
        (work / "rows.jsonl").write_text("".join(json.dumps(ROW | {"prompt": f"{n} + 1?"}) + "\n" for n in range(64)))
        results = {}
        for file in files:
            started = time.monotonic()
            results[file] = result_of(file, work)
            _say(f"{file.name}\t{results[file]}\t{time.monotonic() - started:.1f} s")
    good = sum(result == "unchanged" for result in results.values())
    _say(f"{good} of {len(results)} unchanged ({100 * good / max(1, len(results)):.0f} %)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
