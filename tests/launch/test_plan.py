"""Which workers a case needs, in which order."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from consistency.case import standard
from consistency.case.case import Case
from consistency.case.load_path import LoadPath
from consistency.case.stage import Level
from consistency.devices.spec import DeviceInfo, parse_device
from consistency.launch.plan import default_load_paths, in_lanes, merged_waves, plan_waves, side_by_side

CASE = Case(name="x", base="base", adapter="adapter")


def devices(*names: str) -> list[DeviceInfo]:
    return [DeviceInfo(spec=parse_device(name), architecture="a", model="m") for name in names]


def waves(case: Case, *names: str) -> list[list[tuple[str, str]]]:
    return [[(plan.name, plan.load_path.value) for plan in wave] for wave in plan_waves(case, devices(*names))]


def test_accelerators_are_tried_alone_and_several_together_too() -> None:
    assert waves(CASE, "cpu", "cuda:0") == [[("cpu", "isolated"), ("cuda:0", "isolated")]]
    assert default_load_paths(devices("cpu", "cpu@avx2", "cuda:0", "cuda:0@tf32")) == (LoadPath.ISOLATED,)
    found = waves(CASE, "cpu", "cuda:0", "cuda:1")
    assert found == [
        [("cpu", "isolated"), ("cuda:0", "isolated"), ("cuda:1", "isolated")],
        [("cuda:0", "shared"), ("cuda:1", "shared")],
    ]


def test_roads_that_were_asked_for() -> None:
    shared = Case(name="x", base="base", load_paths=(LoadPath.SHARED,))
    assert waves(shared, "cpu", "cuda:0") == [[("cpu", "isolated"), ("cuda:0", "shared")]]
    both = Case(name="x", base="base", load_paths=tuple(LoadPath))
    assert waves(both, "cpu") == [[("cpu", "isolated")]]


def test_plain_cpu_makes_the_reference_and_is_started_first() -> None:
    (wave,) = plan_waves(CASE, devices("cuda:0", "cpu@avx2", "cpu"))
    assert [plan.name for plan in wave if plan.makes_reference] == ["cpu"]
    assert wave[0].name == "cpu"
    (wave,) = plan_waves(CASE, devices("cuda:0", "cpu@avx2"))
    assert [plan.name for plan in wave if plan.makes_reference] == ["cpu@avx2"]
    (wave,) = plan_waves(CASE, devices("cuda:0"))
    assert wave[0].makes_reference


def test_the_reference_is_not_written_where_no_other_worker_waits_for_it() -> None:
    def waiting(*names: str) -> set[bool]:
        return {plan.others_wait for wave in plan_waves(CASE, devices(*names)) for plan in wave}

    assert waiting("cpu") == waiting("cuda:0") == {False}
    assert waiting("cpu", "cuda:0") == {True}
    twice = msgspec.structs.replace(CASE, load_paths=(LoadPath.ISOLATED, LoadPath.SHARED))
    assert {plan.others_wait for wave in plan_waves(twice, devices("cuda:0")) for plan in wave} == {True}


def test_variants_of_a_card_run_one_after_the_other() -> None:
    """Side by side each would take the memory of the card for its own, and an exclusive one would refuse the second."""
    assert waves(CASE, "cpu", "cpu@avx2", "cuda:0", "cuda:0@tf32", "cuda:0@flash") == [
        [("cpu", "isolated"), ("cpu@avx2", "isolated"), ("cuda:0", "isolated")],
        [("cuda:0@tf32", "isolated")],
        [("cuda:0@flash", "isolated")],
    ]
    assert waves(CASE, "cuda:0@tf32", "cuda:1", "cuda:0") == [
        [("cuda:0@tf32", "isolated"), ("cuda:1", "isolated")],
        [("cuda:0", "isolated")],
        [("cuda:0@tf32", "shared"), ("cuda:1", "shared")],
        [("cuda:0", "shared")],
    ]


def test_two_names_of_one_card_are_one_card() -> None:
    found = [replace(info, uuid="GPU-a") for info in devices("cuda:0", "cuda:1")]
    assert [len(wave) for wave in plan_waves(CASE, found)] == [1, 1, 1, 1]
    found = [replace(info, uuid=f"GPU-{number}") for number, info in enumerate(devices("cuda:0", "cuda:1"))]
    assert [len(wave) for wave in plan_waves(CASE, found)] == [2, 2]


def test_partitions_of_one_card_are_devices_of_their_own() -> None:
    """In an MI300X that is split (CPX) they may report the card's UUID."""
    parts = devices("cuda:0", "cuda:1")
    found = [replace(info, uuid="GPU-a", pci_bus_id=f"0000:05:00.{number}") for number, info in enumerate(parts)]
    assert [len(wave) for wave in plan_waves(CASE, found)] == [2, 2]


def test_labels_name_the_path_where_it_is_not_the_usual_one() -> None:
    first, second = plan_waves(CASE, devices("cuda:0", "cuda:1"))
    assert first[0].label == "cuda:0"
    assert second[0].label == "cuda:0 (shared)"
    assert first[0].slug != second[0].slug


def sides(case: Case, *names: str) -> list[tuple[str, list[str]]]:
    return [
        (plan.label, [load_path.value for load_path in plan.alternative_paths])
        for wave in plan_waves(case, devices(*names))
        for plan in wave
    ]


