from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from lachesis.web.pages import render_page

EVIL = "</script><b>&'"


def template(directory: Path, text: str) -> Path:
    path = directory / "page.j2"
    path.write_text(text)
    return path


def test_values_stay_text_and_data_stays_data(tmp_path: Path):
    page = render_page(template(tmp_path, "{{ value }}<script>{{ [value, 'é'] | tojson }}</script>"), value=EVIL)
    text, _, data = page.removesuffix("</script>").partition("<script>")
    assert "<" not in text and "<" not in data
    assert json.loads(data) == [EVIL, "é"]


def test_control_characters_are_written_out(tmp_path: Path):
    """They would act in a terminal that shows the page, and reorder the text around them in a browser."""
    evil = "a\x1b[2J\x9b31m\u202e\r\nb"
    page = render_page(template(tmp_path, "{{ value }}<script>{{ value | tojson }}</script>"), value=evil)
    text, _, data = page.removesuffix("</script>").partition("<script>")
    assert text == "a\\u001b[2J\\u009b31m\\u202e\r\nb"
    assert json.loads(data) == evil and "\x9b" not in data


def test_shared_templates_can_be_extended(tmp_path: Path):
    page = render_page(template(tmp_path, '{% extends "page.html.j2" %}{% block main %}here{% endblock %}'))
    assert "<main>\nhere</main>" in page and "const byId" in page and "const BOUNDS = [0.9," in page


def test_a_value_that_is_missing_is_an_error(tmp_path: Path):
    with pytest.raises(jinja2.UndefinedError):
        render_page(template(tmp_path, "{{ nothing }}"))


def test_data_without_a_place_in_json_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        render_page(template(tmp_path, "{{ value | tojson }}"), value=float("nan"))
