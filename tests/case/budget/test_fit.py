"""A case is cut to the memory that there is, in the order of what that costs, and says so."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from consistency.case import standard
from consistency.case.budget import fit
from consistency.case.budget.estimate import START, WEIGHT_OF_THE_START, PlannedWorker
from consistency.case.budget.fit import MARGIN, Budget, make_budget
from consistency.case.budget.passes import weight_of
from consistency.case.budget.shape import Shape
from consistency.case.case import Case, Fit
from consistency.case.stage import Stage
from consistency.devices.spec import parse_device
from tests.case.budget.shapes import GIB, LARGE

CASE = Case(name="x", base="b", adapter="a", stages=(standard.BASE, standard.GRADIENT))


@pytest.fixture(autouse=True)
def shape(monkeypatch: pytest.MonkeyPatch) -> Shape:
    monkeypatch.setattr(fit, "read_shape", lambda _: LARGE)
    return LARGE


def planned(*names: str, device_gib: float = 80, wave: int = 0) -> list[PlannedWorker]:
    return [
        PlannedWorker(
            label=name,
            spec=parse_device(name),
            device_memory_bytes=None if name.startswith("cpu") else int(device_gib * GIB),
            makes_reference=number == 0,
            wave=wave,
        )
        for number, name in enumerate(names)
    ]


def budget(available_bytes: float | None, *names: str, case: Case = CASE, device_gib: float = 80) -> Budget:
    return make_budget(
        case,
        planned(*(names or ("cpu", "cpu@avx2", "cpu@baseline")), device_gib=device_gib),
        available_bytes=None if available_bytes is None else int(available_bytes),
    )


def test_what_fits_is_not_changed() -> None:
    found = budget(1000 * GIB)
    assert found.case is not CASE
    assert found.case == CASE
    assert (found.at_once, found.changes, found.not_checked, found.unknown) == (3, (), (), ())


def test_what_is_cut_first_leaves_nothing_unchecked() -> None:
    alone = budget(None).workers[0].host_private_bytes
    fewer = budget(MARGIN * alone)
    assert (fewer.case.fit, fewer.at_once) == (Fit(), 1)
    assert fewer.changes == ("1 of 3 workers at a time",)
    assert fewer.not_checked == ()


def test_what_is_left_out_is_said() -> None:
    def least(case: Case) -> int:
        return make_budget(case, planned("cpu"), available_bytes=None).workers[0].host_private_bytes

    one = least(CASE)
    found = budget(MARGIN * one - 1)
    assert found.case.tokens < 16
    assert found.case.sequences() == 8
    text = f"{16 - found.case.tokens} of 16 tokens of each, for lack of memory"
    assert found.not_checked == (text,)
    assert text in found.case.not_checked()
    assert f"forward and gradient: {found.case.tokens} of 16 tokens" in found.changes


def test_inputs_of_the_user_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    given = msgspec.structs.replace(CASE, inputs="file.safetensors")
    monkeypatch.setattr(fit, "read_shape", lambda _: dataclasses.replace(LARGE, sequences=8, tokens=2000))
    whole = budget(None, "cpu", case=given).workers[0].host_private_bytes
    found = budget(whole, "cpu", case=given)
    assert found.case.fit == Fit()
    assert found.not_checked == ()


def test_a_case_that_cannot_fit_is_refused_with_its_figures() -> None:
    found = budget(0.2 * GIB, "cpu")
    refusal = found.refusal
    assert refusal is not None
    assert found.case == CASE, "cutting it does not help"
    assert "does not fit the memory of this host" in refusal.what
    assert refusal.where is not None
    assert "cpu" in refusal.where
    assert refusal.wanted is not None
    assert "0.2 GiB" in refusal.wanted


def test_a_refusal_takes_no_margin() -> None:
    cut = msgspec.structs.replace(CASE, fit=Fit(tokens=4, sequences=1))
    least = make_budget(cut, planned("cpu"), available_bytes=None)
    found = budget(least.workers[0].host_private_bytes, "cpu")
    assert (found.case.sequences(), found.refusal) == (1, None)
    assert budget(least.workers[0].host_private_bytes - 1, "cpu").refusal is not None


def test_files_are_mapped_once_for_all_and_need_no_room_of_their_own() -> None:
    found = budget(12 * GIB)
    assert found.host_mapped_bytes < 1.2 * LARGE.loaded_bytes
    assert found.host_mapped_bytes > 12 * GIB
    assert any("read again" in text for text in found.unknown)


def test_a_base_that_its_device_cannot_hold_is_streamed_and_one_that_it_can_is_not() -> None:
    small, large = budget(1000 * GIB, "cpu", "cuda:0", device_gib=8), budget(1000 * GIB, "cpu", "cuda:0")
    assert [worker.placement for worker in small.workers] == ["host", "offload"]
    assert [worker.placement for worker in large.workers] == ["host", "device"]
    assert any(text.startswith("cuda:0: offload") for text in small.changes)
    assert small.workers[1].device_bytes is not None
    assert small.workers[1].device_bytes < 8 * GIB


def test_a_base_that_has_to_be_on_its_device_is_tried_there_with_a_word_of_warning() -> None:
    given = msgspec.structs.replace(CASE, placement="device")
    found = budget(1000 * GIB, "cpu", "cuda:0", case=given, device_gib=8)
    assert (found.workers[1].placement, found.refusal) == ("device", None)
    assert any(text.startswith("cuda:0: whether its device has room") for text in found.unknown)


def test_a_device_without_room_for_the_activations_gets_fewer_tokens() -> None:
    given = msgspec.structs.replace(CASE, placement="offload")
    whole = budget(None, "cpu", "cuda:0", case=given).workers[1].device_bytes
    least = budget(None, "cpu", "cuda:0", case=msgspec.structs.replace(given, fit=Fit(tokens=4, sequences=1))).workers[
        1
    ]
    assert whole is not None
    assert least.device_bytes is not None
    found = budget(None, "cpu", "cuda:0", case=given, device_gib=(whole + least.device_bytes) / 2 / GIB)
    assert found.case.tokens < 16


def test_a_quantized_base_is_not_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "read_shape", lambda _: dataclasses.replace(LARGE, quantized=True))
    assert [worker.placement for worker in budget(None, "cuda:0", device_gib=8).workers] == ["device"]


def test_a_base_that_is_to_be_streamed_is_streamed() -> None:
    given = msgspec.structs.replace(CASE, placement="offload")
    found = budget(1000 * GIB, "cpu", "cuda:0", case=given)
    assert [worker.placement for worker in found.workers] == ["host", "offload"]
    assert found.changes == (), "it was asked for"


def test_waves_do_not_share_memory() -> None:
    workers = [*planned("cpu", wave=0), *planned("cpu@avx2", wave=1)]
    alone = budget(None, "cpu").workers[0].host_private_bytes
    found = make_budget(CASE, workers, available_bytes=int(MARGIN * alone))
    assert (found.at_once, found.changes) == (1, ())


def test_only_a_tied_weight_that_is_adapted_makes_the_merged_layers_private(monkeypatch: pytest.MonkeyPatch) -> None:
    given = msgspec.structs.replace(CASE, stages=(standard.FORWARD, standard.MEMORY))
    head = dataclasses.replace(LARGE.layers[0], name="lm_head")

    def private(shape: Shape) -> int:
        monkeypatch.setattr(fit, "read_shape", lambda _: shape)
        return budget(None, "cpu", case=given).workers[0].host_private_bytes

    tied = dataclasses.replace(LARGE, tied=True)
    assert private(LARGE) == private(tied)
    adapted = dataclasses.replace(tied, layers=(head, *LARGE.layers[1:]))
    assert private(adapted) > private(tied) + sum(layer.elements for layer in LARGE.layers)


SOAKED = msgspec.structs.replace(CASE, soak_s=7200.0)


def test_a_soak_takes_what_it_repeats_and_has_the_share_of_its_time() -> None:
    (plain,) = make_budget(CASE, planned("cpu"), available_bytes=None).workers
    (found,) = make_budget(SOAKED, planned("cpu"), available_bytes=None).workers
    assert found.stages[-1].stage == "soak"
    assert found.stages[-1].host_private_bytes == plain.host_private_bytes
    *_, (_, of_soak) = found.shares(SOAKED)
    before = [one for one in found.stages[:-1] if one.stage != START]
    of_stages = sum(weight_of(Stage(one.stage), one.passes) for one in before)
    assert of_soak == pytest.approx(7200 / (7200 + WEIGHT_OF_THE_START + of_stages))
    facts = msgspec.structs.replace(SOAKED, stages=(standard.MEMORY,))
    (worker,) = make_budget(facts, planned("cpu"), available_bytes=None).workers
    assert "soak" not in [stage.stage for stage in worker.stages]


def test_a_load_has_memory_of_its_own() -> None:
    busy = msgspec.structs.replace(SOAKED, load=True)

    def soak(case: Case, device_gib: float) -> tuple[int, int]:
        worker = budget(None, "cpu", "cuda:0", case=case, device_gib=device_gib).workers[1]
        return worker.stages[-1].host_private_bytes, worker.stages[-1].device_bytes or 0

    for device_gib, share in ((80, 3 * 4 * 8192**2), (8, 8 * GIB // 32)):
        (host, device), (more_host, more_device) = soak(SOAKED, device_gib), soak(busy, device_gib)
        assert more_device - device == share
        assert more_host - host == 2 * share // 3, "both factors are made on the host"
    cpu, busy_cpu = (budget(None, "cpu", case=case).workers[0].stages[-1] for case in (SOAKED, busy))
    assert 0 < busy_cpu.host_private_bytes - cpu.host_private_bytes < 2**24


def in_memory(*names: str, wave: int = 0) -> list[PlannedWorker]:
    return [dataclasses.replace(worker, scratch_in_memory=True) for worker in planned(*names, wave=wave)]


def test_scratch_files_in_memory_take_memory() -> None:
    on_disk = make_budget(CASE, planned("cpu", "cpu@avx2"), available_bytes=None)
    found = make_budget(CASE, in_memory("cpu", "cpu@avx2"), available_bytes=None)
    assert (on_disk.scratch_in_memory, found.scratch_in_memory) == (False, True)
    of_each = [worker.scratch_bytes for worker in found.workers]
    assert found.scratch_bytes == on_disk.scratch_bytes == sum(of_each) + found.workers[0].kept_bytes
    gradient = [next(s for s in b.workers[0].stages if s.stage == standard.GRADIENT) for b in (on_disk, found)]
    assert gradient[1].host_private_bytes - gradient[0].host_private_bytes == gradient[0].scratch_bytes > 0
    assert found.host_private_bytes == sum(w.host_private_bytes for w in found.workers) + found.workers[0].kept_bytes


def test_the_reference_takes_memory_in_every_wave() -> None:
    second = [dataclasses.replace(worker, makes_reference=False) for worker in in_memory("cpu@avx2", wave=1)]
    workers = [*in_memory("cpu"), *second]
    found = make_budget(CASE, workers, available_bytes=None)
    alone = max(worker.host_private_bytes for worker in found.workers)
    assert found.host_private_bytes == alone + found.workers[0].kept_bytes


def test_a_case_is_cut_and_refused_by_the_memory_of_its_scratch_files_too() -> None:
    need = make_budget(CASE, in_memory("cpu"), available_bytes=None).host_private_bytes
    assert make_budget(CASE, in_memory("cpu"), available_bytes=int(MARGIN * need) + 1).case == CASE
    cut = make_budget(CASE, in_memory("cpu"), available_bytes=int(MARGIN * need) - 1)
    assert cut.case != CASE
    assert make_budget(CASE, planned("cpu"), available_bytes=int(MARGIN * need) - 1).case == CASE
    refusal = make_budget(CASE, in_memory("cpu"), available_bytes=GIB // 4).refusal
    assert refusal is not None
    assert "TMPDIR" in str(refusal.hint)
    disk = make_budget(CASE, planned("cpu"), available_bytes=GIB // 4).refusal
    assert disk is not None
    assert "TMPDIR" not in str(disk.hint)


def test_workers_side_by_side_leave_room_for_the_reference() -> None:
    workers = in_memory("cpu", "cpu@avx2")
    whole = make_budget(CASE, workers, available_bytes=None).host_private_bytes
    assert make_budget(CASE, workers, available_bytes=int(MARGIN * whole) + 1).at_once == 2
    assert make_budget(CASE, workers, available_bytes=int(MARGIN * whole) - 1).at_once == 1
