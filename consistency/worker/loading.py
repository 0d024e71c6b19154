"""Load a base and an adapter as a user would: `AutoModel*.from_pretrained` and `PeftModel.from_pretrained`."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from consistency.case import Case
from consistency.errors import InputError
from consistency.numerics.dtype import name_of
from consistency.worker.files import WeightFiles, file_names
from consistency.worker.memory import is_out_of_memory

ADAPTER_NAME = "default"

# what transformers and PEFT raise over files and configs that they cannot use
_UNUSABLE = (
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
    """A base model on its device, before any adapter.

    Attributes
    ----------
    model : torch.nn.Module
    files : WeightFiles or None
        None for a model made by a factory.
    tensors : mapping of str to torch.Tensor
        Every parameter and buffer by its name in the base, the non-persistent ones too; tied ones once.
    file_names : mapping of str to str
        Name in the file, by name in the model, where transformers loads the tensor as it is.
    not_in_file : frozenset of str
        Parameters that transformers initialised anew because no file holds them.
    persistent : frozenset of str
        Names of the state dict: parameters and persistent buffers.
    """

    model: torch.nn.Module
    files: WeightFiles | None
    tensors: Mapping[str, torch.Tensor]
    file_names: Mapping[str, str]
    not_in_file: frozenset[str]
    persistent: frozenset[str]

    @property
    def dtype(self) -> str:
        """Return the dtype that most of the model's numbers have."""
        elements: Counter[str] = Counter()
        for tensor in self.tensors.values():
            if tensor.is_floating_point():
                elements[name_of(tensor.dtype)] += tensor.numel()
        return elements.most_common(1)[0][0] if elements else "none"

    def expected(self, name: str) -> torch.Tensor | None:
        """Return what the file says a tensor is, cast on the CPU to the dtype it has in the model."""
        key = self.file_names.get(name)
        if key is None or self.files is None:
            return None
        return self.files.read(key).to(self.tensors[name].dtype)


def load_base(case: Case, device: str) -> LoadedBase:
    """Load the base of a case onto a device."""
    if case.factory is not None:
        model, files, missing = _from_factory(case.factory, device), None, frozenset[str]()
    else:
        model, missing = _from_folder(case, device)
        files = WeightFiles.of_base(case.base, allow_pickle=case.allow_pickle)
    model.eval()
    tensors = _tensors(model, files)
    names = {} if files is None else file_names(tensors, files)
    return LoadedBase(
        model=model,
        files=files,
        tensors=tensors,
        file_names=names,
        not_in_file=missing,
        persistent=frozenset(model.state_dict(keep_vars=True)),
    )


def load_adapter(base: LoadedBase, case: Case) -> torch.nn.Module:
    """Put the case's adapter on the base through PEFT's default road."""
    from peft import PeftModel

    assert case.adapter is not None
    try:
        model = PeftModel.from_pretrained(base.model, case.adapter, adapter_name=ADAPTER_NAME)
    except _UNUSABLE as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            "PEFT cannot load this adapter onto this base",
            where=case.adapter,
            got=f"{type(error).__name__}: {_first_lines(error)}",
            hint=f"is it for {case.base}?",
        ) from error
    assert isinstance(model, torch.nn.Module)
    model.eval()
    return model


def expected_adapter(model: torch.nn.Module, files: WeightFiles) -> dict[str, tuple[str, torch.Tensor]]:
    """Ask PEFT itself which parameter each tensor of the adapter's file goes to.

    PEFT's loading function is run once more on tensors read on the CPU, with the last step, the model's
    `load_state_dict`, replaced by one that only looks. So its key mapping, renaming and weight conversion are the real
    ones, in whatever version is installed.

    Returns
    -------
    dict
        Name in the model to (name in the file, tensor on the CPU in the file's dtype).
    """
    from peft import set_peft_model_state_dict

    given = dict(files.read_all())
    # converted tensors are new objects: tell those apart from what is passed through by storage and shape
    origin = {(t.data_ptr(), tuple(t.shape)): name for name, t in given.items() if t.numel()}
    with _looking_at_load_state_dict(model) as seen:
        set_peft_model_state_dict(model, given, adapter_name=ADAPTER_NAME)
    return {name: (origin.get((tensor.data_ptr(), tuple(tensor.shape)), name), tensor) for name, tensor in seen.items()}


