"""Where things of the repository lie, for tests that read them."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "lachesis"
EXAMPLES = ROOT / "examples"
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks"
GOLDEN = ROOT / "tests" / "golden"
DATA = ROOT / "tests" / "data"
