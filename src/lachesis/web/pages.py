"""HTML pages as single files, made of a template and the styles and scripts of this room."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2

from lachesis.common.errors import CONTROLS
from lachesis.common.version import __version__
from lachesis.web.tokens import BOUNDS

SHARED = Path(__file__).parent / "templates"


def render_page(template: Path, /, **values: Any) -> str:
    """Return the HTML of a template, which may extend and include templates next to it and the shared ones.

    All values are escaped; in a script the filter ``tojson`` inserts them, without any character that could end the
    element or start markup. Control characters except line ends are written out, as in JSON.
    """
    page = _environment(template.parent).get_template(template.name).render(values)
    return CONTROLS.sub(lambda found: "\r" if found[0] == "\r" else f"\\u{ord(found[0]):04x}", page)


@functools.cache
def _environment(templates: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([templates, SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {
        "ensure_ascii": False,
        "allow_nan": False,
        "separators": (",", ":"),
    }
    environment.globals |= {"version": __version__, "bounds": BOUNDS}
    return environment
