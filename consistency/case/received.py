"""Limit what a case from a file may ask: a capture, a report or a request to an engine can be a stranger's.

Nothing of it runs code. What would is asked of the person on this command line, and so is every folder that the file
names outside of its own: results of private weights would go back to whoever sent it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec

from consistency.case.builtin import BUILTIN_CASES, builtin_folder
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stages import SPECS
from consistency.errors import InputError


def check_received(case: Case, given: Options, *, folder: Path) -> None:
    """Raise InputError where a case from a file in `folder` asks for more than this command line allows.

    `given` are the options of the command line. The error's hint has the options that would allow it.
    """
    requests = list(_unanswered_requests(case, given, folder))
    if requests:
        raise InputError(
            f"the case in this file asks for what only you can allow: {', '.join(noun for noun, _ in requests)}",
            where=folder,
            hint=f"if you know and trust them, add {' '.join(option for _, option in requests)}",
        )


def received(case: Case, given: Options, *, folder: Path) -> Case:
    """Return a case that was read from a file in `folder`, with no more in it than what is `given` here allows.

    Raises
    ------
    InputError
        As `check_received`.
    """
    check_received(case, given, folder=folder)
    if not case.base:
        return case
    # The user's adapters take the place of the case's: one and several exclude each other.
    adapters = (given.adapters or case.adapters) if given.adapter is None else ()
    options = Options(
        base=given.base or case.base,
        adapter=None if adapters else given.adapter or case.adapter,
        adapters=adapters or None,
        allow_pickle=given.allow_pickle,
        trust_remote_code=given.trust_remote_code,
        wrapper=given.wrapper,
        inputs=given.inputs or case.inputs,
        dtype=case.dtype,
        stages=case.stages,
    )
    prepared = prepare_case(options)

    return msgspec.structs.replace(
        case,
        base=prepared.base,
        adapter=prepared.adapter,
        adapters=prepared.adapters,
        wrapper=prepared.wrapper,
        inputs=prepared.inputs,
        allow_pickle=prepared.allow_pickle,
        trust_remote_code=prepared.trust_remote_code,
        engine_outputs=(),
    )


def _unanswered_requests(case: Case, given: Options, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what a case asks for and the command line does not give: a noun, and the option that gives it."""
    yield from _requests_for_weights(case, given, folder)
    uses_wrapper = any(SPECS[stage].option == "wrapper" for stage in case.stages)
    if given.wrapper is None and case.wrapper is not None and uses_wrapper:
        yield "a function wraps the base", f"--wrapper {shlex.quote(case.wrapper)}"
    if case.trust_remote_code and not given.trust_remote_code:
        yield "code that comes with the model", "--trust-remote-code"
    if case.allow_pickle and not given.allow_pickle:
        yield "weights in pickles", "--allow-pickle"
    if given.inputs is None and case.inputs is not None and not _is_inside(case.inputs, folder):
        yield "the inputs are in another folder", f"--inputs {shlex.quote(case.inputs)}"


def _requests_for_weights(case: Case, given: Options, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the requests for a base that a function makes, and for a base or adapters in another folder."""
    if given.base is None and case.factory is not None:
        yield "a function makes the base", f"--base {shlex.quote(case.base)}"
    elif given.base is None and case.base and not _is_inside(case.base, folder):
        yield "the base is in another folder", f"--base {shlex.quote(case.base)}"
    if given.adapter is None and not given.adapters:
        for option_value, path in _adapter_paths(case):
            if not _is_inside(path, folder):
                yield "the adapter is in another folder", f"--adapter {shlex.quote(option_value)}"


def _adapter_paths(case: Case) -> list[tuple[str, str]]:
    """Return the value of `--adapter` and the path of each adapter of a case."""
    if not case.adapters:
        return [(case.adapter, case.adapter)] if case.adapter else []
    pairs = []
    for adapter in case.adapters:
        # a damaged file may have an adapter without a name
        option_value = f"{adapter.name}={adapter.path}" if adapter.name else adapter.path
        pairs.append((option_value, adapter.path))
    return pairs


def _is_inside(path: str, folder: Path) -> bool:
    """Report whether a path is in the folder, links followed, or belongs to one of the built-in cases."""
    allowed_folders = [folder, *(builtin_folder(name) for name in BUILTIN_CASES)]
    return any(Path(path).resolve().is_relative_to(allowed.resolve()) for allowed in allowed_folders)
