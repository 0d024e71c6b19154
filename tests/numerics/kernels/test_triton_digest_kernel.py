"""The binaries of the kernel for GPUs that are not here: Triton compiles without one.

A fake driver names the GPU, and `launch` itself is called, so what is compiled is what it would run there.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from consistency.numerics.kernels.numpy_digest import ROW_WORDS

triton = pytest.importorskip("triton", minversion="3.4", reason="needs Triton, as `tox -e triton37` has it")

from triton.backends.compiler import GPUTarget  # noqa: E402 - Triton may be absent

from consistency.numerics.kernels import triton_digest_kernel  # noqa: E402
from consistency.numerics.kernels.triton_digest_kernel import (  # noqa: E402
    _MOST_REGISTERS,
    _PART_WORDS,
    _WARPS,
    launch,
)

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION:UserWarning")

NVIDIA = [GPUTarget("cuda", capability, 32) for capability in (70, 75, 80, 86, 89, 90, 100, 103, 110, 120, 121)]
# CDNA's wavefronts have 64 lanes, RDNA's 32
AMD = [GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942", "gfx950")]
AMD += [GPUTarget("hip", name, 32) for name in ("gfx1100", "gfx1201")]

INSTALLED = tuple(map(int, triton.__version__.split(".")[:2]))
FIRST = {103: (3, 6), 121: (3, 6), 110: (3, 7)} | {target.arch: (3, 5) for target in AMD}
"""The Triton that has a GPU's assembler first, of those that supported versions of torch bring along: 3.4 of torch 2.8
has no linker for AMD's, and aborts the process for some that it does not know."""


def known(target: GPUTarget) -> Any:
    first = FIRST.get(target.arch, (3, 4))
    reason = f"Triton {triton.__version__} has no {target.arch}; {first[0]}.{first[1]} has"
    return pytest.param(target, id=f"{target.arch}", marks=pytest.mark.skipif(first > INSTALLED, reason=reason))


every_gpu = pytest.mark.parametrize("target", [known(target) for target in (*NVIDIA, *AMD)])
every_alignment = pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What Triton asks of a driver before it launches."""

    target: GPUTarget

    def get_current_device(self) -> str:
        return f"{self.target}"  # Triton keeps binaries by device

    def get_current_stream(self, _: Any) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@pytest.fixture
def kernels_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[GPUTarget, torch.Tensor], list[Any]]:
    """Return the binaries that `launch` would run on a GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled: list[Any] = []
    run = triton_digest_kernel._sum_parts.run

    def compile_only(*args: Any, **kwargs: Any) -> None:
        compiled.append(run(*args, **{**kwargs, "warmup": True}))

    monkeypatch.setattr(triton_digest_kernel._sum_parts, "run", compile_only)

    def compile_for(target: GPUTarget, words: torch.Tensor) -> list[Any]:
        monkeypatch.setattr(torch.version, "hip", "7.0" if target.backend == "hip" else None)
        # not `set_active`: `reset_active` looks for a GPU; the name is that of Triton 3.4 or of a later one
        kept = vars(triton.runtime.driver)
        monkeypatch.setitem(kept, "active" if "active" in kept else "_active", Driver(target=target))
        weights = torch.zeros(ROW_WORDS, dtype=torch.int64)
        launch(words, weights, weights, turns=1)
        return compiled

    return compile_for


def words_at(offset: int, *, rows: int = 2) -> torch.Tensor:
    """Return words whose address is a multiple of 16 bytes where `offset` is even."""
    words = torch.zeros(rows * ROW_WORDS + 3, dtype=torch.int64)
    assert words.data_ptr() % 16 == 0
    return words[offset:]


@pytest.mark.process
@every_alignment
@every_gpu
def test_it_compiles_without_spills_and_with_wide_loads(
    target: GPUTarget, offset: int, kernels_of: Callable[..., list[Any]], tmp_path: Path
) -> None:
    (kernel,) = kernels_of(target, words_at(offset))
    used = _by_ptxas(kernel, tmp_path) if target.backend == "cuda" else _by_llvm(kernel)
    assert used.registers <= _MOST_REGISTERS
    assert used.spilled == 0
    # 16 bytes a load, or it would not come near the memory's rate: of both weight tables, and of words so aligned. A
    # row that is not full is loaded word by word, under its mask; LLVM of Triton 3.5 found more to combine.
    tables = 2 if offset else 3
    assert used.wide_loads >= tables * _PART_WORDS // (_WARPS * target.warp_size) // 2


@pytest.mark.parametrize("target", [known(NVIDIA[2]), known(AMD[1])])
def test_sizes_have_the_binary_that_was_checked(target: GPUTarget, kernels_of: Callable[..., list[Any]]) -> None:
    beyond = torch.empty((1 << 28) + ROW_WORDS, dtype=torch.int64)  # 2 GiB, of which no page is touched
    kernels_of(target, words_at(0))
    kernels_of(target, words_at(0, rows=7))
    first, *others = kernels_of(target, beyond)
    assert all(kernel is first for kernel in others)
    assert len(others) == 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a binary takes of a GPU, per thread, and its loads of 16 bytes."""

    registers: int
    spilled: int
    wide_loads: int


def _by_ptxas(kernel: Any, folder: Path) -> Used:
    """Read what ptxas gave out, from the binary, with the tool that Triton has beside it."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    command = [f"{tool}", "--dump-resource-usage", f"{binary}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # STACK and LOCAL are where it spills to
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Used(
        registers=found["REG"],
        spilled=found["STACK"] + found["LOCAL"],
        wide_loads=Counter(re.findall(r"\bld\.global[.\w:]*", kernel.asm["ptx"]))["ld.global.v2.b64"],
    )


def _by_llvm(kernel: Any) -> Used:
    """Read what LLVM gave out, from the metadata at the end of its assembly."""
    text = kernel.asm["amdgcn"]
    found = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+): +(\d+)$", text, flags=re.MULTILINE)}
    return Used(
        registers=found["vgpr_count"],
        spilled=found["vgpr_spill_count"] + found["sgpr_spill_count"] + found["private_segment_fixed_size"],
        wide_loads=len(re.findall(r"\b(?:global|buffer)_load_(?:dwordx4|b128)\b", text)),
    )
