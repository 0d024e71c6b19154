"""Print the table of known faults of other libraries, or write it into `docs/upstream.md`.

python -P -m benchmarks.upstream_faults --write
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.generated_parts import show
from consistency.extras.diagnosis.upstream.fault import UpstreamFault
from consistency.extras.diagnosis.upstream.faults import FAULTS

PAGE = Path(__file__).parents[1] / "docs" / "upstream.md"
_TITLES = ("fault", "outcome", "seen in", "what helps", "to report to")


def parts() -> dict[str, str]:
    """Return the generated parts of the page by their names."""
    lines = [_row(_TITLES), _row(["---"] * len(_TITLES)), *(_row(_cells(fault)) for fault in FAULTS)]
    return {"faults": "\n".join(lines)}


def _cells(fault: UpstreamFault) -> list[str]:
    page = "" if fault.page == PAGE.stem else f"{fault.page}.md"
    tracker = f"{fault.library} (open: {fault.issue})" if fault.issue else fault.library
    link = f"[{fault.title}]({page}#{fault.anchor})"
    return [link, fault.outcome, f"{fault.library} {fault.versions}", fault.helps, tracker]


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(
        prog="python -P -m benchmarks.upstream_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name}")
    show(parts(), PAGE, write=parser.parse_args().write)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
