"""The checks of alternative load paths: the adapter's file loaded again over poison, by other arguments or loaders.

A load takes hundredths of a second where starting a worker takes seconds, so one worker checks all its alternative load
paths. Each leaves the model as it was: the same parameter objects with the same bytes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch

from consistency.capture.names import LOADED_AGAIN, SETTINGS_LAYER, adapter_place, module_place
from consistency.capture.records import TensorRecord
from consistency.case.load_path import LoadPath
from consistency.errors import first_line
from consistency.numerics.diagnosis_moved import OtherContents
from consistency.numerics.digest import as_bytes, digest
from consistency.numerics.dtype import name_of
from consistency.numerics.rules import Rule
from consistency.numerics.same_bytes import same_memory
from consistency.worker.context import Context
from consistency.worker.device_error import is_of_the_device, of_another
from consistency.worker.model.loading import ADAPTER_NAME, UNUSABLE
from consistency.worker.model.poison import POISON, as_it_was, poison
from consistency.worker.recorder import Skip


def run(context: Context, by_digest: Mapping[str, str]) -> None:
    """Check every alternative load path of this worker.

    `by_digest` has the keys of the tensors in the adapter's file, by the digests of their bytes.
    """
    paths = context.job.alternative_paths
    for done, load_path in enumerate(paths):
        context.events.step(f"load path {load_path}", done, len(paths))
        with context.record.on_load_path(load_path), skipping(context):
            if load_path.by_transformers:
                _load_by_transformers(context, load_path, by_digest)
            else:
                _load_by_peft(context, load_path, by_digest)


def _load_by_peft(context: Context, load_path: LoadPath, by_digest: Mapping[str, str]) -> None:
    """Load the adapter with PEFT's `load_adapter` into the model, over poison, and record what arrived."""
    model: Any = context.model
    device = {None: None, "cpu": "cpu", "target": context.job.device}[load_path.torch_device]
    with as_it_was(model, context.expected) as state, _shown_on(model, context.device):
        # a tensor that this load leaves alone shows the poison
        poison(tensor for tensor in state.values() if tensor.is_floating_point())
        try:
            model.load_adapter(
                context.job.case.adapter, ADAPTER_NAME, torch_device=device, low_cpu_mem_usage=load_path.low_memory
            )
        except UNUSABLE as error:
            raise refusal(context, error, f"PEFT cannot load this adapter twice: {first_line(error)}") from error
        _record_loaded(context, load_path, by_digest, model.state_dict(keep_vars=True))


def _load_by_transformers(context: Context, load_path: LoadPath, by_digest: Mapping[str, str]) -> None:
    """Load the adapter with the base's own `load_adapter`, onto a stand-in that has no PEFT around it."""
    if not hasattr(context.base.model, "load_adapter"):
        raise Skip("the base is not a transformers model: it has no load_adapter")
    model: Any = context.model
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        raise Skip("transformers does not load prompts")
    try:
        shell = stand_in(model, context.device).unload()
        with _poisoned_injection():
            shell.load_adapter(
                context.job.case.adapter, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=load_path.low_memory
            )
    except UNUSABLE as error:
        reason = first_line(error)
        if context.rewritten:
            reason = "its method computes from the base's values, which the stand-in for the base lacks"
        raise refusal(context, error, f"transformers cannot load this adapter: {reason}") from error
    state = shell.state_dict(keep_vars=True)
    # by the names under PEFT's own model, which is not around the stand-in
    by_name = {name: state.get(module_place(name)) for name in context.expected}
    _record_loaded(context, load_path, by_digest, by_name)


def refusal(context: Context, error: Exception, reason: str) -> Skip:
    """Return the `Skip` for a load that raised an error, with the reason; raise an error of the worker's own device.

    A load goes by way of another device too, whose failure blocks the rows instead of skipping them.
    """
    other_device = of_another(error, context.device)
    if other_device is not None:
        return Skip(f"this load path goes through another device, which fails: {other_device.words}", status="blocked")
    if is_of_the_device(error, context.device):
        raise error
    return Skip(reason)


