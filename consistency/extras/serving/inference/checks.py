"""The files of engines are checked before a case is run."""

from __future__ import annotations

from pathlib import Path

from consistency.case.case import Case


def check_engine_files(case: Case) -> None:
    """Raise InputError where a file of an engine's outputs belongs to another case."""
    if not case.engine_outputs:
        return
    from consistency.extras.serving.inference.outputs import check_files_of, read_outputs

    for engine_file in case.engine_outputs:
        check_files_of(case, read_outputs(Path(engine_file.path)))
