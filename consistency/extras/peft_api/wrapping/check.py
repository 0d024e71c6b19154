"""Compare a wrapped model with the plain one: layers and attributes that PEFT and trainers find, and memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.capture.wording import some
from consistency.errors import first_line
from consistency.extras.peft_api.wrapping.held import Held, held_twice
from consistency.extras.peft_api.wrapping.keys import other_keys, prefix_of
from consistency.extras.peft_api.wrapping.peft_view import (
    Layers,
    adapted_layers,
    checkpointed,
    inject,
    inject_anyway,
    is_quantized,
    prepared,
    untouched,
)
from consistency.extras.peft_api.wrapping.reach import HINT, hidden
from consistency.extras.peft_api.wrapping.report import WrapperFinding, WrapperReport
from consistency.extras.peft_api.wrapping.spec import HELD_TWICE, HIDDEN, LAYERS_MISSED, MORE_MEMORY
from consistency.extras.peft_api.wrapping.step import Step, training_step
from consistency.numerics import words
from consistency.numerics.dtype import name_of
from consistency.numerics.words import Word
from consistency.worker.device_error import is_of_the_device, is_out_of_memory
from consistency.worker.model.inputs import made_inputs, with_labels
from consistency.worker.model.running import device_of

_SEQUENCES, _TOKENS = 2, 64
"""Enough for the activations of a training step to outweigh the adapter of a small model."""

_MOST_NAMED = 4


def check_wrapped(
    wrapped: torch.nn.Module,
    plain: torch.nn.Module,
    *,
    adapter: Any = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    step: bool = True,
) -> WrapperReport:
    """Check a wrapper around a model: PEFT and trainers must find what they need, and nothing may be held twice.

    Both models are left unchanged: checks that change a model run on copies that share its tensors.

    Parameters
    ----------
    wrapped, plain : torch.nn.Module
        The wrapper, and the model without it: the one inside the wrapper, or another of the same kind.
    adapter : peft.PeftConfig, optional
        The adapter to be trained; without it a LoRA on the layers that PEFT chooses for the plain model.
    inputs : mapping of str to torch.Tensor, optional
        Keyword arguments of a forward pass, with labels; by default made from the plain model's config.
    step : bool
        Whether to run two training steps on each, for the peak memory.

    Returns
    -------
    WrapperReport
        `findings` is empty where the wrapper hides nothing. A mismatch is never raised.
    """
    with warnings.catch_warnings():
        # warnings of libraries are not about the wrapper, and must not become errors
        warnings.simplefilter("ignore")
        return _Check(wrapped=wrapped, plain=plain).run(adapter, inputs, step)


@dataclass(kw_only=True)
class _Check:
    wrapped: torch.nn.Module
    plain: torch.nn.Module
    prefix: str | None = None
    findings: list[WrapperFinding] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def run(self, adapter: Any, inputs: Mapping[str, torch.Tensor] | None, step: bool) -> WrapperReport:
        # tied weights are under both their names in a state dict, through the wrapper and without it
        names, plain_names = self.wrapped.state_dict(keep_vars=True), self.plain.state_dict(keep_vars=True)
        self.prefix = prefix_of(names, plain_names)
        self.findings += hidden(self.wrapped, self.plain)
        self.figures["reach"] = {}
        self.findings += other_keys(names, plain_names, self.prefix)
        self.figures["keys"] = {"keys": len(names), "keys_plain": len(plain_names), "prefix": self.prefix}
        self._check_storages()
        with untouched(self.plain, self.wrapped):
            config = self._check_layers(adapter)
        if step:
            self._check_step(config, inputs)
        else:
            self.skipped["training_step"] = "not requested"
        findings = tuple(self.findings)
        return WrapperReport(findings=findings, prefix=self.prefix, figures=self.figures, skipped=self.skipped)

    def _add(self, check: str, kind: Word, sentence: str, *, where: str, got: Any, wanted: Any, hint: str) -> None:
        finding = WrapperFinding(
            check=check, kind=kind, what=sentence, where=where, got=str(got), wanted=str(wanted), hint=hint
        )
        self.findings.append(finding)

    def _raise_if_of_the_device(self, error: Exception) -> None:
        if is_of_the_device(error, device_of(self.plain)):
            raise error

    def _check_storages(self) -> None:
        """Compare the storages that both models keep alive: their bytes, and the dtypes of their tensors."""
        wrapped, plain = Held.by(self.wrapped), Held.by(self.plain)
        copies = held_twice(wrapped, plain)
        if copies:
            size = sum(wrapped.tensors[copy_name].untyped_storage().nbytes() for _, copy_name in copies)
            name, copy_name = copies[0]
            self._add(
                "storages",
                HELD_TWICE,
                f"{len(copies)} storages are held twice: {size} bytes",
                where=f"{copy_name} is a copy of {name}",
                got=f"{wrapped.nbytes} bytes",
                wanted=f"{plain.nbytes} bytes",
                hint="keep the model itself, not a copy of it or of its weights",
            )
        self.figures["storages"] = {"bytes": wrapped.nbytes, "bytes_plain": plain.nbytes}
        self._check_dtypes(wrapped, plain)

    def _check_dtypes(self, wrapped: Held, plain: Held) -> None:
        changed = []
        for name, wanted in plain.tensors.items():
            got = wrapped.tensors.get(f"{self.prefix or ''}{name}")
            if got is not None and got.dtype != wanted.dtype:
                changed.append((name, got.dtype, wanted.dtype))
        if changed:
            name, got_dtype, wanted_dtype = changed[0]
            self._add(
                "dtypes",
                words.DTYPE,
                f"{len(changed)} tensors change dtype through the wrapper",
                where=name,
                got=name_of(got_dtype),
                wanted=name_of(wanted_dtype),
                hint="wrap the model as it was loaded; `.to`, `.half` and `.float` on it undo a quantization",
            )
        self.figures["dtypes"] = {"bytes": wrapped.bytes_by_dtype, "bytes_plain": plain.bytes_by_dtype}

    def _check_layers(self, adapter: Any) -> Any:
        """Compare the layers that PEFT puts an adapter on; return the adapter's config, None where there is none."""
        adapted_already = adapted_layers(self.plain, "")
        if adapted_already:
            self._compare_layers(adapted_layers(self.wrapped, self.prefix or ""), adapted_already)
            return None
        try:
            config, plain = _on_plain(self.plain, adapter)
            wanted, resolved = adapted_layers(plain, "base_model.model."), plain.peft_config["default"]
        except Exception as error:  # PEFT rejects unknown models in many ways
            self._raise_if_of_the_device(error)
            self.skipped["adapter_layers"] = f"PEFT cannot adapt the plain model: {first_line(error)}"
            return None
        try:
            layers = adapted_layers(inject(self.wrapped, config), f"base_model.model.{self.prefix or ''}")
        except Exception as error:
            self._raise_if_of_the_device(error)
            layers = self._layers_by_name(resolved)
            self._add(
                "adapter_layers",
                LAYERS_MISSED,
                "get_peft_model rejects the wrapped model",
                where="get_peft_model",
                got=first_line(error),
                wanted=f"{len(wanted)} adapted layers",
                hint=HINT,
            )
        self._compare_layers(layers, wanted)
        self._check_preparation()
        return resolved

    def _layers_by_name(self, resolved: Any) -> Layers:
        """Return the layers that PEFT finds through the wrapper where it is given their names; none if it fails."""
        adapted = _try(lambda: inject_anyway(self.wrapped, resolved))
        if adapted is None:
            return {}
        return adapted_layers(adapted, self.prefix or "")

    def _compare_layers(self, layers: Layers, wanted: Layers) -> None:
        """Compare the layers that PEFT adapts through the wrapper with those of the plain model."""
        self.figures["adapter_layers"] = {"layers": len(layers), "layers_plain": len(wanted)}
        missed = [name for name in wanted if name not in layers]
        if missed:
            self._add(
                "adapter_layers",
                LAYERS_MISSED,
                f"PEFT finds {len(wanted) - len(missed)} of {len(wanted)} adapted layers through the wrapper",
                where=some(missed, _MOST_NAMED),
                got=len(wanted) - len(missed),
                wanted=len(wanted),
                hint=HINT,
            )
        of_other_kind = [name for name in wanted if name in layers and layers[name] != wanted[name]]
        if of_other_kind:
            self._add(
                "adapter_layers",
                LAYERS_MISSED,
                f"{len(of_other_kind)} of {len(wanted)} adapted layers are of a different kind through the wrapper",
                where=some(of_other_kind, _MOST_NAMED),
                got=_layer_words(layers[of_other_kind[0]]),
                wanted=_layer_words(wanted[of_other_kind[0]]),
                hint=HINT,
            )
        unexpected = [name for name in layers if name not in wanted]
        if unexpected:
            self._add(
                "adapter_layers",
                LAYERS_MISSED,
                f"PEFT adapts {len(unexpected)} layers that do not belong to the model",
                where=some(unexpected, _MOST_NAMED),
                got=len(layers),
                wanted=len(wanted),
                hint="give target_modules as names that only the model has, or exclude_modules",
            )

    def _check_preparation(self) -> None:
        """Compare the effect of `prepare_model_for_kbit_training` on a quantized model."""
        if not is_quantized(self.plain):
            return
        wanted = checkpointed(prepared(self.plain, quantized=True))
        try:
            got: int | str = checkpointed(prepared(self.wrapped, quantized=True))
        except Exception as error:
            self._raise_if_of_the_device(error)
            got = first_line(error)
        self.figures["reach"] |= {"checkpointed": got, "checkpointed_plain": wanted}
        if got != wanted:
            self._add(
                "reach",
                HIDDEN,
                "prepare_model_for_kbit_training does not enable gradient checkpointing through the wrapper",
                where="prepare_model_for_kbit_training",
                got=f"{got} modules that recompute their activations",
                wanted=wanted,
                hint="prepare the model before it is wrapped, or: " + HINT,
            )

    def _check_step(self, config: Any, inputs: Mapping[str, torch.Tensor] | None) -> None:
        """Compare the peak memory of a training step through the wrapper and without it."""
        if config is None:
            self.skipped["training_step"] = "no adapter to train"
            return
        batch = inputs
        if batch is None:
            made, reason = made_inputs(self.plain, sequences=_SEQUENCES, tokens=_TOKENS)
            if made is None:
                self.skipped["training_step"] = reason
                return
            batch = with_labels(made, self.plain)
        try:
            plain = self._step(self.plain, config, batch)
        except Exception as error:
            if not is_out_of_memory(error):  # a step takes several times the model, and nothing else asks for it
                self._raise_if_of_the_device(error)
            self.skipped["training_step"] = f"the plain model cannot be trained: {first_line(error)}"
            return
        try:
            wrapped = self._step(self.wrapped, config, batch)
        except Exception as error:
            self._raise_if_of_the_device(error)
            self._add(
                "training_step",
                words.DOES_NOT_RUN,
                "the adapter cannot be trained through the wrapper",
                where="forward and backward",
                got=first_line(error),
                wanted="a training step, as without the wrapper",
                hint=HINT,
            )
            return
        self.figures["training_step"] = {
            "peak_bytes": wrapped.peak_bytes,
            "peak_plain_bytes": plain.peak_bytes,
            "allowed_bytes": plain.allowed_bytes,
        }
        if wrapped.peak_bytes > plain.allowed_bytes:
            self._add(
                "training_step",
                MORE_MEMORY,
                f"a training step takes {wrapped.peak_bytes / plain.peak_bytes:.2f} times the memory",
                where="peak of forward, backward and AdamW",
                got=f"{wrapped.peak_bytes} bytes",
                wanted=f"at most {plain.allowed_bytes} bytes: the plain model's {plain.peak_bytes} and one copy of "
                "its output",
                hint=HINT,
            )

    def _step(self, model: torch.nn.Module, config: Any, batch: Mapping[str, torch.Tensor]) -> Step:
        """Prepare a model and adapt it as a user would, and train it by one step."""
        from peft import get_peft_model, inject_adapter_in_model

        with untouched(self.plain, self.wrapped):
            # through a wrapper that hides its quantization, the user's call prepares nothing or fails
            ready = _try(lambda: prepared(model, quantized=is_quantized(self.plain)))
            if ready is None:
                ready = prepared(model, quantized=False)
                ready.requires_grad_(False)
            trained = _try(lambda: get_peft_model(ready, copy.deepcopy(config)))
            if trained is None:
                trained = inject_adapter_in_model(copy.deepcopy(config), ready)
            return training_step(trained, batch)


def _on_plain(plain: torch.nn.Module, adapter: Any) -> tuple[Any, Any]:
    """Return the adapter's config and the plain model with it; by default a LoRA, if need be on every linear layer."""
    from peft import LoraConfig

    if adapter is not None:
        return adapter, inject(plain, adapter)
    config = LoraConfig()
    adapted = _try(lambda: inject(plain, config))
    if adapted is not None:
        return config, adapted
    # PEFT knows no layers to choose for this kind of model
    linear = [name for name, module in plain.named_modules() if isinstance(module, torch.nn.Linear)]
    config = LoraConfig(target_modules=sorted({name.rpartition(".")[2] for name in linear}))
    return config, inject(plain, config)


def _try(make: Callable[[], Any]) -> Any:
    """Return a function's result, None where it fails."""
    try:
        return make()
    except Exception as error:  # PEFT and model code may raise anything
        if is_of_the_device(error):
            raise
        return None


def _layer_words(layer: tuple[str, tuple[tuple[int, ...], ...]]) -> str:
    class_name, shapes = layer
    return f"{class_name} with {', '.join(map(str, shapes)) or 'no parameters'}"
