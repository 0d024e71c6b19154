"""Write the folder of a reproducer, and run its script before reporting success."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consistency.capture.names import HOST, split_pair
from consistency.capture.transport import ARCHIVE
from consistency.capture.writer import write_json
from consistency.case.load_path import LoadPath
from consistency.case.stages import COMPUTES_WITH_WEIGHTS, MOVES_WEIGHTS, Stage
from consistency.devices.backends import kernel_variables
from consistency.devices.settings import UNREADABLE
from consistency.devices.spec import parse_device
from consistency.errors import CaptureError, ConsistencyError, UsageError
from consistency.report.text import clean
from consistency.workflows.reproduce.evidence import Evidence, find_evidence
from consistency.workflows.saved_report import redaction_for

if TYPE_CHECKING:
    import torch

_TEXTS = (".json", ".md", ".txt")
SCRIPTS = Path(__file__).resolve().parent / "scripts"
RUN_TIMEOUT_S = 300.0
_HAPPENS = {0: False, 1: True}
_OF_MODEL = (*MOVES_WEIGHTS, *COMPUTES_WITH_WEIGHTS)


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
    """

    folder: Path
    happens_here: bool
    shows: bool
    output: str
    needs_model: bool

    @property
    def sentence(self) -> str:
        """Report whether the finding was reproduced on this machine."""
        if self.happens_here:
            return "reproduced: it happens on this machine"
        recorded = "the recorded bytes show it" if self.shows else "no recorded bytes show it"
        if self.needs_model:
            return f"not retried, which needs more than the stored tensors; {recorded}"
        return f"not reproduced: it does not happen on this machine now; {recorded}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The contents of the folder: script, tensors, which part of the whole they are, and the script's parameters."""

    script: str
    tensors: Mapping[str, torch.Tensor]
    window: str
    facts: Mapping[str, Any]


def reproduce(report: Path, number: int, out: Path, *, replace: bool = False, redact: bool = False) -> Reproduced:
    """Write a folder, or a ZIP of it, that shows a finding without this package, and run its script.

    Parameters
    ----------
    report : Path
        `report.json`, or its folder.
    number : int
        Of the finding, from 1.
    out : Path
        The folder to write, or a file that ends in `.zip`; `replace` replaces an existing one.
    redact : bool
        Without paths, names of hosts and users, and ids of devices: see `report/redaction.py`.

    Raises
    ------
    UsageError, CaptureError
        The report has no such finding, or no stored tensor shows it.
    ConsistencyError
        The script does not run.
    """
    if out.exists() and not replace and (not out.is_dir() or any(out.iterdir())):
        what = "the output folder of the reproducer is not empty" if out.is_dir() else "the reproducer's file exists"
        raise UsageError(what, where=out, hint="give --force, or another --out")
    with tempfile.TemporaryDirectory(prefix="consistency-reproduce-") as scratch:
        evidence = find_evidence(report, number, Path(scratch))
        parts = _parts(evidence)
    partial = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        partial.mkdir(parents=True)
        _write(partial, evidence, parts)
        found = _try(partial, needs_model=parts.script == "recorded.py")
        (partial / "transcript.txt").write_text(found.output, encoding="utf-8")
        if redact:
            _redact(partial, report)
            found = dataclasses.replace(found, output=(partial / "transcript.txt").read_text(encoding="utf-8"))
        made = _packed(partial, out.stem) if out.suffix == ARCHIVE else partial
        if out.exists():
            shutil.rmtree(out) if out.is_dir() else out.unlink()
        os.replace(made, out)
    except OSError as error:
        raise CaptureError("cannot write the reproducer", where=out, got=error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        partial.with_suffix(ARCHIVE).unlink(missing_ok=True)
    return dataclasses.replace(found, folder=out)


def _redact(folder: Path, report: Path) -> None:
    """Take what names people and machines out of every text; the scripts hold none, and the tensors are numbers."""
    texts = {file: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.suffix in _TEXTS}
    redaction = redaction_for(report, texts.values())
    for file, text in texts.items():
        if file.suffix == ".json":  # value by value: in JSON a path may be escaped
            write_json(file, redaction.value(json.loads(text)))
        else:
            file.write_text(redaction.text(text), encoding="utf-8")


def _packed(folder: Path, name: str) -> Path:
    """Return a ZIP of a folder, in which the folder has this name."""
    made = folder.with_suffix(ARCHIVE)
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"{name}/{file.name}")
    return made


