"""Answer a request of `consistency inputs` with the outputs of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from consistency.capture.whole_file import write_whole
from consistency.case.case import Case
from consistency.case.options import Options
from consistency.case.received import check_received
from consistency.errors import InputError, first_line
from consistency.extras.serving.engines.engine import Compiled, Engine, LogitsOf
from consistency.extras.serving.inference.identity import adapter_digest, base_digest
from consistency.extras.serving.inference.outputs import About, batch_name
from consistency.extras.serving.inference.request import METADATA, Mode, Request
from consistency.worker.model.loading import load_model

Tensors = dict[str, torch.Tensor]


def answer(source: Path, target: Path, engine: Engine, *, base: str | None = None, adapter: str | None = None) -> None:
    """Read a request, compute the outputs that it asks for, and write them.

    `base` and `adapter` are the folders on this host, where they are not those that the request names.

    Raises
    ------
    InputError
        The request cannot be read, is of other files, or the engine cannot compile or run the model.
    """
    request, inputs = read_request(source)
    check_request(request, source, base=base, adapter=adapter)
    case = case_of(request, base=base, adapter=adapter)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # on the CPU, as the inputs are: an engine moves the model to its own device
    write_outputs(target, request, engine, dict(computed(engine, load_model(case, "cpu"), request, inputs)))


def read_request(path: Path) -> tuple[Request, Tensors]:
    """Return the request in a file, and the inputs."""
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA, "")
            inputs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - safe_open is no mapping
        return msgspec.json.decode(text, type=Request), inputs
    except (SafetensorError, OSError, msgspec.DecodeError) as error:
        raise InputError(
            "no request to an engine", where=path, got=first_line(error), hint="`consistency inputs` writes one"
        ) from error


def check_request(request: Request, source: Path, *, base: str | None = None, adapter: str | None = None) -> None:
    """Raise InputError where a request needs what only the user of this host can allow: it may be a stranger's."""
    requested = Case(name=request.case.name, base=request.base, adapter=request.adapter)
    check_received(requested, Options(base=base, adapter=adapter), folder=source.absolute().parent)


def case_of(request: Request, *, base: str | None = None, adapter: str | None = None) -> Case:
    """Return the case of a request, with the folders that it names or those that are given.

    Raises
    ------
    InputError
        A folder has other files than the request was written for.
    """
    dtype: Any = request.case.dtype  # checked where the request was written
    case = Case(name=request.case.name, base=base or request.base, adapter=adapter or request.adapter, dtype=dtype)
    digests = {"base": (case.base, base_digest(case), request.case.base)}
    if case.adapter is not None:
        digests["adapter"] = (case.adapter, adapter_digest(case), request.case.adapter)
    for noun, (folder, got, wanted) in digests.items():
        if got != wanted:
            raise InputError(
                f"this is not the {noun} that the request is of",
                where=folder,
                got=f"digest {got}",
                wanted=f"digest {wanted}",
            )
    return case


def computed(engine: Engine, model: Any, request: Request, inputs: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and values of every output that is asked for; the model is merged last, and stays so.

    Raises
    ------
    InputError
        The engine cannot compile or run the model.
    """
    floating = next(p.dtype for p in model.parameters() if p.is_floating_point())
    converted = {name: tensor.to(floating) for name, tensor in inputs.items() if tensor.is_floating_point()}
    inputs = {**inputs, **converted}
    function = LogitsOf(model, tuple(inputs)).eval()
    for mode in request.modes:
        try:
            with _in_mode(model, mode, has_adapter=request.adapter is not None), torch.no_grad():
                run = engine.compiled(function, inputs)
                yield mode, run(inputs)
                if mode == request.modes[0]:
                    yield from _in_batches(run, inputs, request.batches)
        except Exception as error:  # compilers raise anything over a model that they do not take
            raise InputError(
                f"{engine.name} cannot run this model", where=f"{mode} of {request.base}", got=first_line(error)
            ) from error


def _in_mode(model: Any, mode: Mode, *, has_adapter: bool) -> AbstractContextManager[None]:
    """Bring the model into a mode: merged for good, or without the adapter as long as the context lasts."""
    if mode == "adapter_merged":
        model.merge_adapter()
    if mode != "adapter_off" or not has_adapter:
        return nullcontext()
    disabled: AbstractContextManager[None] = model.disable_adapter()
    return disabled


def _in_batches(run: Compiled, inputs: Tensors, sizes: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the outputs of the first row alone, and as the first and the last of several."""
    for size in sizes:
        yield batch_name(size, "first"), run({name: t[:size] for name, t in inputs.items()})[0]
        if size > 1:
            first_row_last = {name: torch.cat([t[1:size], t[:1]]) for name, t in inputs.items()}
            yield batch_name(size, "last"), run(first_row_last)[-1]


def write_outputs(path: Path, request: Request, engine: Engine, outputs: Tensors) -> None:
    """Write the outputs in the dtype that they have, with a description of the case and the engine."""
    dtype: Any = request.case.dtype
    about = About(
        schema="consistency.outputs/1",
        case=request.case,
        engine=engine.name,
        version=engine.version,
        device=engine.device,
        dtype=dtype,
        settings=engine.settings,
    )
    text = msgspec.json.encode(about).decode()
    write_whole(path, [save({name: t.contiguous().clone() for name, t in outputs.items()}, metadata={METADATA: text})])
