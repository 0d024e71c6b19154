"""The reference of the stage `forward`: float64 results, what they were computed on, and passes with noise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from consistency import plugins
from consistency.capture.names import ADAPTER_MERGED as MERGED
from consistency.capture.names import ADAPTER_OFF as OFF
from consistency.capture.names import ADAPTER_ON as ON
from consistency.capture.names import END_TO_END, LOGITS
from consistency.case import standard
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.devices.backends import CPU
from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.error_spread import Spread
from consistency.numerics.exact import Float64Mode
from consistency.stages.forward import passes as titles
from consistency.stages.forward.long_text import make_long_reference
from consistency.stages.forward.modes import block_modes, exact_mode_of, in_mode, modes_of, products_suffix
from consistency.worker import cpu_error
from consistency.worker.context import Context
from consistency.worker.decisions.replay import deciding
from consistency.worker.decisions.track import Track
from consistency.worker.judging.block_rule import (
    draw,
    limits_of,
    named_factors,
    passes_for,
    rows_of,
    spreads,
)
from consistency.worker.judging.long_text import long_mode, long_text
from consistency.worker.judging.outputs import ForwardOutputs, OutputJudge
from consistency.worker.model import half_kernels
from consistency.worker.model.block_pass import (
    BlockBegan,
    ResultPlace,
    as_exact,
    rounded,
    run_by_blocks,
)
from consistency.worker.model.float64_reference import Reference, Tables, given_name, publish
from consistency.worker.model.inputs import first_sequences
from consistency.worker.model.merging import DisableRefusedError, MergeRefusedError
from consistency.worker.model.running import (
    Activations,
    activations,
    model_code,
    tokens_of,
)
from consistency.worker.product_types import product_types
from consistency.worker.protocol import DECISIONS_FILE, REFERENCE_FILE
from consistency.worker.quantized.exact import exact_layers
from consistency.worker.recorder import Skip

Results = dict[str, torch.Tensor]
"""Results of modules on the CPU, by the names of their places."""

PassReaders = dict[str, list[Callable[[str], torch.Tensor | None]]]
"""Functions by the name of the products, one per noisy pass: each returns a result by its name, None without one."""


@dataclass(slots=True, kw_only=True)
class Exact:
    """Float64 results, the block inputs that they were computed on, and passes with noise; by `mode::name`.

    Attributes
    ----------
    results : dict
        The float64 result of each module, and each output, on the block inputs.
    given : dict
        What enters and leaves the blocks, in the tested dtype.
    ends : dict
        The float64 outputs of the model from end to end.
    ends_drawn : dict of str to list of dict
        The outputs of noisy passes from end to end, by mode; empty unless a plug-in judges by them.
    failures : dict of str to str
        Why a mode has no float64 results, by mode.
    """

    track: Track
    results: Results = field(default_factory=dict)
    given: Results = field(default_factory=dict)
    ends: Activations = field(default_factory=dict)
    ends_drawn: dict[str, list[Activations]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def make_reference(context: Context, model: torch.nn.Module, inputs: Activations) -> tuple[Exact, Reference]:
    """Compute the reference of all workers with a model on the CPU; publish it where another process or stage reads it.

    Returns
    -------
    Exact
        What was computed, for what this worker itself records by it.
    Reference
        The same as other workers read it.
    """
    case, exact = context.job.case, Exact(track=Track(decisions_file(context)))
    modes = modes_of(context)
    # of a large model one sequence shows how far the outputs are from float64
    is_small = len(block_modes(context, model)) == len(modes)
    takes_all_sequences = is_small or bool(_output_judges(context))
    end_inputs = inputs if takes_all_sequences else first_sequences(inputs, 1)
    spreads_by_title: dict[str, dict[str, Spread]] = {}
    for mode in modes:
        drawn = _compute_mode(context, model, inputs, mode, exact, end_inputs=end_inputs)
        if drawn is None:
            continue
        truth = _results_of_mode(exact.results, exact_mode_of(mode))
        for title, spreads_by_name in spreads(drawn, truth).items():
            spreads_by_title.setdefault(title, {}).update(
                {f"{mode}::{name}": spread for name, spread in spreads_by_name.items()}
            )
    exact.track.publish()
    _add_long_text(context, model, modes[0], exact, spreads_by_title)
    tensors = {
        **exact.results,
        **named_factors(spreads_by_title),
        **exact.given,
        **{f"{END_TO_END}::{name}": value for name, value in exact.ends.items()},
    }
    with model_code(model):
        types = product_types(model, inputs)
    tables = Tables(
        failures=exact.failures,
        names=tuple(tensors),
        product_types=types,
        limits=limits_of(spreads_by_title),
    )
    # a soak reads it from the file again; where nobody does, none is written
    if context.job.others_wait or case.soak_s is not None or _is_read_by_another_stage(case.stages):
        publish(context.scratch, tensors, tables)
    return exact, Reference(path=context.scratch / REFERENCE_FILE, tables=tables, in_memory=tensors)


def _add_long_text(
    context: Context,
    model: torch.nn.Module,
    mode: str,
    exact: Exact,
    spreads_by_title: dict[str, dict[str, Spread]],
) -> None:
    """Add the long text in a mode to the exact results, to the block inputs, and to the spreads of rounding errors."""
    text, _ = long_text(context)
    if text is None or mode in exact.failures:
        return
    long = long_mode(mode)
    try:
        with context.events.passes(titles.LONG_TEXT):
            context.events.step(titles.LONG_TEXT, 0, 1)
            made = make_long_reference(context, model, text)
    except Skip as skip:
        exact.failures[long] = str(skip)
        return
    drawn: PassReaders = {}
    for title, noisy_passes in made.drawn.items():
        drawn[title] = [results.get for results in noisy_passes]
    for title, spreads_by_name in spreads(drawn, made.exact).items():
        spreads_by_title.setdefault(title, {}).update(
            {f"{long}::{name}": spread for name, spread in spreads_by_name.items()}
        )
    exact.results.update({f"{long}::{name}": result for name, result in made.exact.items()})
    exact.given.update({given_name(long, name): value for name, value in made.given.items()})


def _compute_mode(
    context: Context,
    model: torch.nn.Module,
    inputs: Activations,
    mode: str,
    exact: Exact,
    *,
    end_inputs: Activations,
) -> PassReaders | None:
    """Compute a mode in float64 into `exact`, and then with noise; return readers of the noisy passes.

    None where the blocks of the mode are not compared, or where there are no float64 results. A model that refuses the
    mode is noted in `exact.failures`; an adapter that PEFT does not merge or disable is not.
    """
    is_compared = mode in block_modes(context, model)
    try:
        with model_code(model):  # the model's code may insist on its own dtype
            if mode != MERGED:  # in exact arithmetic a merged adapter is the same function
                with context.events.passes(titles.exact(mode)):
                    context.events.step(titles.exact(mode), 0, 1)
                    _compute_in_float64(
                        model,
                        inputs,
                        mode,
                        exact,
                        by_blocks=is_compared,
                        end_inputs=end_inputs,
                        began=context.events.block,
                    )
            if not is_compared or exact_mode_of(mode) in exact.failures:
                return None
            with context.events.passes(titles.noise(mode)):
                return _draw(context, model, inputs, mode, exact)
    except (MergeRefusedError, DisableRefusedError):
        return None  # each worker says so itself
    except Skip as skip:
        exact.failures[mode] = str(skip)
        return None


def _compute_in_float64(
    model: torch.nn.Module,
    inputs: Activations,
    mode: str,
    exact: Exact,
    *,
    by_blocks: bool,
    end_inputs: Activations,
    began: BlockBegan,
) -> None:
    """Compute a mode in float64 into `exact`: by blocks, on values that it rounds itself, and from end to end."""
    dtype = next(p.dtype for p in model.parameters() if p.dtype in UNIT_ROUNDOFF)

    def given(name: str, value: torch.Tensor) -> torch.Tensor:
        # rounded once: workers get these values in the tested dtype, and their exact results have to come from the same
        block_input = exact.given[given_name(mode, name)] = rounded(value, dtype)
        return block_input.to(value.dtype)

    def take(place: ResultPlace, result: torch.Tensor) -> None:
        exact.results[f"{mode}::{place}"] = as_exact(result, dtype)

    def compute() -> Activations:
        if by_blocks:
            with deciding(exact.track.exact(mode), gradient=False):
                run_by_blocks(model, inputs, given, take, began=began)
        with deciding(exact.track.exact(f"{mode}.{END_TO_END}"), gradient=False):
            return activations(model, end_inputs)

    with torch.no_grad(), exact_layers(model), Float64Mode():
        ends = in_mode(model, mode, compute)
    exact.ends.update({f"{mode}::{name}": tensor.to(torch.float64) for name, tensor in ends.items()})


def _draw(context: Context, model: torch.nn.Module, inputs: Activations, mode: str, exact: Exact) -> PassReaders:
    """Compute a mode with noise, on the exact pass's block inputs and decisions; return readers of the noisy passes."""
    kernels = half_kernels.replacement(model, tokens_of(inputs))
    given = functools.partial(Reference.of_this_process(exact.given).given_value, exact_mode_of(mode))

    def compute(title: str) -> Results:
        results: Results = {}

        def take(place: ResultPlace, result: torch.Tensor) -> None:
            results[str(place)] = result.detach()

        def run_blocks() -> None:
            with deciding(exact.track.other(exact_mode_of(mode), title), gradient=False):
                run_by_blocks(model, inputs, given, take, began=context.events.block)

        with half_kernels.computing(kernels):
            in_mode(model, mode, run_blocks)
        return results

    truth = _results_of_mode(exact.results, exact_mode_of(mode))
    row_counts = [rows_of(tensor) for tensor in truth.values() if tensor.is_floating_point()]
    passes = passes_for(model, tokens_of(inputs), row_counts)
    drawn = draw(context, model, compute, passes, named=products_suffix(mode))
    if _output_judges(context):
        _draw_ends(context, model, inputs, mode, exact)
    readers: PassReaders = {}
    for title, noisy_passes in drawn.items():
        readers[title] = [results.get for results in noisy_passes]
    return readers