def _parts(evidence: Evidence) -> _Parts:
    from consistency.workflows.reproduce.cut import cut_moved, cut_product

    record = evidence.record
    actual, expected = evidence.stored(record.blob), evidence.stored(record.reference_blob)
    worst = None if record.measure is None else record.measure.worst_index
    recipe = record.evidence.get("recipe")
    stored = {name: evidence.stored(blob) for name, blob in record.ingredients.items()}
    made_of = {name: tensor for name, tensor in stored.items() if tensor is not None}
    complete = {"left", "right"} <= made_of.keys() == stored.keys()
    if isinstance(recipe, dict) and actual is not None and complete:
        tensors, window = cut_product({**made_of, "actual": actual}, worst)
        return _Parts(script="merged.py", tensors=tensors, window=window, facts=recipe)
    if expected is not None and record.rule == "bitwise":
        whole = {"expected": expected}
        # a different shape or dtype is described in words, and cannot be compared
        if actual is not None and (actual.shape, actual.dtype) == (expected.shape, expected.dtype):
            whole["actual"] = actual
        tensors, window = cut_moved(whole, worst)
        hop = _hop(evidence) if record.stage == Stage.TRANSFER else {"via": _via(evidence)}
        return _Parts(script="moved.py", tensors=tensors, window=window, facts=hop)
    if record.stage == Stage.TRANSFER:
        return _Parts(script="moved.py", tensors={"expected": _payload()}, window="generated", facts=_hop(evidence))
    if expected is not None and actual is not None and record.measure is not None:
        allowed = {name: tensor for name, tensor in made_of.items() if name == "allowed"}
        tensors, window = cut_moved({"expected": expected, "actual": actual, **allowed}, worst)
        return _Parts(script="recorded.py", tensors=tensors, window=window, facts={"allowed": _allowed(evidence)})
    raise CaptureError(
        "no stored tensor shows this finding",
        where=evidence.name,
        got=evidence.finding.message,
        hint=("it concerns a fact, not a tensor: " if record.rule == "limit" else "")
        + (evidence.finding.next or "run the case again on this machine"),
    )


def _payload() -> torch.Tensor:
    """Return 4 MiB to copy: finite values without a pattern, the same on every machine."""
    import numpy as np
    import torch

    numbers = np.random.Generator(np.random.PCG64(0)).standard_normal(1 << 20, dtype=np.float32)
    return torch.from_numpy(numbers)


def _hop(evidence: Evidence) -> dict[str, Any]:
    """Return the two ends of a copy: what the script calls `via`, and the destination device."""
    pair = split_pair(evidence.record.layer)
    source, destination = pair if pair is not None else (HOST, _device(evidence))
    return {"via": None if source == HOST else source, "device": destination}


def _allowed(evidence: Evidence) -> float:
    """Return the tolerance of an element, as recorded in the capture."""
    record = evidence.record
    stated = record.evidence.get("allowed")
    if isinstance(stated, (int, float)):
        return float(stated)
    assert record.measure is not None
    ratio = float(record.measure.bound_ratio or 0)
    return float(record.measure.max_abs) / ratio if ratio > 0 else 0.0


def _device(evidence: Evidence) -> str:
    return dataclasses.replace(parse_device(evidence.participant.info.name), variant=None).name


def _via(evidence: Evidence) -> str | None:
    """Return the device through which PEFT's default loading goes if all devices were visible."""
    device = _device(evidence)
    kind, _, index = device.partition(":")
    load_path = _load_path(evidence)
    hops = load_path is not None and load_path.main is LoadPath.SHARED and load_path.chooses_device
    return f"{kind}:0" if evidence.record.stage == "adapter" and hops and index not in ("", "0") else None


def _load_path(evidence: Evidence) -> LoadPath | None:
    """Return the worker's load path; None for one that this version does not know."""
    name = evidence.participant.load_path
    return LoadPath(name) if name in list(LoadPath) else None


