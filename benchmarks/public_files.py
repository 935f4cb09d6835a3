"""Whether files of other trainers are taken as they stand: each is planned, and trains two steps on a tiny model.

Run ``python -m benchmarks.public_files SOURCES.json [--plan]``. The list has for each file its ``repo``, ``path`` and
``commit``, and in ``file`` where it lies here, in a checkout of its repository; the path of a block in a page ends in
``#N``. Replaced are the model, the data and the engine alone, and rewards that cannot be had here: models, servers,
and functions whose imports are not installed. Steps are two (``--smoke``); ``--plan`` leaves them out. What is printed
is the table of benchmarks/PUBLIC_FILES.md. The files are not part of this repository.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from lachesis.common.errors import ConfigError, LachesisError
from lachesis.common.imports import load_function
from lachesis.common.json_values import flat
from lachesis.config.document import read_document
from lachesis.config.load import LoadedConfig, load_config
from lachesis.config.paths import is_model_spec
from lachesis.config.rules import check
from lachesis.config.schema import EmbeddedEngineConfig, InProcessBridgeConfig, LachesisConfig
from lachesis.config.schema.rollouts import NAMED_REWARDS
from lachesis.config.smoke import trial
from lachesis.engines.build import server_options
from lachesis.plan.plan import plan
from lachesis.plugins.dialects.foreign_files import translated
from lachesis.plugins.dialects.other_systems import other_system
from lachesis.plugins.serving.serve import vllm_arguments
from lachesis.plugins.serving.vllm_launch import plan_launch
from lachesis.run.train import train

_YAML_BLOCK = re.compile(r"^```\{?\.?yaml[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVED = ("ioi_code", "cf_code")  # by judges on other machines, which Lachesis does not ask
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
ROW = {
    "prompt": "1 + 1?",
    "solution": "$2$",
    "answer": "2",
    "answers": ["assert True"],
    "verification_info": {"language": "python", "test_cases": [{"type": "stdin_stdout", "input": "", "output": "2"}]},
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
            # The tiny tokenizer has a token for each character, of which theirs have several.
            "max_prompt_length": (config.data.max_prompt_length or 0) * 8 or None,
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
    """Theirs, or where it cannot be had here a stand-in under a name of its own."""
    name = str(spec["function"] if isinstance(spec, dict) else spec)
    if (name in NAMED_REWARDS and name not in SERVED) or (
        not is_model_spec(name) and name not in SERVED and _loads(name)
    ):
        return spec
    label = "".join(letter if letter.isalnum() else "_" for letter in name)
    file = work / "stand_in.py"
    known = file.read_text() if file.exists() else "import random\n"
    if f"def r_{label}(" not in known:
        body = "    return [random.random() for _ in completions]\n"
        file.write_text(f"{known}def r_{label}(completions, **_):\n{body}")
    return f"{file}:r_{label}"


def _loads(name: str) -> bool:
    try:
        load_function(name)
    except LachesisError:
        return False
    return True


def planned(file: Path, work: Path) -> tuple[LoadedConfig | None, str]:
    """The configuration and ``as it stands`` or ``translated``, or None and the first reason for its refusal."""
    try:
        read = read_foreign(file, work)
        loaded, how = load_config(read), "as it stands" if read == file else "translated"
        check(loaded.config, located=loaded.located)
        plan(loaded.config)
        check_server(loaded.config)
    except LachesisError as error:
        lines = [line.strip() for line in error.message.replace(f"{file}: ", "").replace(str(file), "it").splitlines()]
        reason = next(line for line in lines if not line.endswith("problems"))
        reason = (
            reason.partition(" If it is for your own")[0].partition("; did you mean")[0].partition("; write one")[0]
        )
        return None, f"refused: {reason.replace('|', '/')[:150]}"
    return loaded, how


def read_foreign(file: Path, work: Path) -> Path:
    """The file itself if it can be run; else what `lachesis translate` makes of it, with a stand-in for its rewards."""
    if file.suffix == ".yaml" and other_system(dict(flat(read_document(file).data))) is None:
        return file
    ours = work / "ours.yaml"
    rewards = "" if "\nrewards:" in (text := translated(file)) else "rewards: {functions: [theirs.reward]}\n"
    ours.write_text(text + rewards, encoding="utf-8")
    return ours


def check_server(config: LachesisConfig) -> None:
    """That vLLM, where it is installed, knows each flag of the server that the run would start: the trial has another.

    Raises:
        ConfigError: with vLLM's words.
    """
    if config.engine.kind != "vllm" or importlib.util.find_spec("vllm") is None:
        return
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = server_options(config, config.engine, directory=Path("run"))
    words = io.StringIO()
    try:
        with contextlib.redirect_stderr(words):
            arguments = plan_launch(vllm_arguments(options), environment={}).arguments
            make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    except SystemExit as error:
        raise ConfigError(f"engine: {words.getvalue().strip().splitlines()[-1]}") from error


def two_steps(loaded: LoadedConfig, work: Path) -> str:
    try:
        changed = replaced(loaded, work)
        summary = train(changed, resume=False, overwrite=True)
    except LachesisError as error:
        return " ".join(error.message.split())[:160]
    finally:
        shutil.rmtree(work / "runs", ignore_errors=True)
    own = changed.config.rewards.functions == loaded.config.rewards.functions
    stand_ins = "" if own else " with stand-ins for rewards"
    return f"trains two steps{stand_ins}" if summary.steps == 2 else f"{summary.steps} steps"


def file_of(source: Mapping[str, str], work: Path) -> Path:
    """Where it lies; a path that ends in ``#N`` means the N-th block of YAML, from 0, in a page."""
    file, number = Path(source["file"]), source["path"].partition("#")[2]
    if not number:
        return file
    block = work / f"{file.stem}-{number}.yaml"
    block.write_text(_YAML_BLOCK.findall(file.read_text(encoding="utf-8"))[int(number)], encoding="utf-8")
    return block


def row_of(source: Mapping[str, str], work: Path, *, run: bool) -> str:
    """A line of the table."""
    file, repo, commit = file_of(source, work), source["repo"], source["commit"]
    loaded, result = planned(file, work)
    result = result.replace(source["file"].removesuffix(source["path"]), "")
    ran = "" if loaded is None else f", {two_steps(loaded, work)}" if run else ""
    place = f"https://github.com/{repo}/blob/{commit}/{source['path'].partition('#')[0]}"
    return f"| {repo} | [`{source['path']}`]({place}) | `{commit[:7]}` | {result}{ran} |"


def main(sources: Path, *, run: bool) -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        write_model(work / "model")
        (work / "rows.jsonl").write_text("".join(json.dumps(ROW | {"prompt": f"{n} + 1?"}) + "\n" for n in range(64)))
        rows = []
        for source in json.loads(sources.read_text()):
            rows.append(row_of(source, work, run=run))
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
    refused, ran = (sum(word in row for row in rows) for word in ("| refused", "trains two steps"))
    sys.stdout.write(f"\n{len(rows) - refused} of {len(rows)} taken, {ran} trained, {refused} refused by name\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), run="--plan" not in sys.argv)
