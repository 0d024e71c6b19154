"""Which setting explains a difference: the search on made-up causes, and one on real kernels."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.case.builtin import builtin_folder
from consistency.case.options import Options
from consistency.case.stage import Level
from consistency.comparison.workers import ComparedWorker, gather
from consistency.devices.discovery import discover
from consistency.errors import InputError, UsageError
from consistency.extras.diagnosis.bisect import bisect as bisecting
from consistency.extras.diagnosis.bisect.bisect import Trial, bisect, candidates, smallest
from consistency.extras.training.collectives.spec import COLLECTIVES
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.launch.change import Change
from consistency.launch.environment import worker_environment
from consistency.launch.forked import Importer, Importers
from consistency.workflows import pipeline
from tests.conftest import MakeCapture

pytestmark = pytest.mark.slow

KERNELS = [info.spec.name for info in discover() if info.spec.is_cpu]
CHANGES = tuple(Change(name=name, environment={name: None}) for name in "ABCDEF")


def cured_by(causes: set[frozenset[str]]) -> Any:
    """Return a trial in which the difference goes away with any of some sets of changes, and what goes beyond them."""

    def gone(chosen: Sequence[Sequence[Change]]) -> list[bool]:
        return [any(cause <= {change.name for change in changes} for cause in causes) for changes in chosen]

    return gone


@given(st.sets(st.frozensets(st.sampled_from("ABCDEF"), min_size=1), max_size=3))
def test_what_is_named_is_enough_and_has_no_part_to_spare(causes: set[frozenset[str]]) -> None:
    gone = cured_by(causes)
    found = smallest(CHANGES, gone)
    assert bool(found) == bool(causes)
    if found:
        assert gone([found])[0]
        for part in itertools.combinations(found, len(found) - 1):
            assert not part or not gone([part])[0]


def test_one_change_is_named_before_two() -> None:
    found = smallest(CHANGES, cured_by({frozenset("AB"), frozenset("C")}))
    assert [change.name for change in found] == ["C"]


def test_changes_of_one_thing_are_not_made_at_once() -> None:
    """Two values of a setting contradict one another: the set of all holds the first of them."""
    tried: list[tuple[str, ...]] = []

    def gone(chosen: Sequence[Sequence[Change]]) -> list[bool]:
        tried.extend(tuple(change.name for change in changes) for changes in chosen)
        return [False] * len(chosen)

    changes = [Change(name="one", threads=1), Change(name="two", threads=2), Change(name="other", settings={"a": 1})]
    assert smallest(changes, gone) == ()
    assert tried == [("one",), ("two",), ("other",), ("one", "other")]


def compared_worker(make_capture: MakeCapture, name: str, **info: Any) -> ComparedWorker:
    folder = make_capture(
        f"c-{name.replace(':', '-')}",
        {name: [TensorRecord(rule="bitwise", status="equal", stage="base", layer="l", tensor="t")]},
        info={name: info},
    )
    return gather([read_capture(folder)])[0]


def test_variant_is_taken_apart_into_its_variables(make_capture: MakeCapture) -> None:
    environment = {"environment": {"threads": 2}}
    subject = compared_worker(make_capture, "cpu@baseline", **environment)
    found = candidates(subject, compared_worker(make_capture, "cpu", environment={"threads": 1}), "merged")
    assert [change.name for change in found] == [
        "ATEN_CPU_CAPABILITY unset", "MKL_CBWR unset", "ONEDNN_MAX_CPU_ISA unset", "1 thread"
    ]  # fmt: skip


def test_accelerator_has_its_switches_tried(make_capture: MakeCapture) -> None:
    asked = {"matmul_allow_tf32": False, "cudnn_allow_tf32": False, "bf16_reduced_precision_reduction": False}
    subject = compared_worker(make_capture, "cuda:1", asked=asked, load_path="shared", environment={"threads": 1})
    names = [
        c.name for c in candidates(subject, compared_worker(make_capture, "cpu", environment={"threads": 1}), "merged")
    ]
    assert "TF32 in matrix products" in names
    assert "bfloat16 sums in reduced precision" in names
    assert "SDPA flash" in names
    assert "the other devices hidden" in names


def test_variant_with_tf32_has_it_put_back(make_capture: MakeCapture) -> None:
    subject = compared_worker(
        make_capture, "cuda:0@tf32", asked={"matmul_allow_tf32": True}, environment={"threads": 1}
    )
    asked = {"matmul_allow_tf32": False, "cudnn_enabled": True}
    found = candidates(subject, compared_worker(make_capture, "cpu", asked=asked, environment={"threads": 1}), "merged")
    assert Change(name="matmul_allow_tf32 = False", settings={"matmul_allow_tf32": False}) in found
    assert "TF32 in matrix products" not in [change.name for change in found]


@pytest.mark.parametrize(("dtype", "tried"), [("bfloat16", True), ("float32", False)])
def test_dtype_of_the_adapter_is_tried_on_a_half_precision_base(
    make_capture: MakeCapture, dtype: str, tried: bool
) -> None:
    subject = compared_worker(make_capture, "cpu@baseline", environment={"threads": 1, "dtype": dtype})
    found = candidates(subject, compared_worker(make_capture, "cpu", environment={"threads": 1}), "merged")
    assert ("autocast_adapter_dtype=False" in [change.name for change in found]) is tried


def test_adapter_has_its_paths_tried(make_capture: MakeCapture) -> None:
    subject = compared_worker(make_capture, "cuda:1", load_path="shared", environment={"threads": 1})
    found = candidates(subject, compared_worker(make_capture, "cpu", environment={"threads": 1}), "adapter")
    load_paths = {change.name: change.load_path for change in found if change.load_path}
    assert load_paths == {
        "the other devices hidden": "isolated",
        "torch_device='cpu'": "shared+cpu",
        "torch_device=target": "shared+target",
        "low_cpu_mem_usage=True": "shared+low-memory",
        "transformers' loader": "shared+transformers",
    }


def test_change_has_the_last_word_in_the_environment() -> None:
    from consistency.case.load_path import LoadPath
    from consistency.devices.discovery import cpu_info
    from consistency.devices.spec import parse_device

    info = cpu_info(parse_device("cpu@baseline"))
    found = worker_environment(info, LoadPath.ISOLATED, threads=1, change={"MKL_CBWR": None, "EXTRA": "1"})
    assert "MKL_CBWR" not in found
    assert found["EXTRA"] == "1"
    assert found["ATEN_CPU_CAPABILITY"] == "default"


def test_a_group_has_the_transports_of_its_library_tried(make_capture: MakeCapture) -> None:
    subject = compared_worker(make_capture, "cuda:1", asked={"matmul_allow_tf32": False}, environment={"threads": 1})
    found = candidates(subject, compared_worker(make_capture, "cpu", environment={"threads": 1}), "collectives")
    assert [change.name for change in found] == [
        "NCCL_P2P_DISABLE=1", "NCCL_SHM_DISABLE=1", "NCCL_NVLS_ENABLE=0", "NCCL_ALGO=Ring", "NCCL_PROTO=Simple",
        "2 threads",
    ]  # fmt: skip
    assert found[0].environment == {"NCCL_P2P_DISABLE": "1"}


@pytest.mark.process
@pytest.mark.skipif(len(KERNELS) < 2, reason="this processor has one kernel variant: there is no group")
def test_a_variable_of_the_library_explains_a_wrong_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault reads the variable in the place of NCCL: that NCCL obeys it is not shown here."""
    fault = {"cpu@baseline": "sum-wrong-with-p2p"}
    only = ("collectives::all_reduce.sum",)
    options = Options(devices=("cpu", "cpu@baseline"), stages=(COLLECTIVES,), only=only, level=Level.QUICK)
    plan = dataclasses.replace(pipeline.prepare(options), faults=fault)
    pipeline.run(plan, tmp_path / "out", watch=lambda *_: None)
    changes = [Change(name=f"{name}=1", environment={name: "1"}) for name in ("NCCL_SHM_DISABLE", "NCCL_P2P_DISABLE")]
    monkeypatch.setattr(bisecting, "candidates", lambda *_: changes)
    answer = bisect(tmp_path / "out", number=1, faults=fault)
    assert answer.repeats
    assert answer.explained_by == ("NCCL_P2P_DISABLE=1",)
    assert answer.sentence.endswith("on cpu@baseline matches the reference with NCCL_P2P_DISABLE=1")


