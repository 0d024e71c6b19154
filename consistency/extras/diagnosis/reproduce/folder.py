"""Write the folder of a reproducer, or a ZIP of it, and run its script before reporting success."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consistency.capture.claim import PARTIAL, claim_of, claimed, scratch_folder
from consistency.capture.names import COMPUTED_AGAIN
from consistency.capture.transport import ARCHIVE
from consistency.capture.whole_file import as_readable_as_its_folder, put_in_place, restore
from consistency.capture.writer import write_json
from consistency.case.stages import COMPUTES_WITH_WEIGHTS, MOVES_WEIGHTS
from consistency.devices.backends import kernel_variables
from consistency.devices.settings import UNREADABLE
from consistency.errors import CaptureError, ConsistencyError, UsageError
from consistency.extras.diagnosis.reproduce.evidence import Evidence, find_evidence
from consistency.extras.diagnosis.reproduce.parts import CALLS_FILE, PROVES, Parts, device_of, load_arguments, parts_of
from consistency.text import one_line
from consistency.workflows.report_folder import redaction_for

_TEXTS = (".json", ".md", ".txt")
SCRIPTS = Path(__file__).resolve().parent / "scripts"
_MODEL_STAGES = (*MOVES_WEIGHTS, *COMPUTES_WITH_WEIGHTS)


def reproduce(
    report: Path, number: int | None, out: Path, *, replace: bool = False, redact: bool = False
) -> Reproduced:
    """Write a folder, or a ZIP of it, that shows a finding without this package, and run its script.

    Parameters
    ----------
    report : Path
        `report.json`, or its folder.
    number : int or None
        Number of the finding, from 1; None for the only finding of the report.
    out : Path
        The folder to write, or a file that ends in `.zip`; `replace` replaces an existing one.
    redact : bool
        Leave out paths, names of hosts and users, and ids of devices: see `report/redaction.py`.

    Raises
    ------
    UsageError, CaptureError
        The report has no such finding, or no stored tensor shows it.
    ConsistencyError
        The script does not run.
    """
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        problem = "the output folder of the reproducer is not empty" if out.is_dir() else "the reproducer's file exists"
        raise UsageError(problem, where=out, hint="give --force, or another --out")
    with scratch_folder("reproduce") as scratch:
        evidence = find_evidence(report, number, scratch)
        parts = parts_of(evidence)
    try:
        with _folder_beside(out) as home:
            folder = home / out.stem
            transcript = folder / "transcript.txt"
            folder.mkdir()
            _write(folder, evidence, parts)
            result = try_script(folder, parts.script_name, computes=parts.computes)
            transcript.write_text(result.output, encoding="utf-8")
            result = dataclasses.replace(result, proves=PROVES.get(parts.script, ""))
            if redact:
                # after the script has run: its output names the folder, and is redacted with the other texts
                _redact(folder, report)
                result = dataclasses.replace(result, output=transcript.read_text(encoding="utf-8"))
            put_in_place(_packed(folder) if out.suffix == ARCHIVE else folder, out)
    except OSError as error:
        raise CaptureError("cannot write the reproducer", where=out, got=error) from None
    return dataclasses.replace(result, folder=out, is_large=_is_large(parts))


def _is_large(parts: Parts) -> bool:
    from consistency.extras.diagnosis.reproduce.cut import MOST_BYTES

    return sum(tensor.nbytes for tensor in parts.tensors.values()) > MOST_BYTES


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """Yield a new folder beside a path, which is claimed meanwhile; the remains of a killed process are removed."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with claimed(claim_of(out)):
        home = out.parent / f".{out.name}{PARTIAL}"
        shutil.rmtree(home, ignore_errors=True)
        restore(out)
        try:
            home.mkdir()
            yield home
        finally:
            shutil.rmtree(home, ignore_errors=True)


def _redact(folder: Path, report: Path) -> None:
    """Replace the names of people and machines in every text; scripts and calls name none, and tensors are numbers."""
    files = [file for file in folder.iterdir() if file.suffix in _TEXTS and file.name != CALLS_FILE]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    redaction = redaction_for(report, texts.values())
    for file, text in texts.items():
        if file.suffix == ".json":  # value by value: in JSON a path may be escaped
            write_json(file, redaction.value(json.loads(text)))
        else:
            file.write_text(redaction.text(text), encoding="utf-8")


