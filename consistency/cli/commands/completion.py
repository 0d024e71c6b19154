"""`consistency completion`: print a script that completes commands, options and their values in a shell."""

from __future__ import annotations

import argparse
from collections.abc import Callable

SHELLS = ("bash", "zsh", "tcsh")

EXAMPLES = (
    ("bash", "consistency completion bash > ~/.local/share/bash-completion/completions/consistency"),
    ("zsh, in a folder of $fpath", "consistency completion zsh > ~/.zfunc/_consistency"),
)

_FOLDERS = {"DIR", "MODEL", "ADAPTER"}
_FILES = {"FILE", "REPORT", "CONFIG.toml", "A", "B", "URL"}


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("completion", _completion, "print the completion script of a shell", EXAMPLES)
    parser.add_argument("shell", choices=SHELLS)


def _completion(parsed: argparse.Namespace) -> int:
    import shtab

    from consistency.cli.main import build_parser  # which imports this module, in its turn

    root = build_parser()
    for one in _parsers(root):
        for action in one._actions:
            if action.metavar in _FOLDERS | _FILES:
                # the attribute that shtab reads
                action.complete = shtab.DIRECTORY if action.metavar in _FOLDERS else shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(root, shell=parsed.shell))
    return 0


def _parsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(one for action in inner for choice in action.choices.values() for one in _parsers(choice))]
