"""Every format of a few reports that are made by hand, as text that does not depend on the day or the machine.

python -m tests.golden.rendered    # write them anew; a reviewer reads the difference
"""

from __future__ import annotations

import html.parser
import json
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from consistency.capture.version import __version__
from consistency.comparison.result import Comparison
from consistency.comparison.suite import SuiteResult
from consistency.report.formats import Chosen, Format, View, formats
from consistency.report.summary import all_rows
from tests.report.made_comparisons import ALL, comparison, faulty, four_architectures, hostile, tensor
from tests.report.made_suites import case, good, lost, suite, unusable, zeros

FILES = Path(__file__).parent / "files"

RUNS: dict[str, Comparison] = {
    "consistent": comparison([tensor([ALL])]),
    "faulty": faulty(),
    "four-architectures": four_architectures(),
    "hostile": hostile(),
}
SUITES: dict[str, SuiteResult] = {
    "suite": suite(case("good", good()), case("zeros", zeros(3)), case("lost", lost()), unusable("unusable"))
}
_MOST_BYTES = 2**15
"""Of a golden file: a table of every tensor and device says no more than a small one."""

_HERE = re.compile(rf"""(consistency|"tool":) "?{re.escape(__version__)}\b"?""")
_TOKEN = re.compile(r"(?<=::)[0-9a-f]{32}")


def rendered() -> dict[str, str]:
    """Return what has to be in each golden file, by its name."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        return dict(_rendered())
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _rendered() -> Iterator[tuple[str, str]]:
    for reports, of_suite in ((RUNS, False), (SUITES, True)):
        for name, found in reports.items():
            rows = all_rows(found) if isinstance(found, Comparison) else None
            for row in (row for chosen in Chosen for row in formats(chosen, of_suite=of_suite)):
                if row.name != "json":  # as the file in --out
                    text = _text(row, b"".join(row.render(found, View(rows=rows))).decode())
                    text = _HERE.sub(r"\1 VERSION", text).replace(f'"{platform.node()}"', '"this host"')
                    if len(text) <= _MOST_BYTES:
                        yield f"{name}.{row.name.removeprefix('report.').removeprefix('suite.')}.txt", text


def _text(row: Format, text: str) -> str:
    if row.name.endswith(".html"):
        return _Shown(text).text
    if row.name.endswith(".json"):
        document = json.loads(text)
        if row.name.endswith("status.json"):
            document["created"] = "when it was written"
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    return _TOKEN.sub("TOKEN", text)


class _Shown(html.parser.HTMLParser):
    """The texts of a page, an element a line, without what a reader does not see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._hidden: list[str] = []
        self._lines: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in ("style", "script"):
            self._hidden.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._hidden and self._hidden[-1] == tag:
            self._hidden.pop()

    def handle_data(self, data: str) -> None:
        line = " ".join(data.split())
        if line and not self._hidden:
            self._lines.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def main() -> None:
    FILES.mkdir(exist_ok=True)
    for old in FILES.iterdir():
        old.unlink()
    for name, text in rendered().items():
        (FILES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
