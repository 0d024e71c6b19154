"""Write the README of a reproducer: the finding, where it was found, and how to run the scripts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from consistency.report.text import clean
from consistency.workflows.reproduce.evidence import Evidence
from consistency.workflows.reproduce.parts import Parts


def readme(evidence: Evidence, parts: Parts, scripts: Mapping[str, str]) -> str:
    """Return the text of the README."""
    info = evidence.participant.info
    name = clean(evidence.name).replace("`", "'")
    lines = [
        f"# {evidence.finding.kind}: `{name}`{'' if parts.computes else ' (does not recompute)'}",
        "",
        "    " + clean(evidence.finding.message),
        "",
        *(f"    {clean(line)}" for line in evidence.finding.detail[:3]),
        "",
        f"Found on `{evidence.participant.label}` ({info.architecture}, {info.model}), torch "
        f"{info.environment.get('torch')}. This folder has one of {1 + len(evidence.others)} tensors, {parts.window}.",
        "",
        *_made_by(evidence),
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
        lines += [f"**The fault was planted on purpose** (`{info.planted}`): it is not a fault of the device.", ""]
    if info.simulated:
        lines += ["**The device was simulated in software.**", ""]
    lines += [
        "* `tensors.safetensors`: the tensors; `finding.json`: their origin and SHA-256, and the script's parameters",
        "* `environment.json`: where it was found; `transcript.txt`: the script's output where this folder was written",
    ]
    return "\n".join(lines) + "\n"


def _made_by(evidence: Evidence) -> list[str]:
    """Return the lines that state which command found it; reports of earlier versions do not."""
    if not evidence.command:
        return []
    host = clean(evidence.host).replace("`", "'")  # as code: a redacted name looks like markup
    when = clean(str(evidence.created))
    return [f"The report was made on `{host}`, {when}, by:", "", f"    {clean(shlex.join(evidence.command))}", ""]
