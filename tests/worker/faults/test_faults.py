"""Every fault that can be planted is found and named; without it the same run is clean (see test_end_to_end)."""

from __future__ import annotations

import dataclasses
import json
import os
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from consistency.capture.folder import SCHEMA, CaptureManifest, worker_slug
from consistency.capture.reader import read_capture
from consistency.capture.records import WorkerInfo
from consistency.capture.writer import CaptureWriter
from consistency.case.load_path import LoadPath
from consistency.case.named_adapters import NamedAdapter
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.stage import Level, Stage
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison, Finding
from consistency.devices.discovery import discover
from consistency.extras.diagnosis.drill.plantable import several_adapters
from consistency.extras.peft_api.adapters.spec import ADAPTERS
from consistency.extras.peft_api.wrapping.faults import HARMLESS_WRAPPER
from consistency.extras.serving.generation.spec import GENERATION
from consistency.extras.training.trajectory.spec import TRAJECTORY
from consistency.worker import session
from consistency.worker.faults import plant
from consistency.worker.faults.catalogue import FAULTS
from consistency.worker.faults.fault import Fault, Need
from consistency.worker.protocol import EventLog, Job
from tests.conftest import FinishedRun, RunSuiteWithFaults
from tests.golden.executed import shows
from tests.reported import rows

pytestmark = pytest.mark.process

Run = Callable[..., Comparison]
FAULTY = "cpu@baseline"
ONE_LAYER = ("merged::model.layers.0.self_attn.q_proj",)

# what two workers are asked in turn, and the faults in it
CASES: dict[str, dict[str, Any]] = {
    "all stages": {},
    "one on all devices": {"stages": ("adapter",)},
    "one load path": {"stages": ("adapter",)},
    "setting": {"stages": ("merged",)},
    "no repeats": {"stages": ("merged",), "repeat": 2},
    "seldom": {"stages": ("merged",), "only": ONE_LAYER},
    "seldom, in a soak": {"stages": ("merged",), "only": ONE_LAYER, "soak": "3s", "load": True},
    "no reference": {"stages": ("merged", "forward")},
}
PLANTED = {
    "all stages": {FAULTY: "adapter-zeros"},
    "one on all devices": {"cpu": "adapter-zeros", FAULTY: "adapter-zeros"},
    "one load path": {FAULTY: "load-path-low-memory-rounds"},
    "setting": {FAULTY: "setting-flipped"},
    "no repeats": {FAULTY: "merge-not-repeatable"},
    "seldom": {FAULTY: "merge-bit-flip-now-and-then"},
    "seldom, in a soak": {FAULTY: "merge-bit-flip-now-and-then"},
    "no reference": {"cpu": "out-of-memory"},
}

# what is found otherwise than by one run with wrong values has a test below
LOST = {
    "killed": "SIGKILL",
    "hung": "no sign of life for 8 s",
    "stopped": "no sign of life for 8 s",
    "out-of-memory": "ran out of memory",
}
OTHERS = {"merge-not-repeatable", "merge-bit-flip-now-and-then", "setting-flipped"}
NOT_IN_TWO = {Need.QUANTIZED, Need.THREE_RANKS}
"""What two workers with the built-in case lack."""

HERE = [f for f in FAULTS.values() if not f.accelerators and not NOT_IN_TWO & {*f.needs}]
OF_A_GROUP = {f.name for f in HERE if Need.RANKS in f.needs}  # in tests/worker/stages/collectives
OF_SHAPES = {f.name for f in HERE if "planted_shapes" in f.plant}
"""In this process the kernels that make the passes with noise are wrong too: tests/stages/forward/test_long_text.py."""
WRONG = [f for f in HERE if f.name not in {*LOST, *OTHERS, *OF_A_GROUP, *OF_SHAPES}]
LONG = {
    name for stage in (ADAPTERS, TRAJECTORY, GENERATION) for name in [f.name for f in WRONG if f.stages[0] is stage][2:]
}
"""Faults of stages that take seconds, but for two of each."""
SENTENCES = {
    "labels-changed-on-hop": "labels changed during transfer to device cpu: labels[0, 3] was",
    "ids-past-vocabulary": "ids past the vocabulary: largest id 515, embedding has 512 rows",
    "wrapper-hides-model": "the wrapper hides config",
    "wrapper-holds-twice": "39 storages are held twice: 2888192 bytes",
}
SHOWN = {*SENTENCES, "placed-elsewhere", "merge-third-copy"} - {"wrapper-hides-model"}
"""Faults of which a page shows the finding."""

