"""Advice for each kind of fact of a host, and none for a fact that asks for nothing."""

from __future__ import annotations

from typing import Any

import pytest

from consistency.comparison import kinds
from consistency.comparison.findings.host import Advice, about, advise
from consistency.comparison.result import Comparison, Finding
from consistency.devices.host import Gpu, HostFacts, Link
from consistency.devices.host.nvml import REMAP_FAILED, REMAP_PENDING
from consistency.devices.vendors import Vendor

XID = "[5.1] NVRM: Xid (PCI:0000:17:00): 79"


def gpu(index: int = 0, **fields: Any) -> Gpu:
    return Gpu(name=f"cuda:{index}", pci_bus_id=f"0000:{index}0:00.0", **fields)


def compared(*hosts: HostFacts, findings: tuple[Finding, ...] = (), **fields: Any) -> Comparison:
    plain: dict[str, Any] = {
        "case": "doctor", "dtype": "float32", "level": "quick", "load_paths": (), "verdict": "consistent",
        "reference": None, "workers": (), "architectures": (), "tensors": (),
    }  # fmt: skip
    return Comparison(hosts=hosts, findings=findings, **{**plain, **fields})


def host(*gpus: Gpu, **fields: Any) -> HostFacts:
    return HostFacts(host="node", gpus=gpus, **fields)


@pytest.mark.parametrize(
    ("facts", "what", "fix", "urgent"),
    [
        (host(gpu(counters={REMAP_FAILED: 1, REMAP_PENDING: 1})), "cuda:0 has bad memory rows", "replace it", True),
        (host(gpu(counters={REMAP_PENDING: 1})), "cuda:0 waits for a reset", "reset it", True),
        (
            host(gpu(counters={"ecc uncorrected, since boot": 3}, vendor=Vendor.NVIDIA)),
            "data 3 times since boot",
            "dcgmi diag -r 3",
            True,
        ),
        (
            host(gpu(counters={"ecc uncorrected, since boot": 3}, vendor=Vendor.OTHER)),
            "data 3 times",
            "test it: its vendor's own tool",
            True,
        ),
        (host(gpu(counters={"ecc uncorrected, since boot": 3}, vendor=Vendor.AMD)), "data 3 times", "rvs", True),
        (host(gpu(link={"width": 4, "max_width": 16, "slot_width": 8})), "cuda:0 has 4 PCIe lanes", "reseat it", False),
        (host(log=(XID,)), "1 line", XID, False),
        (host(gpu(iommu_type="DMA"), gpu(1, iommu_type="DMA-FQ")), "IOMMU translates", "iommu=pt", False),
    ],
)
def test_each_kind_of_fact_has_its_advice(facts: HostFacts, what: str, fix: str, urgent: bool) -> None:
    (advice,) = advise(compared(facts))
    assert what in advice.what
    assert fix in (advice.fix or "")
    assert advice.urgent is urgent


@pytest.mark.parametrize(("kind", "urgent"), [(kinds.NO_ACCELERATOR, False), (kinds.UNUSED_CARD, True)])
def test_a_card_that_torch_cannot_use_is_urgent_and_a_host_without_one_is_not(kind: str, urgent: bool) -> None:
    (advice,) = advise(compared(findings=(Finding(kind=kind, severity="warning", message="m", next="n"),)))
    assert (advice.what, advice.fix, advice.urgent) == ("m", "n", urgent)


@pytest.mark.parametrize(
    "facts",
    [
        host(),
        host(gpu(counters={REMAP_FAILED: 0, REMAP_PENDING: 0, "ecc corrected, ever": 9})),
        host(gpu(counters={"ecc uncorrected, since boot": 3}, after={"ecc uncorrected, since boot": 4})),
        host(gpu(link={"width": 8, "max_width": 16, "slot_width": 8})),
        host(log=(XID,), new_log=(XID,)),
        host(gpu(iommu_type="DMA")),
        host(gpu(iommu_type="identity"), gpu(1, iommu_type="identity")),
    ],
)
def test_what_is_fine_or_a_finding_already_has_none(facts: HostFacts) -> None:
    assert advise(compared(facts)) == ()


def test_findings_come_first_and_notes_are_left_out() -> None:
    findings = tuple(
        Finding(kind="zeros", severity=severity, message=severity, next=f"fix {severity}")
        for severity in ("error", "warning", "note")
    )
    facts = host(gpu(counters={REMAP_PENDING: 1}))
    found = advise(compared(facts, findings=findings, verdict="inconsistent"))
    assert [(a.what.partition(" waits")[0], a.urgent) for a in found] == [
        ("error", True),
        ("cuda:0", True),
        ("warning", False),
    ]
    assert found[0] == Advice(what="error", fix="fix error", urgent=True)


def test_two_captures_of_one_host_give_its_advice_once() -> None:
    facts = host(gpu(counters={REMAP_PENDING: 1}))
    assert len(advise(compared(facts, facts))) == 1


def test_every_fact_has_its_line() -> None:
    facts = host(
        gpu(iommu_group="7", iommu_type="DMA", link={"width": 4}),
        gpu(1),
        kernel="6.1",
        boot_id="b",
        uptime_s=7200.0,
        iommu="dmar0",
        iommu_options=("iommu=pt",),
        links=(Link(a="cuda:0", b="cuda:1", topology="PHB", ancestor="0000:00:01.0", peer="ok"),),
        log=(XID,),
        unread={"acs": "not readable without root"},
    )
    lines = list(about(facts))
    assert "kernel 6.1" in lines[0]
    assert "2.0 h" in lines[0]
    assert lines[1] == "IOMMU: dmar0 (iommu=pt)"
    assert [line.partition(":")[0] for line in lines[2:4]] == ["cuda", "cuda"]
    assert "PHB" in lines[4]
    assert "0000:00:01.0" in lines[4]
    assert lines[5].endswith(XID)
    assert lines[6] == "acs: not readable without root"
