"""Print the reference pages, or write them into `docs/`."""

from __future__ import annotations

import argparse

from benchmarks import reference_pages
from benchmarks.reference_pages import DOCS, PAGES, text_of


def main() -> int:
    """Print or write them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reference_pages",
        description=reference_pages.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help=f"write {', '.join(PAGES)}")
    write = parser.parse_args().write
    for name in PAGES:
        if write:
            (DOCS / name).write_text(text_of(name), encoding="utf-8")
        else:
            print(text_of(name))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
