"""`consistency env`: print the environment of this host, to paste into an issue."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from consistency.cli.output import print_json

EXAMPLES = (
    ("versions, devices and variables, to paste into an issue", "consistency env"),
    ("for scripts", "consistency env --json"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("env", _env, "print versions, devices and settings of this host, to paste into an issue", EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _env(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from consistency.workflows.host_environment import as_markdown, read_host_environment

    environment = read_host_environment()
    if parsed.json:
        print_json(environment)
    else:
        print(as_markdown(environment), end="")
    return 0
