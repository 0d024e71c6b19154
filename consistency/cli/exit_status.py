"""The exit status of each command and what it means: what `--help` prints, and what `main` holds the command to."""

from __future__ import annotations

from collections.abc import Mapping

BAD_USE = {2: "bad usage or bad input"}

VERDICT = {0: "consistent", 1: "inconsistent", **BAD_USE, 3: "incomplete (a worker was lost)"}

CLOSED_PIPE = 141
"""The reader of the output closed it: 128 and the number of SIGPIPE, as a shell counts; 130 is SIGINT's."""

OUR_MISTAKE = 70
"""An error that this tool should not have raised, and so no verdict: EX_SOFTWARE of sysexits(3)."""

OF_EVERY_COMMAND = {
    OUR_MISTAKE: "a mistake of this tool, and no verdict",
    130: "stopped by Ctrl-C, SIGTERM, SIGHUP or SIGQUIT",
    CLOSED_PIPE: "the reader of the output closed it",
}

EXIT_STATUS: Mapping[str, Mapping[int, str]] = {
    "run": VERDICT,
    "compare": VERDICT,
    "fleet": VERDICT,
    "doctor": {**VERDICT, 0: "nothing is wrong", 1: "something is wrong"},
    "capture": {0: "captured", **BAD_USE, 3: "incomplete (a worker was lost)"},
    "diff": {0: "equal", 1: "different", **BAD_USE},
    "drill": {0: "every planted fault was found and named", 1: "one was not", **BAD_USE},
    "bisect": {0: "a setting explains it, or it does not occur again", 1: "no setting explains it", **BAD_USE},
    "reproduce": {0: "written, whether it happens on this machine or not", **BAD_USE},
    "status": {
        0: "consistent",
        1: "inconsistent",
        2: "nothing was checked, no result, or bad usage",
        3: "incomplete, or stale",
    },
    "show": {0: "printed, whatever the verdict is", **BAD_USE},
    "devices": {0: "listed", **BAD_USE},
    "check-text": {
        0: "the model could have written all of it",
        1: "it could not",
        **BAD_USE,
        3: "incomplete (a text was not judged)",
    },
    "inputs": {0: "written", **BAD_USE},
    "engine": {0: "written", **BAD_USE},
    "history": {0: "printed, written or removed, whatever the verdicts are", **BAD_USE},
    "baseline": {0: "written", **BAD_USE},
    "explain": {0: "explained", **BAD_USE},
    "env": {0: "printed", **BAD_USE},
    "completion": {0: "printed", **BAD_USE},
}
"""By command. Those of Nagios are in the help of `status --format`."""


def status_line(statuses: Mapping[int, str]) -> str:
    """Return the line of a help."""
    return "exit status: " + "; ".join(f"{status} {meaning}" for status, meaning in statuses.items())
