"""Load a base and an adapter as a user would: `AutoModel*.from_pretrained` and `PeftModel.from_pretrained`."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import sys
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from safetensors import SafetensorError

from consistency.case.case import Case
from consistency.case.named_adapters import NamedAdapter
from consistency.errors import InputError
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import name_of
from consistency.numerics.identity import Start, start_of
from consistency.worker.device_error import is_of_the_device, of_another
from consistency.worker.model.head_class import HEAD, auto_class, is_synthetic, labels, overwrite, synthetic
from consistency.worker.model.running import device_of
from consistency.worker.model.weight_files import WeightFiles, file_names
from consistency.worker.quantized.held import is_composite, quantized_layers, stored_names

if TYPE_CHECKING:
    from consistency.worker.model.offload import Offload

ADAPTER_NAME = "default"
"""PEFT's name of the case's adapter."""

_OTHER_ROWS = re.compile(
    r"mismatch for \S*(?:embed|wte|lm_head)\S*: .*?Size\(\[(\d+), (\d+)\]\).*?Size\(\[(\d+), \2\]\)"
)
"""PEFT's message on embeddings or a head with other numbers of rows: in the file, and in the model (groups 1, 3)."""

# errors of transformers and PEFT over files, configs and adapters that they cannot use, or cannot load twice
UNUSABLE = (
    ValueError,
    RuntimeError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OSError,
    EOFError,
    ImportError,
    pickle.UnpicklingError,
    SafetensorError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBase:
    """A base model on its device, before any adapter."""

    model: torch.nn.Module
    files: WeightFiles | None
    """None for a model made by a factory."""
    tensors: Mapping[str, torch.Tensor]
    """Every parameter and buffer by its name in the base, the non-persistent ones too; tied ones once. An offloaded
    base has them on the host: `on_device` has them as they arrive on the device."""
    file_names: Mapping[str, str]
    """Name in the file, by name in the model, where transformers loads the tensor as it is."""
    not_in_file: frozenset[str]
    """Parameters that transformers initialised because no file holds them. Matrices among them hold the values of
    `consistency.worker.model.head_class`, which are the same everywhere; torch's own random values are not."""
    persistent: frozenset[str]
    """Names of the state dict: parameters and persistent buffers."""
    digests: dict[str, TensorDigest] = field(default_factory=dict)
    """The digests of the tensors as they were loaded, before any adapter, by name, as far as they were asked for."""
    in_file: dict[str, TensorDigest] = field(default_factory=dict)
    """The digests of the values that the files imply, by name in the model, as far as they were read."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """Number of elements of a parameter that are NaN or infinite in the file, by name in the model, as far as they were
    looked for."""
    offload: Offload | None = None
    """Brings the tensors to the device; None where they are on it."""

    @property
    def dtype(self) -> str:
        """Return the dtype of most of the model's elements, leaving out codes of quantized weights."""
        elements = Counter[str]()
        for tensor in self.tensors.values():
            if tensor.is_floating_point() and tensor.itemsize > 1:
                elements[name_of(tensor.dtype)] += tensor.numel()
        return elements.most_common(1)[0][0] if elements else "none"

    def digest_of(self, name: str, tensor: torch.Tensor) -> TensorDigest:
        """Return the digest of a tensor on the device, which is computed once: before any adapter is loaded."""
        if name not in self.digests:
            self.digests[name] = digest(tensor)
        return self.digests[name]

    def on_device(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those of `names`, on the device: an offloaded one until the next is taken."""
        chosen = {name: tensor for name, tensor in self.tensors.items() if names is None or name in names}
        return iter(chosen.items()) if self.offload is None else self.offload.tensors(chosen)

    def onload(self, module: torch.nn.Module) -> AbstractContextManager[None]:
        """Hold every weight inside a module on the device for as long as a `with` block takes."""
        return nullcontext() if self.offload is None else self.offload.onload(module)

    def addresses(self) -> set[Start]:
        """Return the addresses at which the tensors begin in memory."""
        buffers_on_device = () if self.offload is None else self.offload.buffers()
        return {start_of(tensor) for tensor in chain(self.tensors.values(), buffers_on_device)}

    def expected(self, name: str) -> torch.Tensor | None:
        """Return a tensor's value in the file, cast on the CPU to the dtype that it has in the model.

        A tensor that no file holds has synthetic values, or none: then None is returned.
        """
        if name in self.not_in_file and is_synthetic(self.tensors[name]):
            return synthetic(name, self.tensors[name])
        key = self.file_names.get(name)
        if key is None or self.files is None:
            return None
        return self.files.read(key).to(self.tensors[name].dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAdapter:
    """An adapter on its base."""

    model: torch.nn.Module
    """PEFT's model."""
    origins: Mapping[str, str]
    """Name in the base of each of its tensors, by name in `model`: PEFT's layer replication numbers layers anew."""
    initial: Mapping[str, str]
    """Digest of each of the adapter's parameters before its file was loaded into them, by name; empty where nobody
    asked for it."""
    detour: str
    """The error of another device that PEFT loads by way of, in its own words; empty where none failed."""


def load_base(
    case: Case, device: str, *, device_map: str | Mapping[str, Any] | None = None, offload: bool = False
) -> LoadedBase:
    """Load the base of a case onto a device, or onto several by a device map; `offload` leaves it on the host."""
    first_device = "cpu" if offload else device
    if case.factory is not None:
        model, files, missing = _from_factory(case.factory, first_device, case.dtype), None, frozenset[str]()
    else:
        model, missing = _from_folder(case, first_device, device_map)
        files = WeightFiles.of_base(case.base, allow_pickle=case.allow_pickle)
    model.eval()
    missing = overwrite(model, missing)
    tensors = _tensors(model, files)
    # a tensor in no file has no name there, even where a name looks similar (`classifier.dense`, `lm_head.dense`)
    filled = {name: tensor for name, tensor in tensors.items() if name not in missing}
    names = {} if files is None else file_names(filled, files)
    tensors, names = _taken_apart(model, tensors, names, files)
    persistent = frozenset(model.state_dict(keep_vars=True))
    return LoadedBase(
        model=model,
        files=files,
        tensors=tensors,
        file_names=names,
        not_in_file=missing,
        persistent=persistent,
        offload=_offloaded(model, device) if offload else None,
    )


def _taken_apart(
    model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str], files: WeightFiles | None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Replace quantized weights by the tensors that store them (codes, scales, tables); return tensors and file names.

    Parameters
    ----------
    names : mapping of str to str
        Name in the files, by name in the model.
    """
    tensors, names = dict(tensors), dict(names)
    in_file = set() if files is None else set(files.names())
    for layer, module in quantized_layers(model):
        weight = f"{layer}.weight" if layer else "weight"
        if is_composite(module.weight):
            tensors.pop(weight, None)
            names.pop(weight, None)
        for name, key, tensor in stored_names(weight, module.weight):
            tensors[name] = tensor
            if key in in_file:
                names[name] = key
    return tensors, names


def _offloaded(model: torch.nn.Module, device: str) -> Offload:
    """Put hooks on a base on the host that bring its weights to a device."""
    from consistency.worker.model.offload import Offload

    offload = Offload(model, torch.device(device))
    offload.attach(model)
    return offload


def load_adapter(
    base: LoadedBase,
    case: Case,
    *,
    autocast: bool = True,
    instead: NamedAdapter | None = None,
    notes_initial: bool = False,
) -> LoadedAdapter:
    """Load the case's adapter onto the base by PEFT's default load path.

    Where a device fails that PEFT loads by way of, and the base's own does not, the adapter is loaded straight to the
    base's own device.

    Parameters
    ----------
    autocast : bool
        PEFT's argument `autocast_adapter_dtype`.
    instead : NamedAdapter, optional
        Loaded in the place of the case's adapter, under its own name.
    notes_initial : bool
        Whether to take digests of the adapter's parameters before its file is loaded into them.

    Raises
    ------
    InputError
        PEFT cannot load the adapter onto this base.
    """
    import peft

    path, adapter_name = case.adapter, ADAPTER_NAME
    if instead is not None:
        path, adapter_name = instead.path, instead.name
    assert path is not None
    noting: AbstractContextManager[dict[str, str]] = nullcontext({})
    if notes_initial:
        noting = _noting_initial_values(base)
    if base.offload is not None:  # PEFT loads while the base is on the host: some methods compute from its values
        base.offload.detach()
    # by default PEFT copies by way of the first accelerator, which is no way for a reference on the CPU
    is_detour = device_of(base.model).type == "cpu" and peft.utils.infer_device() != "cpu"
    torch_device = "cpu" if is_detour else None
    hint = f"is it for {case.base}?"
    try:
        own = device_of(base.model)
        with (
            _as_input_error((*UNUSABLE, AssertionError), _NO_ADAPTER, where=path, hint=hint, device=own),
            _past_another_device(own) as detours,
            noting as initial,
        ):
            model = peft.PeftModel.from_pretrained(
                base.model,
                path,
                adapter_name=adapter_name,
                autocast_adapter_dtype=autocast,
                torch_device=torch_device,
            )
    except InputError as error:
        explained = _explained(error, path=path, hint=hint)
        if explained is None:
            raise
        raise explained from error.__cause__
    assert isinstance(model, torch.nn.Module)
    model.eval()
    origins = _origins(model, base)  # while the objects are those of the base: an offloaded one gets others
    if base.offload is not None:
        base.offload.attach(model)
    return LoadedAdapter(model=model, origins=origins, initial=initial, detour=detours[0] if detours else "")


_NO_ADAPTER = "PEFT cannot load this adapter onto this base"


_LIBRARY = re.compile(r"[Nn]o module named '(\w+)|[`'\"](\w+)[`'\"]|\b(bitsandbytes|scipy)\b")
"""The library that an ImportError is about, in Python's own words, or in PEFT's."""


def library_missing(error: BaseException, adapter: str) -> InputError:
    """Return the error of an adapter that takes a library which is not installed, in PEFT's own words."""
    message = " ".join(str(error).split())[:300]
    found = _LIBRARY.search(message)
    name = next((group for group in found.groups() if group), "") if found is not None else ""
    return InputError(
        "PEFT takes a library for this adapter that is not installed",
        where=adapter,
        got=f"{type(error).__name__}: {message}",
        hint=f"pip install {name}" if name else None,
    )


def _explained(error: InputError, *, path: str, hint: str) -> InputError | None:
    """Return an error that says more about why PEFT cannot load an adapter; None where no more is known.

    Parameters
    ----------
    path : str
        The adapter's folder.
    hint : str
        The hint of `error`.
    """
    import peft
    import transformers

    cause = error.__cause__
    # PEFT looks up every tensor of a module that it saves whole, by the name in the file
    if isinstance(cause, KeyError) and cause.args and str(cause.args[0]).startswith("base_model."):
        return InputError(
            "the adapter's file lacks a tensor that its config asks for",
            where=path,
            got=f"no {cause.args[0]}",
            wanted="every tensor of the modules in modules_to_save of adapter_config.json",
            hint="save it again by PEFT's save_pretrained(), or take the module out of modules_to_save",
        )
    if isinstance(cause, ImportError):
        return library_missing(cause, path)
    message = error.parts["got"]
    if isinstance(cause, AssertionError):  # of a library that computes on accelerators alone
        hint = "load it where there is a device that this library computes on"
        return InputError(
            "a library that PEFT loads this adapter by cannot be used here", where=path, got=message, hint=hint
        )
    if (rows := _OTHER_ROWS.search(str(message))) is not None:
        hint = f"resize the base from {rows[3]} rows: model.resize_token_embeddings({rows[1]}), and save it"
        return InputError(_NO_ADAPTER, where=path, got=message, hint=hint)
    if isinstance(cause, TypeError | AttributeError):  # as code raises that was written for another version
        hint = f"does peft {peft.__version__} fit transformers {transformers.__version__}? {hint}"
        return InputError(_NO_ADAPTER, where=path, got=message, hint=hint)
    return None


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter, then every buffer of a model, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _origins(model: torch.nn.Module, base: LoadedBase) -> dict[str, str]:
    """Return the name in the base of each of its tensors, by name in the model with the adapter."""
    names_in_base = {id(tensor): name for name, tensor in base.tensors.items()}
    return {name: names_in_base[id(tensor)] for name, tensor in _named_tensors(model) if id(tensor) in names_in_base}


@contextmanager
def _as_input_error(
    kinds: tuple[type[Exception], ...], what: str, *, where: object, device: torch.device | str, hint: str | None = None
) -> Iterator[None]:
    """Raise errors of these kinds as errors of the user's input, except those of the device or its memory.

    Parameters
    ----------
    what, where, hint
        The parts of the error that is raised; the first lines of the library's own are added.
    """
    try:
        yield
    except kinds as error:
        if is_of_the_device(error, device):
            raise
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        message = " ".join(lines[:3])[:600]
        raise InputError(what, where=where, got=f"{type(error).__name__}: {message}", hint=hint) from error


@contextmanager
def _conversions_raise() -> Iterator[None]:
    """Let an error of the device out of transformers' conversions of weights, such as a merge of experts.

    They log any error, and raise another at the end that says to read the log.
    """
    from transformers import core_model_loading

    real = getattr(core_model_loading, "log_conversion_errors", None)
    skipping = getattr(core_model_loading, "SkipParameters", None)
    if real is None or skipping is None:  # another version of transformers
        yield
        return

    @contextmanager
    def raising(*args: Any, **options: Any) -> Iterator[None]:
        try:
            with real(*args, **options):
                yield
        except skipping as skipped:
            if skipped.__context__ is not None and is_of_the_device(skipped.__context__):
                raise skipped.__context__ from None
            raise

    with mock.patch.object(core_model_loading, "log_conversion_errors", raising):
        yield


def load_model(case: Case, device: str) -> torch.nn.Module:
    """Load the base of a case, with its adapter if it has one."""
    base = load_base(case, device)
    return base.model if case.adapter is None else load_adapter(base, case).model


@contextmanager
def _past_another_device(own: torch.device) -> Iterator[list[str]]:
    """Let PEFT load a file straight to its own device, where another one fails that it loads by way of.

    Yields
    ------
    list of str
        The errors of other devices, in their own words, as they occur.
    """
    from peft import PeftModel

    real, detours = PeftModel.load_adapter, list[str]()

    def load(model: Any, *args: Any, **options: Any) -> Any:
        try:
            return real(model, *args, **options)
        except Exception as error:  # of any kind: one that is not of another device is raised again
            reported = of_another(error, own)
            if reported is None:
                raise
            detours.append(reported.words)
        return real(model, *args, **{**options, "torch_device": str(own)})

    with mock.patch.object(PeftModel, "load_adapter", load):
        yield detours


@contextmanager
def _noting_initial_values(base: LoadedBase) -> Iterator[dict[str, str]]:
    """Take digests as PEFT begins to load the file: the adapter is in place and still at initialization.

    Yields
    ------
    dict of str to str
        The digest of each parameter that is not the base's, by name.
    """
    from peft import PeftModel

    base_addresses = base.addresses()
    real, initial = PeftModel.load_adapter, dict[str, str]()

    def load(model: Any, *args: Any, **options: Any) -> Any:
        for name, tensor in model.named_parameters():
            if tensor.is_meta or is_composite(tensor):
                continue
            if tensor.numel() and start_of(tensor) not in base_addresses:
                initial.setdefault(name, digest(tensor).value)
        return real(model, *args, **options)

    with mock.patch.object(PeftModel, "load_adapter", load):
        yield initial


def class_and_labels(case: Case) -> tuple[Any, int | None]:
    """Return the Auto class that a folder is loaded as, and the number of labels; None if that is the config's."""
    from transformers import AutoConfig

    config_errors = (ValueError, KeyError, TypeError, OSError)
    problem = "transformers cannot use this config"
    with _as_input_error(config_errors, problem, where=Path(case.base) / "config.json", device="cpu"):
        config = AutoConfig.from_pretrained(case.base, trust_remote_code=case.trust_remote_code)
    return auto_class(config, case), labels(config, case)


def _from_folder(
    case: Case, device: str, device_map: str | Mapping[str, Any] | None = None
) -> tuple[torch.nn.Module, frozenset[str]]:
    """Load a base from its folder; return it, and the names of the parameters that no file holds.

    Raises
    ------
    InputError
        Transformers cannot load it, or a weight has another shape than its config implies.
    """
    auto, label_count = class_and_labels(case)
    arguments: dict[str, Any] = {
        "dtype": case.dtype if case.dtype == "auto" else getattr(torch, case.dtype),
        "trust_remote_code": case.trust_remote_code,
        "use_safetensors": None if case.allow_pickle else True,  # None: a pickle where there is no safetensors file
        "output_loading_info": True,
    }
    if device_map is not None:
        arguments["device_map"] = device_map
    elif device != "cpu":
        arguments["device_map"] = {"": device}  # loads straight to the device
    if label_count is not None:
        arguments.update(num_labels=label_count, ignore_mismatched_sizes=True)
    problem = f"transformers cannot load this base as {auto.__name__}"
    with _as_input_error(UNUSABLE, problem, where=case.base, device=device), _conversions_raise():
        model, info = auto.from_pretrained(case.base, **arguments)
    mismatched = {name: (in_file, in_model) for name, in_file, in_model in info.get("mismatched_keys") or ()}
    new_heads: set[str] = set()
    if label_count is not None:  # the adapter brings a head of another size, and the base's own is not used
        new_heads = {name for name in mismatched if HEAD.search(name)}
    for name in sorted(set(mismatched) - new_heads):
        in_file, in_model = map(tuple, mismatched[name])
        problem = "a weight of the base does not have the shape that its config implies"
        raise InputError(problem, where=f"{name} in {case.base}", got=in_file, wanted=in_model)
    return model, frozenset(info.get("missing_keys") or ()) | new_heads


def _from_factory(text: str, device: str, dtype: str) -> torch.nn.Module:
    """Return the model of a user's function, `module:function`, on a device.

    Raises
    ------
    InputError
        It cannot be imported, returns no module, or a quantized one that is asked for in another dtype.
    """
    module_name, _, function_name = text.partition(":")
    sys.path.append(os.getcwd())  # a user's own module is in the working directory; installed ones come first
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError("cannot import the model factory", where=f"python:{text}", got=error) from error
    model = factory()
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            "the factory does not return a module", where=f"python:{text}", got=type(model).__name__, wanted="Module"
        )
    if dtype != "auto":
        _bring_to(model, getattr(torch, dtype), text)
    return model.to(device)


def _bring_to(model: torch.nn.Module, dtype: torch.dtype, text: str) -> None:
    """Cast the floating-point tensors of a model, as loading it in that dtype does.

    Tensors that transformers' models compute themselves, such as rotary frequencies, keep their own dtype, and so do
    tensors of one byte per element.
    """
    from transformers import PreTrainedModel

    if next(quantized_layers(model), None) is not None:
        raise InputError(
            "a quantized model cannot be brought to another dtype",
            where=f"python:{text}",
            got=f"--dtype {name_of(dtype)}",
            wanted="no --dtype: it is checked in the dtype that its factory gives it",
        )
    saved_names = model.state_dict(keep_vars=True).keys() if isinstance(model, PreTrainedModel) else None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_saved = saved_names is None or name in saved_names
        if is_saved and tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.data = tensor.data.to(dtype)


def _tensors(model: torch.nn.Module, files: WeightFiles | None) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under one name: of tied names, one in the file, else the first."""
    in_file = set() if files is None else set(files.names())
    names: dict[tuple[int | Start, torch.Size, torch.dtype], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _named_tensors(model):
        # a quantized weight may have no memory of its own
        address = id(tensor) if is_composite(tensor) else start_of(tensor)
        identity = (address, tensor.shape, tensor.dtype)
        is_tied = tensor.numel() and identity in names
        if not is_tied:
            names[identity] = name
            tensors[name] = tensor
        elif name in in_file and names[identity] not in in_file:
            tensors = _renamed(tensors, names[identity], name)
            names[identity] = name
    return tensors


def _renamed(tensors: Mapping[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    """Return tensors in the same order, one of them under another name."""
    return {new if name == old else name: tensor for name, tensor in tensors.items()}
