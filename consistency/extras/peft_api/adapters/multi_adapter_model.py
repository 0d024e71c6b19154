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
MOST_IN_EVIDENCE = 64
_BASE = "the base"

Digests = dict[str, str]
"""Digest of each hidden state and output, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiAdapterModel:
    """A model with several adapters, and the checks after each step that is taken with it."""

    context: Context
    model: Any
    expected: Mapping[str, Expected]
    """The tensors in each adapter's file, by the adapter's name."""
    inputs: dict[str, torch.Tensor] | None
    """None where the model does not run; no row is then written about results."""
    alone: Mapping[str, Digests]
    """Results with each adapter alone in the model, by the adapter's name."""
    off: Digests
    """Results of the base before any adapter was loaded."""
    changed: set[tuple[str, str]] = field(default_factory=set)
    """Adapter and name of each tensor that no longer holds its bytes: it is reported after the step that changed it."""

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.expected)

    def fact(
        self, step: str, name: str, reason: str | None = None, *, word: Word | None = None, **evidence: object
    ) -> None:
        """Record a condition after a step: it holds, or with a word it does not."""
        if self.context.record.wants(STAGE, step):
            status: RecordStatus = "equal" if word is None else "outside"
            self.context.record.fact(STAGE, step, name, status=status, word=word, reason=reason, evidence=evidence)

    def skipped(self, step: str, name: str, reason: str) -> None:
        """Record that a condition after a step is not checked."""
        if self.context.record.wants(STAGE, step):
            self.context.record.fact(STAGE, step, name, status="skipped", reason=reason)

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
            self._record_bytes(step, name, wrong, tensors=len(self.expected[name]))
        self._record_bytes(step, _BASE, list(self.context.changed_base()), tensors=len(self.context.base.tensors))

    def _record_bytes(self, step: str, owner: str, wrong: Sequence[str], *, tensors: int) -> None:
        """Record the tensors of an adapter or of the base that this step has changed, and no earlier one."""
        changed_here = [tensor for tensor in wrong if (owner, tensor) not in self.changed]
        if not changed_here:
            self.fact(step, f"bytes of {owner}", tensors=tensors)
            return
        self.changed.update((owner, tensor) for tensor in changed_here)
        self.fact(
            step,
            f"bytes of {owner}",
            f"{step} changes {_counted(changed_here)} of {owner}, which it has to leave as they were loaded",
            word=words.BYTES_CHANGED,
            tensors=tensors,
            changed=changed_here[:MOST_IN_EVIDENCE],
        )

    def check_result(self, step: str, name: str = _BASE) -> None:
        """Record whether the results have the bits that they had with one adapter alone in the model, or with none.

        One device runs one program on the same numbers twice.
        """
        if self.inputs is None:
            return
        row = f"results of {name}"
        wanted = self.off if name == _BASE else self.alone[name]
        if any(owner in (name, _BASE) for owner, _ in self.changed):
            self.skipped(step, row, f"{name} no longer holds the bytes of its file")
            return
        digests = results(self.model, self.inputs)
        differing = [result for result, digest_alone in wanted.items() if digests.get(result) != digest_alone]
        if not differing:
            self.fact(step, row, results=len(wanted))
            return
        unordered = self.context.record.operations.ran()
        if unordered:
            self.skipped(step, row, f"torch has no deterministic version of {', '.join(unordered)}")
            return
        if results(self.model, self.inputs) != digests:
            self.skipped(step, row, "this device does not repeat its own results bit for bit")
            return
        alone = "before any adapter" if name == _BASE else "alone in the model"
        reason = f"{_counted(differing, 'result')} of {name} after {step} differ from those of {name} {alone}"
        self.fact(step, row, reason, word=OTHERS_INTERFERE, results=len(wanted))

    def check_active(self, step: str, names: Sequence[str]) -> None:
        """Record whether these adapters, and no other, are active in every layer."""
        layers = list(tuner_layers(self.model))
        wrong = []
        for name, layer in layers:
            if list(layer.active_adapters) != list(names) or layer.disable_adapters:
                wrong.append(module_place(name))
        if not wrong:
            self.fact(step, "active adapters", layers=len(layers))
            return
        reason = f"{_counted(wrong, 'layer')} with other active adapters than {' and '.join(names)} after {step}"
        self.fact(step, "active adapters", reason, word=words.INACTIVE, layers=len(layers))

    def check_deleted(self, step: str, name: str) -> None:
        """Record whether nothing of an adapter is left in the model."""
        base_addresses = self.context.base.addresses()
        remaining = []
        for key, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            is_named_so = name in key.split(".") and tensor.numel()
            # a module of the base may have the adapter's name too
            if is_named_so and start_of(tensor) not in base_addresses:
                remaining.append(module_place(key))
        if name in self.model.peft_config:
            remaining.append(f"peft_config[{name}]")
        if not remaining:
            self.fact(step, "deleted")
            return
        reason = f"delete_adapter leaves {_counted(remaining)} of {name} in the model"
        self.fact(step, "deleted", reason, word=LEFT_BEHIND)

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
    """Return the number of names, with the first of them: `3 tensors (a, b and 1 more)`."""
    first_names = ", ".join(names[:_MOST_NAMED])
    if len(names) > _MOST_NAMED:
        first_names += f" and {len(names) - _MOST_NAMED} more"
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} {noun}{plural} ({first_names})"