def skipping(context: Context) -> AbstractContextManager[None, bool]:
    """Return a context that records a `Skip` as the reason why the adapter cannot be loaded again."""
    if not context.record.wants("adapter", SETTINGS_LAYER):
        return suppress(Skip)
    return context.record.skipping("adapter", LOADED_AGAIN, layer=SETTINGS_LAYER)


def _record_loaded(
    context: Context, load_path: LoadPath, by_digest: Mapping[str, str], state: Mapping[str, torch.Tensor | None]
) -> None:
    """Compare every tensor that this load path has loaded with the adapter's file, and record it."""
    if context.record.wants("adapter", SETTINGS_LAYER):
        context.record.fact("adapter", SETTINGS_LAYER, LOADED_AGAIN, status="equal")
    for name, (key, tensor) in context.expected.items():
        layer, part = adapter_place(key)
        actual = state.get(name)
        if actual is None or not context.record.wants("adapter", layer):
            # unknown keys are reported for the default load path; transformers renames some modules
            continue
        expected, cast = tensor.to(actual.dtype), ""
        evidence = {} if actual.dtype == tensor.dtype else {"dtype_in_file": name_of(tensor.dtype)}
        if load_path.low_memory and digest(actual).value != digest(expected).value:
            # PEFT casts the parameter to the dtype of the base first, and then to its own
            base_dtype = getattr(torch, context.base.dtype, actual.dtype)
            cast_twice = tensor.to(base_dtype).to(actual.dtype)
            if digest(actual).value == digest(cast_twice).value:
                expected, cast = cast_twice, context.base.dtype
        context.record.moved(
            TensorRecord("adapter", layer, part, rule=Rule.BITWISE, status="equal", cast=cast, evidence=evidence),
            actual=actual,
            expected=expected,
            other_contents=OtherContents(
                poison=POISON.get(actual.element_size()),
                swapped=functools.partial(file_of_another, by_digest, digest(expected).value),
                stale=functools.partial(stale_bytes, context.base.tensors),
            ),
        )


