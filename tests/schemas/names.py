"""Writes ``names.json``: the fields of the classes that other trainers' files are read into.

Run ``python tests/schemas/names.py DIR`` with a directory that holds the unpacked wheels of the versions below
(``pip download --no-deps trl==1.16.0 axolotl==0.19.0 transformers==5.19.0``). Classes are read and not imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

TARGET = Path(__file__).with_name("names.json")
VERSIONS = {"transformers": "5.19.0", "trl": "1.16.0", "axolotl": "0.19.0"}

# Where a class is, and the names before its fields: of the package, its folder or file, and the class.
CLASSES: Sequence[tuple[str, str, str]] = (
    ("transformers/training_args.py", "TrainingArguments", "trl:"),
    ("trl/trainer/grpo_config.py", "GRPOConfig", "trl:"),
    ("trl/trainer/model_config.py", "ModelConfig", "trl:"),
    ("trl/scripts/utils.py", "ScriptArguments", "trl:"),
    ("trl/scripts/utils.py", "DatasetMixtureConfig", "trl:"),
    ("trl/scripts/utils.py", "DatasetConfig", "trl:datasets."),
    ("trl/scripts/grpo.py", "GRPOScriptArguments", "trl:"),
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


def main(packages: Path) -> None:
    found: dict[str, list[str]] = {}
    for path, name, prefix in CLASSES:
        place = packages / path
        found[f"{prefix}{name}"] = class_fields([place] if place.is_file() else sorted(place.rglob("*.py")), name)
    TARGET.write_text(json.dumps({"versions": VERSIONS, "classes": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
