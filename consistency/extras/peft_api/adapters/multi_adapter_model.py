"""A model with several adapters, each under its own name, and what has to hold after every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from consistency.capture.names import module_place
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.extras.peft_api.adapters.spec import LEFT_BEHIND, OTHERS_INTERFERE
from consistency.numerics import words
from consistency.numerics.digest import digest
from consistency.numerics.identity import start_of
from consistency.numerics.rules import Rule
from consistency.numerics.words import Word
from consistency.worker.context import Context
from consistency.worker.model import half_kernels
from consistency.worker.model.adapter_settings import tuner_layers
from consistency.worker.model.low_rank import Expected
from consistency.worker.model.running import activations, tokens_of

STAGE, DONE = "adapters", "done"
_MOST_NAMED = 2  # tensors that a sentence names
_MOST_IN_EVIDENCE = 64
_BASE = "the base"

Digests = dict[str, str]
"""Digest of each hidden state and output, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiAdapterModel:
    """A model with several adapters."""

    context: Context
    model: Any
    expected: Mapping[str, Expected]
    """The tensors in each adapter's file, by the adapter's name."""
    inputs: dict[str, torch.Tensor] | None
    """None where the model does not run; no row is then written about results."""
    alone: Mapping[str, Digests]
    """What the model gave with each adapter alone in it, by the adapter's name."""
    off: Digests
    """What the base gave before any adapter was loaded."""
    changed: set[tuple[str, str]] = field(default_factory=set)
    """What no longer holds its bytes, by adapter and name: each is reported after the step that changed it."""

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.expected)

    def fact(
        self, step: str, what: str, reason: str | None = None, *, word: Word | None = None, **evidence: object
    ) -> None:
        """Record what holds after a step, or with a word what does not."""
        if self.context.record.wants(STAGE, step):
            status: RecordStatus = "equal" if word is None else "outside"
            self.context.record.fact(STAGE, step, what, status=status, word=word, reason=reason, evidence=evidence)

    def skipped(self, step: str, what: str, reason: str) -> None:
        if self.context.record.wants(STAGE, step):
            self.context.record.fact(STAGE, step, what, status="skipped", reason=reason)

    def done(self, step: str) -> None:
        """Record that PEFT took a step, which is then expected of every worker."""
        if self.context.record.wants(STAGE, step):
            taken = torch.ones((), dtype=torch.uint8)
            self.context.record.computed(TensorRecord(STAGE, step, DONE, rule=Rule.PEER, status="measured"), taken)

    def refused(self, step: str, reason: str) -> None:
        """Record that PEFT did not take a step."""
        if self.context.record.wants(STAGE, step):
            self.context.record.skipped(STAGE, reason, DONE, layer=step, rule=Rule.PEER)

    def check_bytes(self, step: str, names: Sequence[str] | None = None) -> None:
        """Record whether adapters, and the base, hold the bytes of their files."""
        state = self.model.state_dict(keep_vars=True)
        for name in self.names if names is None else names:
            wrong = []
            for parameter, (_, tensor) in self.expected[name].items():
                actual = state.get(parameter)
                if actual is None or digest(actual).value != digest(tensor.to(actual.dtype)).value:
                    wrong.append(module_place(parameter))
            self._bytes(step, name, wrong, tensors=len(self.expected[name]))
        self._bytes(step, _BASE, list(self.context.changed_base()), tensors=len(self.context.base.tensors))

    def _bytes(self, step: str, name: str, wrong: Sequence[str], *, tensors: int) -> None:
        new = [tensor for tensor in wrong if (name, tensor) not in self.changed]
        self.changed.update((name, tensor) for tensor in new)
        reason = f"{step} changes {_counted(new)} of {name}, which it has to leave as they were loaded"
        self.fact(
            step,
            f"bytes of {name}",
            reason if new else None,
            word=words.BYTES_CHANGED if new else None,
            tensors=tensors,
            **({"changed": new[:_MOST_IN_EVIDENCE]} if new else {}),
        )

    def check_result(self, step: str, name: str = _BASE) -> None:
        """Record whether the model gives, bit for bit, what it gave with one adapter alone in it, or with none.

        One device runs one program on the same numbers twice.
        """
        if self.inputs is None:
            return
        what, wanted = f"of {name}", self.off if name == _BASE else self.alone[name]
        if any(owner in (name, _BASE) for owner, _ in self.changed):
            self.skipped(step, f"results {what}", f"{name} no longer holds the bytes of its file")
            return
        found = results(self.model, self.inputs)
        differing = [name for name, value in wanted.items() if found.get(name) != value]
        unordered = self.context.record.operations.ran()
        if differing and unordered:
            self.skipped(step, f"results {what}", f"torch has no deterministic version of {', '.join(unordered)}")
            return
        if differing and results(self.model, self.inputs) != found:
            self.skipped(step, f"results {what}", "this device does not repeat its own results bit for bit")
            return
        alone = "before any adapter" if name == _BASE else "alone in the model"
        reason = f"{_counted(differing, 'result')} {what} after {step} differ from those {what} {alone}"
        self.fact(
            step,
            f"results {what}",
            reason if differing else None,
            word=OTHERS_INTERFERE if differing else None,
            results=len(wanted),
        )

    def check_active(self, step: str, names: Sequence[str]) -> None:
        """Record whether these adapters, and no other, are active in every layer."""
        layers = list(tuner_layers(self.model))
        wrong = [
            module_place(name)
            for name, layer in layers
            if list(layer.active_adapters) != list(names) or layer.disable_adapters
        ]
        reason = f"{_counted(wrong, 'layer')} with other active adapters than {' and '.join(names)} after {step}"
        self.fact(
            step,
            "active adapters",
            reason if wrong else None,
            word=words.INACTIVE if wrong else None,
            layers=len(layers),
        )

    def check_deleted(self, step: str, name: str) -> None:
        """Record whether nothing of an adapter is left in the model."""
        of_base = self.context.base.addresses()
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        its = [(key, tensor) for key, tensor in named if name in key.split(".") and tensor.numel()]
        left = [module_place(key) for key, tensor in its if start_of(tensor) not in of_base]
        if name in self.model.peft_config:
            left.append(f"peft_config[{name}]")
        reason = f"delete_adapter leaves {_counted(left)} of {name} in the model" if left else None
        self.fact(step, "deleted", reason, word=LEFT_BEHIND if left else None)

    @contextmanager
    def active(self, *names: str) -> Iterator[None]:
        """Let adapters be active; PEFT takes several at once below its own class."""
        self.model.base_model.set_adapter(list(names))
        try:
            yield
        finally:
            self.model.set_adapter(self.names[0])


def results(model: Any, inputs: dict[str, torch.Tensor]) -> Digests:
    """Run a model and return the digests of its results."""
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    with half_kernels.computing(kernels):
        return {name: digest(tensor).value for name, tensor in activations(model, inputs).items()}


def _counted(names: Sequence[str], noun: str = "tensor") -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{len(names)} {noun}{'' if len(names) == 1 else 's'} ({shown}{more})"
