"""The budget of a case on the devices of a host, and that a run keeps to it."""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import msgspec
import pytest

from consistency.case import standard
from consistency.case.budget.fit import MARGIN, Budget
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Level
from consistency.case.stages import HOST_STAGES
from consistency.case.suite import SuiteOptions
from consistency.devices.discovery import select
from consistency.devices.spec import DeviceInfo, DeviceSpec, parse_device
from consistency.errors import InputError, UsageError
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.report.plan import render_suite, suite_as_table
from consistency.workflows import pipeline, planning

OPTIONS = Options(base="builtin:llama", devices=("cpu", "cpu@baseline"))


def with_memory(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    monkeypatch.setattr(planning, "available_bytes", lambda: mib * 2**20)


def test_a_small_case_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 4096)
    plan = pipeline.prepare(OPTIONS)
    assert plan.case == prepare_case(OPTIONS)
    assert plan.limits.at_once == 2


def test_workers_that_do_not_fit_side_by_side_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = planning.budget_of(prepare_case(OPTIONS), select(OPTIONS.devices)).workers[0].host_private_bytes
    with_memory(monkeypatch, int(1.5 * MARGIN * alone) >> 20)
    plan = pipeline.prepare(OPTIONS)
    assert plan.limits.at_once == 1
    assert plan.case.not_checked() == prepare_case(OPTIONS).not_checked()


def test_a_device_that_shares_the_host_s_memory_takes_it_from_there() -> None:
    own = DeviceInfo(spec=DeviceSpec(type="cuda", index=0), architecture="Blackwell sm_121", model="GB10")
    shared = msgspec.structs.replace(own, shares_memory=True)
    case = prepare_case(OPTIONS)
    (apart,), (together,) = (planning.budget_of(case, [info]).workers for info in (own, shared))
    assert apart.device_bytes == together.device_bytes
    by_stage = {stage.stage: stage for stage in apart.stages}
    for stage in together.stages:
        alone = by_stage[stage.stage]
        assert stage.host_private_bytes == alone.host_private_bytes + (alone.device_bytes or 0)


def test_a_host_without_room_for_one_worker_is_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 100)
    with pytest.raises(InputError, match="does not fit the memory of this host"):
        pipeline.prepare(OPTIONS)


def test_each_worker_of_each_wave_has_its_stages() -> None:
    case = prepare_case(OPTIONS)
    found = planning.budget_of(case, select(OPTIONS.devices))
    assert [worker.worker for worker in found.workers] == ["cpu", "cpu@baseline"]
    assert [worker.makes_reference for worker in found.workers] == [True, False]
    for worker in found.workers:
        names = [stage.stage for stage in worker.stages]
        assert names[0] == "start"
        assert (
            names.index("load base") < names.index(standard.BASE) < names.index("load adapter") < names.index("merged")
        )
        assert set(case.stages) <= set(names)


@pytest.mark.parametrize("in_memory", [False, True])
def test_scratch_files_are_where_temporary_files_are(monkeypatch: pytest.MonkeyPatch, in_memory: bool) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    monkeypatch.setattr(planning, "is_in_memory", lambda folder: in_memory and str(folder) == "/scratch")
    assert planning.budget_of(prepare_case(OPTIONS), select(OPTIONS.devices)).scratch_in_memory is in_memory


def test_a_suite_has_a_budget_for_every_case_and_the_reason_where_there_is_none() -> None:
    cases = tuple(dataclasses.replace(OPTIONS, name=name) for name in ("one", "two"))
    missing = dataclasses.replace(OPTIONS, name="missing", base="./nowhere")
    contradiction = dataclasses.replace(OPTIONS, name="contradiction", load=True)
    suite = SuiteOptions(name="night", shared=OPTIONS, cases=(missing, contradiction, *cases))
    found = planning.budgets_of(suite, select(OPTIONS.devices))
    assert list(found) == ["missing", "contradiction", "one", "two"]
    assert isinstance(found["missing"], InputError)
    assert isinstance(found["contradiction"], UsageError)
    text = render_suite(suite.name, found, 1)
    assert "missing: cannot be checked: no such folder for the base (nowhere)" in text
    assert "contradiction: cannot be checked: there is no soak to load devices during (--load)" in text
    assert text.count("consistency plan ·") == 2, "one line per case, and the largest case in full"
    table = suite_as_table(suite.name, found, 1)
    assert "there is no soak to load devices during" in table["cases"]["contradiction"]["refusal"]["what"]


