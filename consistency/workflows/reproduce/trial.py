"""Run the script of a reproducer in its folder, in both ways."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from consistency.errors import ConsistencyError

RUN_TIMEOUT_S = 300.0
_HAPPENS = {0: False, 1: True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduced:
    """The result of a reproducer on this machine.

    Attributes
    ----------
    happens_here : bool
        Whether the script reproduced the fault.
    shows : bool
        Whether it finds the fault in the recorded tensors.
    needs_model : bool
        Whether only the second script, with the model, can reproduce it.
    runs : bool
        Whether this machine has what the script computes with.
    proves : str
        The conclusion where it does not happen here, if this is the machine and the device of the finding.
    """

    folder: Path
    happens_here: bool
    shows: bool
    output: str
    needs_model: bool
    runs: bool = True
    proves: str = ""

    @property
    def sentence(self) -> str:
        """Report whether the finding was reproduced on this machine."""
        if self.happens_here:
            return "reproduced: it happens on this machine"
        recorded = "the recorded bytes show it" if self.shows else "no recorded bytes show it"
        if not self.runs:
            return f"not retried: this machine has not the operations for it; {recorded}"
        if self.needs_model:
            return f"not retried, which needs more than the stored tensors; {recorded}"
        proof = f"\nif it was found on this machine: {self.proves}, unless it comes and goes" if self.proves else ""
        return f"not reproduced: it does not happen on this machine now; {recorded}{proof}"


def try_script(folder: Path, name: str, *, computes: bool) -> Reproduced:
    """Run a script, in both ways if it computes; raise if it does not end with a documented status."""
    output = []
    statuses = []
    runs = True
    for arguments in ([], ["--as-recorded"]) if computes else ([],):
        command = [sys.executable, "-P", name, *arguments]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConsistencyError(
                "the reproducer takes too long", where=folder, got=f"still running after {RUN_TIMEOUT_S:g} s"
            ) from None
        text = f"$ python {name} {' '.join(arguments)}".rstrip() + f"\n{done.stdout}{done.stderr}"
        output.append(text + f"(exit status {done.returncode})\n")
        runs = runs and "the calls do not run here" not in done.stderr
        if runs and done.returncode not in _HAPPENS and not (arguments and "were not recorded" in done.stderr):
            raise ConsistencyError("the reproducer does not run here", where=folder, got=done.stderr.strip()[-600:])
        statuses.append(_HAPPENS.get(done.returncode, False))
    return Reproduced(
        folder=folder,
        happens_here=statuses[0] and computes,
        shows=statuses[-1],
        output="\n".join(output),
        needs_model=not computes,
        runs=runs,
    )
