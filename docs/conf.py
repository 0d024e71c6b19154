"""The documentation site: `sphinx-build -W -n docs build/site` makes it from the Markdown of this folder, offline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

from consistency.capture.version import __version__

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

project = "consistency"
copyright = "the consistency developers"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
root_doc = "index"

html_theme = "furo"
html_title = f"consistency {__version__}"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # a link to `page.md#heading` leads there as it does on a forge

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = True
napoleon_type_aliases = {
    "path": ":class:`~pathlib.Path`",
    "Path": ":class:`~pathlib.Path`",
    "mapping": ":class:`~collections.abc.Mapping`",
    "sequence": ":class:`~collections.abc.Sequence`",
    "iterable": ":class:`~collections.abc.Iterable`",
    "callable": ":class:`~collections.abc.Callable`",
    "Consequence": ":class:`~consistency.comparison.result.Consequence`",
    "EngineFile": ":class:`~consistency.case.engine_file.EngineFile`",
    "Fit": ":class:`~consistency.case.case.Fit`",
    "LoadPath": ":class:`~consistency.case.load_path.LoadPath`",
    "NamedAdapter": ":class:`~consistency.case.named_adapters.NamedAdapter`",
    "Outcome": ":class:`~consistency.comparison.outcomes.Outcome`",
    "Switch": ":class:`~consistency.case.profile.Switch`",
}
nitpick_ignore_regex = [
    # of the standard library and of other packages: without a network their indexes cannot be read
    ("py:.*", r"(collections\.abc|os|pathlib|torch|peft|msgspec|unittest)\..*"),
]


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(convert(node.astext()))
    raise SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise SkipNode


_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)[^)]*\)")
"""A link to a file that is not in this folder."""


def _name_what_is_outside(_app: Sphinx, _docname: str, source: list[str]) -> None:
    """Name the files of the repository that are no pages of the site; the repository has no public address yet."""
    source[0] = _OUTSIDE.sub(lambda link: f"{link[1]} (`{link[2]}` in the repository)", source[0])


def setup(app: Sphinx) -> None:
    """Render formulas as MathML: browsers show it without a script, so the site needs no network."""
    app.connect("source-read", _name_what_is_outside)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
