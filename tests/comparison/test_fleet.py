"""Many workers: what is judged once holds for each, the work grows with the rows, and people can still read it."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from xml.etree.ElementTree import tostring

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import consistency
from consistency.capture.folder import SCHEMA, Capture, CaptureManifest, WorkerCapture
from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.reader import RecordPool, read_capture
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.case.case import Case
from consistency.comparison.by_worker import worst_ratios
from consistency.comparison.compare import compare
from consistency.comparison.findings.causes import causes_of
from consistency.comparison.judge import judge
from consistency.comparison.layers import layers_of
from consistency.comparison.records import tables_of
from consistency.comparison.result import Comparison, TensorComparison
from consistency.comparison.workers import ComparedWorker, choose_reference, gather, on_load_path
from consistency.numerics import words
from consistency.report import json as report_json
from consistency.report.html import as_html
from consistency.report.junit import as_junit
from consistency.report.markdown import as_markdown
from consistency.workflows import comparing
from tests.comparison.made_records import computed, digest, forward, moved, rounding
from tests.conftest import MakeCapture
from tests.report.printed import printed

# --- captures in memory ---------------------------------------------------------------------------------------------


def make_info(name: str, **fields: Any) -> WorkerInfo:
    plain: dict[str, Any] = {"load_path": "isolated", "architecture": "Hopper sm_90", "model": "H100", "status": "ok"}
    return WorkerInfo(name=name, **{**plain, **fields})


def make_capture_of(number: int, info: WorkerInfo, records: Sequence[TensorRecord]) -> Capture:
    return Capture(
        folder=Path(f"/nowhere/node-{number:04}"),
        manifest=CaptureManifest(
            schema=SCHEMA, tool="0", created="2026-01-01", host="h", workers=(),
            case=Case(name="made-up", base="base", adapter="adapter"),
        ),
        workers=(WorkerCapture(info=info, parts=(tuple(records),)),),
    )  # fmt: skip


def unshared(records: Sequence[TensorRecord]) -> list[TensorRecord]:
    return [decode_json(encode_json(record), TensorRecord) for record in records]


def layers(count: int, bits: str, *, faulty: bool = False) -> list[TensorRecord]:
    """Return the records of a worker: `count` layers of four tensors, of which two are computed."""
    found = []
    for i in range(count):
        right = moved(layer=f"layers.{i}", order=i)
        wrong = moved("x", layer=f"layers.{i}", word=words.ZEROS, order=i)
        found += [
            moved(layer=f"layers.{i}", stage="base", tensor="weight", order=i),
            wrong if faulty else right,
            computed(bits, layer=f"layers.{i}", order=i),
            forward(bits),
        ]
        found[-1] = decode_json(encode_json(found[-1]).replace(b'"logits"', f'"layers.{i}"'.encode()), TensorRecord)
    return found


def fleet(
    workers: int, tensors: int = 2, *, apart: bool = False, faulty: frozenset[int] = frozenset()
) -> list[Capture]:
    """Return captures of a CPU and GPUs, which agree with one another to the bit or not at all."""
    alike = {is_faulty: tuple(layers(tensors, "gpu", faulty=is_faulty)) for is_faulty in (False, True)}
    captures = [make_capture_of(0, make_info("cpu", architecture="x86-64", model="EPYC"), layers(tensors, "cpu"))]
    for number in range(1, workers):
        own = layers(tensors, f"{number}", faulty=number in faulty) if apart else ()
        seen = own or alike[number in faulty]
        captures.append(make_capture_of(number, make_info("cuda:0"), seen))
    return captures


def scattered(workers: int, tensors: int) -> list[Capture]:
    """Return captures in which each tensor is wrong on workers of its own: as many findings as tensors."""
    right, wrong = layers(tensors, "gpu"), layers(tensors, "gpu", faulty=True)
    captures = fleet(1, tensors)
    for number in range(1, workers):
        lot = random.Random(number)
        seen = [w if lot.random() < 0.2 else r for r, w in zip(right, wrong, strict=True)]
        captures.append(make_capture_of(number, make_info("cuda:0"), seen))
    return captures


# --- what is judged once holds for each -----------------------------------------------------------------------------

PALETTE: dict[str, list[TensorRecord]] = {
    "moved": [
        moved(), moved("x"), moved("other", "other"), moved("other", "other", blob="ab" * 32, reference_blob="ab" * 32),
        moved(status="skipped", digest=None, reason="so it is"), moved(repeats=(digest("z"),)),
    ],
    "bound": [computed(), computed("b"), computed("c", 3.0), computed(status="skipped", digest=None, measure=None)],
    "relative": [forward(), forward("b", 1e-3), forward("c", 1e-6, rounding(1e-5)), forward("d", 1e-5, rounding(1e-9))],
    "peer": [
        computed(bits, stage="base", layer="rotary", tensor="inv_freq", rule="peer", status="measured", measure=None)
        for bits in "ab"
    ],
}  # fmt: skip
WORKERS = [
    make_info("cpu", architecture="x86-64", model="EPYC"),
    make_info("cpu@avx2", architecture="x86-64 AVX2", model="EPYC"),
    make_info("cuda:0", kernel_key="a"),
    make_info("cuda:0", kernel_key="a"),
    make_info("cuda:1", kernel_key="b"),
    make_info("cuda:2", status="lost", reason="was killed by SIGKILL"),
    make_info("cuda:2", status="lost", reason="ran out of memory"),
]
one_of_each = st.fixed_dictionaries({rule: st.sampled_from([None, *records]) for rule, records in PALETTE.items()})


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(WORKERS), one_of_each), min_size=1, max_size=8))
@settings(deadline=None, max_examples=300)
def test_workers_that_share_a_record_are_judged_like_each_alone(
    drawn: list[tuple[WorkerInfo, dict[str, TensorRecord | None]]],
) -> None:
    shared, alone = [], []
    for number, (info, seen) in enumerate(drawn):
        records = [record for record in seen.values() if record is not None]
        shared.append(make_capture_of(number, info, records))
        alone.append(make_capture_of(number, info, unshared(records)))
    assert encode_json(compare(shared)) == encode_json(compare(alone))


def one_by_one(found: Comparison) -> Comparison:
    """Return a comparison in which every worker has an outcome of its own, as one that a program made."""
    tensors = (
        msgspec.structs.replace(
            tensor, outcomes=tuple(one for worker in tensor.workers if (one := tensor.outcome(worker)) is not None)
        )
        for tensor in found.tensors
    )
    return msgspec.structs.replace(found, tensors=tuple(tensors))


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(WORKERS), one_of_each), min_size=1, max_size=8), st.booleans())
@settings(deadline=None, max_examples=60)
def test_what_is_said_of_groups_is_what_is_said_of_each_worker(
    drawn: list[tuple[WorkerInfo, dict[str, TensorRecord | None]]], sides: bool
) -> None:
    captures = []
    for number, (info, seen) in enumerate(drawn):
        records = [record for record in seen.values() if record is not None]
        if sides:  # the same on an alternative load path, but for what is wrong with it
            records += [msgspec.structs.replace(one, load_path="isolated+low-memory") for one in records]
        captures.append(make_capture_of(number, info, records))
    found = compare(captures)
    workers = gather(captures)
    reference = choose_reference(workers)
    for load_path in found.load_paths if reference is not None else ():
        assert reference is not None
        members, own = on_load_path(workers, reference, load_path)
        for tensor in (tensor for tensor in found.tensors if tensor.load_path == load_path):
            assert list(tensor.workers) == [m.label for m in members if tensor.outcome(m.label)]
            for member in members:
                row = tensor.outcome(member.label)
                assert row is None or row == judge(member, own, (tensor.stage, tensor.layer, tensor.tensor))
            digests = [{m.records[k].digest for m in members if m.label in alike and (k := key_of(tensor)) in m.records}
                       for alike in tensor.classes]  # fmt: skip
            assert all(map(len, digests)), "no class without bits"
            assert len(set().union(*digests)) == sum(map(len, digests)), "workers of two classes differ"
            assert all(len(some) == 1 for some in digests), "workers of one class agree"
    single = one_by_one(found)
    assert printed(found, verbose=True) == printed(single, verbose=True)
    assert as_html(found) == as_html(single)
    assert as_markdown(found) == as_markdown(single)
    assert list(layers_of(found)) == list(layers_of(single))
    assert tostring(as_junit(found)) == tostring(as_junit(single))
    assert worst_ratios(found) == worst_ratios(single)
    finding = functools.partial(causes_of, next_step=lambda _: None)
    assert list(finding(found.tensors)) == list(finding(single.tensors))


def key_of(tensor: TensorComparison) -> tuple[str, str, str]:
    return (tensor.stage, tensor.layer, tensor.tensor)


def test_what_one_capture_has_lost_another_may_hold(make_capture: MakeCapture) -> None:
    """Two captures with one record: the tensor it names is in the second alone, and there it is measured."""
    import torch
    from safetensors.torch import save_file

    from consistency.capture.folder import blob_key

    names = []
    tensors = [torch.zeros(2, 2), torch.ones(2, 2)]
    for tensor in tensors:
        names.append(blob_key("float32", tensor.shape, tensor.numpy().tobytes()))
    one = make_capture("a", {"cpu": [moved("f", "f", blob=names[0], reference_blob=names[0])]})
    other = moved("g", "g", blob=names[1], reference_blob=names[1])
    # or the second and the third were a majority
    again = make_capture("a2", {"cpu": [moved("f", "f", blob=names[0], reference_blob=names[0])]})
    folders = [one, make_capture("b", {"cpu": [other]}), make_capture("c", {"cpu": [other]}), again]
    for folder, place in ((folders[0], 0), (folders[2], 1)):
        save_file({"tensor": tensors[place]}, folder / "blobs" / f"{names[place]}.safetensors")
    found = comparing.compare_folders(folders, None)
    first, second = (found.tensors[0].outcome(name) for name in ("b:cpu", "c:cpu"))
    assert first is not None
    assert "kept" in first.evidence
    assert second is not None
    assert second.mismatched == 4


def test_equal_stages_are_read_once(make_capture: MakeCapture) -> None:
    """Only the lines of a stage in which a worker differs are its own, and so is no work per tensor of the others."""
    fact = computed(stage="memory", layer="process", tensor="resident", rule="limit", measure=None, evidence={"b": 1})
    seen = [[moved(), computed(), fact], [moved(), computed(), msgspec.structs.replace(fact, evidence={"b": 2})]]
    folder = make_capture("a", {"cpu": seen[0], "cuda:0": seen[1]})
    cpu, cuda = read_capture(folder, RecordPool()).workers
    assert [a is b for a, b in zip(cpu.parts, cuda.parts, strict=True)] == [True, True, False]
    workers = gather([read_capture(folder)])
    assert len(tables_of(worker.records for worker in workers)) == 4
    assert [list(worker.records.values()) for worker in workers] == seen


def test_equal_lines_are_one_record(make_capture: MakeCapture) -> None:
    folder = make_capture("a", {"cpu": [moved(), computed()], "cuda:0": [moved(), computed("b")]})
    pool = RecordPool()
    first, second = (read_capture(folder, pool) for _ in range(2))
    cpu, cuda = (worker.records for worker in first.workers)
    assert cpu[0] is cuda[0]
    assert cpu[0] is second.workers[0].records[0]
    assert (cpu[1].digest, cuda[1].digest) == (digest("a"), digest("b"))
    apart = read_capture(folder)
    assert apart == first
    assert apart.workers[0].records[0] is not cpu[0]


# --- the work grows with the rows -----------------------------------------------------------------------------------


def test_of_workers_of_one_kind_one_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(subject: ComparedWorker, *rest: Any) -> Any:
        calls.append(subject.label)
        return judge(subject, *rest)

    monkeypatch.setattr("consistency.comparison.stage_cohorts.judge", counted)
    counts = []
    for workers in (4, 40, 400):
        calls.clear()
        found = compare(fleet(workers))
        assert sum(len(tensor.workers) for tensor in found.tensors) == 8 * workers
        counts.append(len(calls))
    assert counts == [16, 16, 16]  # 8 tensors, on the CPU and on one GPU


def steps(captures: list[Capture]) -> int:
    """Count the lines and calls of this package that comparing and reporting takes.

    Every round of a loop, of a comprehension and of a generator is one, also where all of it is on one line.
    """
    home = str(Path(consistency.__file__).parent)
    count = 0

    def enter(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(home):
            return None
        count += 1
        return watch

    def watch(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return watch

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        found = compare(captures)
        printed(found)
        report_json.as_bytes(found)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["alike", "apart", "scattered"])
@pytest.mark.parametrize("grows", ["workers", "tensors"])
def test_the_work_grows_no_faster_than_the_rows(grows: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one size to twice that size as much is added as at most from half of it: 2 where linear, 4 where quadratic.

    What C code does inside one line is not counted; benchmarks/scaling.py measures the time of all of it.
    """
    monkeypatch.setattr("consistency.report.sentences.MOST_COLUMNS", 0)  # what is done of a fleet alone, for every size
    monkeypatch.setattr(report_json, "MOST_IN_FULL", 8)
    monkeypatch.setattr("consistency.report.ranges.MOST_NAMED", 0)
    faulty = frozenset(range(3, 200, 9))

    def work(size: int) -> int:
        workers, tensors = (size, 6) if grows == "workers" else (12, size)
        if kind == "scattered":
            return steps(scattered(workers, 2 * tensors))
        return steps(fleet(workers, tensors, apart=kind == "apart", faulty=faulty))

    work(12)  # fills caches
    small, middle, large = work(24), work(48), work(96)
    # linear work measures 1.87 to 2.02 (what does not grow at all is in no difference; tables have a longest length)
    assert (large - middle) / (middle - small) < 2.05


