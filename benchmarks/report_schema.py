"""Print the JSON schema of `report.json`, or write `docs/report.schema.json`.

python -m benchmarks.report_schema             # print it
python -m benchmarks.report_schema --write     # into docs/report.schema.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from consistency.report.json import schema

FILE = Path(__file__).parents[1] / "docs" / "report.schema.json"


def text() -> str:
    """Return the file's contents."""
    return json.dumps(schema(), indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Print or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}")
    if parser.parse_args().write:
        FILE.write_text(text(), encoding="utf-8")
    else:
        print(text(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
