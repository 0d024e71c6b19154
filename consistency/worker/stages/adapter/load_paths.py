"""The side roads of the stage `adapter`: the file loaded again over poison, with other arguments or another loader.

A load takes hundredths of a second where starting a worker takes seconds, so one worker takes all the roads that lie
beside its default one. Each leaves the model as it was: the same parameter objects with the same bytes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from consistency.capture.names import CAST_ON_THE_WAY, LOADED_AGAIN, SETTINGS_LAYER, adapter_place, module_place
from consistency.case.load_path import LoadPath
from consistency.numerics.diagnosis_moved import Known
from consistency.numerics.digest import digest
from consistency.numerics.dtype import name_of
from consistency.worker.memory.host_memory import is_out_of_memory
from consistency.worker.model.loading import ADAPTER_NAME
from consistency.worker.stages.adapter.reload import POISON, poison
from consistency.worker.stages.adapter.stale_bytes import file_of_another, leftover
from consistency.worker.stages.context import Context

# what PEFT and transformers raise over adapters that they cannot load, or cannot load twice
_REFUSED = (
    RuntimeError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    NotImplementedError,
    ImportError,
    OSError,
)

State = Mapping[str, torch.Tensor]


def run(context: Context, by_digest: Mapping[str, str]) -> None:
    """Take every side road of this worker.

    Parameters
    ----------
    context : Context
    by_digest : mapping of str to str
        Key in the adapter's file, by the digest of its tensor.
    """
    sides = context.job.alternative_paths
    for done, load_path in enumerate(sides):
        context.events.step(f"road {load_path}", done, len(sides))
        with context.record.on_load_path(load_path):
            if load_path.by_transformers:
                _by_transformers(context, load_path, by_digest)
            else:
                _by_peft(context, load_path, by_digest)


def _by_peft(context: Context, load_path: LoadPath, by_digest: Mapping[str, str]) -> None:
    model: Any = context.model
    device = {None: None, "cpu": "cpu", "target": context.job.device}[load_path.torch_device]
    with as_it_was(model, context.expected) as state:
        poison(tensor for tensor in state.values() if tensor.is_floating_point())
        try:
            model.load_adapter(
                context.job.case.adapter, ADAPTER_NAME, torch_device=device, low_cpu_mem_usage=load_path.low_memory
            )
        except _REFUSED as error:
            if is_out_of_memory(error):  # torch's is a RuntimeError
                raise
            _skip(context, f"PEFT cannot load this adapter twice: {type(error).__name__}: {error}")
            return
        _look(context, load_path, by_digest, model.state_dict(keep_vars=True))


def _by_transformers(context: Context, load_path: LoadPath, by_digest: Mapping[str, str]) -> None:
    """Load the adapter with the base's own `load_adapter`, onto a stand-in that has no PEFT around it."""
    if not hasattr(context.base.model, "load_adapter"):
        _skip(context, "the base is no transformers model: it has no load_adapter")
        return
    model: Any = context.model
    if model.peft_config[ADAPTER_NAME].is_prompt_learning:
        _skip(context, "transformers loads no prompt")
        return
    try:
        shell = stand_in(model).unload()
        with _poisoned_injection():
            shell.load_adapter(
                context.job.case.adapter, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=load_path.low_memory
            )
    except _REFUSED as error:
        if is_out_of_memory(error):
            raise
        why = f"{type(error).__name__}: {error}"
        if context.rewritten:
            why = "its method computes from the base's numbers, which what stands in for the base has not"
        _skip(context, f"transformers cannot load this adapter: {why}")
        return
    # the names that PEFT's own model around it would have
    state = shell.state_dict(keep_vars=True)
    _look(context, load_path, by_digest, {name: state.get(module_place(name)) for name in context.expected})


def _skip(context: Context, reason: str) -> None:
    if context.record.wants("adapter", SETTINGS_LAYER):
        context.record.absent(
            stage="adapter", layer=SETTINGS_LAYER, tensor=LOADED_AGAIN, status="skipped", reason=reason
        )