@contextmanager
def _looking_at_load_state_dict(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    seen: dict[str, torch.Tensor] = {}

    def look(state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        seen.update(state_dict)
        own = set(model.state_dict(keep_vars=True))
        return torch.nn.modules.module._IncompatibleKeys(
            missing_keys=sorted(own - set(state_dict)), unexpected_keys=sorted(set(state_dict) - own)
        )

    model.load_state_dict = look  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del model.load_state_dict  # the class's own method shows again


def _from_folder(case: Case, device: str) -> tuple[torch.nn.Module, frozenset[str]]:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(case.base, trust_remote_code=case.trust_remote_code)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(
            "transformers cannot use this config",
            where=Path(case.base) / "config.json",
            got=_first_lines(error),
        ) from error
    auto = auto_class(config, case)
    arguments: dict[str, Any] = {
        "dtype": case.dtype if case.dtype == "auto" else getattr(torch, case.dtype),
        "trust_remote_code": case.trust_remote_code,
        "use_safetensors": None if case.allow_pickle else True,
        "output_loading_info": True,
    }
    if device != "cpu":
        arguments["device_map"] = {"": device}
    try:
        model, info = auto.from_pretrained(case.base, **arguments)
    except _UNUSABLE as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"transformers cannot load this base as {auto.__name__}",
            where=case.base,
            got=f"{type(error).__name__}: {_first_lines(error)}",
        ) from error
    if info.get("mismatched_keys"):
        name, found, wanted = next(iter(info["mismatched_keys"]))
        raise InputError(
            "a weight of the base has another shape than its config says",
            where=f"{name} in {case.base}",
            got=tuple(found),
            wanted=tuple(wanted),
        )
    return model, frozenset(info.get("missing_keys", ()))


def auto_class(config: Any, case: Case) -> Any:
    """Choose the Auto class whose models include the architecture that the config names.

    Decoder, encoder, seq2seq, vision: the config's `architectures` decides; without it the adapter's `task_type`, and
    without that the bare model.
    """
    from transformers.models.auto import modeling_auto

    remote = getattr(config, "auto_map", None) or {}
    if case.trust_remote_code:
        for name in remote:
            if name.startswith("AutoModel"):
                return getattr(modeling_auto, name)
    first = [
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForMaskedLM",
        "AutoModelForSequenceClassification",
        "AutoModelForTokenClassification",
        "AutoModelForQuestionAnswering",
        "AutoModelForImageClassification",
        "AutoModelForImageTextToText",
        "AutoModelForSpeechSeq2Seq",
    ]
    every = [n for n in vars(modeling_auto) if n.startswith("AutoModel") and n not in ("AutoModelWithLMHead", *first)]
    for architecture in getattr(config, "architectures", None) or ():
        for name in (*first, *sorted(every)):
            if architecture in _classes(getattr(modeling_auto, name), config):
                return getattr(modeling_auto, name)
    return getattr(modeling_auto, _by_task(case), modeling_auto.AutoModel)


def _classes(auto: Any, config: Any) -> tuple[str, ...]:
    try:
        found = auto._model_mapping[type(config)]
    except (KeyError, AttributeError, ImportError, ValueError):
        return ()
    return tuple(c.__name__ for c in (found if isinstance(found, (tuple, list)) else (found,)) if c is not None)


_TASKS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoModel",
}


def _by_task(case: Case) -> str:
    if case.adapter is None:
        return "AutoModel"
    config = json.loads((Path(case.adapter) / "adapter_config.json").read_text(encoding="utf-8"))
    return _TASKS.get(str(config.get("task_type")), "AutoModel")


def _from_factory(text: str, device: str) -> torch.nn.Module:
    module_name, _, function_name = text.partition(":")
    sys.path.append(os.getcwd())  # a user's own module lies where the command was typed; installed ones come first
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError("cannot import the model factory", where=f"python:{text}", got=error) from error
    try:
        model = factory()
    except Exception as error:  # a user's own function may raise anything; whatever it is, it is theirs to mend
        if is_out_of_memory(error):
            raise
        raise InputError(
            "the model factory failed", where=f"python:{text}", got=f"{type(error).__name__}: {_first_lines(error)}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            "the factory does not return a module", where=f"python:{text}", got=type(model).__name__, wanted="Module"
        )
    return model.to(device)


def _tensors(model: torch.nn.Module, files: WeightFiles | None) -> dict[str, torch.Tensor]:
    """Name every parameter and buffer once; of tied names the one that is in the file."""
    in_file = set() if files is None else set(files.names())
    chosen: dict[tuple[int, torch.Size, torch.dtype], str] = {}
    found: dict[str, torch.Tensor] = {}
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        identity = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if tensor.numel() and identity in chosen:
            first = chosen[identity]
            if name in in_file and first not in in_file:
                found = {(name if key == first else key): value for key, value in found.items()}
                chosen[identity] = name
            continue
        chosen[identity] = name
        found[name] = tensor
    return found


def _first_lines(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:3])[:600] or type(error).__name__
