"""What a case from a file may ask: a capture, a report or a request to an engine can be a stranger's.

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
from consistency.case.named_adapters import NamedAdapter
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stages import SPECS
from consistency.errors import InputError


def check_received(case: Case, given: Options, *, folder: Path) -> None:
    """Raise InputError where a case from a file in `folder` asks for more than what is `given` on this command line.

    Its hint has the options that would allow it.
    """
    asked = list(_asked(case, given, folder))
    if asked:
        raise InputError(
            f"the case in this file asks for what only you can allow: {', '.join(what for what, _ in asked)}",
            where=folder,
            hint=f"if you know and trust them, add {' '.join(option for _, option in asked)}",
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
    own = prepare_case(options)
    return msgspec.structs.replace(
        case,
        base=own.base,
        adapter=own.adapter,
        adapters=own.adapters,
        wrapper=own.wrapper,
        inputs=own.inputs,
        allow_pickle=own.allow_pickle,
        trust_remote_code=own.trust_remote_code,
        engine_outputs=(),
    )


def _asked(case: Case, given: Options, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what a case asks for and is not given, and the option that gives it."""
    if given.base is None and case.factory is not None:
        yield "a function makes the base", f"--base {shlex.quote(case.base)}"
    elif given.base is None and case.base and not _is_inside(case.base, folder):
        yield "the base is in another folder", f"--base {shlex.quote(case.base)}"
    if given.adapter is None and not given.adapters:
        adapters = case.adapters or ((NamedAdapter(name="", path=case.adapter),) if case.adapter else ())
        for one in adapters:
            if not _is_inside(one.path, folder):
                path = f"{one.name}={one.path}" if one.name else one.path
                yield "the adapter is in another folder", f"--adapter {shlex.quote(path)}"
    if (
        given.wrapper is None
        and case.wrapper is not None
        and any(SPECS[stage].option == "wrapper" for stage in case.stages)
    ):
        yield "a function wraps the base", f"--wrapper {shlex.quote(case.wrapper)}"
    for what, option, wanted, has in (
        ("code that comes with the model", "--trust-remote-code", case.trust_remote_code, given.trust_remote_code),
        ("weights in pickles", "--allow-pickle", case.allow_pickle, given.allow_pickle),
    ):
        if wanted and not has:
            yield what, option
    if given.inputs is None and case.inputs is not None and not _is_inside(case.inputs, folder):
        yield "the inputs are in another folder", f"--inputs {shlex.quote(case.inputs)}"


def _is_inside(path: str, folder: Path) -> bool:
    """Report whether a path is in the folder, links followed, or is one of the built-in cases."""
    homes = [folder, *(builtin_folder(name) for name in BUILTIN_CASES)]
    return any(Path(path).resolve().is_relative_to(home.resolve()) for home in homes)
