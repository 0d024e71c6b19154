"""Stage `forward`: hidden states per layer and logits on fixed inputs, with the adapter on, off and merged.

Each is held against the same model run in float64 on the CPU: a device passes when its largest error is at most twice
the CPU's own in the same dtype, plus the final store. Merged and unmerged adapters are the same function in exact
arithmetic, so one float64 pass serves both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from consistency.capture import RecordStatus
from consistency.naming import ADAPTER_MERGED as MERGED
from consistency.naming import ADAPTER_OFF as OFF
from consistency.naming import ADAPTER_ON as ON
from consistency.naming import WHOLE_MODEL
from consistency.numerics.bound import measure_against_exact
from consistency.numerics.diagnosis import diagnose_computed
from consistency.numerics.digest import TensorDigest, digest
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of
from consistency.numerics.exact import in_float64
from consistency.tolerance import Rule, passes, ratio, relative_allowance
from consistency.worker.inputs import fixed_inputs
from consistency.worker.loading import load_adapter, load_base
from consistency.worker.memory import is_out_of_memory
from consistency.worker.reference import Reference, publish, wait_for
from consistency.worker.stages.context import Context
from consistency.worker.stages.merged import adapted_layers

Activations = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Passes:
    """What the forward passes of one model gave, by mode.

    Attributes
    ----------
    outputs : dict of str to dict
        Activations on the CPU by mode and name, from the first run.
    digests : dict
        One digest per run, by mode and name.
    unmergeable : str
        Why PEFT does not merge this adapter; empty where it does.
    """

    outputs: dict[str, Activations] = field(default_factory=dict)
    digests: dict[tuple[str, str], list[TensorDigest]] = field(default_factory=dict)
    unmergeable: str = ""


def run(context: Context) -> None:
    """Record every hidden state and the logits in every mode. The adapter stays merged: this is the last stage."""
    inputs, reason = fixed_inputs(context.job.case, context.base.model)
    reason = reason or _why_not(context.base.model)
    if inputs is None or reason:
        _not_run(context, _modes(context), "skipped", reason)
        return
    exact: Activations = {}
    if not context.job.makes_reference:
        found = _pass(context, context.model, inputs, exact=None)
        answer = wait_for(context.scratch, context.events)
    elif context.device.type == "cpu":
        found = _pass(context, context.model, inputs, exact=exact)
        answer = publish(context.scratch, exact, _errors(found, exact))
    else:
        found = _pass(context, context.model, inputs, exact=None)
        on_cpu = _pass(context, _on_cpu(context), inputs, exact=exact)
        answer = publish(context.scratch, exact, _errors(on_cpu, exact))
    if found.unmergeable:
        _not_run(context, [MERGED], "skipped", f"PEFT does not merge this adapter: {found.unmergeable}")
    if isinstance(answer, str):
        _not_run(context, list(found.outputs), "blocked", answer)
        return
    for mode, outputs in found.outputs.items():
        for name, tensor in outputs.items():
            if context.record.wants("forward", name):
                _judge(context, mode, name, tensor, found.digests[mode, name], answer)


def _pass(
    context: Context, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *, exact: Activations | None
) -> Passes:
    """Run a model in every mode, merged last; fill `exact` with float64 activations where it is given."""
    found = Passes()
    modes = _modes(context)
    for done, mode in enumerate(modes):
        if mode == MERGED:
            failure = _merge(model)
            if failure:
                return replace(found, unmergeable=failure)
        for _ in range(context.job.case.repeat):
            context.events.step(mode, done, len(modes))
            with _without_adapter(model) if mode == OFF and ON in modes else nullcontext():
                outputs = activations(model, inputs)
            for name, tensor in outputs.items():
                found.digests.setdefault((mode, name), []).append(digest(tensor))
            found.outputs.setdefault(mode, outputs)
        if exact is not None and mode != MERGED:
            context.events.step(f"{mode}, float64", done, len(modes))
            with _without_adapter(model) if mode == OFF and ON in modes else nullcontext():
                truth = in_float64(activations, model, inputs)
            exact.update((f"{mode}::{name}", tensor.to(torch.float64)) for name, tensor in truth.items())
    return found


def _errors(found: Passes, exact: Activations) -> dict[str, float]:
    """Return the CPU's own largest error by mode and name."""
    errors = {}
    for mode, outputs in found.outputs.items():
        for name, tensor in outputs.items():
            truth = exact.get(_exact_name(mode, name))
            if truth is not None and truth.shape == tensor.shape:
                errors[f"{mode}::{name}"] = float(measure_against_exact(tensor, truth).max_abs)
    return errors


