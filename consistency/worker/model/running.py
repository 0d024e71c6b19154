"""Run a model on inputs, and distinguish an error of its code from a failure of its device."""

from __future__ import annotations

import importlib.util
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from consistency.case.case import Case
from consistency.errors import ConsistencyError, InputError, first_line
from consistency.worker.device_error import is_of_the_device
from consistency.worker.quantized.exact import as_loaded
from consistency.worker.recorder import Skip

Activations = dict[str, torch.Tensor]
"""Inputs or outputs of a model, by name."""

_PYTHONS_OWN = Path(sysconfig.get_path("stdlib")).parts

TASKS = "task_ids"
"""PEFT's name for the input that some methods ask for besides the model's own: which task a sequence belongs to."""


def is_of_the_model(error: Exception, model: torch.nn.Module) -> bool:
    """Report whether an error is of the model's code: no mistake of this package, and no failure of the device."""
    return not _is_ours(error) and not is_of_the_device(error, device_of(model))


@contextmanager
def model_code(
    of: torch.nn.Module | torch.device,
    prefix: str = "",
    *,
    says: Callable[[Exception], str] = first_line,
    kinds: tuple[type[Exception], ...] = (),
    raises: type[Skip] = Skip,
) -> Iterator[None]:
    """Raise errors of code that is not ours as `Skip`, except those of the device or its memory.

    Parameters
    ----------
    of : torch.nn.Module or torch.device
        The model that runs, or the device on which a library does.
    prefix, says
        Text before the reason, and a function that returns the reason of an error.
    kinds : tuple of type
        Errors by which a library refuses a call; without, any error is meant, as a model's code may raise.
    raises : type
        The kind of `Skip` to raise.
    """
    try:
        yield
    except Exception as error:
        is_foreign = not isinstance(error, Skip) and not _is_ours(error)
        is_theirs = isinstance(error, kinds) if kinds else is_foreign
        if not is_theirs:
            raise
        device = of if isinstance(of, torch.device) else device_of(of)
        if is_of_the_device(error, device):
            raise
        raise raises(f"{prefix}{says(error)}") from error


def _is_ours(error: Exception) -> bool:
    """Report whether this package raises an error amid the model's code: by a mistake, or for a file that it writes.

    Hooks of ours run inside of the model's passes. An error of theirs, such as a full disk, says nothing of the model.
    """
    if isinstance(error, ConsistencyError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, OSError | SafetensorError):
        return _is_called_by_us(frames)
    if not frames or not isinstance(error, NameError | TypeError | AssertionError):
        return False
    # an operation that a mode of ours hands on to torch is the model's
    is_handed_on = frames[-1].name.startswith("__torch_")
    return _is_in("consistency", _path(frames[-1])) and not is_handed_on


def _is_called_by_us(frames: traceback.StackSummary) -> bool:
    """Report whether the code that called a library to read or write is ours, and not the model's."""
    for frame in reversed(frames):
        if _is_in("consistency", _path(frame)):
            return True
        if not _is_of_a_library(frame):
            return False
    return False


def _is_of_a_library(frame: traceback.FrameSummary) -> bool:
    """Report whether a frame is of Python's own library, or of one that writes files for whoever calls it."""
    path = _path(frame)
    is_pythons = frame.filename.startswith("<frozen") or path[: len(_PYTHONS_OWN)] == _PYTHONS_OWN
    if is_pythons and "site-packages" not in path:
        return True
    return any(_is_in(name, path) for name in ("torch", "numpy", "safetensors", "msgspec"))


def _path(frame: traceback.FrameSummary) -> tuple[str, ...]:
    return Path(frame.filename).parts


def base_of(model: Any) -> Any:
    """Return the base model inside of PEFT's, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def device_of(model: torch.nn.Module) -> torch.device:
    """Return the device that a model computes on; an offloaded model has its parameters elsewhere."""
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    device = next((hook.execution_device for hook in hooks if hook is not None), None)
    return next(model.parameters()).device if device is None else torch.device(device)


def _is_out_of_reach(error: Exception) -> bool:
    """Report whether an offloaded model's code met a weight that is not on the device: one on meta has no bytes."""
    return isinstance(error, RuntimeError | NotImplementedError) and "meta" in str(error)


def _is_unimplemented(error: Exception) -> bool:
    """Report whether an error says that there is no such operation on this device, or not in this dtype."""
    return isinstance(error, NotImplementedError) or "not implemented for" in str(error)


def _module_of(error: Exception, model: torch.nn.Module) -> str:
    """Return the name in the base of the innermost module that was running when an error was raised; empty of none."""
    names = {id(module): name for name, module in base_of(model).named_modules()}
    innermost = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = names.get(id(frame.f_locals.get("self")), innermost)
    return innermost


def refusal(case: Case, error: Exception, model: torch.nn.Module) -> str:
    """Return the reason why the model does not run on the inputs.

    Raises
    ------
    InputError
        The inputs are the user's own.
    """
    if _is_out_of_reach(error):
        return f"the model reads weights that accelerate's hooks do not bring to the device: {first_line(error)}"
    if _is_unimplemented(error):
        module = _module_of(error, model)
        where = f"an operation of {module}" if module else "an operation of the model"
        return f"{where} is not implemented on {device_of(model)}: {first_line(error)}"
    if case.inputs is not None:
        raise InputError("the model does not run on these inputs", where=case.inputs, got=first_line(error)) from error
    if _is_of_replaced_layer(error):
        return f"the model reads an attribute that PEFT's layer in its place lacks: {first_line(error)}"
    if _is_of_peft(error):
        return f"PEFT's code fails on this model: {first_line(error)}"
    return f"the model does not run on inputs made from its config: {first_line(error)}: give --inputs FILE.safetensors"


