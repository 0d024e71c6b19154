"""The names of the roads and what each stands for."""

from __future__ import annotations

import pytest

from consistency.case.load_path import SIDES, Road, is_side_road, main_road


def test_every_choice_has_a_road_and_none_has_two() -> None:
    found = {(r.main, r.torch_device, r.low_memory, r.by_transformers) for r in Road}
    # transformers' loader has no torch_device
    peft = {(v, d, low, False) for v in (Road.ISOLATED, Road.SHARED) for d in (None, "cpu", "target") for low in (0, 1)}
    theirs = {(v, None, low, True) for v in (Road.ISOLATED, Road.SHARED) for low in (0, 1)}
    assert found == peft | theirs
    assert len(Road) == len(found)


@pytest.mark.parametrize("road", Road)
def test_a_name_says_what_is_beside_what(road: Road) -> None:
    assert road.main in (Road.ISOLATED, Road.SHARED)
    assert road.is_main == (road in (Road.ISOLATED, Road.SHARED))
    assert (main_road(road), is_side_road(road)) == (road.main, not road.is_main)
    assert road.beside(road.main) is road
    other = Road.SHARED if road.main is Road.ISOLATED else Road.ISOLATED
    there = road.beside(other)
    assert (there.main, there.side) == (other, road.side)
    assert not road.without_low_memory.low_memory
    assert road.is_main or road.side in SIDES


def test_peft_chooses_the_device_where_nobody_tells_it() -> None:
    assert [r.value for r in Road if r.chooses_device] == [
        "isolated", "isolated+low-memory", "shared", "shared+low-memory",
    ]  # fmt: skip