def _load_arguments(evidence: Evidence) -> dict[str, Any]:
    """Return the arguments with which PEFT takes the load path of the finding."""
    load_path = _load_path(evidence)
    if load_path is None or load_path.by_transformers:
        return {}
    found: dict[str, Any] = {"low_cpu_mem_usage": True} if load_path.low_memory else {}
    if load_path.torch_device is not None:
        found["torch_device"] = "cpu" if load_path.torch_device == "cpu" else _device(evidence)
    return found


def _write(folder: Path, evidence: Evidence, parts: _Parts) -> None:
    from safetensors.torch import save_file

    from consistency.numerics.digest import as_bytes

    info = evidence.participant.info
    variables = info.environment.get("variables")
    known = {str(k): str(v) for k, v in variables.items()} if isinstance(variables, dict) else {}
    facts = {
        "schema": "consistency.reproducer/1",
        "finding": evidence.number,
        "kind": evidence.finding.kind,
        "message": evidence.finding.message,
        "tensor": evidence.name,
        "others": len(evidence.others),
        "worker": evidence.participant.label,
        "road": evidence.participant.load_path,
        "planted": info.planted,
        "created": evidence.created,
        "host": evidence.host,
        "command": list(evidence.command),
        "device": _device(evidence),
        "window": parts.window,
        "diagnosis": evidence.record.diagnosis,
        "variables": {name: known[name] for name in sorted(kernel_variables()) if name in known},
        "settings": {name: value for name, value in info.in_force.items() if not str(value).startswith(UNREADABLE)},
        "sha256": {
            name: hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()
            for name, tensor in parts.tensors.items()
        },
        **parts.facts,
    }
    scripts = {"reproduce.py": parts.script}
    case = evidence.participant.case
    if case.adapter is not None and case.factory is None and evidence.record.stage in _OF_MODEL:
        scripts["load_with_peft.py"] = "load_with_peft.py"
        facts.update(
            base=case.base,
            adapter=case.adapter,
            dtype=str(info.environment.get("dtype", "float32")),
            **{"class": info.environment.get("model_class")},
            load_arguments=_load_arguments(evidence),
        )
    save_file(dict(parts.tensors), folder / "tensors.safetensors")
    write_json(folder / "finding.json", facts)
    environment = {"architecture": info.architecture, "model": info.model, "driver": info.driver, **info.environment}
    write_json(folder / "environment.json", {**environment, "simulated": info.simulated})
    for name, source in scripts.items():
        shutil.copyfile(SCRIPTS / source, folder / name)
    (folder / "README.md").write_text(_readme(evidence, parts, scripts), encoding="utf-8")


def _readme(evidence: Evidence, parts: _Parts, scripts: Mapping[str, str]) -> str:
    info = evidence.participant.info
    name = clean(evidence.name).replace("`", "'")
    lines = [
        f"# {evidence.finding.kind}: `{name}`",
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
            ["python reproduce.py                 # checks the recorded tensor: 1 if it exceeds tolerance"]
            if parts.script == "recorded.py"
            else [
                "python reproduce.py                 # 0: does not happen here, 1: happens here",
                "python reproduce.py --as-recorded   # the same check on the recorded tensor",
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


def _try(folder: Path, *, needs_model: bool) -> Reproduced:
    """Run the script in both ways; raise if it does not end with a documented status."""
    output = []
    statuses = []
    for arguments in ([], ["--as-recorded"]):
        command = [sys.executable, "-P", "reproduce.py", *arguments]
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise ConsistencyError(
                "the reproducer takes too long", where=folder, got=f"still running after {RUN_TIMEOUT_S:g} s"
            ) from None
        text = f"$ python reproduce.py {' '.join(arguments)}".rstrip() + f"\n{done.stdout}{done.stderr}"
        output.append(text + f"(exit status {done.returncode})\n")
        if done.returncode not in _HAPPENS and not (arguments and "were not recorded" in done.stderr):
            raise ConsistencyError("the reproducer does not run here", where=folder, got=done.stderr.strip()[-600:])
        statuses.append(_HAPPENS.get(done.returncode, False))
    return Reproduced(
        folder=folder,
        happens_here=statuses[0] and not needs_model,
        shows=statuses[1],
        output="\n".join(output),
        needs_model=needs_model,
    )
