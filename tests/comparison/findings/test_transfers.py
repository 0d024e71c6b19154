"""The matrix of pairs: what goes wrong in one sentence, what is fine beside it, and what explains it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.json_codec import encode_json
from consistency.capture.names import CHAIN, DIRECT, HOST_STAGED, OVERLAPPED
from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.compare import compare
from consistency.comparison.findings.host import advise, as_table
from consistency.comparison.findings.transfers import home_of, matrices
from consistency.comparison.result import Comparison, Finding
from consistency.devices.host import Gpu, HostFacts, Link
from consistency.numerics import words
from consistency.report.console import make_console
from consistency.report.terminal import print_doctor
from tests.comparison.made_transfers import ALL, CASE, DEVICES, TWO, compared, copies, workers
from tests.conftest import MakeCapture
from tests.report.printed import printed


def machine(**of: Any) -> HostFacts:
    gpus = tuple(
        Gpu(name=n, pci_bus_id=f"0000:{i}0:00.0", iommu_type=of.get("iommu", "identity"), **of.get("gpu", {}))
        for i, n in enumerate(DEVICES)
    )
    return HostFacts(host="box", boot_id=of.get("boot_id", "b1"), uptime_s=7200.0, gpus=gpus, log=of.get("log", ()))


def errors(comparison: Comparison) -> list[Finding]:
    return [f for f in comparison.findings if f.severity == "error"]


def test_a_machine_whose_copies_are_right(make_capture: MakeCapture) -> None:
    found = compared(make_capture, {}, machine(iommu="DMA-FQ", log=("[1.0] NVRM: Xid 31",)))
    assert found.verdict == "consistent"
    assert found.findings == ()
    assert found.first_divergence == found.first_bitwise_difference == ()
    assert "no mismatch in transfer on 5 workers" in printed(found)


def test_one_sentence_says_which_copies_are_wrong_and_which_are_fine(make_capture: MakeCapture) -> None:
    found = compared(make_capture, TWO)
    (error,) = errors(found)
    assert error.kind == "never-written"
    assert error.workers == ("cuda:1", "cuda:3")
    assert error.message.startswith(
        "transfer · cuda:1, cuda:3 · copies cuda:0→cuda:1 and cuda:0→cuda:3 deliver nothing: the destination is "
        "never written; cuda:0→cuda:2 and 9 others are fine"
    )
    (matrix,) = matrices(found.tensors)
    assert set(matrix.wrong) == set(TWO)
    assert matrix.places == ("cpu", *DEVICES)
    assert len(matrix.cells) == 1 + 4 * 6


def test_a_chain_that_leads_over_a_wrong_pair_is_no_fault_of_its_own(make_capture: MakeCapture) -> None:
    found = compared(make_capture, TWO)
    chains = [t for t in found.tensors if t.tensor == CHAIN and any(row.status == "outside" for row in t.outcomes)]
    assert len(chains) > 2
    (error,) = errors(found)
    assert {t.name for t in chains} <= set(error.tensors), "no wrong row is left without a finding"
    alone = compare(
        [read_capture(make_capture("b", workers({("cuda:2", "cuda:1"): {HOST_STAGED: "stale"}}), case=CASE))]
    )
    (error,) = errors(alone)
    assert (error.kind, error.workers) == ("stale", ("cuda:1",))
    assert "copies cuda:2→cuda:1 deliver the bytes of an earlier copy, but only when staged " in error.message
    assert "but only when staged through the host" in error.message


@pytest.mark.parametrize("moves_over", [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_what_changes_on_the_way_between_the_same_devices_follows_from_the_copies(
    make_capture: MakeCapture, moves_over: tuple[str, str]
) -> None:
    """A split model was accused once more, on every worker that sends over the wrong pair."""
    source, destination = moves_over
    move = TensorRecord(
        rule="limit", status="outside", stage="sharding", layer="auto", tensor="on the way",
        word=words.IDS_CHANGED, evidence={"from": source, "to": destination}, reason="ids changed during transfer",
    )  # fmt: skip
    records = workers({("cuda:0", "cuda:1"): ALL})
    records["cuda:2"].append(move)
    info = {name: {"load_path": "shared", "stages_done": ("transfer", "sharding")} for name in DEVICES}
    case = {**CASE, "stages": ("transfer", "sharding")}
    found = errors(compare([read_capture(make_capture("a", records, info=info, case=case))]))
    transfer = next(one for one in found if one.message.startswith("transfer"))
    if moves_over == ("cuda:0", "cuda:1"):
        assert found == [transfer]
        (follows,) = transfer.consequences
        assert (follows.stage, follows.workers) == ("sharding", ("cuda:2",))
        assert follows.message.endswith("1 check of what is moved there: ids changed during transfer")
    else:  # copies the other way are fine, so this is another fault
        assert not transfer.consequences
        assert [one.workers for one in found if one is not transfer] == [("cuda:2",)]


def test_copies_that_fail_beside_work_alone(make_capture: MakeCapture) -> None:
    (error,) = errors(compared(make_capture, {("cuda:0", "cuda:1"): {OVERLAPPED: "stale"}}))
    assert "deliver the bytes of an earlier copy, but only under load" in error.message


def test_what_explains_it(make_capture: MakeCapture) -> None:
    acs = {"acs": {"0000:16:01.0": ("request redirect",)}, "after": {"ecc uncorrected, since boot": 3}}
    host_facts = machine(iommu="DMA-FQ", gpu=acs, log=("[1.0] AMD-Vi: IO_PAGE_FAULT",))
    found = compared(make_capture, TWO, host_facts)
    error = next(f for f in errors(found) if f.kind == "never-written")
    assert "the IOMMU translates (group type DMA-FQ; no iommu=pt)" in error.message
    assert "ACS redirects peer traffic through the root complex at 0000:16:01.0" in error.message
    assert "ecc uncorrected, since boot (now 3) rose on cuda:1" in error.message
    assert error.next is not None
    assert "iommu=pt" in error.next
    assert any("boot b1, up 2.0 h: a reboot may hide the fault" in text for text in error.detail)
    assert any("IO_PAGE_FAULT" in text for text in error.detail)


def test_the_host_s_lanes_are_no_matter_of_peer_traffic(make_capture: MakeCapture) -> None:
    (error,) = errors(compared(make_capture, {("cpu", "cuda:1"): ALL}, machine(iommu="DMA-FQ")))
    assert "IOMMU" not in error.message
    assert "copies cpu→cuda:1 deliver nothing" in error.message


def test_peer_access_that_is_missing_is_named(make_capture: MakeCapture) -> None:
    records = {"cuda:1": [copies(("cuda:0", "cuda:1"), DIRECT, "zeros", evidence={"peer_access": False})]}
    (error,) = errors(compare([read_capture(make_capture("a", records, case=CASE))]))
    assert "no peer access cuda:0→cuda:1" in error.message


def test_each_machine_of_several_has_its_own_matrix(make_capture: MakeCapture) -> None:
    info = {name: {"load_path": "shared"} for name in DEVICES}
    a = make_capture("host-a", workers({}), info=info, case=CASE, host_facts=machine())
    b = make_capture("host-b", workers(TWO), info=info, case=CASE, host_facts=machine(boot_id="b2"))
    found = compare([read_capture(a), read_capture(b)])
    (error,) = errors(found)
    assert error.workers == ("host-b:cuda:1", "host-b:cuda:3")
    assert [m.home for m in matrices(found.tensors)] == ["host-a", "host-b"]
    assert [f.message for f in found.findings if f.kind == "rebooted"] == [
        "box was rebooted between these captures: a reboot may have fixed what differs"
    ]
    assert len(found.hosts) == 2


def test_captures_of_two_levels_are_no_difference(make_capture: MakeCapture) -> None:
    other = [copies(("cpu", "cpu"))]
    more = [msgspec.structs.replace(r, digest="ef" * 16, reference_digest="ef" * 16, shape=(99,)) for r in other]
    a, b = make_capture("a", {"cpu": other}, case=CASE), make_capture("b", {"cpu": more}, case=CASE)
    found = compare([read_capture(a), read_capture(b)])
    assert found.verdict == "consistent"
    assert found.tensors[0].classes == (("a:cpu", "b:cpu"),)


@pytest.mark.parametrize("status", ["equal", "outside"])
def test_a_record_that_says_it_is_equal_and_is_not(make_capture: MakeCapture, status: Any) -> None:
    lies = msgspec.structs.replace(copies(("cpu", "cpu")), digest=None, reference_digest=None, status=status)
    assert compare([read_capture(make_capture("a", {"cpu": [lies]}, case=CASE))]).verdict == "inconsistent"


def test_the_report_shows_the_matrix(make_capture: MakeCapture) -> None:
    text = printed(compared(make_capture, TWO))
    lines = [line.split() for line in text.splitlines()]
    start = next(i for i, words in enumerate(lines) if words[:1] == ["copies"])
    assert lines[start] == ["copies", "cpu", *DEVICES]
    assert lines[start + 2] == ["cuda:0", "=", "20", "=", "20", "✗", "=", "20", "✗"]
    assert lines[start + 1] == ["cpu", "=", "20", *["=", "20"] * 4]
    assert "->cuda:1" not in text.split("copies")[-1], "what the matrix shows is in no table beside it"


def test_names_of_workers() -> None:
    names = ["cuda:1", "host-a:cuda:1", "cpu@avx2", "night/1:cpu", "a:b:npu:0@tf32"]
    assert [home_of(name) for name in names] == ["", "host-a", "", "night/1", "a:b"]


def test_what_to_mend_first(make_capture: MakeCapture) -> None:
    link = {"width": 4, "max_width": 16, "slot_width": 16}
    found = compared(
        make_capture, TWO, machine(iommu="DMA", gpu={"link": link, "counters": {"row remapping pending": 1}})
    )
    advice = advise(found)
    assert advice[0].what.startswith("transfer · cuda:1, cuda:3 · copies")
    assert "iommu=pt" in (advice[0].fix or "")
    assert [a.urgent for a in advice] == sorted((a.urgent for a in advice), reverse=True)
    assert any("cuda:2 has 4 PCIe lanes; it and its slot support 16" in a.what for a in advice)
    assert any("cuda:2 waits for a reset" in a.what for a in advice)
    file = io.StringIO()
    print_doctor(found, make_console(file), elapsed_s=3.0)
    text = file.getvalue()
    assert "fix first:" in text
    assert "  1  transfer" in text
    assert "cuda:3: PCI 0000:30:00.0, IOMMU group None DMA, link x4" in text
    table = as_table(found)
    assert len(table["copies"]) == 25
    encode_json(table)


def test_a_pair_that_is_slow_beside_others(make_capture: MakeCapture) -> None:
    records = workers({})
    records["cuda:1"] = [
        copies(("cuda:0", "cuda:1"), evidence={"gb_per_s": 0.8})
        if r.layer == "cuda:0->cuda:1" and r.tensor == DIRECT
        else r
        for r in records["cuda:1"]
    ]
    found = compare([read_capture(make_capture("a", records, case=CASE))])
    (advice,) = advise(found)
    assert "slow, the median of its kind is 20 GB/s: cuda:0→cuda:1 0.8 GB/s" in advice.what
    assert not advice.urgent
    assert found.verdict == "consistent"


BRIDGED = [("cuda:0", "cuda:1"), ("cuda:0", "cuda:2"), ("cuda:1", "cuda:3"), ("cuda:2", "cuda:3")]
"""Pairs that NVLink joins, of a box where the two others copy over PCIe."""


def bridged(make_capture: MakeCapture, speeds: dict[tuple[str, str], float]) -> Comparison:
    """Return a comparison where pairs over NVLink copy 100 GB/s and others 10, but for these."""
    joined = {*BRIDGED, *((b, a) for a, b in BRIDGED)}

    def with_speed(record: TensorRecord) -> TensorRecord:
        source, _, target = record.layer.partition("->")
        if record.tensor != DIRECT or not {source, target} <= set(DEVICES):
            return record
        speed = speeds.get((source, target), 100.0 if (source, target) in joined else 10.0)
        return copies((source, target), evidence={"gb_per_s": speed})

    records = {name: [with_speed(record) for record in found] for name, found in workers({}).items()}
    pairs = [(a, b) for place, a in enumerate(DEVICES) for b in DEVICES[place + 1 :]]
    links = tuple(Link(a=a, b=b, topology="SYS", peer="ok", nvlink=(a, b) in joined) for a, b in pairs)
    capture = make_capture("-".join(["capture", *map(str, speeds.values())]), records, case=CASE)
    return msgspec.structs.replace(
        compare([read_capture(capture)]), hosts=(msgspec.structs.replace(machine(), links=links),)
    )


def test_pairs_that_nvlink_does_not_join_are_not_slow_beside_those_that_it_does(make_capture: MakeCapture) -> None:
    assert advise(bridged(make_capture, {})) == ()


def test_a_pair_is_slow_beside_those_that_are_joined_alike(make_capture: MakeCapture) -> None:
    (advice,) = advise(bridged(make_capture, {("cuda:0", "cuda:2"): 11.0}))
    assert "slow, the median of its kind is 100 GB/s: cuda:0→cuda:2 11 GB/s" in advice.what
    (other,) = advise(bridged(make_capture, {("cuda:3", "cuda:0"): 1.0}))
    assert "slow, the median of its kind is 10 GB/s: cuda:3→cuda:0 1 GB/s" in other.what


def test_nothing_to_mend_on_a_healthy_machine(make_capture: MakeCapture, tmp_path: Path) -> None:
    found = compared(make_capture, {}, machine(iommu="identity"))
    assert advise(found) == ()
    file = io.StringIO()
    print_doctor(found, make_console(file), elapsed_s=3.0)
    assert "nothing to fix" in file.getvalue()
