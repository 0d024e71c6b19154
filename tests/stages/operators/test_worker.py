"""Operators on a device that lacks a dtype or a kernel, that fails, and that gives something else."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from consistency.capture.names import UNSUPPORTED
from consistency.capture.records import TensorRecord
from consistency.capture.writer import CaptureWriter
from consistency.case.stage import Level
from consistency.case.tolerance import Override
from consistency.devices.backends import BACKENDS
from consistency.devices.products import Products
from consistency.numerics.precision import Precision
from consistency.stages.operators import worker as operators
from consistency.stages.operators.table import Operation, operations
from consistency.worker.protocol import EventLog
from consistency.worker.recorder import Recorder
from tests.capture.whole import read_records
from tests.comparison.made_records import compared, computed, only_row
from tests.conftest import MakeCapture


def look(
    folder: Path, *, only: Sequence[str] = (), tolerance: Sequence[Override] = (), **options: object
) -> dict[tuple[str, str], TensorRecord]:
    trials = operators.Trials(device=torch.device("cpu"), **{"level": Level.QUICK, **options})  # type: ignore[arg-type]
    with CaptureWriter(folder / "capture") as writer:
        home = writer.worker_folder("cpu.isolated")
        with (
            EventLog(home / "events.jsonl") as events,
            Recorder(home, writer.blobs, only=only, tolerance=tolerance) as record,
        ):
            operators.try_all(trials, record, events)
        return {(r.layer, r.tensor): r for r in read_records(home / "records.jsonl")}


def test_levels_try_more_and_more() -> None:
    counts = [len(operations(level)) for level in Level]
    assert 0 < counts[0] < counts[1] < counts[2]
    names = [(o.name, o.size) for o in operations(Level.THOROUGH)]
    assert len(set(names)) == len(names), "a record is known by them"


def test_inputs_of_one_operation_do_not_depend_on_the_others() -> None:
    by_level = [{(o.name, o.size): o.inputs()[0].tobytes() for o in operations(level)} for level in Level]
    assert by_level[0].items() <= by_level[1].items() <= by_level[2].items()


def test_every_operation_has_a_record_in_every_dtype(tmp_path: Path) -> None:
    found = look(tmp_path, repeat=2)
    assert set(found) == {(o.name, f"{d} {o.size}") for o in operations(Level.QUICK) for d in o.dtypes}
    assert {r.status for r in found.values()} <= {"within", "equal"}  # some are exact on some processors
    assert {r.rule for r in found.values()} == {"bound"}
    assert all(r.repeats == (r.digest,) for r in found.values())


def test_only_what_is_asked_for_is_tried(tmp_path: Path) -> None:
    assert {name for name, _ in look(tmp_path, only=("operators::exp",))} == {"exp"}


def test_a_tolerance_of_the_users_own_replaces_the_bound(tmp_path: Path) -> None:
    given = (Override(layer="exp", atol=0.0, rtol=0.0), Override(layer="softmax", atol=1.0, rtol=0.0))
    found = look(tmp_path, tolerance=given)
    assert {r.rule for (name, _), r in found.items() if name in ("exp", "softmax")} == {"user"}
    assert {r.status for (name, _), r in found.items() if name == "exp"} == {"outside"}
    assert {r.status for (name, _), r in found.items() if name == "softmax"} == {"within"}
    assert {r.rule for (name, _), r in found.items() if name == "matmul"} == {"bound"}


@pytest.mark.parametrize(
    ("error", "status"), [(NotImplementedError("no kernel"), "skipped"), (RuntimeError("launch failed"), "missing")]
)
def test_what_there_is_no_kernel_for_is_told_from_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    def compute(operation: Operation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        raise error

    monkeypatch.setattr(operators, "compute", compute)
    found = look(tmp_path, only=("operators::exp",))
    assert {r.status for r in found.values()} == {status}
    assert all(str(error) in (r.reason or "") for r in found.values())
    assert all((UNSUPPORTED in r.evidence) is r.unsupported is (status == "skipped") for r in found.values())


def test_a_result_of_another_shape_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "compute", lambda *_: torch.zeros(3))
    assert {r.status for r in look(tmp_path, only=("operators::exp",)).values()} == {"missing"}


def test_a_dtype_that_the_device_does_not_have_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_why_no_dtype", lambda _, dtype: "no float16" if dtype == "float16" else "")
    found = look(tmp_path, only=("operators::exp",))
    assert {tensor.split()[0]: r.status for (_, tensor), r in found.items()} == {
        "float32": "within", "bfloat16": "within", "float16": "skipped",
    }  # fmt: skip


@pytest.mark.parametrize(("unsupported", "status"), [(True, "skipped"), (False, "missing")])
def test_only_what_there_is_no_kernel_for_excuses_a_device(
    make_capture: MakeCapture, unsupported: bool, status: str
) -> None:
    cpu = computed("a", stage="operators", layer="exp", tensor="float64 2048")
    other = TensorRecord(
        stage="operators", layer="exp", tensor="float64 2048", rule="bound", status="skipped", unsupported=unsupported,
        reason="no float64 on this device",
    )  # fmt: skip
    assert only_row(compared(make_capture("a", {"cpu": [cpu], "mps": [other]})), "mps").status == status


BFLOAT16 = Products(matmul=Precision.BFLOAT16)
MATMUL = ("operators::matmul", "operators::linear")


def in_bfloat16(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def compute(operation: Operation, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return real(operation, [x.bfloat16().float() if x.dtype == torch.float32 else x for x in inputs])

    return compute


def test_products_in_bfloat16_are_a_finding_unless_settings_permit_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "compute", in_bfloat16(operators.compute))
    unasked = look(tmp_path / "pinned", only=MATMUL)
    assert {r.status for r in unasked.values() if r.dtype == "float32"} == {"outside"}
    permitted = look(tmp_path / "permitted", only=MATMUL, products=BFLOAT16)
    assert {r.status for r in permitted.values()} <= {"within", "equal"}


def test_zeros_are_a_finding_where_bfloat16_is_permitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = operators.compute
    monkeypatch.setattr(operators, "compute", lambda operation, inputs: real(operation, inputs) * 0)
    found = look(tmp_path, only=MATMUL, products=BFLOAT16)
    assert {r.status for r in found.values()} == {"outside"}


def test_a_bound_that_zeros_would_pass_is_skipped_where_partial_sums_may_be_stored_in_a_half_type(
    tmp_path: Path,
) -> None:
    found = look(tmp_path, only=MATMUL, products=Products(partial_terms={"float16": 1, "bfloat16": 1}))
    skipped = {r.dtype: r.reason for r in found.values() if r.status == "skipped"}
    assert set(skipped) == {"bfloat16"}
    assert "partial sums may be stored in bfloat16" in str(skipped["bfloat16"])
    assert {r.status for r in found.values() if r.dtype == "float32"} <= {"within", "equal"}


def test_a_bound_that_zeros_would_pass_is_skipped_where_each_step_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, "cpu", dataclasses.replace(BACKENDS["cpu"], rounds_each_step=True))
    found = look(tmp_path, only=("operators::softmax",))
    skipped = {r.dtype: r.reason for r in found.values() if r.status == "skipped"}
    assert set(skipped) == {"bfloat16"}
    assert "sums are added up in bfloat16: the bound for such a long sum would let" in str(skipped["bfloat16"])
    assert {r.dtype for r in found.values() if r.status == "within"} == {"float16", "float32"}
