"""How the cost of a stage grows with what is asked of it."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from consistency.case import standard
from consistency.case.budget.costs import (
    RESULTS_OF_BLOCK,
    Cost,
    Setting,
    cost_of,
    long_text,
)
from consistency.case.budget.shape import Shape
from consistency.case.case import Case, Fit
from consistency.case.stage import Level, Stage
from consistency.case.stages import SPECS
from tests.case.budget.shapes import LARGE, SMALL, deeper


def setting(**changes: object) -> Setting:
    plain = Setting(shape=LARGE, case=Case(name="x", base="b", adapter="a"), on_device=False, makes_reference=True)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def test_every_stage_has_a_cost() -> None:
    for stage in SPECS:
        taken = cost_of(stage, setting())
        assert min(taken.host_bytes, taken.device_bytes, taken.window_bytes) >= 0


def test_gradient_grows_with_the_depth_by_the_states_between_blocks() -> None:
    cost, deep = functools.partial(cost_of, standard.GRADIENT), deeper(LARGE, 2)
    once, twice = cost(setting(shape=deep)), cost(setting(shape=deeper(deep, 2)))
    states = 4 * 16 * deep.blocks * 4096  # sequences × tokens × blocks × hidden
    # values and their gradients in bfloat16; in float64 both, and in float32 what is to be the same the second time
    of_states = states * (2 * 2 + 2 * 8 + 4)
    assert twice.host_bytes - once.host_bytes == of_states


@pytest.mark.parametrize("stage", [standard.FORWARD, standard.GRADIENT])
def test_fewer_sequences_and_fewer_tokens_take_less_memory(stage: Stage) -> None:
    cost = functools.partial(cost_of, stage)

    def taken(fit: Fit) -> int:
        return cost(setting(case=Case(name="x", base="b", adapter="a", fit=fit))).host_bytes

    assert taken(Fit(tokens=4)) < taken(Fit())
    assert taken(Fit(tokens=4, sequences=1)) < taken(Fit(tokens=4))


@pytest.mark.parametrize("stage", [standard.FORWARD, standard.GRADIENT])
def test_only_the_worker_that_makes_the_reference_computes_in_float64(stage: Stage) -> None:
    cost = functools.partial(cost_of, stage)
    other = cost(setting(makes_reference=False))
    assert other.host_bytes < cost(setting()).host_bytes


@pytest.mark.parametrize("stage", [standard.FORWARD, standard.GRADIENT])
def test_the_decisions_of_a_router_are_in_scratch_files(stage: Stage) -> None:
    """A score for each position."""
    plain, routed = (cost_of(stage, setting(shape=dataclasses.replace(LARGE, experts=experts))) for experts in (0, 8))
    scores = 4 * 16 * LARGE.blocks * 8
    assert routed.scratch_bytes - plain.scratch_bytes == scores * 4
    assert routed.kept_bytes - plain.kept_bytes == scores * 16
    other = cost_of(stage, setting(shape=dataclasses.replace(LARGE, experts=8), makes_reference=False))
    assert other.kept_bytes == 0


def test_inputs_of_a_file_have_their_own_size() -> None:
    from_file = setting(shape=dataclasses.replace(SMALL, sequences=3, tokens=700))
    assert (from_file.sequences, from_file.tokens) == (3, 700)
    short = setting(shape=dataclasses.replace(SMALL, positions=5))
    assert (short.sequences, short.tokens) == (8, 5)


def test_the_result_of_a_step_has_a_file_and_what_all_are_given_stays() -> None:
    cost = functools.partial(cost_of, standard.GRADIENT)
    found, other = cost(setting()), cost(setting(makes_reference=False))
    assert found.scratch_bytes == other.scratch_bytes == LARGE.largest_trained_elements * 4
    states = 4 * 16 * (LARGE.blocks + 1) * (LARGE.hidden or 0)
    assert found.kept_bytes == 2 * states * LARGE.width + 8 * (states + LARGE.trained_elements)
    assert other.kept_bytes == 0


@pytest.mark.parametrize(("shape", "modes"), [(LARGE, 1), (SMALL, 2)])
def test_exact_results_of_blocks_stay(shape: Shape, modes: int) -> None:
    found = functools.partial(cost_of, standard.FORWARD)(setting(shape=shape))
    rows = setting(shape=shape).positions
    of_one = rows * ((RESULTS_OF_BLOCK * shape.blocks + 1) * (shape.hidden or 0) + (shape.vocabulary or 0)) * 8
    assert found.kept_bytes == modes * of_one + long_text(setting(shape=shape)).kept_bytes
    assert functools.partial(cost_of, standard.FORWARD)(setting(makes_reference=False)).kept_bytes == 0


def test_a_long_text_takes_three_blocks_and_keeps_what_enters_and_leaves_them() -> None:
    found, other = long_text(setting()), long_text(setting(makes_reference=False))
    assert found.kept_bytes == 7 * 515 * (LARGE.hidden or 0) * LARGE.width
    assert other.kept_bytes == 0
    assert found.host_bytes > other.host_bytes > 0
    without = setting(case=Case(name="x", base="b", adapter="a", fit=Fit(long_tokens=0)))
    assert long_text(without) == Cost()
    assert long_text(setting(shape=dataclasses.replace(SMALL, positions=200))).kept_bytes < found.kept_bytes
    assert not setting(shape=dataclasses.replace(SMALL, positions=16)).long_tokens, "it would be no longer"


def test_a_merge_in_float64_takes_three_arrays_of_the_largest_layer() -> None:
    def host_bytes(level: Level) -> int:
        case = Case(name="x", base="b", adapter="a", level=level)
        shape = dataclasses.replace(LARGE, sequences=1, tokens=16)
        return functools.partial(cost_of, standard.FORWARD)(setting(shape=shape, case=case)).host_bytes

    elements = LARGE.largest_layer_elements
    of_thorough, of_standard = host_bytes(Level.THOROUGH), host_bytes(Level.STANDARD)
    assert of_thorough - of_standard >= (3 * 8 - 2 * 4) * elements