def _look(
    context: Context, load_path: LoadPath, by_digest: Mapping[str, str], state: Mapping[str, torch.Tensor | None]
) -> None:
    """Hold every tensor of the adapter's file against what this road has made of it."""
    if context.record.wants("adapter", SETTINGS_LAYER):
        context.record.fact(stage="adapter", layer=SETTINGS_LAYER, tensor=LOADED_AGAIN, status="equal")
    for name, (key, tensor) in context.expected.items():
        layer, part = adapter_place(key)
        actual = state.get(name)
        if actual is None or not context.record.wants("adapter", layer):
            # what the model has no place for is told on the default road; transformers names some modules otherwise
            continue
        expected = tensor.to(actual.dtype)
        evidence = {} if actual.dtype == tensor.dtype else {"dtype_in_file": name_of(tensor.dtype)}
        if load_path.low_memory and digest(actual).value != digest(expected).value:
            # PEFT moves the parameter to the dtype of the base on its way, and to its own after that
            way = getattr(torch, context.base.dtype, actual.dtype)
            through = tensor.to(way).to(actual.dtype)
            if digest(actual).value == digest(through).value:
                expected, evidence = through, {**evidence, CAST_ON_THE_WAY: context.base.dtype}
        context.record.moved(
            stage="adapter",
            layer=layer,
            tensor=part,
            actual=actual,
            expected=expected,
            known=Known(
                poison=POISON.get(actual.element_size()),
                swapped=functools.partial(file_of_another, by_digest, digest(expected).value),
                stale=functools.partial(leftover, context.base.tensors),
            ),
            evidence=evidence,
        )


@contextmanager
def as_it_was(model: torch.nn.Module, names: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield these tensors of a model, and put every parameter and buffer back at the end: the objects, and their bytes.

    `low_cpu_mem_usage=True` puts new parameters in the places of the old ones.
    """
    state = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name in names}
    storages = {name: tensor.data for name, tensor in state.items()}
    bytes_before = {name: tensor.detach().clone() for name, tensor in state.items()}
    places = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        yield state
    finally:
        for module, parameters, buffers in places:
            _put_back(module._parameters, parameters)
            _put_back(module._buffers, buffers)
        with torch.no_grad():
            for name, tensor in state.items():
                storages[name].copy_(bytes_before[name])
                tensor.data = storages[name]


def _put_back(held: dict[str, Any], before: dict[str, Any]) -> None:
    held.clear()
    held.update(before)


def stand_in(model: torch.nn.Module) -> Any:
    """Return a model of the same modules, whose tensors have the shape, dtype and device but not the numbers.

    All elements of a tensor lie in one place of its own, so it needs no memory, and whatever is written into it while
    an adapter is put in place cannot reach the model.

    Raises
    ------
    TypeError
        A parameter is of a kind of its own, as quantized ones are, which an ordinary tensor cannot stand for.
    """
    copies: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
            raise TypeError(f"nothing can stand in for a {type(tensor).__name__}")
        one = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        copies[id(tensor)] = torch.nn.Parameter(one, requires_grad=False) if is_parameter else one
    return copy.deepcopy(model, copies)


@contextmanager
def _poisoned_injection() -> Iterator[None]:
    """Poison an adapter's parameters as soon as they are made: transformers makes and loads them in one call."""
    import peft

    real = peft.inject_adapter_in_model

    def inject(
        config: Any, model: torch.nn.Module, adapter_name: str = ADAPTER_NAME, *args: Any, **options: Any
    ) -> Any:
        before = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
        done = real(config, model, adapter_name, *args, **options)
        new = (t for t in model.state_dict(keep_vars=True).values() if id(t) not in before)
        poison(t for t in new if t.is_floating_point() and t.is_contiguous())
        return done

    peft.inject_adapter_in_model = inject
    try:
        yield
    finally:
        peft.inject_adapter_in_model = real
