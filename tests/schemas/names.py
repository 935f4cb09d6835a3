"""Writes ``names.json``: the fields of the classes that other trainers' files are read into, and their defaults.

Run ``python tests/schemas/names.py DIR`` with a directory that holds the unpacked wheels of the versions below
(``pip download --no-deps trl==1.16.0 axolotl==0.19.0 transformers==5.19.0``), and open-r1's ``src/open_r1`` at that
commit. Classes are read and not imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

TARGET = Path(__file__).with_name("names.json")
VERSIONS = {"transformers": "5.19.0", "trl": "1.16.0", "axolotl": "0.19.0", "open_r1": "1416fa0cf215"}

# Where a class is, and the names before its fields: of the package, its folder or file, and the class.
CLASSES: Sequence[tuple[str, str, str]] = (
    ("transformers/training_args.py", "TrainingArguments", "trl:"),
    ("trl/trainer/base_config.py", "_BaseConfig", "trl:"),
    ("trl/trainer/grpo_config.py", "GRPOConfig", "trl:"),
    ("trl/trainer/rloo_config.py", "RLOOConfig", "rloo:"),
    ("trl/trainer/model_config.py", "ModelConfig", "trl:"),
    ("trl/scripts/utils.py", "ScriptArguments", "trl:"),
    ("trl/scripts/utils.py", "DatasetMixtureConfig", "trl:"),
    ("trl/scripts/utils.py", "DatasetConfig", "trl:datasets."),
    ("trl/scripts/grpo.py", "GRPOScriptArguments", "trl:"),
    ("open_r1/configs.py", "ScriptArguments", "trl:open_r1_"),
    ("open_r1/configs.py", "GRPOConfig", "trl:open_r1_"),
    ("open_r1/configs.py", "GRPOScriptArguments", "trl:open_r1_"),
    ("axolotl/utils/schemas", "AxolotlInputConfig", "axolotl:"),
    ("axolotl/utils/schemas", "HyperparametersConfig", "axolotl:"),
    ("axolotl/utils/schemas", "TRLConfig", "axolotl:trl."),
    ("axolotl/utils/schemas", "VllmConfig", "axolotl:vllm."),
    ("axolotl/utils/schemas", "SpecialTokensConfig", "axolotl:special_tokens."),
    ("axolotl/utils/schemas", "SFTDataset", "axolotl:datasets."),
)


def class_fields(files: Sequence[Path], name: str) -> list[str]:
    """The annotated fields of a class and of its bases in the same files, first come first."""
    classes = {node.name: node for file in files for node in _classes(file)}
    return list(dict.fromkeys(_fields(classes, name)))


def _classes(file: Path) -> Iterator[ast.ClassDef]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _fields(classes: dict[str, ast.ClassDef], name: str) -> Iterator[str]:
    if name not in classes:
        return
    for statement in classes[name].body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(statement.annotation) and not statement.target.id.startswith("_"):
            yield statement.target.id
    for base in classes[name].bases:
        yield from _fields(classes, base.id if isinstance(base, ast.Name) else "")


def class_defaults(files: Sequence[Path], name: str) -> dict[str, object]:
    """The defaults of the fields of a class that are written as constants; the class's own before its bases'."""
    classes = {node.name: node for file in files for node in _classes(file)}
    found: dict[str, object] = {}
    for field, value in _values(classes, name):
        if value is not None and field not in found:
            with suppress(ValueError):
                found[field] = ast.literal_eval(value)
    return found


def _values(classes: dict[str, ast.ClassDef], name: str) -> Iterator[tuple[str, ast.expr | None]]:
    """Fields and the expressions of their defaults."""
    for statement in classes[name].body if name in classes else ():
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, _default(statement.value)
    for base in classes[name].bases if name in classes else ():
        yield from _values(classes, base.id if isinstance(base, ast.Name) else "")


def _default(value: ast.expr | None) -> ast.expr | None:
    """``default`` of ``field(...)`` or ``Field(...)``, or what its ``default_factory`` returns; else the value."""
    if not isinstance(value, ast.Call):
        return value
    named = {keyword.arg: keyword.value for keyword in value.keywords}
    factory = named.get("default_factory")
    if isinstance(factory, ast.Lambda):
        return factory.body
    return named.get("default", value.args[0] if value.args else None)


def main(packages: Path) -> None:
    found: dict[str, list[str]] = {}
    defaults: dict[str, dict[str, object]] = {}
    for path, name, prefix in CLASSES:
        place = packages / path
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        found[f"{prefix}{name}"] = class_fields(files, name)
        defaults[f"{prefix}{name}"] = class_defaults(files, name)
    text = json.dumps({"versions": VERSIONS, "classes": found, "defaults": defaults}, indent=1)
    TARGET.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
