"""A wrong kernel, or wrong code, of one device: the reproducer calls what the module called, and says which."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from consistency.case import standard
from consistency.case.options import Options
from consistency.case.stage import Stage
from consistency.extras.diagnosis.reproduce import parts
from consistency.extras.diagnosis.reproduce.folder import Reproduced, reproduce
from consistency.extras.diagnosis.reproduce.parts import Parts
from consistency.stages.forward import planted as of_forward
from consistency.stages.gradient import planted as of_gradient
from consistency.worker.judging import block_rule
from consistency.worker.model import call_trace
from consistency.workflows import pipeline
from tests.launch.in_this_process import in_this_process

pytestmark = pytest.mark.process

FAULTY = "cpu@baseline"


def silu(x: torch.Tensor) -> torch.Tensor:
    return off(x * torch.sigmoid(x))


def silu_backward(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    share = torch.sigmoid(x)
    return off(gradient * share * (1 + x * (1 - share)))


def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return off(torch.bmm(left[None], right[None])[0])


def off(found: torch.Tensor) -> torch.Tensor:
    return found * 1.001 if found.dtype == torch.float32 else found


def wrong_kernel(function: Callable[..., torch.Tensor] = silu) -> Callable[[], None]:
    """Let an operation in float32 be off by a thousandth on this process's CPU; return what takes that back."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch says that it is overridden
        library.impl(function.__name__, function, "CPU")
    return library._destroy


@contextlib.contextmanager
def with_wrong_kernel(function: Callable[..., torch.Tensor] = silu) -> Iterator[None]:
    undo = wrong_kernel(function)
    try:
        yield
    finally:
        undo()


def found_with(fault: str | None, out: Path, stage: Stage = standard.FORWARD) -> Path:
    options = Options(base="builtin:llama", devices=("cpu", FAULTY), stages=(stage,))
    plan = dataclasses.replace(pipeline.prepare(options), faults={} if fault is None else {FAULTY: fault})
    with in_this_process():
        pipeline.run(plan, out, watch=lambda *_: None)
    return out


@pytest.fixture(scope="module")
def of_a_kernel(tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_forward, "layer_zero", wrong_kernel)
        found_with("forward-layer-zero", folder / "run")
    return reproduce(folder / "run", 1, folder / "reproducer")


