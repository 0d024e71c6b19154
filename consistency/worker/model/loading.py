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
_OTHER_ROWS = re.compile(
    r"mismatch for \S*(?:embed|wte|lm_head)\S*: .*?Size\(\[(\d+), (\d+)\]\).*?Size\(\[(\d+), \2\]\)"
)

# what transformers and PEFT raise over files, configs and adapters that they cannot use, or cannot load twice
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
    """Every parameter and buffer by its name in the base, the non-persistent ones too; tied ones once. Those of an
    offloaded base are on the host: `on_device` has them as they arrive on the device."""
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
    """Of the values that the files imply, by name in the model, as far as they were read."""
    not_finite: dict[str, int] = field(default_factory=dict)
    """How many elements of a parameter are NaN or infinite there, by name in the model, as far as that was looked
    for."""
    offload: Offload | None = None
    """Brings the tensors to the device; None where they are there."""

    @property
    def dtype(self) -> str:
        """Return the dtype of most of the model's elements, but codes of quantized weights."""
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
        """Return where the tensors begin in memory."""
        there = () if self.offload is None else self.offload.buffers()
        return {start_of(tensor) for tensor in chain(self.tensors.values(), there)}

    def expected(self, name: str) -> torch.Tensor | None:
        """Return a tensor's value in the file, cast on the CPU to the dtype that it has in the model.

        For a tensor that no file holds, its synthetic values, or None where it has none.
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
    """What another device said that PEFT loads by way of and that failed; empty where it did not."""


def load_base(
    case: Case, device: str, *, device_map: str | Mapping[str, Any] | None = None, offload: bool = False
) -> LoadedBase:
    """Load the base of a case onto a device, or onto several by a device map; `offload` leaves it on the host."""
    place = "cpu" if offload else device
    if case.factory is not None:
        model, files, missing = _from_factory(case.factory, place, case.dtype), None, frozenset[str]()
    else:
        model, missing = _from_folder(case, place, device_map)
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
    """Return tensors, and names in the files, with what stores a quantized weight in its place: codes, scales, tables.

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

    Where a device fails that PEFT loads by way of, and the base's own does not, the adapter is loaded straight to that
    one.

    Parameters
    ----------
    autocast : bool
        PEFT's argument `autocast_adapter_dtype`.
    instead : NamedAdapter, optional
        Loaded in the place of the case's adapter, under its own name.
    notes_initial : bool
        Whether to take digests of the adapter's parameters before its file is loaded into them.
    """
    import peft
    import transformers

    path = case.adapter if instead is None else instead.path
    assert path is not None
    noting: AbstractContextManager[dict[str, str]] = nullcontext({})
    if notes_initial:
        noting = _noting_initial_values(base)
    if base.offload is not None:
        base.offload.detach()
    # by default PEFT copies by way of the first accelerator, which is no way for a reference on the CPU
    is_detour = device_of(base.model).type == "cpu" and peft.utils.infer_device() != "cpu"
    torch_device = "cpu" if is_detour else None
    problem, hint = "PEFT cannot load this adapter onto this base", f"is it for {case.base}?"
    try:
        own = device_of(base.model)
        with (
            _as_input_error(UNUSABLE, problem, where=path, hint=hint, device=own),
            _past_another_device(own) as detours,
            noting as initial,
        ):
            model = peft.PeftModel.from_pretrained(
                base.model,
                path,
                adapter_name=ADAPTER_NAME if instead is None else instead.name,
                autocast_adapter_dtype=autocast,
                torch_device=torch_device,
            )
    except InputError as error:
        lost = error.__cause__
        # PEFT looks up every tensor of a module that it saves whole, by the name in the file
        if isinstance(lost, KeyError) and str(lost.args[0] if lost.args else "").startswith("base_model."):
            raise InputError(
                "the adapter's file lacks a tensor that its config asks for",
                where=path,
                got=f"no {lost.args[0]}",
                wanted="every tensor of the modules in modules_to_save of adapter_config.json",
                hint="save it again by PEFT's save_pretrained(), or take the module out of modules_to_save",
            ) from lost
        if (rows := _OTHER_ROWS.search(str(error.parts["got"]))) is not None:
            hint = f"resize the base from {rows[3]} rows: model.resize_token_embeddings({rows[1]}), and save it"
            raise InputError(problem, where=path, got=error.parts["got"], hint=hint) from lost
        if isinstance(lost, TypeError | AttributeError):  # as code raises that was written for another version
            hint = f"does peft {peft.__version__} fit transformers {transformers.__version__}? {hint}"
            raise InputError(problem, where=path, got=error.parts["got"], hint=hint) from lost
        raise
    assert isinstance(model, torch.nn.Module)
    model.eval()
    origins = _origins(model, base)  # while the objects are those of the base: an offloaded one gets others
    if base.offload is not None:
        base.offload.attach(model)
    return LoadedAdapter(model=model, origins=origins, initial=initial, detour=detours[0] if detours else "")


def _origins(model: torch.nn.Module, base: LoadedBase) -> dict[str, str]:
    """Return the name in the base of each of its tensors, by name in the model with the adapter."""
    of_base = {id(tensor): name for name, tensor in base.tensors.items()}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: of_base[id(tensor)] for name, tensor in chain.from_iterable(named) if id(tensor) in of_base}


@contextmanager
def _as_input_error(
    kinds: tuple[type[Exception], ...], what: str, *, where: object, device: torch.device | str, hint: str | None = None
) -> Iterator[None]:
    """Raise errors of these kinds as the user's, except those of the device or its memory."""
    try:
        yield
    except kinds as error:
        if is_of_the_device(error, device):
            raise
        lines = " ".join([line for line in str(error).strip().splitlines() if line.strip()][:3])[:600]
        raise InputError(what, where=where, got=f"{type(error).__name__}: {lines}", hint=hint) from error


