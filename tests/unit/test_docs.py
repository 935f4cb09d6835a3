"""The documentation says what the code does: links, command lines, configurations, and the messages it quotes."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from lachesis.cli import app
from lachesis.cli.base import HELP_FLAGS
from lachesis.common import errors
from lachesis.common.errors import LachesisError
from lachesis.config.load import load_argv, load_config
from lachesis.config.rules import check
from lachesis.plugins.atropos import evaluate as env_eval
from lachesis.plugins.atropos import services as launch
from lachesis.plugins.atropos.catalogue import described
from lachesis.plugins.atropos.environments.settings import parse_options
from lachesis.plugins.atropos.run import find
from lachesis.plugins.sweep.commands import read_sweep
from tests.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Flags of `vllm serve` in the pages, which our server hands on.
VLLM_FLAGS = {"--max-num-batched-tokens", "--data-parallel-size", "--served-model-name"}

# Of the commands `grpo` and `run`, those that say what the configuration is.
OPTIONS = ("overrides", "engine", "environment", "environment_args")

# What a fragment of a configuration is put into, so that its keys are checked too.
CANONICAL = """
run: {steps: 10}
model: {path: model}
data: {path: problems.jsonl}
rewards: {functions: [rewards.right]}
"""
AXOLOTL = """
base_model: model
rl: grpo
max_steps: 10
micro_batch_size: 8
gradient_accumulation_steps: 8
warmup_steps: 1
learning_rate: 1.0e-6
datasets: [{path: problems.jsonl}]
trl: {reward_funcs: [rewards.right]}
"""
ENVIRONMENT_SECTIONS = {"env", "openai", "slurm"}


@dataclass(frozen=True, slots=True)
class Code:
    """Code in a page: a fenced block of ``language``, or a span in a line (``language`` is "")."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def pages_code() -> tuple[Code, ...]:
    return tuple(code for page in PAGES for code in code_of(page))


def code_of(page: Path) -> Iterator[Code]:
    """All code in a page. A comment of HTML is no part of the page."""
    text = re.sub(r"<!--.*?-->", lambda comment: "\n" * comment[0].count("\n"), page.read_text(), flags=re.DOTALL)
    fence, start, block = "", 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        opening = re.match(r"\s*```(\w*)", line)
        if fence and line.strip() == "```":
            yield Code(page, start, fence, "\n".join(block))
            fence = ""
        elif opening and not fence:
            fence, start, block = opening[1] or "text", number + 1, []
        elif fence:
            block.append(line)
        else:
            yield from (Code(page, number, "", span) for span in re.findall(r"`([^`]+)`", line))
    assert not fence, f"{page}: the code block of line {start} does not end"


def blocks(*languages: str) -> list[Code]:
    return [code for code in pages_code() if code.language in languages]


# Links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_point_to_something(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_readme():
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in found:
            found.add(page)
            targets = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
            waiting += [(page.parent / name).resolve() for name in targets if ":" not in name]
    assert set(PAGES) <= found


# Commands


def command_lines() -> Iterator[tuple[Code, str]]:
    """Each command of ours: a line of a block, or a span. What is in a block may go on over several lines.

    Blocks of tutorials are run, with the files that they write: tests/e2e/test_tutorials.py.
    """
    for code in pages_code():
        if code.language and code.page.parent.name == "tutorials":
            continue
        if code.language in ("bash", "sh", "console", "text"):
            for line in re.sub(r"\\\n\s*", " ", code.text).splitlines():
                if found := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\S*/bin/)?((?:lachesis|run-api)\b.*)", line):
                    yield code, expanded(found[1], page=code.page)
        elif code.language == "" and re.match(r"lachesis [a-z]", code.text):
            yield code, code.text