@pytest.mark.process
@pytest.mark.skipif(len(KERNELS) < 2, reason="this processor has one kernel variant: there is no group")
def test_what_is_recorded_only_where_it_is_wrong_is_gone_where_it_is_not_recorded(tmp_path: Path) -> None:
    fault = {"cpu@baseline": "split-part-of-another"}
    options = Options(devices=("cpu", "cpu@baseline"), stages=(standard.FORWARD, TENSOR_PARALLEL))
    plan = dataclasses.replace(pipeline.prepare(options), faults=fault)
    pipeline.run(plan, tmp_path / "out", watch=lambda *_: None)
    again: list[Trial] = []
    answer = bisect(tmp_path / "out", number=1, watch=lambda trial, _: again.append(trial))  # nothing is planted
    assert not answer.repeats
    assert [trial.detail for trial in again] == ["not found"]


@pytest.mark.process
@pytest.mark.skipif(len(KERNELS) < 2, reason="this processor has one kernel variant: there is no group")
def test_a_stage_that_fails_without_a_change_is_said(tmp_path: Path) -> None:
    """It was said that the tensor is not recorded alone, as of a tensor that its stage leaves out."""
    only = ("collectives::broadcast",)
    options = Options(devices=("cpu", "cpu@baseline"), stages=(COLLECTIVES,), only=only, level=Level.QUICK)
    done = pipeline.run(pipeline.prepare(options), tmp_path / "out", watch=lambda *_: None)
    tensor = next(one.name for one in done.comparison.tensors if one.layer.startswith("broadcast"))
    with pytest.raises(InputError, match=r"(?s)nothing was tested.*IndexError: planted"):
        bisect(tmp_path / "out", tensor=tensor, worker="cpu@baseline", faults={"cpu@baseline": "rank-raises"})