def test_the_host_is_checked_in_the_first_case_that_can_be_planned() -> None:
    given = dataclasses.replace(OPTIONS, devices=("cpu",), level=Level.QUICK)
    missing, *cases = (dataclasses.replace(given, name=name) for name in ("missing", "one", "two"))
    missing = dataclasses.replace(missing, base="./nowhere")
    suite = SuiteOptions(name="night", shared=given, cases=(missing, *cases))
    stages = {
        name: {stage.stage for stage in budget.workers[0].stages}
        for name, budget in planning.budgets_of(suite, select(given.devices)).items()
        if isinstance(budget, Budget)
    }
    assert {name: set(HOST_STAGES) <= found for name, found in stages.items()} == {"one": True, "two": False}


def test_a_suite_without_a_case_that_can_be_checked_has_no_sums() -> None:
    given = dataclasses.replace(OPTIONS, name="missing", base="./nowhere")
    found = planning.budgets_of(SuiteOptions(name="night", shared=given, cases=(given,)), select(given.devices))
    text = render_suite("night", found, 1)
    assert "missing: cannot be checked" in text
    assert "together" not in text


@pytest.mark.parametrize(
    ("cores", "cases", "given", "expected"),
    [
        (4, 40, {}, 4),  # two devices, so two threads for each worker of one case
        (64, 400, {}, planning.MOST_CASES_AT_ONCE),
        (8, 5, {}, 2),
        (8, 3, {}, 1),
        (1, 40, {}, 1),
        (8, 40, {"threads": 4}, 1),
        (8, 40, {"soak": 60.0}, 1),
    ],
)
def test_cases_run_side_by_side_where_threads_would_help_none(
    monkeypatch: pytest.MonkeyPatch, cores: int, cases: int, given: dict[str, Any], expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(planning, "threads_per_worker", lambda workers: max(1, cores // workers))
    options = dataclasses.replace(OPTIONS, **given)
    suite = SuiteOptions(name="night", shared=options, cases=(options,) * cases)
    assert planning.cases_at_once(suite, select(options.devices), {}) == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for each of the two workers
    assert planning.cases_at_once(suite, select(options.devices), {}) == min(2, expected)


def test_cases_side_by_side_fit_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "threads_per_worker", lambda _: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cases = tuple(dataclasses.replace(OPTIONS, name=str(number)) for number in range(8))
    suite, devices = SuiteOptions(name="night", shared=OPTIONS, cases=cases), select(OPTIONS.devices)
    found = planning.budgets_of(suite, devices)
    assert planning.cases_at_once(suite, devices, found) == 4
    (case,) = {one.case.base for one in found.values() if isinstance(one, Budget)}
    assert case
    first = found["0"]
    assert isinstance(first, Budget)
    for fit in (0, 1, 3):
        room = int(MARGIN * first.host_private_bytes * (fit + 0.5))
        found["0"] = dataclasses.replace(first, host_available_bytes=room)
        assert planning.cases_at_once(suite, devices, found) == max(1, fit)
    text, alone = render_suite("night", found, 3), render_suite("night", found, 1)
    assert "take the cases in turn, 3 at a time" in text
    assert "in turn, " not in alone
    table = suite_as_table("night", found, 3)
    assert table["cases_at_a_time"] == 3


def test_an_accelerator_has_one_process_at_a_time() -> None:
    gpu = DeviceInfo(spec=parse_device("cuda:0"), model="", architecture="")
    suite = SuiteOptions(name="night", shared=OPTIONS, cases=(OPTIONS,) * 40)
    assert planning.cases_at_once(suite, [*select(("cpu",)), gpu], {}) == 1


@pytest.mark.parametrize(
    ("models", "given", "is_there"),
    [
        (("H100", "H100"), {"level": Level.THOROUGH}, True),
        (("H100", "A100"), {"level": Level.THOROUGH}, False),
        (("H100",), {"level": Level.THOROUGH}, False),
        (("H100", "H100"), {}, False),
        (("H100", "H100"), {"level": Level.THOROUGH, "stages": (standard.BASE,)}, False),
    ],
)
def test_two_equal_cards_do_together_what_a_level_checks(
    models: tuple[str, ...], given: dict[str, Any], is_there: bool
) -> None:
    case = prepare_case(Options(base="builtin:llama", **given))
    cards = [
        DeviceInfo(spec=DeviceSpec(type="cuda", index=index), architecture="sm_90", model=model)
        for index, model in enumerate(models)
    ]
    found = planning.budget_of(case, cards).case
    assert (COLLECTIVES in found.stages) is is_there
    assert any(text == "stage collectives" for text in found.not_checked()) is not is_there
    machine = msgspec.structs.replace(case, base="", stages=pipeline._STAGES)
    if "stages" not in given:
        assert (COLLECTIVES in planning.budget_of(machine, cards).case.stages) is is_there
