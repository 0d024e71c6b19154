"""Load and render the templates of pages; each text of a stranger is put on one line and escaped."""

from __future__ import annotations

import importlib.resources

import jinja2
from markupsafe import Markup

from consistency.capture.wording import and_more
from consistency.text import one_line

PACKAGE = __package__


def page_environment() -> jinja2.Environment:
    """Return the environment in which every page is rendered."""
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(part),
    )
    environment.filters["and_more"] = and_more
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    return environment


def part(name: str, package: str = PACKAGE) -> str:
    """Return a template, a style sheet or a script of a page."""
    return (importlib.resources.files(package) / name).read_text(encoding="utf-8")


def _shown(value: object) -> object:
    """Return a value as the template shows it: a line feed in a stranger's name could forge a line."""
    is_text = isinstance(value, str) and not isinstance(value, Markup)
    return one_line(value) if is_text else value
