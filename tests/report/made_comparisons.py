"""Comparisons made by hand, for every format of the report."""

from __future__ import annotations

import random
from typing import Any

from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Finding,
    Outcome,
    Status,
    TensorComparison,
    Verdict,
    WorkerSummary,
)
from consistency.numerics import words
from consistency.numerics.real import Real
from consistency.numerics.words import Word


def worker(name: str, architecture: str = "Ampere sm_86", **fields: Any) -> WorkerSummary:
    plain: dict[str, Any] = {"load_path": "isolated", "model": "RTX A6000", "uuid": None, "status": "ok"}
    plain["reason"] = None
    return WorkerSummary(**{"name": name, "architecture": architecture, **plain, "environment": {}, **fields})


def tensor(classes: list[list[str]], *, stage: str = "adapter", layer: str = "layers.0", **of: Any) -> TensorComparison:
    statuses: dict[str, Status] = of.pop("statuses", {})
    ratio, max_ulp = of.pop("ratio", None), of.pop("max_ulp", None)
    rows = tuple(
        Outcome(
            workers=(name,), reference="file", status=statuses.get(name, "equal"),
            ratio=None if ratio is None else Real(ratio), max_ulp=max_ulp,
            worst_index=(1, 2) if name in statuses else None, word=words.ZEROS if name in statuses else None,
        )
        for names in classes for name in names
    )  # fmt: skip
    plain: dict[str, Any] = {"load_path": "isolated", "tensor": "lora_B", "shape": (2, 2), "dtype": "float32"}
    plain["rule"] = "bitwise" if ratio is None else "bound"
    return TensorComparison(
        stage=stage, layer=layer, classes=tuple(map(tuple, classes)), outcomes=rows, **{**plain, **of}
    )


def comparison(tensors: list[TensorComparison], *, verdict: Verdict = "consistent", **fields: Any) -> Comparison:
    workers = fields.pop("workers", (worker("cpu", "x86-64"), worker("cuda:0"), worker("cuda:1"), worker("cuda:2")))
    names = tuple(w.name for w in workers if w.architecture == "Ampere sm_86")
    plain: dict[str, Any] = {
        "case": "llama", "dtype": "float32", "level": "standard", "load_paths": ("isolated",), "reference": "cpu",
        "findings": (), "adapter": "adapter",
        "architectures": (
            ArchitectureGroup(name="x86-64", workers=("cpu",)),
            ArchitectureGroup(name="Ampere sm_86", workers=names),
        ),
    }  # fmt: skip
    return Comparison(verdict=verdict, workers=workers, tensors=tuple(tensors), **{**plain, **fields})


ALL = ["cpu", "cuda:0", "cuda:1", "cuda:2"]


HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\u202e<!--\"'&{{7*7}}"


SAFE = "</script><img src=x onerror=alert(1)>\\x2028\\x202e<!--\"'&{{7*7}}"  # as it is to be read


def hostile() -> Comparison:
    """Return a comparison in which every text that can come from a stranger is hostile."""
    named = Outcome(
        workers=(HOSTILE,), reference=HOSTILE, status="outside", word=Word(HOSTILE), reason=HOSTILE, mismatched=1,
        evidence={"flipped_bits": {HOSTILE: 1, "x": HOSTILE, -1: 5, 10**9: 1, 3: 2}, "gb_per_s": HOSTILE},
    )  # fmt: skip
    tensors = [
        TensorComparison(
            stage=stage, load_path=HOSTILE, layer=HOSTILE, tensor=HOSTILE, shape=(), dtype=HOSTILE, rule=HOSTILE,
            classes=(("a",), (HOSTILE,)), outcomes=(named,),
        )
        for stage in (HOSTILE, "transfer")
    ]  # fmt: skip
    person = WorkerSummary(
        name=HOSTILE, load_path=HOSTILE, architecture=HOSTILE, model=HOSTILE, uuid=HOSTILE, status=HOSTILE,  # type: ignore[arg-type]  # a hostile report
        reason=HOSTILE,
        environment={HOSTILE: {HOSTILE: HOSTILE}}, host=HOSTILE, driver=HOSTILE, asked={HOSTILE: 1},
        in_force={HOSTILE: HOSTILE},
    )  # fmt: skip
    finding = Finding(
        kind=HOSTILE, severity="error", message=HOSTILE, workers=(HOSTILE,), tensors=(HOSTILE,),
        detail=(HOSTILE, HOSTILE), next=HOSTILE,
    )  # fmt: skip
    note = Finding(kind=HOSTILE, severity="note", message=HOSTILE)
    return Comparison(
        case=HOSTILE, dtype=HOSTILE, level=HOSTILE, load_paths=(HOSTILE,), verdict="inconsistent", reference=HOSTILE,
        workers=(person, worker("plain", load_path=HOSTILE)), tensors=tuple(tensors), findings=(finding, note),
        architectures=(ArchitectureGroup(name=HOSTILE, workers=(HOSTILE,)),), not_checked=(HOSTILE,), base=HOSTILE,
        adapter=HOSTILE,
    )  # fmt: skip