@contextmanager
def _shown_on(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Put stand-ins of an offloaded base on the device: PEFT moves an adapter to the device of the weight below it.

    With `low_cpu_mem_usage=True` it does so on every load. `as_it_was` puts the tensors on `meta` back.
    """
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta:
                module._parameters[name] = _without_memory(tensor, device)
    yield


def stand_in(model: torch.nn.Module, device: torch.device) -> Any:
    """Return a model of the same modules, whose tensors have the same shape, dtype and device but not the values.

    All elements of a tensor share one address, so it needs no memory, and writes while an adapter is put in place
    cannot reach the model. An offloaded base has its tensors on the device that it is brought to.

    Raises
    ------
    TypeError
        A parameter is of a special class, as quantized ones are, which an ordinary tensor cannot replace.
    """
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
            raise TypeError(f"no stand-in for a {type(tensor).__name__}")
        place = device if tensor.is_meta else tensor.device
        copies[id(tensor)] = _without_memory(tensor, place)
    return copy.deepcopy(model, copies)


def _without_memory(tensor: torch.Tensor, device: torch.device) -> Any:
    """Return zeros of a tensor's shape and dtype, all at one address; a parameter for a parameter."""
    zeros = torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(zeros, requires_grad=False)
    return zeros


@contextmanager
def _poisoned_injection() -> Iterator[None]:
    """Poison an adapter's parameters as soon as they exist: transformers creates and loads them in one call."""
    import peft

    real = peft.inject_adapter_in_model

    def inject(
        config: Any, model: torch.nn.Module, adapter_name: str = ADAPTER_NAME, *args: Any, **options: Any
    ) -> Any:
        before = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        injected = real(config, model, adapter_name, *args, **options)
        created = (tensor for tensor in model.state_dict(keep_vars=True).values() if id(tensor) not in before)
        poison(tensor for tensor in created if tensor.is_floating_point() and tensor.is_contiguous())
        return injected

    with mock.patch.object(peft, "inject_adapter_in_model", inject):
        yield


_GRANULARITY = 512
"""Torch's caching allocators hand out memory in multiples of so many bytes, so stale bytes begin at one."""

_LEAST_BYTES = 64  # fewer bytes may agree by chance

_WIDEST = 8  # bytes of the widest number: every narrower one repeats at such a distance too


def file_of_another(by_digest: Mapping[str, str], own: str, tensor: torch.Tensor) -> str | None:
    """Return the key of another tensor of the adapter's file that has the bytes of a tensor, None where none has.

    `by_digest` has the keys of the file's tensors; `own` is the digest of the right one.
    """
    value = digest(tensor).value
    return by_digest.get(value) if value != own else None


def stale_bytes(tensors: Mapping[str, torch.Tensor], tensor: torch.Tensor) -> str | None:
    """Return where else in the model the bytes of a tensor are, as `name` or `bytes 512 to 2560 of name`, or None.

    `tensors` are those that the model held before, on any device; they are read to the CPU one at a time.
    """
    raw = as_bytes(tensor.detach().to("cpu")).numpy()
    if len(raw) < _LEAST_BYTES or same_memory(raw[_WIDEST:], raw[:-_WIDEST]):  # too few, or one value everywhere
        return None
    for name, other in tensors.items():
        # a sparse tensor, or one that is too small, does not hold the bytes
        if other.layout is not torch.strided or other.nbytes < len(raw):
            continue
        memory = as_bytes(other.detach().to("cpu")).numpy()
        for start in _candidates(raw, memory):
            if same_memory(memory[start : start + len(raw)], raw):
                return name if len(raw) == len(memory) else f"bytes {start} to {start + len(raw)} of {name}"
    return None


def _candidates(raw: np.ndarray, memory: np.ndarray) -> list[int]:
    """Return the offsets in `memory`, multiples of the allocator's granularity, at which `raw` could begin."""
    starts = np.arange(0, len(memory) - len(raw) + 1, _GRANULARITY)
    fits = np.ones(len(starts), bool)
    for byte in range(8):  # the first bytes rule out nearly all offsets
        fits &= memory[starts + byte] == raw[byte]
    return [int(start) for start in starts[fits]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """The results of later loads of the adapter's file for one parameter."""

    digests: tuple[str, ...] = ()
    """One per load."""
    wrong: torch.Tensor | None = None
    """The first tensor that differs from the first load of all, on the CPU."""


def reload(context: Context, state: dict[str, Any]) -> dict[str, Loads]:
    """Load the adapter again under the same name, over parameters filled with NaN, and return the results by name.

    The parameters are left as the first load set them. `state` has the parameters of the model, by name.
    """
    names = [
        name
        for name in context.expected
        if name in state and state[name].is_floating_point() and not state[name].is_meta
    ]
    first_digests = {name: digest(state[name]).value for name in names}
    loads_by_name = dict.fromkeys(names, Loads())
    with as_it_was(context.model, set(names)) as parameters:
        # the load that made the model is the first of the runs that are compared
        for _ in range(max(1, context.job.case.repeat - 1)):
            poison(parameters.values())
            try:
                context.model.load_adapter(context.job.case.adapter, ADAPTER_NAME)  # type: ignore[operator]
            except UNUSABLE as error:
                raise refusal(context, error, f"PEFT cannot load this adapter twice: {first_line(error)}") from error
            for name, loads in loads_by_name.items():
                value, wrong = digest(state[name]).value, loads.wrong
                if wrong is None and value != first_digests[name]:
                    wrong = state[name].detach().to("cpu", copy=True)
                loads_by_name[name] = Loads(digests=(*loads.digests, value), wrong=wrong)
    if context.record.wants("adapter", SETTINGS_LAYER):
        # a constant: the row only says that the adapter loads again here, which the workers have to agree on
        loaded = torch.ones((), dtype=torch.uint8)
        row = TensorRecord("adapter", SETTINGS_LAYER, LOADED_AGAIN, rule=Rule.PEER, status="measured")
        context.record.computed(row, loaded)
    return loads_by_name
