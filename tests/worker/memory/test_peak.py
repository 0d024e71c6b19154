from __future__ import annotations

import gc

import torch

from consistency.worker.memory.peak import Mark, ProfilerMeter


def test_allocations_are_counted_before_and_after_the_mark() -> None:
    def act(mark: Mark) -> None:
        torch.empty(3000, dtype=torch.uint8)
        first = torch.empty(1000, dtype=torch.uint8)
        mark()
        second = torch.empty(500, dtype=torch.uint8)
        torch.empty(300, dtype=torch.uint8)
        del first
        kept.append(second)

    kept: list[torch.Tensor] = []
    found = ProfilerMeter().measure(act)
    assert (found.before_mark, found.after_mark, found.kept, found.whole) == (3000, 1800, 500, 3000)


def test_without_a_mark_all_of_it_is_before() -> None:
    def act(_: Mark) -> None:
        torch.empty(100, dtype=torch.uint8)

    found = ProfilerMeter().measure(act)
    assert (found.before_mark, found.after_mark, found.kept) == (100, 0, 0)


def test_garbage_that_lay_there_is_not_collected_in_the_middle() -> None:
    enabled = gc.isenabled()
    seen: list[bool] = []
    ProfilerMeter().measure(lambda _: seen.append(gc.isenabled()))
    assert seen == [False]
    assert gc.isenabled() is enabled