CASES_PAGES = tuple(Path(__file__).parents[3] / "docs" / name for name in ("cases.md", "cases-models.md"))
STALL_S = 8.0
"""Less than the 10 s after which a worker says that it is alive: one that hangs would say so once."""
# the second pair is waited for at the same time
PAIRS = (("killed", "out-of-memory"), ("hung", "stopped"))
# a processor without AVX2 has no third worker to lose
LOSABLE = [info.spec.name for info in discover() if info.spec.name in (FAULTY, "cpu@avx2")]
# a scaling is in no file, a merge that no device makes is no fault of one, and the forward pass needs a CPU's own error
NEED_ANOTHER = {
    "adapter-wrong-scaling",
    "merge-fails",
    "forward-off",
    "forward-fails",
    "router-flipped",
    "gradient-off",
    "gradient-zeros",
}
NEED_RELOAD = {"adapter-copy-dropped-later"}
ALTERNATIVE_PATHS = (LoadPath.ISOLATED_CPU, LoadPath.ISOLATED_LOW_MEMORY, LoadPath.ISOLATED_TRANSFORMERS)
# fault: what the load paths say of it
BY_LOAD_PATH = {
    "load-path-copies-dropped": "correct with torch_device=cpu: copies through the device that PEFT chooses",
    "load-path-low-memory-rounds": "with low_cpu_mem_usage=True, and correct without: a dtype conversion",
    "load-path-transformers-zeros": "and correct with PEFT's: transformers' loader",
    "adapter-zeros": "with PEFT's loader, and correct with transformers': PEFT's loader",
}


def test_every_fault_is_a_function_that_plants_it() -> None:
    """Those that need accelerators are tried on the double: inside_memory.py and test_offload_on_double.py.

    Those of quantized bases are tried in test_quantized_base.py, which needs their libraries.
    """
    found = [pkgutil.resolve_name(fault.plant) for fault in FAULTS.values()]
    assert all(map(callable, found))
    assert len(set(found)) == len(found)


def test_the_documents_count_them() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "own-model.md").read_text(encoding="utf-8")
    assert f"one of {len(FAULTS)} faults" in page
    assert f"{len(HERE)} of {len(HERE)} planted faults" in page
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"one of {len(FAULTS)} faults" in readme
    assert set(re.findall(r"(\d+) of \d+ planted faults", readme)) <= {str(len(HERE))}


def errors(comparison: Comparison) -> list[Finding]:
    return [finding for finding in comparison.findings if finding.severity == "error"]


@pytest.fixture(scope="module")
def two_adapters() -> Iterator[tuple[NamedAdapter, ...]]:
    with several_adapters() as adapters:
        assert adapters is not None
        yield adapters


@pytest.fixture
def look_at_fault(tmp_path: Path, two_adapters: tuple[NamedAdapter, ...]) -> Run:
    """Run the session of a worker in this process with a fault planted, and compare what it saw."""

    def run(fault: str, stage: str, alternative_paths: tuple[LoadPath, ...] = ()) -> Comparison:
        # of one sequence's gradient luck leaves little to tell, and a cache of one has no rows to exchange
        needs_several = stage in ("gradient", "generation")
        level = Level.STANDARD if fault in NEED_RELOAD or needs_several else Level.QUICK
        wrapper = HARMLESS_WRAPPER if stage == "wrapping" else None
        base = getattr(FAULTS.get(fault), "base", None) or "builtin:llama"
        steps = getattr(FAULTS.get(fault), "steps", None)
        options = Options(base=base, stages=(Stage(stage),), level=level, wrapper=wrapper, steps=steps)
        if stage == "adapters":
            options = dataclasses.replace(options, adapters=two_adapters)
        case = prepare_case(options)
        workers = {"cpu": None, FAULTY: fault} if fault in NEED_ANOTHER else {FAULTY: fault}
        slugs: list[str] = []
        with CaptureWriter(tmp_path / "capture") as writer:
            for name, planted in workers.items():
                slug = worker_slug(name, "isolated")
                folder = writer.worker_folder(slug)
                job = Job(
                    case=case, name=name, device="cpu", load_path="isolated", folder=str(folder),
                    blobs=str(writer.blobs),
                    scratch=str(tmp_path), settings={}, makes_reference=not slugs, threads=1, parent_pid=os.getpid(),
                    fault=planted, alternative_paths=alternative_paths,
                )  # fmt: skip
                with EventLog(folder / "events.jsonl") as events:
                    session.run(job, events)
                info = WorkerInfo(name=name, load_path="isolated", architecture=name, model="chip", status="ok")
                writer.write_worker(slug, info)
                slugs.append(slug)
            manifest = CaptureManifest(
                schema=SCHEMA, tool="0", created="2026-01-01", host="here", case=case, workers=tuple(slugs)
            )
            return compare([read_capture(writer.commit(manifest))])

    return run


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize(
    "fault", [pytest.param(f, id=f.name, marks=pytest.mark.slow if f.name in LONG else ()) for f in WRONG]
)
def test_wrong_numbers_are_found_and_named(look_at_fault: Run, fault: Fault) -> None:
    name, stage = fault.name, fault.stages[0]
    found = look_at_fault(name, stage, ALTERNATIVE_PATHS if name in BY_LOAD_PATH else ())
    assert found.verdict == "inconsistent"
    assert found.exit_status == 1
    first = errors(found)[0]
    assert first.kind == fault.expected
    assert first.workers == (FAULTY,)
    assert first.message.startswith(f"{stage} · {FAULTY} · {SENTENCES.get(name, '')}")
    assert all(name.startswith(f"{stage}::") for name in first.tensors)
    assert {name for d in found.first_divergence for name in d.workers} == {FAULTY}
    assert BY_LOAD_PATH.get(name, "") in first.message
    assert name not in SHOWN or any(shows(page, first.message) for page in CASES_PAGES), first.message
    assert len(errors(found)) == 1 or name not in BY_LOAD_PATH, (
        "one cause is one finding, on however many load paths it shows"
    )