WRONG_IN_EVERY_DTYPE = """
import torch, transformers

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        is_baseline = torch.backends.cpu.get_cpu_capability() == "DEFAULT"
        return gradient / 4 if is_baseline else gradient

class Activation(torch.nn.Module):
    def forward(self, x):
        return Scaled.apply(torch.nn.functional.silu(x))

def load():
    model = transformers.AutoModelForCausalLM.from_pretrained({base!r})
    model.model.layers[0].mlp.act_fn = Activation()
    return model
"""


@pytest.mark.process
@pytest.mark.skipif("cpu@baseline" not in KERNELS, reason="this processor has no other kernel variant")
def test_a_kernel_that_is_wrong_in_float64_too_does_not_judge_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial's worker made its own float64 gradients, as wrong as what they judge: nothing to bisect, it said."""
    folder = builtin_folder("llama")
    (tmp_path / "wrong_kernel.py").write_text(WRONG_IN_EVERY_DTYPE.format(base=str(folder / "base")), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    source: dict[str, Any] = {"base": "python:wrong_kernel:load", "adapter": str(folder / "adapter")}
    only = ("gradient::model.layers.0",)
    options = Options(devices=("cpu", "cpu@baseline"), stages=(standard.GRADIENT,), only=only, **source)
    done = pipeline.run(pipeline.prepare(options), tmp_path / "out", watch=lambda *_: None)
    assert {worker for finding in done.comparison.findings for worker in finding.workers} == {"cpu@baseline"}
    change = Change(name="kernels", environment={"ATEN_CPU_CAPABILITY": None})
    monkeypatch.setattr(bisecting, "candidates", lambda *_: (change,))
    answer = bisect(tmp_path / "out", number=1, given=Options(**source))
    assert answer.repeats
    assert answer.explained_by == ("kernels",)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bisect") / "out"
    only = ("merged::model.layers.0.self_attn",)
    options = Options(devices=("cpu", "cpu@baseline"), stages=(standard.MERGED,), only=only)
    pipeline.run(pipeline.prepare(options), out, watch=lambda *_: None)
    return out


@pytest.mark.process
def test_kernels_of_matrix_products_explain_other_bits(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = (
        Change(name="MKL", environment={"MKL_CBWR": None}),
        Change(name="oneDNN", environment={"ONEDNN_MAX_CPU_ISA": None}),
    )
    monkeypatch.setattr(bisecting, "candidates", lambda *_: changes)
    importers: list[Importer | None] = []
    one_for = Importers.one_for

    def seen(*args: Any) -> Importer | None:
        importers.append(one_for(*args))
        return importers[-1]

    monkeypatch.setattr(Importers, "one_for", seen)
    name = "merged::model.layers.0.self_attn.q_proj.delta"
    found = bisect(report, tensor=name, worker="cpu@baseline")
    if sys.platform == "linux":
        assert len(importers) == 1 + len(found.trials), "the reference worker and each trial"
        assert None not in importers
        assert len({*importers}) == 1, "libraries are imported once"
    if not found.repeats:
        pytest.skip("this processor's baseline kernels give the native bits")
    assert found.explained_by == ("MKL",)
    assert found.sentence == f"{name} on cpu@baseline matches the reference with MKL"


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "the report has no finding"),
        ({"tensor": "merged::no.such"}, "need each other"),
        ({"worker": "cpu"}, "need each other"),
        ({"tensor": "merged::no.such", "worker": "cpu"}, "no such tensor"),
        ({"tensor": "merged::no.such", "worker": "cuda:9"}, "no such worker"),
        ({"number": 77}, "no finding 77"),
    ],
)
def test_what_cannot_be_asked(report: Path, arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        bisect(report, **arguments)
