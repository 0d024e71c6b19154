"""Print what each extra of the package adds, or write `consistency/extras.json`.

Where an extra is not installed, a user who asks for a command, a stage, an option or a name of it is told so by this
file.

python -m benchmarks.extras_index             # print it
python -m benchmarks.extras_index --write     # into consistency/extras.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from consistency import plugins

FILE = Path(__file__).parents[1] / "consistency" / "extras.json"


def text() -> str:
    """Return the file's contents."""
    return json.dumps({plugin.name: _added_by(plugin) for plugin in plugins.own()}, indent=1) + "\n"


def _added_by(plugin: plugins.Plugin) -> dict[str, list[str]]:
    """Return the names by which a user asks for what an extra adds."""
    stages = [plugins.resolved(reference).stage for reference in plugin.stages]
    return {
        "commands": sorted(plugin.commands),
        "stages": sorted(stages),
        "options": sorted(plugin.options),
        "api": sorted(plugin.api),
    }


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
