"""Accelerators that a host had the night before: gone, or not asked for, or other ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison import kinds
from consistency.comparison.result import Comparison, Finding
from consistency.devices.host.facts import HostFacts
from consistency.devices.spec import AutoChoice
from consistency.extras.operations.history.baseline import Baseline, accept, read_baseline
from consistency.extras.operations.history.drift import add_run
from consistency.extras.operations.history.store import History
from consistency.report.sentences import sentence
from consistency.workflows.judging import compare_captures
from tests.conftest import MakeCapture

Night = Callable[..., Comparison]

AUTO = AutoChoice()


@pytest.fixture
def night(tmp_path: Path, make_capture: MakeCapture) -> Night:
    """Add a run of some hosts to a history: the UUIDs of the GPUs of each, which are `cuda:0`, `cuda:1` and so on."""
    count = 0

    def add(*, auto: AutoChoice | None = AUTO, baseline: Baseline | None = None, **hosts: Sequence[str]) -> Comparison:
        nonlocal count
        count += 1
        captures = []
        for host, uuids in hosts.items():
            weight = TensorRecord(
                rule="bitwise",
                status="equal",
                stage="base",
                layer="l",
                tensor="weight",
                digest="b",
                reference_digest="b",
            )
            names = ["cpu", *(f"cuda:{i}" for i in range(len(uuids)))]
            info = {f"cuda:{i}": {"uuid": uuid} for i, uuid in enumerate(uuids)}
            facts = HostFacts(host=host, auto=auto)
            path = make_capture(
                f"night-{count}-{host}", {name: [weight] for name in names}, info=info, host=host, host_facts=facts
            )
            captures.append(read_capture(path))
        return add_run(History(str(tmp_path / "history")), captures, compare_captures(captures), baseline)

    return add


def gone(found: Comparison) -> list[Finding]:
    return [finding for finding in found.findings if finding.kind == kinds.GONE_DEVICE and finding.severity == "error"]


def test_a_card_that_is_gone_is_named_every_night_until_it_is_back(night: Night) -> None:
    assert not gone(night(box=["GPU-a", "GPU-b"]))
    for _ in range(3):
        found = night(box=["GPU-a"])
        (finding,) = gone(found)
        assert finding.message.startswith("box no longer has cuda:1 (GPU-b), which the run of ")
        assert (found.verdict, found.exit_status, finding.workers) == ("incomplete", 3, ())
        assert sentence(found) == finding.message
    assert night(box=["GPU-a", "GPU-b"]).exit_status == 0


def test_all_of_them_are_gone_with_their_driver(night: Night) -> None:
    night(box=["GPU-a", "GPU-b"])
    (finding,) = gone(night(box=[], auto=AutoChoice(build="cuda", reason="NVML: Driver Not Loaded")))
    assert finding.detail == ("cuda:0 (GPU-a)", "cuda:1 (GPU-b)")


@pytest.mark.parametrize(
    ("now", "auto"),
    [
        (["GPU-b"], None),  # devices were named
        (["GPU-b", "GPU-a"], AUTO),  # other numbers
        (["GPU-a", "GPU-b", "GPU-c"], AUTO),
        (["GPU-c"], AUTO),  # a scheduler gave out another, or the card was replaced
        (["GPU-b"], AutoChoice(masks={"CUDA_VISIBLE_DEVICES": "1"})),
    ],
)
def test_what_is_no_loss(night: Night, now: list[str], auto: AutoChoice | None) -> None:
    night(box=["GPU-a", "GPU-b"])
    assert not gone(night(box=now, auto=auto))


def test_a_host_is_compared_with_its_own_latest_run(night: Night) -> None:
    night(one=["GPU-a"], two=["GPU-b", "GPU-c"])
    night(two=["GPU-b", "GPU-c"])
    found = night(one=["GPU-a"], two=["GPU-c"])
    assert [finding.detail for finding in gone(found)] == [("cuda:0 (GPU-b)",)]
    assert gone(found)[0].message.startswith("two no longer has")


def test_a_card_that_was_taken_out_is_accepted_once(night: Night, tmp_path: Path) -> None:
    night(box=["GPU-a", "GPU-b", "GPU-c"])
    found = night(box=["GPU-a", "GPU-b"])
    path = tmp_path / "baseline.json"
    accept(path, found.findings, found.workers, reason="sent back")
    accepted = read_baseline(path)
    assert night(box=["GPU-a", "GPU-b"], baseline=accepted).exit_status == 0
    (finding,) = gone(night(box=["GPU-a"], baseline=accepted))
    assert "cuda:1 (GPU-b)" in finding.message
    assert "GPU-c" not in finding.message