def _draw_ends(context: Context, model: torch.nn.Module, inputs: Activations, mode: str, exact: Exact) -> None:
    """Compute the outputs from end to end with noise into `exact`, for the plug-ins that judge by them.

    Of the passes with the products of each worker, those with this CPU's are kept.
    """
    logits = exact.ends.get(f"{exact_mode_of(mode)}::{LOGITS}")
    if logits is not None:
        run_model = functools.partial(in_mode, model, mode, functools.partial(activations, model, inputs))
        passes = passes_for(model, tokens_of(inputs), [rows_of(logits)])
        drawn = draw(context, model, lambda _: run_model(), passes)
        exact.ends_drawn[mode] = drawn[cpu_error.products_on(model, CPU)]


def _results_of_mode(results: Results, mode: str) -> Results:
    """Return the results of a mode by names without it."""
    return {name.removeprefix(f"{mode}::"): value for name, value in results.items() if name.startswith(f"{mode}::")}


def _is_read_by_another_stage(stages: Iterable[Stage]) -> bool:
    """Return whether another stage of the same worker reads the float64 results."""
    return any(standard.FORWARD in (*SPECS[stage].by, *SPECS[stage].reads) for stage in stages)


def _output_judges(context: Context) -> list[OutputJudge]:
    """Return the judges of plug-ins that ask for the outputs of this case."""
    return [*plugins.asked("output_judges", context.job.case)]


def let_plugins_judge(context: Context, model: torch.nn.Module, inputs: Activations, exact: Exact) -> None:
    """Hand the exact and the noisy outputs to the plug-ins that judge by them."""
    judges = _output_judges(context)
    if not judges:
        return
    ends = {mode: exact.ends[f"{mode}::{LOGITS}"] for mode in (ON, OFF) if f"{mode}::{LOGITS}" in exact.ends}
    drawn: dict[str, list[torch.Tensor]] = {}
    for mode, noisy_passes in exact.ends_drawn.items():
        drawn[mode] = [ends_of_pass[LOGITS] for ends_of_pass in noisy_passes]
    outputs = ForwardOutputs(
        model=model,
        inputs=inputs,
        drawn=drawn,
        failures=exact.failures,
        exact=ends,
        again=functools.partial(exact.track.other, f"{ON}.{END_TO_END}"),
    )
    for judge in judges:
        judge.judge(context, outputs)


def decisions_file(context: Context) -> Path:
    """Return the path of the file with the decisions of the exact pass."""
    return context.scratch / DECISIONS_FILE.format("forward")