def _modes(context: Context) -> list[str]:
    if context.job.case.adapter is None:
        return [OFF]
    return [ON, OFF, MERGED] if any(True for _ in adapted_layers(context.model)) else [ON, OFF]


def _without_adapter(model: Any) -> AbstractContextManager[None]:
    return model.disable_adapter()  # type: ignore[no-any-return]


def _merge(model: Any) -> str:
    """Merge the adapter as a user would; return why PEFT refuses, or nothing."""
    try:
        with torch.no_grad():
            model.merge_adapter()
    except (NotImplementedError, ValueError, RuntimeError, AttributeError, TypeError) as failure:
        if is_out_of_memory(failure):
            raise
        return f"{type(failure).__name__}: {failure}"
    return ""


def _on_cpu(context: Context) -> torch.nn.Module:
    """Load base and adapter once more, onto the CPU, for a run that has no CPU worker."""
    base = load_base(context.job.case, "cpu")
    return base.model if context.job.case.adapter is None else load_adapter(base, context.job.case)


def activations(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run the model and return its hidden states and outputs on the CPU, in order, by name.

    Names are `hidden_states.0` (the embeddings) onwards, with `encoder_` or `decoder_` before them where the model has
    both, then `logits`, or whatever the bare model ends with.
    """
    parameter = next(model.parameters())
    moved = {
        name: t.to(parameter.device, parameter.dtype if t.is_floating_point() else None) for name, t in inputs.items()
    }
    with torch.no_grad():
        output = model(**moved, **_extras(model))
    found: dict[str, torch.Tensor] = {}
    if isinstance(output, torch.Tensor):
        return {"output": output.detach().to("cpu")}
    last: dict[str, torch.Tensor] = {}
    for key, value in dict(output).items():
        if key.endswith("hidden_states") and isinstance(value, (tuple, list)):
            found.update((f"{key}.{i}", t) for i, t in enumerate(value) if isinstance(t, torch.Tensor))
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0:
            last[key] = value
    found.update(last)
    return {name: t.detach().to("cpu") for name, t in found.items()}


def _extras(model: torch.nn.Module) -> dict[str, Any]:
    """Ask transformers models for every hidden state and no cache; a model of the user's own takes its inputs alone."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return {}
    extras: dict[str, Any] = {"output_hidden_states": True, "return_dict": True}
    if hasattr(config, "use_cache"):
        extras["use_cache"] = False
    return extras


def _why_not(model: torch.nn.Module) -> str:
    config = getattr(model, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    for count in ("num_local_experts", "num_experts", "n_routed_experts"):
        if (getattr(text, count, None) or 0) > 1:
            return (
                "a mixture of experts: a rounding can send a token to another expert, which no bound on errors covers"
            )
    return ""


def _judge(
    context: Context, mode: str, name: str, tensor: torch.Tensor, digests: list[TensorDigest], reference: Reference
) -> None:
    exact = reference.read(_exact_name(mode, name))
    error = reference.errors.get(f"{mode}::{name}")
    if exact is None or error is None or exact.shape != tensor.shape or tensor.dtype not in UNIT_ROUNDOFF:
        context.record.computed(
            stage="forward", layer=name, tensor=mode, actual=tensor, rule=Rule.PEER, found=None, status="measured",
            diagnosis=None, digests=digests, keep=context.job.case.keep,
        )  # fmt: skip
        return
    found = measure_against_exact(tensor, exact)
    allowed = relative_allowance(error, float(found.magnitude), name_of(tensor.dtype))
    inside = passes(ratio(float(found.max_abs), allowed))
    context.record.computed(
        stage="forward",
        layer=name,
        tensor=mode,
        actual=tensor,
        rule=Rule.RELATIVE,
        found=found,
        status="within" if inside else "outside",
        diagnosis="accumulation-order" if inside else diagnose_computed(found).word,
        digests=digests,
        reference_error=error,
        keep=context.job.case.keep,
    )


def _exact_name(mode: str, name: str) -> str:
    return f"{ON if mode == MERGED else mode}::{name}"


def _not_run(context: Context, modes: list[str], status: RecordStatus, reason: str) -> None:
    for mode in modes:
        context.record.absent(
            stage="forward", layer=WHOLE_MODEL, tensor=mode, status=status, reason=reason, rule=Rule.RELATIVE
        )
