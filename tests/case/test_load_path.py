"""The names of the load paths and what each stands for."""

from __future__ import annotations

import pytest

from consistency.case.load_path import SIDES, LoadPath, is_alternative, main_path


def test_every_choice_has_a_path_and_none_has_two() -> None:
    found = {(r.main, r.torch_device, r.low_memory, r.by_transformers) for r in LoadPath}
    # transformers' loader has no torch_device
    peft = {
        (v, d, low, False)
        for v in (LoadPath.ISOLATED, LoadPath.SHARED)
        for d in (None, "cpu", "target")
        for low in (0, 1)
    }
    theirs = {(v, None, low, True) for v in (LoadPath.ISOLATED, LoadPath.SHARED) for low in (0, 1)}
    assert found == peft | theirs
    assert len(LoadPath) == len(found)


@pytest.mark.parametrize("load_path", LoadPath)
def test_a_name_says_what_is_beside_what(load_path: LoadPath) -> None:
    assert load_path.main in (LoadPath.ISOLATED, LoadPath.SHARED)
    assert load_path.is_main == (load_path in (LoadPath.ISOLATED, LoadPath.SHARED))
    assert (main_path(load_path), is_alternative(load_path)) == (load_path.main, not load_path.is_main)
    assert load_path.beside(load_path.main) is load_path
    other = LoadPath.SHARED if load_path.main is LoadPath.ISOLATED else LoadPath.ISOLATED
    there = load_path.beside(other)
    assert (there.main, there.side) == (other, load_path.side)
    assert not load_path.without_low_memory.low_memory
    assert load_path.is_main or load_path.side in SIDES


def test_peft_chooses_the_device_where_nobody_tells_it() -> None:
    assert [r.value for r in LoadPath if r.chooses_device] == [
        "isolated", "isolated+low-memory", "shared", "shared+low-memory",
    ]  # fmt: skip
