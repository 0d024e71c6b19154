"""A package of GPU kernels that transformers binds at import: the CPU computes by the model's own code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from consistency.worker import bound_kernels, cpu_error
from consistency.worker.determinism import deterministic
from consistency.worker.protocol import Peer
from tests.worker.made_jobs import job_of
from tests.worker.model.made_models import case_of

pytestmark = pytest.mark.process

MODEL = """
import sys
if sys.argv[1] == "chosen":
    from consistency.worker.session import import_models
    import_models()
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
config = Mamba2Config(
    vocab_size=97, hidden_size=32, state_size=16, num_hidden_layers=1, num_heads=4, head_dim=16, expand=2, n_groups=1,
    chunk_size=16,
)
with torch.no_grad():
    print(Mamba2ForCausalLM(config).eval()(torch.zeros(1, 4, dtype=torch.long)).logits.shape)
if sys.argv[1] == "chosen":
    from consistency.worker.bound_kernels import BOUND
    print(BOUND)
"""

KERNEL = """
def {name}(*args, **kwargs):
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")
"""
NAMES = ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")


def run(tmp_path: Path, how: str) -> subprocess.CompletedProcess[str]:
    kernels = tmp_path / "mamba_ssm" / "ops" / "triton"
    kernels.mkdir(parents=True, exist_ok=True)
    for folder in (kernels, kernels.parent, kernels.parent.parent):
        (folder / "__init__.py").touch()
    (kernels / "ssd_combined.py").write_text("".join(KERNEL.format(name=name) for name in NAMES))
    (kernels / "selective_state_update.py").write_text(KERNEL.format(name="selective_state_update"))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(Path(__file__).parents[2]))])
    return subprocess.run(
        [sys.executable, "-c", MODEL, how], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_the_cpu_runs_the_models_own_code(tmp_path: Path) -> None:
    assert "cpu tensor?" in run(tmp_path, "as it is").stderr, "the fault is there without"
    found = run(tmp_path, "chosen")
    assert found.returncode == 0, found.stderr
    assert "[1, 4, 97]" in found.stdout
    assert "'mamba_chunk_scan_combined': 'mamba_ssm'" in found.stdout


def test_products_of_triton_may_be_in_tf32_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes with noise, of models that call them: what torch multiplies stays in float32, as the settings say."""
    monkeypatch.setattr(bound_kernels, "BOUND", {})
    monkeypatch.setattr(bound_kernels, "_modules_with_triton", set())
    plain, bound = torch.nn.Linear(2, 2), torch.nn.Sequential(Bound())
    job = job_of(case_of(Path("base"), None), peers=tuple(Peer(type=kind, settings={}) for kind in ("cuda", "xpu")))
    with deterministic(threads=1):
        assert list(cpu_error.products_of_run(job, bound)) == ["float32"], "nothing is bound"
        bound_kernels._bind_by_device("name", "causal_conv1d", lambda one: one, forward)
        assert list(cpu_error.products_of_run(job, bound)) == ["float32"], "it has no product"
        bound_kernels._bind_by_device("name", "fla", lambda one: one, forward)
        assert list(cpu_error.products_of_run(job, bound)) == ["float32", "tf32"]
        assert list(cpu_error.products_of_run(job, plain)) == ["float32"], "a case before it in this process bound it"
        assert cpu_error.products_on(bound, "cpu") == "float32"


def forward(x: torch.Tensor) -> torch.Tensor:
    return x


class Bound(torch.nn.Module):
    """A module of this file's, whose functions are bound."""