def _is_of_replaced_layer(error: Exception) -> bool:
    """Report whether model code misses an attribute of a layer that PEFT has wrapped, as Whisper's its strides."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(error, AttributeError) and isinstance(error.obj, BaseTunerLayer)


def _is_of_peft(error: Exception) -> bool:
    """Report whether PEFT's own code, rather than the model's, raises an error or makes torch raise it."""
    frames = [_path(frame) for frame in traceback.extract_tb(error.__traceback__)]
    outside = [parts for parts in frames if not _is_in("torch", parts) and not _is_in("consistency", parts)]
    return bool(outside) and _is_in("peft", outside[-1])


def _is_in(package: str, parts: tuple[str, ...]) -> bool:
    """Report whether the path of a source file is inside an installed package."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else [Path(folder).parts for folder in spec.submodule_search_locations or ()]
    return any(parts[: len(folder)] == folder for folder in folders)


def activations(model: torch.nn.Module, inputs: Activations) -> Activations:
    """Run the model and return its outputs on the CPU by name: `logits`, or those of the bare model.

    No parameter requires a gradient meanwhile, whatever PEFT left behind: torch chooses between `mm` and `bmm` for a
    layer by that flag, without a gradient too.
    """
    with torch.no_grad(), without_gradients(model):
        on_device = outputs(model, inputs)
    return {name: tensor.detach().to("cpu") for name, tensor in on_device.items()}


def outputs(model: torch.nn.Module, inputs: Activations) -> Activations:
    """Run the model and return its outputs on its device, by name."""
    with parameters_kept(model), as_loaded(model):
        return outputs_by(model, model, inputs)


def outputs_by(call: Callable[..., Any], model: torch.nn.Module, inputs: Activations) -> Activations:
    """Run a wrapper of a model, or a model whose parameters change places meanwhile; return its outputs by name.

    Outputs that are no floating-point tensors, and scalars such as a loss, are left out.
    """
    device, dtype = device_of(model), next(model.parameters()).dtype
    moved = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in inputs.items()}
    output = call(**moved, **_extras(model), **_tasks(model, moved))
    if isinstance(output, torch.Tensor):
        return {"output": output}
    tensors = ((name, value) for name, value in dict(output).items() if isinstance(value, torch.Tensor))
    return {name: value for name, value in tensors if value.is_floating_point() and value.dim() > 0}


@contextmanager
def without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Let no parameter require a gradient for the duration of a `with` block.

    `matmul` folds an input whose rows are not contiguous if the weight requires a gradient, and multiplies in batches
    if not (`should_fold` in ATen's LinearAlgebra.cpp), with other bits. PEFT's `set_adapter` changes the flag.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def parameters_kept(model: torch.nn.Module) -> Iterator[None]:
    """Put back the parameters that a pass replaces with others of its own.

    For every pass PEFT merges its adapter into torch's MultiheadAttention, and registers what it unmerges: the base's
    weights but for rounding, in float64 where the pass was.
    """
    tables = [(module._parameters, dict(module._parameters)) for module in model.modules() if module._parameters]
    try:
        yield
    finally:
        for table, before in tables:
            replaced = [parameter for name, parameter in before.items() if table.get(name) is not parameter]
            # parameters of an offloaded module are on meta, and the hooks replace them
            if any(parameter is not None and not parameter.is_meta for parameter in replaced):
                table.clear()
                table.update(before)


def matrix_elements(model: torch.nn.Module) -> int:
    """Return the number of elements of all matrices: the multiplications for one token."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)


def tokens_of(inputs: Activations) -> int:
    """Return the number of rows of the inputs that pass through the model: tokens, or images."""
    counts = [tensor.numel() if tensor.dim() < 3 else tensor.shape[0] for tensor in inputs.values()]
    return max(counts, default=1)


def _extras(model: torch.nn.Module) -> dict[str, Any]:
    """Return arguments that ask a transformers model for no hidden states and no cache; none for other models."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    extras: dict[str, Any] = {"output_hidden_states": False, "return_dict": True}
    if hasattr(config, "use_cache"):
        extras["use_cache"] = False
    return extras


def _tasks(model: Any, inputs: Activations) -> Activations:
    """Return a task for each sequence, in turn, where the adapter's own code asks for one."""
    configs, prompts = getattr(model, "peft_config", None), getattr(model, "prompt_encoder", {})
    if configs is None or TASKS in inputs or not inputs:
        return {}
    modules = [model.base_model]
    if TASKS in inspect.signature(model.forward).parameters:  # it is the base's while a prompt is disabled
        modules += [prompts[name] for name in model.active_adapters if name in prompts]
    if not any(TASKS in inspect.signature(module.forward).parameters for module in modules):
        return {}
    task_counts = [1]
    for name in model.active_adapters:
        task_counts += [getattr(configs[name], field, 1) for field in ("n_tasks", "num_tasks")]
    rows = next(iter(inputs.values())).shape[0]
    return {TASKS: torch.arange(rows, device=device_of(model)) % max(task_counts)}
