"""`report.html`: one file that opens from disk, without network, and shows where devices diverge.

All text is rendered here, so that it can be read without JavaScript; only the heat map is drawn by the page's script,
from data in the page (`page/cells.py`). Every name may come from a stranger's model, adapter or capture: the template
escapes all of them, the script sets text and never markup, and a content security policy lets nothing run but that
script, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from consistency.capture.version import __version__
from consistency.case.load_path import is_alternative
from consistency.comparison.result import Comparison
from consistency.report.formats import View
from consistency.report.page import agreement, cells, distributions, environments, memory, overview, transfers
from consistency.report.page.labels import KEY
from consistency.report.sentences import LEGEND, alternative_path_texts, divergence_texts, sentence
from consistency.report.summary import Groups, all_groups, stages
from consistency.report.text import one_line

_VERDICTS = {"consistent": "✓", "inconsistent": "✗", "incomplete": "!"}

_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})
"""Inside a JSON string these mean the same; in a script element `</script>` or `<!--` would end or change it."""


def render(comparison: Comparison, view: View) -> Iterator[bytes]:
    """Yield `report.html`."""
    yield as_html(comparison, view.groups).encode()


def as_html(comparison: Comparison, found: Groups | None = None) -> str:
    """Return the page.

    Parameters
    ----------
    comparison : Comparison
    found : mapping of str to sequence of Group, optional
        Where they are known already.
    """
    found = all_groups(comparison) if found is None else found
    columns = stages(comparison)
    script, style = _part("page.js"), _part("style.css")
    parted, ways_left_out = agreement.partitions(comparison.tensors)
    by_load_path = {
        load_path: cells.columns(comparison, load_path, found[load_path]) for load_path in comparison.load_paths
    }
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_part("template.html")).render(
        agreement=parted,
        bits=distributions.bits(comparison.tensors),
        case=one_line(comparison.case),
        data=Markup(_data(comparison, by_load_path)),  # escaped for a script element, which is not HTML
        environments=environments.environments(comparison.workers),
        facts=overview.facts(comparison),
        findings=overview.finding_texts(comparison.findings, notes=False),
        divergences=[one_line(text) for text in divergence_texts(comparison)],
        groups={
            load_path: overview.group_texts(found[load_path], columns, comparison.reference)
            for load_path in comparison.load_paths
            if not is_alternative(load_path)
        },
        alternative_paths=[one_line(text) for _, text in alternative_path_texts(comparison)],
        key=KEY,
        left_out=overview.left_out(comparison),
        mark=_VERDICTS[comparison.verdict],
        legend=LEGEND,
        matrices=transfers.matrix_texts(comparison.tensors),
        not_looked_at=[one_line(text) for text in comparison.not_looked_at],
        notes=overview.finding_texts(comparison.findings, notes=True),
        ratios=distributions.ratios(comparison.tensors),
        reference=one_line(comparison.reference or ""),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        sentence=one_line(sentence(comparison)),
        shortened=any(column.stands_for != 1 for some in by_load_path.values() for column in some),
        simulated=comparison.simulated,
        stages=[one_line(stage) for stage in columns],
        style=Markup(style),
        tool=__version__,
        verdict=comparison.verdict,
        ways_left_out=ways_left_out,
        workers=memory.workers(comparison),
    )


def _part(name: str) -> str:
    return (importlib.resources.files("consistency.report.page") / name).read_text(encoding="utf-8")


def _data(comparison: Comparison, by_load_path: Mapping[str, Sequence[cells.Column]]) -> str:
    """Return the data of the heat map, as JSON that is safe in a script element."""
    strings = cells.Strings()
    sections = cells.sections(comparison, by_load_path, strings)
    table: dict[str, Any] = {
        "columns": {
            one_line(load_path): [[one_line(column.label), column.stands_for] for column in some]
            for load_path, some in by_load_path.items()
        },
        "sections": [
            {
                "loadPath": one_line(section.load_path),
                "stage": one_line(section.stage),
                "total": section.total,
                "bad": section.bad,
                "unlike": section.unlike,
                "leftOut": section.left_out,
                "rows": section.rows,
            }
            for section in sections
        ],
        "strings": strings.all,
        "key": KEY,
    }
    return msgspec.json.encode(table).decode().translate(_ESCAPES)