@pytest.mark.parametrize(
    "stage",
    ["transfer", "operators", "base", "adapter", "merged", "gradient", "adapters", "memory", "sharding", "wrapping"],
)
def test_without_a_fault_nothing_is_found(look_at_fault: Run, stage: str) -> None:
    with plant("merge-off"):
        pass  # and a fault that was taken away is gone
    found = look_at_fault(None, stage)
    assert found.verdict == "consistent"
    assert found.findings == ()


@pytest.fixture(scope="module")
def found_in(run_suite_with_faults: RunSuiteWithFaults) -> dict[str, Comparison]:
    return run_suite_with_faults(CASES, PLANTED)


def test_wrong_numbers_are_found_without_another_device(look_at_fault: Run) -> None:
    """A device that is held against its own neighbours alone passes when all are wrong; the file is the reference."""
    found = look_at_fault("adapter-bit-flip", "adapter")
    assert len(found.workers) == 1
    assert [f.kind for f in errors(found)] == ["bit-flip"]
    assert "bit 20 (mantissa)" in errors(found)[0].detail[0]


def test_same_fault_on_all_devices_is_found(found_in: dict[str, Comparison]) -> None:
    (finding,) = errors(found_in["one on all devices"])
    assert finding.kind == "zeros"
    assert finding.workers == ("cpu", FAULTY)
    assert "28 of 28 lora_B tensors" in finding.message


def test_wrong_bytes_show_in_what_is_computed_from_them(found_in: dict[str, Comparison]) -> None:
    found = found_in["all stages"]
    (cause,) = errors(found)
    assert (cause.message.split(" · ")[0], cause.kind) == ("adapter", "zeros")
    assert {one.stage for one in cause.consequences} == {"merged", "forward", "gradient"}
    assert {name.partition("::")[0] for name in cause.tensors} == {"adapter", "merged", "forward", "gradient"}
    (divergence,) = found.first_divergence
    assert (divergence.stage, divergence.tensor) == ("adapter", "lora_B")
    assert divergence.layer.startswith("model.layers.0.")


@pytest.fixture(scope="module")
def lost_in(run_suite_with_faults: RunSuiteWithFaults) -> dict[str, Comparison]:
    cases = {"+".join(faults): {"stages": ("adapter", "merged")} for faults in PAIRS}
    planted = {"+".join(faults): dict(zip(LOSABLE, faults, strict=False)) for faults in PAIRS}
    return run_suite_with_faults(cases, planted, forked=True, devices=("cpu", *LOSABLE), stall=STALL_S)


@pytest.mark.slow
@pytest.mark.parametrize("faults", PAIRS, ids="+".join)
def test_lost_workers_are_named_and_the_rest_is_compared(
    lost_in: dict[str, Comparison], faults: tuple[str, str]
) -> None:
    planted = dict(zip(LOSABLE, faults, strict=False))
    found = lost_in["+".join(faults)]
    assert found.verdict == "incomplete"
    assert found.exit_status == 3
    by_worker = {f.workers[0]: f for f in errors(found)}
    assert set(by_worker) == set(planted)
    for worker, fault in planted.items():
        finding = by_worker[worker]
        assert finding.kind == "lost-worker"
        assert LOST[fault] in finding.message
        assert "last event: merged" in finding.message
        if fault == "hung":
            assert any("faults" in line and "in hang" in line for line in finding.detail)
    adapter = [t for t in found.tensors if t.stage == "adapter"]
    assert adapter
    assert {row.status for t in adapter for row in t.outcomes} == {"equal"}
    merged = [pair for t in found.tensors if t.stage == "merged" for pair in t.by_worker()]
    assert {row.status for worker, row in merged if worker in planted} == {"blocked"}
    assert {row.status for worker, row in merged if worker == "cpu"} == {"within"}


