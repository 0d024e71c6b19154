"""`consistency inputs`: the fixed inputs of a case, for another inference engine."""

from __future__ import annotations

from pathlib import Path

from consistency.case.inference.request import Request
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.errors import CaptureError


def write_inputs(options: Options, path: Path, *, replace: bool = False) -> Request:
    """Write the file that an engine's side reads; return what it asks for.

    Raises
    ------
    CaptureError
        There is such a file already, or it cannot be written.
    InputError
        The case cannot be used, or no inputs can be made for it.
    """
    if path.exists() and not replace:
        raise CaptureError("the file exists", where=path, hint="choose another --out, or give --force")
    case = prepare_case(options)
    if not path.parent.is_dir():
        raise CaptureError("no such folder", where=path.parent)
    from consistency.worker.model.engine_request import write_request  # torch, which no wrong option should wait for

    return write_request(case, path)