def _packed(folder: Path) -> Path:
    """Write a ZIP of a folder beside it, and return its path."""
    path = folder.with_name(f"{folder.name}{ARCHIVE}")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"{folder.name}/{file.name}")
    return path


def _write(folder: Path, evidence: Evidence, parts: Parts) -> None:
    """Write tensors, facts, scripts and the README of a reproducer into its folder."""
    facts = _facts_of(evidence, parts)
    scripts = {parts.script_name: parts.script, "shared.py": "shared.py"}
    case = evidence.worker.case
    # a script that loads base and adapter can show a fault of the model, from files and by PEFT alone
    if case.adapter is not None and case.factory is None and evidence.record.stage in _MODEL_STAGES:
        scripts["load_with_peft.py"] = "load_with_peft.py"
        facts |= _facts_for_loading(evidence)
    _write_tensors(folder, parts)
    write_json(folder / "finding.json", facts)
    info = evidence.worker.info
    environment = {"architecture": info.architecture, "model": info.model, "driver": info.driver, **info.environment}
    write_json(folder / "environment.json", {**environment, "simulated": info.simulated})
    for name, source in scripts.items():
        shutil.copyfile(SCRIPTS / source, folder / name)
    for name, text in parts.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "README.md").write_text(readme(evidence, parts, scripts), encoding="utf-8")


def _facts_of(evidence: Evidence, parts: Parts) -> dict[str, Any]:
    """Return the contents of `finding.json`: the finding, its worker, and the parameters of the scripts."""
    from consistency.numerics.digest import as_bytes

    info = evidence.worker.info
    variables: Mapping[Any, Any] = {}
    # a capture may be a stranger's, with anything in this place
    if isinstance(info.environment.get("variables"), dict):
        variables = {str(name): str(value) for name, value in info.environment["variables"].items()}
    settings = {name: value for name, value in info.in_force.items() if not str(value).startswith(UNREADABLE)}
    digests = {}
    for name, tensor in parts.tensors.items():
        digests[name] = hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()
    facts = {
        "schema": "consistency.reproducer/1",
        "finding": evidence.number,
        "kind": evidence.finding.kind,
        "message": evidence.finding.message,
        "tensor": evidence.name,
        "others": len(evidence.others),
        "worker": evidence.worker.label,
        "load_path": evidence.worker.load_path,
        "planted": info.planted,
        "created": evidence.created,
        "host": evidence.host,
        "command": list(evidence.command),
        "device": device_of(evidence),
        "window": parts.window,
        "word": evidence.record.word,
        "variables": {name: variables[name] for name in sorted(kernel_variables()) if name in variables},
        "settings": settings,
        "sha256": digests,
        **parts.facts,
    }
    # the scripts print these, and a terminal obeys what a stranger's capture may have in them
    return {name: one_line(value) if isinstance(value, str) else value for name, value in facts.items()}


def _facts_for_loading(evidence: Evidence) -> dict[str, Any]:
    """Return the parameters of the script that loads base and adapter."""
    case, environment = evidence.worker.case, evidence.worker.info.environment
    return {
        "base": case.base,
        "adapter": case.adapter,
        "dtype": str(environment.get("dtype", "float32")),
        "class": environment.get("model_class"),
        "load_arguments": load_arguments(evidence),
    }