def run_here(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the script in this process, in which an operation may be wrong."""
    out, status = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", ["reproduce.py", *arguments])
        patch.setattr(sys, "path", [*sys.path])
        try:
            runpy.run_path(str(folder / "reproduce.py"), run_name="__main__")
        except SystemExit as ended:
            status = int(str(ended.code))
    for name in ("aten_calls", "shared"):
        sys.modules.pop(name, None)
    return status, out.getvalue()


def test_a_wrong_kernel_is_named_where_it_is_and_not_seen_where_it_is_not(of_a_kernel: Reproduced) -> None:
    assert (of_a_kernel.happens_here, of_a_kernel.shows, of_a_kernel.needs_model) == (False, True, False)
    assert "it does not happen here" in of_a_kernel.output
    with with_wrong_kernel():
        status, text = run_here(of_a_kernel.folder)
    assert status == 1
    assert "aten.silu.default: with its result in float64, rounded, all is right" in text
    assert "bitwise as recorded" in text
    status, text = run_here(of_a_kernel.folder)
    assert (status, "cause" in text) == (0, False)


def test_a_stranger_needs_torch_and_safetensors_alone(of_a_kernel: Reproduced) -> None:
    blocked = "import sys\nfor n in ('transformers','peft','consistency','numpy'): sys.modules[n] = None\n"
    code = f"{blocked}sys.argv = ['reproduce.py']\nimport runpy\nrunpy.run_path('reproduce.py', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", code],
        cwd=of_a_kernel.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = {file.name for file in of_a_kernel.folder.iterdir()}
    assert {"calls.txt", "aten_calls.py", "reproduce.py", "tensors.safetensors"} <= names
    assert "__pycache__" not in names


def test_calls_that_somebody_has_changed_are_refused(of_a_kernel: Reproduced, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(of_a_kernel.folder, folder)
    for text in (
        "import os",
        "v1 = aten.from_file.default('none')\nreturn v1",
        "v1 = aten.zeros.default([2])\nreturn v1",
    ):
        (folder / "calls.txt").write_text(text)
        assert run_here(folder)[0] == 2, "neither of the two answers"


def kept(text: str, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    listed = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return {"calls": listed, "allowed": torch.ones(2), "in1": torch.zeros(2), **more}


def of_calls(made_of: dict[str, torch.Tensor]) -> Parts:
    return parts._of_calls(made_of, torch.ones(2), torch.zeros(2), None, None)


@pytest.mark.parametrize(
    ("text", "more"),
    [
        ("import os\nreturn in1", {}),
        ("return actual", {}),
        ("return in1\n" * 200_000, {}),
        ("return in1", {"in2": torch.zeros(3 << 20)}),
        ("return in1", {"calls": torch.tensor([1e9])}),
        ("return in1", {"cut.actual": torch.zeros(2)}),
    ],
)
def test_a_strangers_capture_is_compared_alone(
    text: str, more: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_MOST_INPUT_BYTES", 8 << 20)
    with pytest.raises((ValueError, KeyError, TypeError)):
        of_calls(kept(text, **more))


def test_the_weights_of_a_block_are_more_than_a_public_folder_takes_and_are_kept() -> None:
    found = of_calls(kept("v1 = aten.neg.default(in2)\nreturn v1", in2=torch.zeros(3 << 20)))
    assert found.tensors["in2"].numel() == 3 << 20
    assert found.window.endswith("whole of shape (2,)")


def test_a_strangers_names_command_no_terminal() -> None:
    found = of_calls(kept("# \x1b[31mred\nv1 = aten.neg.default(in1)\nreturn v1"))
    assert "\x1b" not in found.texts["calls.txt"]
    assert found.tensors.keys() == {"in1", "actual", "expected", "allowed"}


@pytest.mark.slow
def test_wrong_calls_are_wrong_in_float64_too(tmp_path: Path) -> None:
    """What a hook does to a result is among the calls, so it happens on every machine."""
    made = reproduce(found_with("forward-layer-zero", tmp_path / "run"), 1, tmp_path / "reproducer")
    assert made.happens_here
    assert "in float64 too: what is called is wrong, or what it takes" in made.output
    assert "aten.fill_.Tensor(" in (made.folder / "calls.txt").read_text()
    assert "so wrong again" in (made.folder / "README.md").read_text()


@pytest.mark.slow
def test_a_wrong_kernel_of_the_backward_pass_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_gradient, "gradients_off", functools.partial(wrong_kernel, silu_backward))
    made = reproduce(found_with("gradient-off", tmp_path / "run", standard.GRADIENT), 1, tmp_path / "reproducer")
    assert (made.happens_here, made.shows) == (False, True)
    with with_wrong_kernel(silu_backward):
        status, text = run_here(made.folder)
    assert status == 1
    assert "aten.silu_backward.default: with its result in float64, rounded, all is right" in text


@pytest.mark.slow
def test_a_fault_outside_of_the_calls_is_said_to_be_none_of_them(tmp_path: Path) -> None:
    made = reproduce(found_with("forward-off", tmp_path / "run"), 1, tmp_path / "reproducer")
    assert (made.happens_here, made.shows) == (False, True)
    assert "the fault comes and goes, or is not in these calls" in (made.folder / "README.md").read_text()


@pytest.mark.slow
def test_what_is_too_large_is_cut_to_its_wrong_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_trace, "MOST_BYTES", 1 << 17)
    monkeypatch.setattr(of_forward, "layer_zero", functools.partial(wrong_kernel, mm))
    made = reproduce(found_with("forward-layer-zero", tmp_path / "run"), 1, tmp_path / "reproducer")
    lines = (made.folder / "calls.txt").read_text().splitlines()
    assert sum(" = aten.mm.default(" in line for line in lines) == 1
    assert all("as_strided" in line or "aten.mm." in line for line in lines if "aten." in line)
    assert (made.happens_here, made.shows) == (False, True)
    with with_wrong_kernel(mm):
        assert run_here(made.folder)[0] == 1


@pytest.mark.slow
def test_what_cannot_be_cut_is_compared_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_trace, "MOST_BYTES", 1 << 10)
    made = reproduce(found_with("forward-layer-zero", tmp_path / "run"), 1, tmp_path / "reproducer")
    assert made.needs_model
    assert "no part that is smaller shows it by itself" in (made.folder / "README.md").read_text()


@pytest.mark.slow
def test_a_healthy_run_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[object] = []
    monkeypatch.setattr(block_rule, "trace_module", lambda _, place, *__: places.append(place))
    found_with(None, tmp_path / "healthy")
    assert places == []
    found_with("forward-layer-zero", tmp_path / "wrong")
    assert [str(place) for place in places] == ["model.layers.2.self_attn"], "once, and this test can fail"