def faulty() -> Comparison:
    """Return four workers, of which one holds zeros in a stage and others' bits in the next."""
    tensors = [tensor([ALL], stage="base", layer=f"model.layers.{i}.mlp", tensor="weight") for i in range(3)]
    tensors += [
        tensor([["cpu", "cuda:0", "cuda:2"], ["cuda:1"]], layer=f"model.layers.{i}.mlp", statuses={"cuda:1": "outside"})
        for i in range(3)
    ]
    within: dict[str, Status] = dict.fromkeys(ALL, "within")
    tensors += [
        tensor([["cpu"], ALL[1:]], stage="merged", layer=f"model.layers.{i}.mlp", ratio=0.3, statuses=within)
        for i in range(3)
    ]
    finding = Finding(
        kind="zeros", severity="error", message="adapter · cuda:1 · zeros in 3 of 3 lora_B tensors",
        workers=("cuda:1",), tensors=tuple(f"adapter::model.layers.{i}.mlp.lora_B" for i in range(3)),
        detail=("got 0, wanted 1", "and more"), next="consistency run --devices cpu,cuda:1",
    )  # fmt: skip
    note = Finding(kind="skipped", severity="note", message="forward was skipped")
    return comparison(tensors, verdict="inconsistent", findings=(finding, note), not_checked=("a second run",))


ARCHITECTURES = ("Volta sm_70", "Ampere sm_86", "Hopper sm_90", "x86-64 AVX-512")
_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def four_architectures(*, wrong: str = "Hopper sm_90:1") -> Comparison:
    """Return two devices per architecture, of which one is wrong in one layer."""
    devices = {name: (f"{name}:0", f"{name}:1") for name in ARCHITECTURES}
    workers = [name for names in devices.values() for name in names]

    def row(name: str, place: int) -> Outcome:
        bad = name == wrong and place == 5
        share = 3.25 if bad else 0.1 + place / 100
        status: Status = "outside" if bad else "within"
        return Outcome(workers=(name,), reference="float64", status=status, max_ulp=12,
                       max_abs=Real(share * 2e-5), allowed=Real(2e-5), ratio=Real(share),
                       worst_index=(1, 2) if bad else None)  # fmt: skip

    tensors = [
        TensorComparison(
            stage="merged", load_path="isolated", layer=f"model.layers.{place // 4}.self_attn.{_NAMES[place % 4]}",
            tensor="weight", shape=(2,), dtype="float32", rule="bound",
            outcomes=tuple(row(n, place) for n in workers),
            classes=(tuple(n for n in workers if n != wrong), (wrong,)),
        )
        for place in range(16)
    ]  # fmt: skip
    return comparison(
        tensors, workers=tuple(worker(n, n.rpartition(":")[0]) for n in workers), verdict="inconsistent",
        findings=(Finding(kind="differs", severity="error", message=f"merged · {wrong}", workers=(wrong,)),),
        architectures=tuple(ArchitectureGroup(name=n, workers=names) for n, names in devices.items()),
        reference=workers[0],
    )  # fmt: skip


def many_devices(*, wrong: str = "Ampere sm_86:17") -> Comparison:
    """Return 64 devices of three architectures, of which one is wrong in one of 64 tensors."""
    devices = {"Hopper sm_90": 32, "Ampere sm_86": 30, "Volta sm_70": 2}
    members = {name: tuple(f"{name}:{n}" for n in range(count)) for name, count in devices.items()}
    workers = [name for names in members.values() for name in names]

    def row(name: str, place: int) -> Outcome:
        bad = name == wrong and place == 45
        share = 3.25 if bad else 0.1 + place / 1000
        return Outcome(workers=(name,), reference="float64", status="outside" if bad else "within", max_ulp=12,
                       max_abs=Real(share * 2e-5), allowed=Real(2e-5), ratio=Real(share))  # fmt: skip

    tensors = [
        TensorComparison(
            stage="merged", load_path="isolated", layer=f"model.layers.{place // 4}.self_attn.{_NAMES[place % 4]}",
            tensor="weight", shape=(2,), dtype="float32", rule="bound",
            outcomes=tuple(row(n, place) for n in workers),
            classes=(tuple(n for n in workers if n != wrong), (wrong,)) if place == 45 else (tuple(workers),),
        )
        for place in range(64)
    ]  # fmt: skip
    finding = Finding(
        kind="differs", severity="error", message=f"merged · {wrong} · 1 of 64 weights exceeds its tolerance",
        workers=(wrong,), tensors=(tensors[45].name,), next="consistency reproduce out --finding 1 --out repro",
    )  # fmt: skip
    return comparison(
        tensors, workers=tuple(worker(n, n.rpartition(":")[0]) for n in workers), verdict="inconsistent",
        findings=(finding,), reference=workers[-1],
        architectures=tuple(ArchitectureGroup(name=n, workers=names) for n, names in members.items()),
    )  # fmt: skip


def computed_apart(tensors: int, workers: int) -> Comparison:
    """Return the worst for a page: every tensor computed, and no two workers with the same bits."""
    rng = random.Random(0)
    names = [f"cuda:{n}" for n in range(workers)]
    classes = tuple((name,) for name in names)
    made = [
        TensorComparison(
            stage="merged", load_path="isolated", layer=f"model.layers.{i // 25}.self_attn.q_proj.{i}", tensor="weight",
            shape=(4096, 4096), dtype="bfloat16", rule="bound", classes=classes,
            outcomes=tuple(
                Outcome(
                    workers=(name,), reference="float64", status="within", mismatched=rng.randrange(1 << 24),
                    max_abs=Real(rng.random() * 1e-5), max_ulp=rng.randrange(10_000), ratio=Real(rng.random()),
                    word=words.ACCUMULATION_ORDER,
                )
                for name in names
            ),
        )
        for i in range(tensors)
    ]  # fmt: skip
    return comparison(made, workers=tuple(worker(name) for name in names), reference="cuda:0")
