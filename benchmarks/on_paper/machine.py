"""The machine on paper, and the seconds that a counted work takes on each of its parts."""

from __future__ import annotations

from dataclasses import dataclass

# What is assumed of the machine.
GPUS, CORES = 8, 64
GPU_MEMORY = 80 * 2**30
HBM = 3.35e12
GPU_BFLOAT16, GPU_FLOAT32, GPU_FLOAT64 = 989e12, 67e12, 67e12
LINK = 55e9
DISK = 7e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A processor on paper: operations per second of a core by dtype, and bytes per second of the host's memory."""

    float64: float
    float32: float
    bfloat16: float
    memory: float


XEON = Host(float64=32 * 2.8e9, float32=64 * 2.8e9, bfloat16=2048 * 2.8e9, memory=16 * 38.4e9)
EPYC = Host(float64=16 * 2.45e9, float32=32 * 2.45e9, bfloat16=32 * 2.45e9, memory=8 * 25.6e9)

SOURCES = (
    ("GPU: memory", HBM, "B/s", "NVIDIA's data sheet of the H100 SXM, HBM3"),
    ("GPU: bfloat16, dense", GPU_BFLOAT16, "FLOP/s", "the same"),
    ("GPU: float32; float64 in matrix units", GPU_FLOAT64, "FLOP/s", "the same"),
    ("PCIe 5.0 × 16, one way", LINK, "B/s", "63e9 by the standard, less what packets take; from pinned memory"),
    ("host core: float64", XEON.float64, "FLOP/s", "Xeon 8462Y+: 2.8 GHz, two AVX-512 units; float32 twice that"),
    ("host core: bfloat16", XEON.bfloat16, "FLOP/s", "the same: 1024 products and sums per cycle by AMX"),
    ("host memory", XEON.memory, "B/s", "two sockets with eight channels of DDR5-4800"),
    ("disk", DISK, "B/s", "one NVMe on PCIe 4.0 × 4"),
)

# What `python -m benchmarks.host_rates` measured on one core of an AMD EPYC (family 25, model 1) on 2026-11-29, in
# seconds per element or byte: work on elements has no peak on paper.
DELTA_S, SUM_S = 5.3e-9, 7.9e-9
BOTH_MEASURED_S, DELTA_MEASURED_S, MERGED_MEASURED_S = 8.5e-9, 8.2e-9, 7.2e-9
DIGEST_S = 1 / 11.2e9
SPREAD_S, FIGURES_S = 31.2e-9 / 2, 9.2e-9
"""`SPREAD_S` and `GRADIENT_SPREAD_S` are of one pass with noise."""
GRADIENT_SPREAD_S, GRADIENT_FIGURES_S = 107.2e-9 / 4, 9.5e-9
STEP_S = 70.7e-9
START_S = 4.6
"""Imports of a process: docs/performance.md."""

ELEMENTS = (
    ("delta of a LoRA; sum with a copy of the weight", (DELTA_S, SUM_S)),
    ("delta and merged weight measured at once; each alone", (BOTH_MEASURED_S, DELTA_MEASURED_S, MERGED_MEASURED_S)),
    ("result of a block: spread, of each pass; figures", (SPREAD_S, FIGURES_S)),
    ("gradient: spread, of each pass; figures", (GRADIENT_SPREAD_S, GRADIENT_FIGURES_S)),
    ("exact step of AdamW, on one thread", (STEP_S,)),
    ("digest, of each byte", (DIGEST_S,)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one worker does in a stage; operations and bytes are of one worker."""

    stage: str
    counted: str
    on_gpu: bool = False
    """Whether it is done by each worker of a GPU, else by the one of the CPU, which makes the reference."""
    float64: float = 0
    float32: float = 0
    bfloat16: float = 0
    """Operations: on the GPU where it has the work, but in float64 always on the CPU."""
    elements_s: float = 0
    """Seconds of one core that is busy with elements or digests; cores share them."""
    thread_s: float = 0
    """Seconds of work that one thread does, however many there are."""
    hbm_bytes: float = 0
    link_bytes: float = 0
    host_bytes: float = 0
    disk_bytes: float = 0
    float64_on_gpu: bool = False
    noisy_passes: int = 0
    """How many passes with noise are in it, each as long as one without."""
    waits: bool = False
    """Whether it needs the reference."""
    waves: int = 1
    """How many waves do it."""

    def core_s(self, host: Host) -> float:
        """Return the seconds of one core."""
        flop_s = 0.0 if self.float64_on_gpu else self.float64 / host.float64
        if not self.on_gpu:
            flop_s += self.float32 / host.float32 + self.bfloat16 / host.bfloat16
        return flop_s + self.elements_s + self.thread_s

    def seconds(self, threads: int) -> dict[str, float]:
        """Return the seconds on each part of the machine, where all workers of GPUs do the same side by side."""
        gpu_s = self.hbm_bytes / HBM
        if self.on_gpu:
            gpu_s = max(gpu_s, self.bfloat16 / GPU_BFLOAT16 + self.float32 / GPU_FLOAT32)
        if self.float64_on_gpu:
            gpu_s += self.float64 / GPU_FLOAT64
        return {
            "CPU": (self.core_s(XEON) - self.thread_s) / threads + self.thread_s,
            "GPU": gpu_s,
            "PCIe": self.link_bytes / LINK,
            "host memory": self.host_bytes * (GPUS if self.on_gpu else 1) / XEON.memory,
            "disk": self.disk_bytes / DISK,
        }
