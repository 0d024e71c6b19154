"""Write the README of a reproducer: the finding, where it was found, and how to run the scripts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from consistency.capture.names import COMPUTED_AGAIN
from consistency.text import one_line
from consistency.workflows.reproduce.evidence import Evidence
from consistency.workflows.reproduce.parts import Parts


def readme(evidence: Evidence, parts: Parts, scripts: Mapping[str, str]) -> str:
    """Return the text of the README."""
    info = evidence.participant.info
    kind = "".join(c for c in evidence.finding.kind if c.isalnum() or c in "- ")
    torch = _code(info.environment.get("torch"))
    lines = [
        f"# {kind}: {_code(evidence.name)}{'' if parts.computes else ' (does not recompute)'}",
        "",
        "    " + one_line(evidence.finding.message),
        "",
        *(f"    {one_line(line)}" for line in evidence.finding.detail[:3]),
        "",
        f"Found on {_code(evidence.participant.label)} ({_code(info.architecture)}, {_code(info.model)}), torch "
        f"{torch}. This folder has one of {1 + len(evidence.others)} tensors, {parts.window}.",
        "",
        *_made_by(evidence),
        *_recomputed(evidence, parts),
        "```",
        "pip install torch safetensors",
        *(
            [
                "python reproduce.py                 # 0: does not happen here, 1: happens here",
                "python reproduce.py --as-recorded   # the same check on the recorded tensor",
            ]
            if parts.computes
            else [
                f"python {parts.script_name}   # checks the recorded tensor: 1 if it exceeds tolerance, on any machine"
            ]
        ),
    ]
    if "load_with_peft.py" in scripts:
        lines.append("python load_with_peft.py --base FOLDER --adapter FOLDER   # needs transformers and peft")
    lines += ["```", ""]
    if info.planted is not None:
        lines += [f"**The fault was planted on purpose** ({_code(info.planted)}): it is not a fault of the device.", ""]
    if info.simulated:
        lines += ["**The device was simulated in software.**", ""]
    lines += [
        "* `tensors.safetensors`: the tensors; `finding.json`: their origin and SHA-256, and the script's parameters",
        "* `environment.json`: where it was found; `transcript.txt`: the script's output where this folder was written",
    ]
    return "\n".join(lines) + "\n"


def _recomputed(evidence: Evidence, parts: Parts) -> list[str]:
    """Return the lines that state what is computed again, and what it was when the device did so."""
    if parts.why_not:
        return [f"It is not computed again here: {_code(parts.why_not)}.", ""]
    if parts.script != "calls.py":
        return []
    ratio = evidence.record.evidence.get(COMPUTED_AGAIN)
    lines = [
        "`calls.txt` has the operations of torch that the module called on that device, from its inputs on, or the one "
        "of them that is off, and `aten_calls.py` runs them: no code of a model, and no pickle.",
    ]
    if isinstance(ratio, int | float):
        is_right = "That was right: the fault comes and goes, or is not in these calls."
        lines.append(
            f"The device computed its module again when it was found: {ratio:.3g} times tolerance"
            + (", so wrong again." if ratio > 1 else f". {is_right}")
        )
    return [*lines, ""]


def _made_by(evidence: Evidence) -> list[str]:
    """Return the lines that state which command found it."""
    if not evidence.command:
        return []
    host, when = _code(evidence.host), _code(evidence.created)
    return [f"The report was made on {host}, {when}, by:", "", f"    {one_line(shlex.join(evidence.command))}", ""]


def _code(text: object) -> str:
    """Return a name as code, in which nothing is markup: neither a stranger's nor a redacted one."""
    return f"`{one_line(text).replace('`', chr(39))}`"
