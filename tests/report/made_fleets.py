"""A comparison of many workers: hosts of eight devices, in turn of two architectures, with a few that are wrong."""

from __future__ import annotations

from typing import Any

from consistency.comparison.outcomes import Outcome
from consistency.comparison.result import ArchitectureGroup, Comparison, Finding, Source, TensorComparison
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.numerics import words
from consistency.numerics.real import Real
from tests.report.made_comparisons import comparison, worker

KINDS = ("Ampere sm_80", "Hopper sm_90")


def many(hosts: int, layers: int, *, wrong: tuple[str, ...] = (), apart: bool = False) -> Comparison:
    """Return a comparison of `hosts` of eight devices; with `apart` no two have the same bits in what is computed."""
    names = tuple(f"node-{host:04}:cuda:{device}" for host in range(hosts) for device in range(8))
    of = {kind: tuple(name for name in names if int(name[5:9]) % 2 == place) for place, kind in enumerate(KINDS)}
    right = tuple(name for name in names if name not in wrong)
    plain: dict[str, Any] = {"load_path": "isolated", "shape": (2, 2), "dtype": "float32"}
    tensors = []
    for place in range(layers):
        where = {**plain, "layer": f"layers.{place}"}
        equal = Outcome(workers=right, reference="file", status="equal", elements=4)
        bad = Outcome(workers=wrong, reference="file", status="outside", elements=4, word=words.ZEROS,
                  max_abs=Real("nan"), evidence={"nonzero": 4})  # fmt: skip
        rows = (equal, bad) if wrong else (equal,)
        classes = (right, wrong) if wrong else (names,)
        tensors.append(
            TensorComparison(
                stage="adapter", tensor="lora_B", rule="bitwise", classes=classes, outcomes=rows, workers=names, **where
            )
        )
        sets = tuple((name,) for name in names) if apart else tuple(of.values())
        found = tuple(
            Outcome(workers=some, reference="float64", status="within", elements=4, ratio=Real((number + 1) / 9999))
            for number, some in enumerate(sets)
        )
        tensors.append(
            TensorComparison(
                stage="merged", tensor="weight", rule="bound", classes=sets, outcomes=found, workers=names, **where
            )
        )
    findings = (Finding(kind="zeros", severity="error", message="zeros", workers=wrong),) if wrong else ()
    return comparison(
        tensors,
        verdict="inconsistent" if wrong else "consistent",
        reference=names[0],
        workers=tuple(
            worker(name, KINDS[int(name[5:9]) % 2], uuid=f"GPU-{place:08x}", device=f"GPU-{place:08x}", host=name[:9],
                   elapsed_s=place / 7, environment={"torch": "2.13.0", "variables": {"VISIBLE": name[-1]}})
            for place, name in enumerate(names)
        ),
        architectures=tuple(ArchitectureGroup(name=kind, workers=some) for kind, some in of.items()),
        findings=findings,
        sources=tuple(
            Source(name=f"node-{host:04}", created=f"2026-01-01T00:00:{host % 60:02}", host=f"node-{host:04}")
            for host in range(hosts)
        ),
        captures=tuple(f"/data/fleet/node-{host:04}" for host in range(hosts)),
        hosts=tuple(
            HostFacts(host=f"node-{host:04}", new_log=("Xid 79",) if host == 3 else (),
                      gpus=(Gpu(name="cuda:0", pci_bus_id="0000:17:00.0"),))
            for host in range(hosts)
        ),
    )  # fmt: skip