def test_a_worker_that_saw_what_others_saw_costs_nothing_per_tensor() -> None:
    """What it adds to the work is the same with four times the tensors."""
    faulty = frozenset({3, 7})
    steps(fleet(10, 4, faulty=faulty))  # fills caches
    few, many = (
        steps(fleet(60, tensors, faulty=faulty)) - steps(fleet(30, tensors, faulty=faulty)) for tensors in (4, 16)
    )
    assert many < 1.1 * few


# --- people can still read it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [False, True], ids=["alike", "apart"])
def test_the_report_of_a_fleet_fits_some_pages(apart: bool) -> None:
    found = compare(fleet(1000, 3, apart=apart, faulty=frozenset({7, 700})))
    text = printed(found)
    assert len(text.splitlines()) < 80
    assert len(text) < 10_000
    assert "zeros where the file is nonzero in 3 of 3 lora_B tensors" in text
    table = text.partition("forward\n")[2].partition("= bitwise equal")[0]
    assert "✗ 3/3" in table
    assert "node-0000:cpu (reference)" in table
    if apart:
        assert "992 others, 992 different results" in table
    else:
        assert "and 994 more" in table
        assert "node-0007:cuda:0  node-0700:cuda:0" in table
    assert len(table.splitlines()) < 16


def test_a_bad_worker_is_not_summed_up_with_good_ones() -> None:
    """The last of a thousand kinds of bits is the one that is wrong: it has a line of its own."""
    table = printed(compare(fleet(1000, 1, apart=True, faulty=frozenset({999}))))
    (line,) = [line for line in table.splitlines() if line.strip().startswith("node-0999:cuda:0 ")]
    assert "✗" in line


