"""Exit statuses; what each means to a command is said by `consistency.cli.exit_status` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from consistency.cli.exit_status import CLOSED_PIPE, EXIT_STATUS, OF_EVERY_COMMAND, OUR_MISTAKE
from consistency.cli.glossary.entry import Explanation, Family, GlossaryEntry, entry

FAMILY = Family(name="exit status", title="exit statuses")

EXPLANATIONS: Mapping[int, Explanation] = {
    0: Explanation(
        meaning="The command did what it was asked for, and nothing is wrong.",
        cause="No finding is an error, and no part is missing. Commands without a verdict exit with 0 when they are "
        "done.",
        action="Nothing.",
        example="consistency run && ./start-service",
    ),
    1: Explanation(
        meaning="The command did what it was asked for, and something is wrong.",
        cause="At least one finding is an error; a planted fault was not found; files differ.",
        action="Read the findings, the first one first.",
        example="consistency diff ./my-lora ./my-lora-copy   # of two folders that differ",
    ),
    2: Explanation(
        meaning="The command could not begin, or had nothing to judge: there is no verdict.",
        cause="An unknown option or device, a file that cannot be read or written, an adapter for another base.",
        action="The message says what is wrong, where, what was found, and what to do.",
        example="consistency: consistency run has no option --device",
    ),
    3: Explanation(
        meaning="A part of what was requested could not be checked.",
        cause="A worker was lost or failed, a stage raised, a device or node is gone; of `status`, the result is older "
        "than it may be.",
        action="Fix what was lost and run again. Treat it as a failure: agreement is not claimed.",
        example="worker cuda:1 was lost: killed by SIGKILL; last event: merged",
    ),
    OUR_MISTAKE: Explanation(
        meaning="An error that this tool should not have raised.",
        cause="A mistake of this tool.",
        action="Report it with what CONSISTENCY_TRACEBACK=1 in the environment prints, and with `consistency env`.",
        example="consistency: a mistake of this tool, and no verdict",
    ),
    130: Explanation(
        meaning="The command was stopped; no worker is left, and no half-written capture.",
        cause="Ctrl-C, or SIGTERM, SIGHUP or SIGQUIT, as of a scheduler that ends a job.",
        action="Run again.",
        example="consistency: stopped: no worker is left, and no half-written capture",
    ),
    CLOSED_PIPE: Explanation(
        meaning="What reads the output of the command closed it before the end.",
        cause="A pipe into a command that ends early.",
        action="Nothing, or let the reader take everything.",
        example="consistency show run-1 | head -1",
    ),
}


_MOST_NAMED = 8  # commands


def entries() -> Iterator[GlossaryEntry]:
    """Yield an entry per exit status, with what it means to each command."""
    for status, explanation in EXPLANATIONS.items():
        by_meaning = list(_by_meaning(status))
        yield entry(FAMILY, str(status), explanation, summary="; ".join(by_meaning), headline=by_meaning[0])


def _by_meaning(status: int) -> Iterator[str]:
    """Yield each meaning of a status with its commands."""
    if status in OF_EVERY_COMMAND:
        yield f"{OF_EVERY_COMMAND[status]} (every command)"
    commands: dict[str, list[str]] = {}
    for command, statuses in EXIT_STATUS.items():
        if status in statuses:
            commands.setdefault(statuses[status], []).append(command)
    for meaning, names in commands.items():
        others = [command for command in EXIT_STATUS if command not in names]
        which = f"every command but {', '.join(others)}" if len(names) > _MOST_NAMED else ", ".join(names)
        yield f"{meaning} ({which})"