def test_a_level_takes_paths_beside_each_default_path() -> None:
    """On a CPU, where PEFT has one device to choose, `+cpu` says what it does anyway."""
    assert sides(CASE, "cpu", "cuda:0", "cuda:1") == [
        ("cpu", ["isolated+low-memory"]),
        ("cuda:0", ["isolated+cpu", "isolated+low-memory"]),
        ("cuda:1", ["isolated+cpu", "isolated+low-memory"]),
        ("cuda:0 (shared)", ["shared+cpu", "shared+low-memory"]),
        ("cuda:1 (shared)", ["shared+cpu", "shared+low-memory"]),
    ]
    quick = Case(name="x", base="base", adapter="adapter", level=Level.QUICK)
    assert sides(quick, "cpu", "cuda:0") == [("cpu", []), ("cuda:0", [])]
    thorough = Case(name="x", base="base", adapter="adapter", level=Level.THOROUGH)
    assert [len(found) for _, found in sides(thorough, "cuda:0", "cuda:1")] == [7, 7, 7, 7]


def test_a_alternative_path_brings_its_default_path_with_it() -> None:
    alone = Case(name="x", base="base", adapter="adapter", load_paths=(LoadPath.SHARED_TARGET,))
    assert sides(alone, "cpu", "cuda:1") == [
        ("cpu", ["isolated+target"]),
        ("cuda:1 (shared)", ["shared+target"]),
    ]
    every = Case(name="x", base="base", adapter="adapter", load_paths=tuple(LoadPath))
    assert [len(found) for _, found in sides(every, "cpu", "cuda:1")] == [7, 7, 7]
    plain = Case(name="x", base="base", adapter="adapter", load_paths=(LoadPath.ISOLATED,))
    assert sides(plain, "cuda:1") == [("cuda:1", [])]


def test_without_an_adapter_or_its_stage_there_is_nothing_to_take() -> None:
    assert sides(Case(name="x", base="base"), "cuda:0") == [("cuda:0", [])]
    merged = Case(name="x", base="base", adapter="adapter", stages=(standard.MERGED,))
    assert sides(merged, "cuda:0") == [("cuda:0", [])]


def turns(*cases: Case, names: tuple[str, ...]) -> list[list[tuple[str, list[int]]]]:
    merged = merged_waves([plan_waves(case, devices(*names)) for case in cases])
    return [[(process[0][1].label, [number for number, _ in process]) for process in wave] for wave in merged]


def test_a_process_takes_several_cases_in_turn_and_a_card_one_process_at_a_time() -> None:
    assert turns(CASE, CASE, names=("cpu", "cuda:0")) == [[("cpu", [0, 1]), ("cuda:0", [0, 1])]]
    alone = Case(name="x", base="base", load_paths=(LoadPath.ISOLATED,))
    shared = Case(name="x", base="base", load_paths=(LoadPath.SHARED,))
    assert turns(shared, names=("cpu", "cuda:0")) == [[("cpu", [0]), ("cuda:0 (shared)", [0])]]
    # a device has one process at a time, whichever case needs which load path
    assert turns(shared, alone, CASE, names=("cpu", "cuda:0", "cuda:1")) == [
        [("cpu", [0, 1, 2]), ("cuda:0", [1, 2]), ("cuda:1", [1, 2])],
        [("cuda:0 (shared)", [0, 2]), ("cuda:1 (shared)", [0, 2])],
    ]
    names = ("cpu", "cuda:0", "cuda:0@tf32")
    assert turns(CASE, CASE, names=names) == [
        [("cpu", [0, 1]), ("cuda:0", [0, 1])],
        [("cuda:0@tf32", [0, 1])],
    ]


def test_no_process_waits_for_a_reference_that_a_later_wave_makes() -> None:
    case = Case(name="x", base="base", load_paths=(LoadPath.SHARED, LoadPath.ISOLATED))
    cases = (Case(name="x", base="base", load_paths=(LoadPath.SHARED,)), case, CASE)
    merged = merged_waves([plan_waves(one, devices("cuda:0", "cuda:1")) for one in cases])
    for number in range(len(cases)):
        workers = [
            (wave, plan.makes_reference)
            for wave, processes in enumerate(merged)
            for process in processes
            for of, plan in process
            if of == number
        ]
        assert min(workers)[0] == next(wave for wave, makes in workers if makes)


def test_no_more_workers_than_fit_run_side_by_side() -> None:
    assert side_by_side([[1, 2, 3], [4]], 2) == [[1, 2], [3], [4]]
    assert side_by_side([[1, 2, 3], [4]], None) == [[1, 2, 3], [4]]
    assert side_by_side([[]], 1) == side_by_side([[]], None) == []


def test_cases_side_by_side_are_in_lanes_of_all_their_workers() -> None:
    queues = [["a0", "a1", "a2", "a4"], ["b0", "b2", "b4"]]
    assert in_lanes(queues, 1, of=lambda one: int(one[1])) == queues
    assert in_lanes(queues, 2, of=lambda one: int(one[1])) == [["a0", "a2"], ["b0", "b2"], ["a1", "a4"], ["b4"]]
    assert in_lanes([["a0"]], 3, of=lambda one: int(one[1])) == [["a0"]]


def test_cases_that_share_no_process_run_one_after_the_other() -> None:
    names = ("cpu", "cuda:0")
    merged = merged_waves([plan_waves(CASE, devices(*names)) for _ in range(3)], ["pinned", "deployed", "pinned"])
    assert [[(process[0][1].label, [number for number, _ in process]) for process in wave] for wave in merged] == [
        [("cpu", [0, 2]), ("cuda:0", [0, 2])],
        [("cpu", [1]), ("cuda:0", [1])],
    ]
