"""What the stages of a group have in common."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from consistency.capture.names import SUM_OVER_RANKS
from consistency.case import standard
from consistency.case.case import Case
from consistency.case.stage import Stage
from consistency.extras.training import group_stage
from consistency.extras.training.group_stage import float64_reference, run_in_group
from consistency.extras.training.ranks.group import GroupError
from consistency.extras.training.replicas.spec import REPLICAS
from consistency.extras.training.shards import worker as shards
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.worker.nondeterministic import NondeterministicOperations
from consistency.worker.recorder import Skip


@pytest.mark.parametrize("stage", [standard.FORWARD, standard.GRADIENT])
def test_results_of_a_stage_that_is_not_run_are_not_waited_for(tmp_path: Path, stage: Stage) -> None:
    """`--only` and bisect run a stage without the others: nobody would ever write its results."""
    case = Case(name="one", base="", stages=(TENSOR_PARALLEL,))
    context = SimpleNamespace(job=SimpleNamespace(case=case), scratch=tmp_path, events=None)
    found = float64_reference(cast("Any", context), stage)
    assert found == f"the stage {stage}, whose float64 results judge it, is not run"


@pytest.mark.parametrize(("given", "wrong"), [(1.0, False), (2.0, True)])
def test_a_sum_in_the_place_of_an_average_is_of_the_library(
    given: float, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo of torch 2.8 gives it to FSDP2; where a device does so, that is a finding."""
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", lambda part, *_, **__: part.fill_(given))
    for device in ("cpu", "cuda"):
        ranks = SimpleNamespace(device=torch.device(device), world=2, process_group=None)
        assert shards._adds_up_averages(cast("Any", ranks)) is (wrong and device == "cpu")


def test_a_process_group_is_held_for_longer_than_what_ran_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the last to hold it may be DistributedDataParallel's reducer, and a rank hangs after an error, at random."""

    class ProcessGroup:
        pass

    @contextmanager
    def joined_group(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(process_group=ProcessGroup(), world=2)

    held: list[bool] = []

    class Reducer:
        def __init__(self, group: ProcessGroup) -> None:
            self.group = weakref.ref(group)

        def __del__(self) -> None:
            held.append(self.group() is not None)

    def run(ranks: Any) -> None:
        reducer = Reducer(ranks.process_group)
        raise GroupError(f"a rank is lost, and {reducer} is in the frames of this error", lost=True)

    monkeypatch.setattr(group_stage, "joined_group", joined_group)
    monkeypatch.setattr(group_stage, "meet_nodes", lambda group, _: group)
    context = SimpleNamespace(job=SimpleNamespace(group=object()), device=torch.device("cpu"), events=None)
    with pytest.raises(Skip, match="a rank is lost"):
        run_in_group(cast("Any", context), REPLICAS, run)
    assert held == [True]


@pytest.mark.parametrize(("world", "nodes", "excused"), [(2, (), ()), (3, (), (SUM_OVER_RANKS,)), (3, ("a", "b"), ())])
def test_what_follows_from_a_sum_over_three_ranks_may_differ_from_host_to_host(
    world: int, nodes: tuple[str, ...], excused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of two numbers has one result, and hosts that form one group share every sum."""

    @contextmanager
    def joined_group(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(world=world, group=SimpleNamespace(nodes=nodes))

    monkeypatch.setattr(group_stage, "joined_group", joined_group)
    monkeypatch.setattr(group_stage, "meet_nodes", lambda group, _: group)
    operations = NondeterministicOperations()
    context = SimpleNamespace(
        job=SimpleNamespace(group=object()), device=torch.device("cpu"), events=None,
        record=SimpleNamespace(operations=operations),
    )  # fmt: skip
    run_in_group(cast("Any", context), REPLICAS, lambda _: None)
    assert operations.ran() == excused