def test_what_is_summed_up_shows_its_worst() -> None:
    faulty = frozenset(range(1, 60))
    table = printed(compare(fleet(80, 2, apart=True, faulty=faulty))).partition("forward\n")[2]
    (line,) = [line for line in table.splitlines() if " others, " in line]
    assert "72 others, 72 different results" in line
    assert "✗ 104/144" in line  # 52 of the 59 faulty ones, each with 2 of its 2 adapter tensors


def test_findings_are_gathered_and_cut() -> None:
    lost = [make_capture_of(i, make_info("cuda:0", status="lost", reason="no sign of life"), []) for i in range(1, 300)]
    found = compare([*fleet(1), *lost])
    assert [f.kind for f in found.findings] == ["lost-worker"]
    assert found.findings[0].message == (
        "workers node-0001:cuda:0, node-0002:cuda:0, node-0003:cuda:0, node-0004:cuda:0, node-0005:cuda:0 and 294 more "
        "were lost: no sign of life"
    )
    assert len(found.findings[0].workers) == 299
    many = [
        make_capture_of(i, make_info("cuda:0", status="lost", reason=f"reason {i}"), []) for i in range(1, 300)
    ]  # fmt: skip
    found = compare([*fleet(1), *many])
    assert len(found.findings) == 299
    text = printed(found)
    assert len(text.splitlines()) < 120
    assert "and 279 more findings: -v shows all" in text
    assert "reason 299" in printed(found, verbose=True)


def test_software_is_named_by_few_workers() -> None:
    captures = [
        make_capture_of(i, make_info("cuda:0", environment={"torch": "2.8" if i % 2 else "2.13"}), [moved()])
        for i in range(100)
    ]
    (finding,) = compare(captures).findings
    assert finding.message.endswith("node-0009:cuda:0 and 45 more")
    assert len(finding.message) < 300
