"""Inference engines: the fixed inputs that one answers, and the case that judges its outputs for captures made before.

A capture has no float64 logits, so the base and the adapter have to be on this host, where the CPU computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from consistency.capture.folder import Capture
from consistency.capture.reader import read_capture
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.checkpoint import read_header
from consistency.case.engine_file import EngineFile
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.errors import CaptureError, InputError
from consistency.extras.serving.inference.outputs import check_files_of, read_outputs
from consistency.extras.serving.inference.request import Request
from consistency.launch.scheduler import Watcher
from consistency.workflows import pipeline


def case_of_engines(capture: Capture, files: Sequence[EngineFile]) -> Case:
    """Return the case that judges an engine's outputs beside a capture.

    What a capture names may be a stranger's: no code of the model or of a function is run, and no pickle is read.

    Raises
    ------
    InputError
        The files of the case are not on this host, a function makes the base, or outputs are of another case.
    """
    case = capture.manifest.case
    where = capture.folder
    if case.factory is not None or not case.base:
        raise InputError(
            "an engine's outputs are compared with a base in a folder",
            where=where,
            got=case.base or "no base",
            hint="consistency run --engine-outputs NAME=FILE",
        )
    for path in (case.base, case.adapter):
        if path is not None and not Path(path).is_dir():
            raise InputError(
                "the files of the capture are not on this host",
                where=where,
                got=path,
                hint="compare where they are: the float64 reference is computed from them",
            )
    if case.inputs is not None and not case.makes_inputs:
        read_header(Path(case.inputs))
    resolved = [EngineFile(name=file.name, path=str(Path(file.path).expanduser().resolve())) for file in files]
    judged_case = msgspec.structs.replace(
        case,
        engine_outputs=tuple(resolved),
        stages=(standard.FORWARD,),
        steps=None,
        soak_s=None,
        load=False,
        only=(),
        wrapper=None,
        adapters=(),
        device_map=None,
        allow_pickle=False,
        trust_remote_code=False,
        load_paths=None,
        repeat=1,
    )
    for file in resolved:
        check_files_of(judged_case, read_outputs(Path(file.path)))
    return judged_case


def judged(first: Capture, files: Sequence[EngineFile], target: Path, watch: Watcher) -> Capture:
    """Return a capture of the engines' outputs alone; the float64 reference is computed again, on the CPU.

    Parameters
    ----------
    first : Capture
        A capture of the case that the engines' outputs are of.
    target : Path
        Folder that the capture is written into.
    """
    plan = pipeline.plan_of(case_of_engines(first, files), Options(devices=("cpu",)))
    pipeline.capture(plan, target, watch=watch)
    return _engines_alone(read_capture(target))


def _engines_alone(capture: Capture) -> Capture:
    """Return a capture without the worker that has computed the reference."""
    return msgspec.structs.replace(
        capture,
        manifest=msgspec.structs.replace(capture.manifest, host_facts=None),
        workers=tuple(worker for worker in capture.workers if worker.info.engine is not None),
    )


def write_inputs(options: Options, path: Path, *, replace: bool = False) -> Request:
    """Write the file that asks an engine for its outputs, and return the request in it.

    Raises
    ------
    CaptureError
        There is such a file already, or its folder is missing.
    InputError
        The case cannot be used, or no inputs can be made for it.
    """
    if path.exists() and not replace:
        raise CaptureError("the file exists", where=path, hint="choose another --out, or give --force")
    case = prepare_case(options)
    if not path.parent.is_dir():
        raise CaptureError("no such folder", where=path.parent)
    from consistency.extras.serving.inference.engine_request import (
        write_request,  # torch, which no wrong option should wait for
    )

    return write_request(case, path)
