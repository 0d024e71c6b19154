from __future__ import annotations

import gc

import pytest
import torch

from consistency.worker.memory.peak import AllocatorMeter, Mark, ProfilerMeter


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


class Blocks:
    """A backend's memory functions: what is asked for is counted, and the blocks of 2 MiB that it lies in."""

    def __init__(self, *, requests: bool = True) -> None:
        self._requests = requests
        self._held: list[int] = []
        self._peaks = {"blocks": 0, "requested": 0}

    def _now(self) -> dict[str, int]:
        return {"blocks": sum(-(-size // 2**21) * 2**21 for size in self._held), "requested": sum(self._held)}

    def take(self, size: int) -> None:
        self._held.append(size)
        self._peaks = {name: max(peak, self._now()[name]) for name, peak in self._peaks.items()}

    def give_back(self) -> None:
        self._held.pop()

    def is_initialized(self) -> bool:
        return True

    def memory_allocated(self, _: object) -> int:
        return self._now()["blocks"]

    def max_memory_allocated(self, _: object) -> int:
        return self._peaks["blocks"]

    def reset_peak_memory_stats(self, _: object) -> None:
        self._peaks = self._now()

    def memory_stats(self, _: object) -> dict[str, int]:
        if not self._requests:
            return {"requested_bytes.all.current": 0, "requested_bytes.all.peak": 0}
        return {
            "requested_bytes.all.current": self._now()["requested"],
            "requested_bytes.all.peak": self._peaks["requested"],
        }


SIZE = 768 * 768 * 2
"""Bytes of a weight of BERT in bfloat16, whose block may be 1 MiB larger: nearly a copy more."""


@pytest.mark.parametrize(("requests", "counted"), [(True, SIZE), (False, 2**21)])
def test_what_is_asked_for_counts_where_it_is_known(
    requests: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(requests=requests)
    monkeypatch.setattr(torch, "get_device_module", lambda _: blocks)

    def act(mark: Mark) -> None:
        blocks.take(SIZE)
        mark()
        blocks.take(SIZE)
        blocks.give_back()

    blocks.take(SIZE)
    found = AllocatorMeter(torch.device("cuda:0"), lambda: None).measure(act)
    assert (found.before_mark, found.after_mark, found.kept) == (counted, 2 * counted, counted)
