from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch

from lachesis.common.errors import ConfigError
from lachesis.common.imports import describe_exception, load_function, without


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch: pytest.MonkeyPatch):
    """What tests import and put on the path is gone afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_is_found_relative_to_the_base_directory(tmp_path):
    write(tmp_path / "sub" / "score.py", "def f(): return 7")
    assert load_function("sub/score.py:f", tmp_path)() == 7
    assert load_function(f"{tmp_path}/sub/score.py:f", Path("/"))() == 7


def test_a_file_with_the_same_content_is_imported_once(tmp_path):
    write(tmp_path / "score.py", "calls = []\ndef f(): calls.append(1); return calls\ndef g(): return calls")
    load_function("score.py:f", tmp_path)()
    assert load_function("score.py:g", tmp_path)() == [1]


def test_a_file_that_changed_is_imported_anew(tmp_path):
    write(tmp_path / "score.py", "def f(): return 1")
    load_function("score.py:f", tmp_path)
    write(tmp_path / "score.py", "def f(): return 2")
    assert load_function("score.py:f", tmp_path)() == 2


def test_files_of_one_name_in_two_directories_do_not_mix(tmp_path):
    write(tmp_path / "a" / "score.py", "def f(): return 'a'")
    write(tmp_path / "b" / "score.py", "def f(): return 'b'")
    assert load_function("score.py:f", tmp_path / "a")() == "a"
    assert load_function("score.py:f", tmp_path / "b")() == "b"


def test_neighbours_can_be_imported_at_once_and_later(tmp_path):
    write(tmp_path / "lachesis_test_helper.py", "value = 3")
    write(tmp_path / "lachesis_test_late.py", "value = 4")
    write(
        tmp_path / "score.py",
        "from lachesis_test_helper import value\n"
        "def f():\n    from lachesis_test_late import value as late\n    return value + late",
    )
    assert load_function("score.py:f", tmp_path)() == 7


def test_neighbours_do_not_replace_installed_packages_after_the_import(tmp_path):
    write(tmp_path / "score.py", "def f(): return 1")
    load_function("score.py:f", tmp_path)
    assert sys.path[0] != str(tmp_path)
    assert str(tmp_path) in sys.path[-2:]


def test_a_module_is_found_in_the_base_directory_and_among_installed_ones(tmp_path):
    write(tmp_path / "lachesis_test_package" / "__init__.py", "")
    write(tmp_path / "lachesis_test_package" / "score.py", "def f(): return 5")
    assert load_function("lachesis_test_package.score.f", tmp_path)() == 5
    assert load_function("os.path.basename", tmp_path)("a/b") == "b"


def test_a_module_hidden_by_a_loaded_one_is_refused(tmp_path):
    write(tmp_path / "json.py", "def f(): return 1")
    with pytest.raises(ConfigError, match=r"of that name is loaded.*name the file: json\.py:f"):
        load_function("json.f", tmp_path)


@pytest.mark.parametrize("spec", ["", "f", "score.py", "a:b", "score.py:", "score.py:a.b", "a b.c", ".f", "a..b"])
def test_a_spec_of_neither_form_is_refused(tmp_path, spec):
    with pytest.raises(ConfigError) as caught:
        load_function(spec, tmp_path)
    assert spec in caught.value.message


def test_a_missing_file_and_a_missing_module_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.py: No such file"):
        load_function("nowhere.py:f", tmp_path)
    with pytest.raises(ConfigError, match="no module 'lachesis_nowhere'"):
        load_function("lachesis_nowhere.deep.f", tmp_path)


def test_a_missing_function_names_the_nearest(tmp_path):
    write(tmp_path / "score.py", "def exact_match(): ...\ndef length(): ...\nnumber = 3")
    with pytest.raises(ConfigError, match=r"no function 'exact_mach' -> did you mean exact_match"):
        load_function("score.py:exact_mach", tmp_path)
    with pytest.raises(ConfigError, match=r"name one of: exact_match, length"):
        load_function("score.py:zzz", tmp_path)
    with pytest.raises(ConfigError, match=r"a int, no function, 'number'"):
        load_function("score.py:number", tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nx / 0", r"ZeroDivisionError: division by zero \(score\.py:2\)"),
        ("import lachesis_not_installed", r"No module named 'lachesis_not_installed' \(score\.py:1\)"),
        ("def f(:\n", r"SyntaxError: .*score\.py, line 1"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(score\.py:2\)"),
    ],
)
@pytest.mark.parametrize("spec", ["score.py:f", "score.f"])
def test_errors_of_the_module_come_with_their_place(tmp_path, text, message, spec):
    write(tmp_path / "score.py", text)
    with pytest.raises(ConfigError, match=message):
        load_function(spec, tmp_path)
    write(tmp_path / "score.py", "def f(): return 'mended now'")
    assert load_function(spec, tmp_path)() == "mended now"


def test_the_place_of_an_exception_is_the_innermost_one_in_the_file():
    def outer() -> None:
        {}["key"]

    with pytest.raises(KeyError) as caught:
        outer()
    line = outer.__code__.co_firstlineno + 1
    assert describe_exception(caught.value, __file__) == f"KeyError: 'key' (test_imports.py:{line})"
    assert describe_exception(ValueError(), None) == "ValueError"


def test_a_file_of_a_package_imports_its_package_by_name(tmp_path):
    write(tmp_path / "graders" / "__init__.py", "")
    write(tmp_path / "graders" / "helpers.py", "LIMIT = 3")
    write(tmp_path / "graders" / "score.py", "from graders.helpers import LIMIT\ndef f(): return LIMIT")
    assert load_function(f"{tmp_path}/graders/score.py:f")() == 3


def test_a_file_of_a_package_imports_relative_to_itself(tmp_path):
    write(tmp_path / "scores" / "__init__.py", "")
    write(tmp_path / "scores" / "text" / "__init__.py", "")
    write(tmp_path / "scores" / "base.py", "VALUE = 7")
    write(tmp_path / "scores" / "text" / "exact.py", "from ..base import VALUE\ndef f(): return VALUE")
    assert load_function(f"{tmp_path}/scores/text/exact.py:f")() == 7
    write(tmp_path / "loose" / "other.py", "VALUE = 8")
    write(tmp_path / "loose" / "exact.py", "from .other import VALUE\ndef f(): return VALUE")
    assert load_function("loose/exact.py:f", tmp_path)() == 8


def test_a_package_of_that_name_from_elsewhere_is_refused(tmp_path):
    for root in ("one", "two"):
        write(tmp_path / root / "mine" / "__init__.py", "")
        write(tmp_path / root / "mine" / "f.py", f"from . import __name__\ndef f(): return {root!r}")
    assert load_function("mine/f.py:f", tmp_path / "one")() == "one"
    with pytest.raises(ConfigError, match="the package 'mine' was found elsewhere"):
        load_function("mine/f.py:f", tmp_path / "two")


def test_without_a_module_those_that_take_it_where_it_is_go_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    loaded = sys.modules["json"]
    with without("colorsys", "json", "there.is_none"):
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ImportError):
            import colorsys
        import json

        assert json is loaded, "what is there stays"
    import colorsys

    assert colorsys.rgb_to_hls and "there.is_none" not in sys.modules


def test_it_is_there_again_after_an_error():
    with pytest.raises(ZeroDivisionError), without("there.is_none"):
        raise ZeroDivisionError
    assert "there.is_none" not in sys.modules


def test_what_a_file_defines_goes_to_processes_that_are_started_anew(tmp_path):
    """Also where its name is none of a module, or one of the standard library's."""
    for name in ("random.py", "my-rewards v2.py"):
        (tmp_path / name).write_text(
            "import dataclasses, neighbour\n@dataclasses.dataclass\nclass Pair:\n    x: int\n    y: int = 5\n"
            "def add(pair): return pair.x + pair.y + neighbour.one\n"
        )
        (tmp_path / "neighbour.py").write_text("one = 1\n")
        pair, add = (load_function(f"{name}:{function}", tmp_path) for function in ("Pair", "add"))
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(add, [pair(3), pair(4)]) == [9, 10]


def test_a_file_that_switches_gradients_off_does_so_for_itself(tmp_path):
    (tmp_path / "off.py").write_text("import torch\ntorch.set_grad_enabled(False)\ndef f(): pass\n")
    with torch.no_grad():
        load_function("off.py:f", tmp_path)
        assert not torch.is_grad_enabled()
    (tmp_path / "off.py").write_text("import torch\ntorch.set_grad_enabled(False)\nraise ValueError\n")
    with pytest.raises(ConfigError):
        load_function("off.py:f", tmp_path)
    assert torch.is_grad_enabled()