def _write_tensors(folder: Path, parts: Parts) -> None:
    """Write the tensors of a reproducer into one file; raise CaptureError where that fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / "tensors.safetensors"
    try:
        save_file(dict(parts.tensors), path)
        as_readable_as_its_folder(path)
    except SafetensorError as error:
        raise CaptureError("cannot write the reproducer", where=folder, got=error) from None


def readme(evidence: Evidence, parts: Parts, scripts: Mapping[str, str]) -> str:
    """Return the text of the README."""
    info = evidence.worker.info
    # a kind is a word of this tool, but the report may be a stranger's
    kind = "".join(letter for letter in evidence.finding.kind if letter.isalnum() or letter in "- ")
    remark = "" if parts.computes else " (does not recompute)"
    torch = _code(info.environment.get("torch"))
    lines = [
        f"# {kind}: {_code(evidence.name)}{remark}",
        "",
        "    " + one_line(evidence.finding.message),
        "",
        *(f"    {one_line(line)}" for line in evidence.finding.detail[:3]),
        "",
        f"Found on {_code(evidence.worker.label)} ({_code(info.architecture)}, {_code(info.model)}), torch "
        f"{torch}. This folder has one of {1 + len(evidence.others)} tensors, {parts.window}.",
        "",
        *_made_by(evidence),
        *_recomputed(evidence, parts),
        "```",
        "pip install torch safetensors",
        *_commands(parts),
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


def _commands(parts: Parts) -> list[str]:
    """Return the command lines of the README that run the script, each with its exit statuses."""
    if not parts.computes:
        remark = "checks the recorded tensor: 1 if it exceeds tolerance, on any machine"
        return [f"python {parts.script_name}   # {remark}"]
    return [
        "python reproduce.py                 # 0: does not happen here, 1: happens here",
        "python reproduce.py --as-recorded   # the same check on the recorded tensor",
    ]


def _recomputed(evidence: Evidence, parts: Parts) -> list[str]:
    """Return the lines that state what is computed again, and the ratio when the device computed it again itself."""
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
        conclusion = ". That was right: the fault comes and goes, or is not in these calls."
        if ratio > 1:
            conclusion = ", so wrong again."
        lines.append(f"The device computed its module again when it was found: {ratio:.3g} times tolerance{conclusion}")
    return [*lines, ""]


def _made_by(evidence: Evidence) -> list[str]:
    """Return the lines that state which command made the report; none where it has no command."""
    if not evidence.command:
        return []
    host, when = _code(evidence.host), _code(evidence.created)
    return [f"The report was made on {host}, {when}, by:", "", f"    {one_line(shlex.join(evidence.command))}", ""]


def _code(text: object) -> str:
    """Return a name as code, in which nothing is markup: neither a stranger's nor a redacted one."""
    return f"`{one_line(text).replace('`', chr(39))}`"


RUN_TIMEOUT_S = 300.0
"""Seconds that a script may take on this machine."""

_HAPPENS = {0: False, 1: True}
"""Whether the fault happens, by the exit status of a script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduced:
    """The result of a reproducer on this machine."""

    folder: Path
    happens_here: bool  # whether the script reproduced the fault
    shows: bool  # whether it finds the fault in the recorded tensors
    output: str
    needs_model: bool  # whether only the second script, with the model, can reproduce it
    runs: bool = True  # whether this machine has what the script computes with
    # the conclusion where it does not happen here, if this is the machine and the device of the finding
    proves: str = ""
    is_large: bool = False  # whether it has more bytes than issue trackers accept

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
    """Run a script, and again with `--as-recorded` if it computes.

    Raises
    ------
    ConsistencyError
        The script takes too long, or ends with a status that is not documented.
    """
    output = []
    statuses = []
    runs = True
    argument_lists: tuple[list[str], ...] = ([], ["--as-recorded"]) if computes else ([],)
    for arguments in argument_lists:
        done = _run_script(folder, name, arguments)
        text = f"$ python {name} {' '.join(arguments)}".rstrip() + f"\n{done.stdout}{done.stderr}"
        output.append(text + f"(exit status {done.returncode})\n")
        # a script of another machine's kernels may be right, and have no kernels here
        runs = runs and "the calls do not run here" not in done.stderr
        has_no_recorded_tensor = bool(arguments) and "were not recorded" in done.stderr
        if runs and done.returncode not in _HAPPENS and not has_no_recorded_tensor:
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


def _run_script(folder: Path, name: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a script of a reproducer in its folder; raise ConsistencyError where it takes too long."""
    command = [sys.executable, "-P", name, *arguments]
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConsistencyError(
            "the reproducer takes too long", where=folder, got=f"still running after {RUN_TIMEOUT_S:g} s"
        ) from None