def test_loss_of_the_worker_that_makes_the_reference_blocks_the_others(found_in: dict[str, Comparison]) -> None:
    found = found_in["no reference"]
    assert found.exit_status == 3
    rows = [row for t in found.tensors if t.stage == "forward" for worker, row in t.by_worker() if worker == FAULTY]
    assert {row.status for row in rows} == {"blocked"}
    assert "cpu, which computes it, is lost" in (rows[0].reason or "")


def test_bits_that_do_not_repeat(found_in: dict[str, Comparison], finished_run: FinishedRun) -> None:
    found = found_in["no repeats"]
    assert {f.kind for f in errors(found)} == {"not-repeatable"}
    assert errors(found)[0].workers == (FAULTY,)
    report = json.loads((finished_run.folder / "report.json").read_text())  # a healthy run of as many repeats
    assert report["verdict"] == "consistent"
    assert FAULTY in {row["worker"] for row in rows(report, "merged")}


def test_a_fault_in_every_20th_repeat_is_found_by_a_soak(found_in: dict[str, Comparison]) -> None:
    assert found_in["seldom"].verdict == "consistent"
    found = found_in["seldom, in a soak"]
    (finding,) = errors(found)
    assert (finding.kind, finding.workers) == ("not-repeatable", (FAULTY,))
    soaks = {worker.name: worker.soak for worker in found.workers}
    healthy, faulty = soaks["cpu"], soaks[FAULTY]
    assert healthy is not None
    assert faulty is not None
    assert faulty.changed is not None
    assert f"in {faulty.changed.count} of {faulty.begun} repeats" in finding.message
    assert (healthy.changed, healthy.complete) == (None, True)
    assert faulty.load is not None
    assert faulty.load.products > 0
    (tensor,) = {t.name for t in found.tensors if any(row.repeated is False for row in t.outcomes)}
    assert (tensor,) == finding.tensors


def test_the_default_run_tells_a_fault_of_one_load_path(found_in: dict[str, Comparison]) -> None:
    """The default load path is right, so that no other stage of the run can see it."""
    found = found_in["one load path"]
    (finding,) = errors(found)
    assert (finding.kind, finding.workers) == ("rounded-to-bf16", (FAULTY,))
    assert BY_LOAD_PATH["load-path-low-memory-rounds"] in finding.message
    assert finding.load_paths == ("isolated+low-memory",)
    wrong = [t for t in found.tensors if any(row.status == "outside" for row in t.outcomes)]
    assert {t.load_path for t in wrong} == {"isolated+low-memory"}
    assert len(wrong) == 56
    assert found.exit_status == 1


def test_setting_that_was_flipped_in_mid_run(found_in: dict[str, Comparison]) -> None:
    found = found_in["setting"]
    changed = [f for f in found.findings if f.kind == "setting-changed"]
    assert changed
    assert changed[0].workers == (FAULTY,)
    assert "float32_matmul_precision changed to medium during merged" in changed[0].message


@pytest.mark.slow
def test_equal_devices_that_differ_inside_the_bound(run_suite_with_faults: RunSuiteWithFaults) -> None:
    """Two workers of one program must agree to the bit, however small the difference."""
    devices = ("cpu", "cpu@avx512")
    from consistency.devices.discovery import cpu_info
    from consistency.devices.spec import parse_device
    from consistency.errors import UsageError

    try:
        cpu_info(parse_device("cpu@avx512"))
    except UsageError:
        pytest.skip("this processor has no AVX-512, so no second name for its native kernels")
    cases = {name: {"stages": ("merged",)} for name in ("faulty", "healthy")}
    found_in = run_suite_with_faults(cases, {"faulty": {"cpu@avx512": "merge-not-repeatable"}}, devices=devices)
    found = found_in["faulty"]
    assert [f.kind for f in errors(found)] == ["same-device-type"]
    assert all(row.status == "within" for t in found.tensors for row in t.outcomes)
    assert found.exit_status == 1
    assert found_in["healthy"].verdict == "consistent"