def expanded(line: str, *, page: Path) -> str:
    """With the variables that a block of the page sets, as ``M=model`` or ``FLAGS="--a 1"``, in their place."""
    values = re.findall(r'^([A-Z]+)=(?:"([^"]*)"|(\S+))$', page.read_text(), flags=re.MULTILINE)
    for name, quoted, plain in reversed(values):
        line = re.sub(rf"\${name}\b", " ".join((quoted or plain).split()), line)
    return line


def words_of(line: str) -> list[str]:
    """The words of a command, without comments, redirections and the brackets around what may be left out."""
    line = re.split(r"\s(?:&|\||2?>|<|&&)(?:\s|$)", line + " ")[0]
    words = shlex.split(re.sub(r"[\[\]](?=\s|$)|(?<=\s)[\[\]]", "", line), comments=True)
    return [word for word in words if word not in ("...", "…", "FLAGS", "|")]


COMMANDS = [pytest.param(code, line, id=f"{code.place}-{line[:40]}") for code, line in command_lines()]


@pytest.mark.parametrize(("code", "line"), COMMANDS)
def test_commands_parse(code: Code, line: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    program, *words = words_of(line)
    words = ["run-api", *words] if program == "run-api" else words
    if words[0] == "--traceback":
        words = words[1:]
    name, words = words[0], words[1:]
    command = commands()[name]
    if name in ("data", "rewards", "cluster") and words:
        command, words = command.commands[words[0]], words[1:]
    if name == "env":
        check_environment(words)
    elif name in ("grpo", "run"):
        check_trainer(name, words, page=code.page)
    else:
        check_options(command, words, page=code.page)


@cache
def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return group.commands


def check_options(command: Any, words: list[str], *, page: Path) -> None:
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    takes_vllm = command.name in ("serve", "vllm-serve")
    for word in words:
        if word.startswith("-"):
            flag = word.partition("=")[0]
            assert flag in known | {"--help"} or (takes_vllm and flag in VLLM_FLAGS), f"unknown option {flag}"
    check_configurations(words, page=page)


def check_environment(words: list[str]) -> None:
    if not words or words[0].isupper():
        return
    if words[0] in ("list", "info"):
        assert words == ["list"] or described(words[1])
        return
    if words[0] in ("eval", "try"):
        if not words[1].isupper():
            kind, flags = env_eval.resolve(words[1])
            parse_options([*flags, *env_eval.parse_trial(words[2:]).rest], env_class=kind.config_class)
        return
    kind = find(words[0])
    if any(word in HELP_FLAGS for word in words):
        return
    _, command, *flags = words
    assert set(command.split("|")) <= {"serve", "process", "evaluate"}
    parse_options(flags, env_class=kind.config_class)


def check_trainer(name: str, words: list[str], *, page: Path) -> None:
    context = commands()[name].make_context(name, list(words))
    flags, options = context.args, {key: value for key, value in context.params.items() if key in OPTIONS}
    if HELP_FLAGS & set(flags) or not flags:
        return
    if not flags[0].startswith("--"):
        check_configurations(flags, page=page)
        return
    if "--model-name" not in flags:  # a flag that is talked about
        load_argv(["--model-name", "model", *flags], overrides=options["overrides"])
        return
    loaded = (launch.load_words if name == "run" else load_argv)(flags, **options)
    assert not [one.message for one in check(loaded.config) if one.level == "problem"]
    if loaded.config.services.environment is not None:
        command = launch.environment_command(loaded.config, loaded.config.services.environment)
        check_environment(command[command.index("env") + 1 :])


def check_configurations(words: list[str], *, page: Path) -> None:
    """A configuration that a command names is in the repository, or a block of the page."""
    text = page.read_text()
    named = {"config.yaml"} | set(re.findall(r"^# (\S+\.ya?ml)", text, flags=re.MULTILINE))
    named |= {f"{directory}/config.yaml" for directory in re.findall(r"lachesis init (\w+)", text)}
    for word in words:
        if re.fullmatch(r"[\w./-]+\.ya?ml", word):
            assert word in named or (ROOT / word).is_file(), f"no configuration {word}"


# Configurations


YAML_BLOCKS = [pytest.param(code, id=code.place) for code in blocks("yaml", "yml")]


@pytest.mark.parametrize("code", YAML_BLOCKS)
def test_configurations_parse(code: Code, tmp_path: Path):
    """A block without a model is a fragment; its keys are checked within a whole configuration."""
    data = yaml.safe_load(code.text)
    assert isinstance(data, dict), code.text
    path = tmp_path / "config.yaml"
    if "config" in data:
        path.write_text(code.text)
        assert read_sweep(path).keys
        return
    if set(data) <= ENVIRONMENT_SECTIONS:
        path.write_text(code.text)
        parse_options(["--config", str(path)], env_class=find("gsm8k").config_class)
        return
    whole = {"model", "base_model", "model_name_or_path"} & set(data)
    if whole:
        path.write_text(code.text)
    else:
        theirs = "trl" in data or "vllm" in data or "datasets" in data or "lora_r" in data
        path.write_text(yaml.safe_dump(merged(yaml.safe_load(AXOLOTL if theirs else CANONICAL), data)))
    loaded = load_config(path)
    if whole:
        assert not [one.message for one in check(loaded.config) if one.level == "problem"]


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        mine = result.get(key)
        result[key] = merged(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return result


@pytest.mark.parametrize("code", [pytest.param(code, id=code.place) for code in blocks("python")])
def test_python_is_that_of_the_files(code: Code):
    """A block that begins with the name of a file has no line that the file has not."""
    ast.parse(code.text)
    first, *lines = code.text.splitlines()
    written = code.page.parent.name == "tutorials"  # by the page
    if not written and (named := re.fullmatch(r"# (\S+/\S+\.py)", first)) is not None:
        there = set((ROOT / named[1]).read_text().splitlines())
        assert not [line for line in lines if line not in there]


# Messages


HOLE = "\0"


@dataclass(frozen=True, slots=True)
class Literal:
    """A text of the source, HOLE where a value is put in; ``exit_code`` if it is an error's message."""

    text: str
    exit_code: int | None


@cache
def literals() -> tuple[Literal, ...]:
    """Every text in the source that may be said to someone: all but docstrings."""
    codes = {name: kind.exit_code for name, kind in vars(errors).items() if is_error(kind)}
    found: list[Literal] = []
    for path in sorted((ROOT / "src" / "lachesis").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        quiet = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        code_at: dict[int, int] = {}
        for node in nodes:
            if isinstance(node, ast.Call) and node.args:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                if name in codes:
                    code_at |= {id(part): codes[name] for part in ast.walk(node.args[0])}
        for node in nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in quiet and (text := text_of(node)):
                found.append(Literal(normal(text), code_at.get(id(node))))
    rules = [tomllib.loads(path.read_text()) for path in (ROOT / "src" / "lachesis").rglob("rules.toml")]
    for row in (row for table in rules for rows in table.values() for row in rows):
        said = [row[level] for level in ("problem", "warning", "note") if level in row]
        found += [Literal(normal(re.sub(r"\{[^{}]*\}", HOLE, text)), 2) for text in said]
    for path in (ROOT / "src" / "lachesis").rglob("refusals.toml"):
        refusals = [row for rows in tomllib.loads(path.read_text()).values() for row in rows]
        found += [Literal(normal(re.sub(r"\{[^{}]*\}", HOLE, row["refused"])), 2) for row in refusals]
    for name in ("messages.toml", "remedies.toml", "vllm_launch.toml"):
        for path in (ROOT / "src" / "lachesis").rglob(name):
            texts = texts_in(tomllib.loads(path.read_text()))
            found += [Literal(normal(re.sub(r"\{[^{}]*\}", HOLE, text)), None) for text in texts]
    return tuple(found)


def texts_in(table: object) -> Iterator[str]:
    """All texts of a table, at any depth."""
    if isinstance(table, str):
        yield table
    elif isinstance(table, dict | list):
        for value in table.values() if isinstance(table, dict) else table:
            yield from texts_in(value)


def is_error(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, LachesisError)


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(HOLE if isinstance(part, ast.FormattedValue) else str(part.value) for part in node.values)  # type: ignore[attr-defined]
    return ""


def normal(text: str) -> str:
    return " ".join(text.split()).lower()


def pattern_of(quoted: str) -> re.Pattern[str]:
    """A quoted message as it stands in the source: an ellipsis, and a number, are values that were put in."""
    parts = [re.escape(normal(part)) for part in quoted.split("…")]
    return re.compile(".*".join(parts))


def matches(quoted: str) -> list[Literal]:
    pattern = pattern_of(quoted)
    longest = max(map(normal, quoted.split("…")), key=len)  # a look for it spares most searches
    return [literal for literal in literals() if longest in literal.text and pattern.search(literal.text)]


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table with the columns ``says`` and ``exit``."""

    line: int
    says: tuple[str, ...]
    exit: str


def rows_of(page: Path) -> Iterator[Row]:
    header: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not header:
            header = cells
        elif "says" in header and not set(line) <= set("|-: "):
            row = dict(zip(header, cells, strict=True))
            yield Row(number, tuple(re.findall(r"`([^`]+)`", row["says"])), row.get("exit", ""))


def codes_of(page: Path) -> Iterator[Row]:
    """The messages on the page of an exit code."""
    code = page.stem.rpartition("-")[2]
    return (replace(row, exit=code) for row in rows_of(page))


TROUBLES = [pytest.param(row, id=str(row.line)) for row in rows_of(ROOT / "docs" / "troubleshooting.md")]


TROUBLES += [
    pytest.param(row, id=f"{page.stem}:{row.line}")
    for page in sorted((ROOT / "docs" / "errors").iterdir())
    for row in codes_of(page)
]


@pytest.mark.parametrize("row", TROUBLES)
def test_quoted_messages_are_in_the_source(row: Row):
    for quoted in row.says:
        found = matches(quoted)
        assert found, f"nothing in src/lachesis says: {quoted}"
        codes = {literal.exit_code for literal in found} - {None}
        if row.exit.isdecimal() and codes:
            assert int(row.exit) in codes, f"{quoted} exits with {codes}"


def test_a_changed_message_would_be_noticed():
    assert len(TROUBLES) > 40
    assert matches("Atropos API not reachable at …")
    assert not matches("Atropos API not reachable by …")
    assert not matches("not reachable at … Atropos API")


def test_the_exit_codes_of_the_page_are_those_of_the_errors():
    page = (ROOT / "docs" / "errors.md").read_text()
    numbers = {int(number) for number in re.findall(r"^\| \[(\d+)\]\(errors/", page, flags=re.MULTILINE)}
    raised = {kind.exit_code for kind in vars(errors).values() if is_error(kind)} - {LachesisError.exit_code}
    assert raised <= numbers


def test_pictures_are_small_shown_on_a_page_and_taken_by_a_script():
    script = (ROOT / "docs" / "pictures.py").read_text()
    pages = "".join(page.read_text() for page in PAGES)
    assert "python docs/pictures.py" in pages
    found = sorted((ROOT / "docs" / "pictures").glob("*.png"))
    assert len(found) >= 5
    for picture in found:
        assert picture.stat().st_size < 150_000, picture
        assert f"pictures/{picture.name})" in pages and f'"{picture.stem}"' in script


@pytest.mark.parametrize(
    "diff", re.findall(r"^```diff\n(.*?)^```$", (ROOT / "docs/extending.md").read_text(), re.M | re.S)
)
def test_a_diff_of_the_page_on_extending_applies(diff: str):
    """tests/e2e/test_extending.py runs what they add; this one tells within seconds that the code has moved on."""
    done = subprocess.run(
        ["git", "apply", "--check", "-"], input=diff, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