@contextmanager
def _conversions_raise() -> Iterator[None]:
    """Let an error of the device out of transformers' conversions of weights, such as a merge of experts.

    They log any error, and raise another at the end that says to read the log.
    """
    from transformers import core_model_loading

    real, skipping = (getattr(core_model_loading, name, None) for name in ("log_conversion_errors", "SkipParameters"))
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
    """Let PEFT load a file straight to a device, where the one fails by way of which it loads; yield what that said."""
    from peft import PeftModel

    real, detours = PeftModel.load_adapter, list[str]()

    def load(model: Any, *args: Any, **options: Any) -> Any:
        try:
            return real(model, *args, **options)
        except Exception as error:  # whatever it is: what no other device said is raised again
            said = of_another(error, own)
            if said is None:
                raise
            detours.append(said.words)
        return real(model, *args, **{**options, "torch_device": str(own)})

    with mock.patch.object(PeftModel, "load_adapter", load):
        yield detours


@contextmanager
def _noting_initial_values(base: LoadedBase) -> Iterator[dict[str, str]]:
    """Take digests as PEFT begins to load the file: the adapter is in place and still at initialization."""
    from peft import PeftModel

    of_base = base.addresses()
    real, initial = PeftModel.load_adapter, dict[str, str]()

    def look(model: Any, *args: Any, **options: Any) -> Any:
        for name, tensor in model.named_parameters():
            if tensor.is_meta or is_composite(tensor):
                continue
            if tensor.numel() and start_of(tensor) not in of_base:
                initial.setdefault(name, digest(tensor).value)
        return real(model, *args, **options)

    with mock.patch.object(PeftModel, "load_adapter", look):
        yield initial


def class_and_labels(case: Case) -> tuple[Any, int | None]:
    """Return the Auto class that a folder is loaded as, and the number of labels if it is not the config's."""
    from transformers import AutoConfig

    of_config = (ValueError, KeyError, TypeError, OSError)
    problem = "transformers cannot use this config"
    with _as_input_error(of_config, problem, where=Path(case.base) / "config.json", device="cpu"):
        config = AutoConfig.from_pretrained(case.base, trust_remote_code=case.trust_remote_code)
    return auto_class(config, case), labels(config, case)


def _from_folder(
    case: Case, device: str, device_map: str | Mapping[str, Any] | None = None
) -> tuple[torch.nn.Module, frozenset[str]]:
    auto, wanted = class_and_labels(case)
    arguments: dict[str, Any] = {
        "dtype": case.dtype if case.dtype == "auto" else getattr(torch, case.dtype),
        "trust_remote_code": case.trust_remote_code,
        "use_safetensors": None if case.allow_pickle else True,
        "output_loading_info": True,
    }
    if device_map is not None:
        arguments["device_map"] = device_map
    elif device != "cpu":
        arguments["device_map"] = {"": device}
    if wanted is not None:
        arguments.update(num_labels=wanted, ignore_mismatched_sizes=True)
    problem = f"transformers cannot load this base as {auto.__name__}"
    with _as_input_error(UNUSABLE, problem, where=case.base, device=device), _conversions_raise():
        model, info = auto.from_pretrained(case.base, **arguments)
    mismatched = {name: (found, shape) for name, found, shape in info.get("mismatched_keys") or ()}
    anew = {name for name in mismatched if wanted is not None and HEAD.search(name)}
    for name in sorted(set(mismatched) - anew):
        found, shape = map(tuple, mismatched[name])
        problem = "a weight of the base does not have the shape that its config implies"
        raise InputError(problem, where=f"{name} in {case.base}", got=found, wanted=shape)
    return model, frozenset(info.get("missing_keys") or ()) | anew


def _from_factory(text: str, device: str, dtype: str) -> torch.nn.Module:
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
    """Cast what is stored in a number format, as loading in that dtype does.

    Transformers' models keep what they compute themselves, such as rotary frequencies, in its own dtype.
    """
    from transformers import PreTrainedModel

    if next(quantized_layers(model), None) is not None:
        raise InputError(
            "a quantized model cannot be brought to another dtype",
            where=f"python:{text}",
            got=f"--dtype {name_of(dtype)}",
            wanted="no --dtype: it is checked in the dtype that its factory gives it",
        )
    kept = model.state_dict(keep_vars=True).keys() if isinstance(model, PreTrainedModel) else None
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor.itemsize > 1 and (kept is None or name in kept):
            tensor.data = tensor.data.to(dtype)


def _tensors(model: torch.nn.Module, files: WeightFiles | None) -> dict[str, torch.Tensor]:
    """Name every parameter and buffer once; of tied names, the one in the file."""
    in_file = set() if files is None else set(files.names())
    chosen: dict[tuple[int | Start, torch.Size, torch.dtype], str] = {}
    found: dict[str, torch.Tensor] = {}
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for name, tensor in chain.from_iterable(named):
        # a quantized weight may have no memory of its own
        address = id(tensor) if is_composite(tensor) else start_of(tensor)
        identity = (address, tensor.shape, tensor.dtype)
        if tensor.numel() and identity in chosen:
            first = chosen[identity]
            if name in in_file and first not in in_file:
                found = {(name if key == first else key): value for key, value in found.items()}
                chosen[identity] = name
            continue
        chosen[identity] = name
        found[name] = tensor
    return found
