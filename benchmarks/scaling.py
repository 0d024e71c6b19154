"""How `consistency compare` grows with the size of a fleet: seconds, peak memory and report, per number of rows.

Writes captures of made-up workers in the real format, one or several workers per capture, and runs the real command on
them in a process of its own. What a worker holds is like a LoRA on a decoder: base and adapter tensors that are equal
everywhere, merged weights and activations with measures, whose bits depend on the architecture (four of them), and in a
few workers zeros in every `lora_B`, with everything that follows from it. Tensors count as 1 MiB each: four block
digests. Equal files of records are hard links, so that a fleet fits a disk and stays in memory: what is measured
is the command and not the disk. With `--facts` every worker has facts of its own, as the stage `memory` leaves them.

What is printed, per size: wall and processor seconds and peak resident memory of the whole process (a row is one tensor
on one worker), the bytes of captures, `report.json` and `report.html`, and by how much time and memory grew over the
line above against how much the rows grew. Peak memory holds some 60 MB that Python and its libraries take before the
first row.

`alike`: workers of one architecture hold the same bits, as they do in health. `apart`: no two workers have the same
bits in anything that is computed, the worst that a fleet can do.

    python benchmarks/scaling.py            # some minutes
    python benchmarks/scaling.py --quick    # some seconds
    python benchmarks/scaling.py --size 125x8x2000 --size 1000x8x2000    # captures × workers × tensors
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consistency.capture.folder import SCHEMA, CaptureManifest, worker_slug
from consistency.capture.json_codec import encode_json
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.capture.writer import CaptureWriter
from consistency.case.case import Case
from consistency.numerics import words
from consistency.numerics.measure import Measure
from consistency.numerics.real import Real
from consistency.numerics.rules import RoundingError

ARCHITECTURES = (
    ("Ampere sm_86", "RTX A6000"),
    ("Ampere sm_80", "A100-SXM4-80GB"),
    ("Ada sm_89", "L4"),
    ("Hopper sm_90", "H100 80GB HBM3"),
)
FAULTY = frozenset({3, 17, 40})
"""Captures of which one worker holds zeros in every lora_B: of several the one with the capture's number, modulo."""

Size = tuple[int, int, int]
"""Captures, workers of each, tensors of each worker."""

SIZES: tuple[Size, ...] = ((125, 1, 2000), (250, 1, 2000), (500, 1, 2000), (1000, 1, 2000))
HOSTS: tuple[Size, ...] = ((125, 8, 2000), (250, 8, 2000), (500, 8, 2000), (1000, 8, 2000))
NARROW: tuple[Size, ...] = ((1000, 1, 500), (1000, 1, 1000), (1000, 1, 2000))
QUICK: tuple[Size, ...] = ((10, 1, 500), (20, 1, 500), (40, 1, 500), (10, 8, 500), (20, 8, 500))

BLOCKS = 4  # of 256 KiB each
SHAPE = (512, 512)  # float32: 1 MiB
WORST = -0.06659322  # what the element that is off the most should be
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
BASE = (*(f"self_attn.{name}" for name in MODULES), "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One run of the command.

    Attributes
    ----------
    peak_bytes : int
        Largest resident size of the process.
    captures_bytes : int
        That the command reads; files that are links to one count each.
    report_bytes, page_bytes : int
        Of report.json and report.html.
    """

    captures: int
    workers: int
    tensors: int
    alike: bool
    seconds: float
    processor_s: float
    peak_bytes: int
    captures_bytes: int
    report_bytes: int
    page_bytes: int
    verdict: str

    @property
    def rows(self) -> int:
        return self.captures * self.workers * self.tensors


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work, not how fast is it")
    parser.add_argument("--size", action="append", metavar="CAPTURES[xWORKERS]xTENSORS",
                        help="these sizes only; may be repeated")  # fmt: skip
    parser.add_argument("--facts", type=int, default=0, metavar="N", help="facts of its own that each worker has")
    parser.add_argument("--apart", action="store_true", help="no two workers with equal bits in what is computed")
    parser.add_argument("--folder", type=Path, help="where the captures are written (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    asked = parser.parse_args()
    if asked.size:
        plan = [(_size(text), not asked.apart) for text in asked.size]
    else:
        plan = [(size, not asked.apart) for size in (QUICK if asked.quick else SIZES + HOSTS + NARROW)]
        if not asked.quick and not asked.apart:
            plan.append((SIZES[-1], False))
    timings: list[Timing] = []
    for size, alike in plan:
        with tempfile.TemporaryDirectory(dir=asked.folder, prefix="consistency-scaling-") as scratch:
            folders = write_captures(Path(scratch), size, alike=alike, facts=asked.facts)
            timings.append(measure(Path(scratch), folders, size, alike=alike))
        if not asked.json:
            show(timings)
    if asked.json:
        print(encode_json([{**_table(t), "rows": t.rows} for t in timings], indent=1).decode())
    return 0


def _size(text: str) -> Size:
    captures, *workers, tensors = (int(part) for part in text.split("x"))
    return captures, workers[0] if workers else 1, tensors


def _table(timing: Timing) -> dict[str, Any]:
    return {name: getattr(timing, name) for name in Timing.__slots__}


def show(timings: list[Timing]) -> None:
    """Print the newest line, and before the first the titles."""
    if len(timings) == 1:
        print(
            "captures × workers × tensors      rows   bits        s  processor s     MB  captures MB  report MB  "
            "page MB  rows ×  time ×  memory ×  verdict"
        )
    now, before = timings[-1], timings[-2] if len(timings) > 1 else None
    growth = " " * 24
    if before is not None and now.rows > before.rows and now.alike == before.alike:
        growth = (
            f"{now.rows / before.rows:8.2f}{now.seconds / before.seconds:8.2f}{now.peak_bytes / before.peak_bytes:8.2f}"
        )
    print(
        f"{now.captures:8} × {now.workers:7} × {now.tensors:<7}{now.rows:10}  {'alike' if now.alike else 'apart'} "
        f"{now.seconds:8.1f}{now.processor_s:13.1f}{now.peak_bytes / 1e6:7.0f}{now.captures_bytes / 1e6:13.0f}"
        f"{now.report_bytes / 1e6:11.1f}{now.page_bytes / 1e6:9.1f}{growth}    {now.verdict}",
        flush=True,
    )


def measure(scratch: Path, folders: list[Path], size: Size, *, alike: bool) -> Timing:
    """Run `consistency compare` on captures in a process of its own."""
    out = scratch / "report"
    arguments = [sys.executable, "-m", "consistency", "compare", *map(str, folders), "--out", str(out)]
    started = time.perf_counter()
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise SystemExit(f"consistency compare ended with {process.returncode}: {printed[:2000]}")
    if len(longest := max(printed.splitlines(), key=len)) > 2000:
        raise SystemExit(f"a line of {len(longest)} characters is nothing to read: {longest[:200]}")
    return Timing(
        captures=size[0],
        workers=size[1],
        tensors=size[2],
        alike=alike,
        seconds=seconds,
        processor_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        captures_bytes=sum(path.stat().st_size for folder in folders for path in folder.glob("workers/*/*")),
        report_bytes=(out / "report.json").stat().st_size,
        page_bytes=(out / "report.html").stat().st_size,
        verdict=json.dumps(printed.partition("\n\n")[2].split()[0]).strip('"').lower(),
    )


def write_captures(folder: Path, size: Size, *, alike: bool, facts: int = 0) -> list[Path]:
    """Write captures of GPUs, in turn of each kind by capture; the first worker is a CPU, which is the reference."""
    captures, workers, tensors = size
    files: dict[tuple[str, bool], Path] = {}
    written = []
    for number in range(captures):
        with CaptureWriter(folder / f"node-{number:04}") as writer:
            slugs = []
            for place in range(workers):
                is_faulty = number in FAULTY and place == number % workers
                architecture, model = ARCHITECTURES[number % len(ARCHITECTURES)]
                name, bits = f"cuda:{place}", architecture if alike else f"{architecture} {number} {place}"
                if number == place == 0:
                    name, architecture, model, bits = "cpu", "x86-64 AVX-512", "AMD EPYC", "cpu"
                slug = worker_slug(name, "isolated")
                slugs.append(slug)
                # chips that round differently do not run one program: where no two are alike, each has its own key
                info = worker(name, number * workers + place, architecture, model, program="made up " + bits)
                writer.write_worker(slug, info)
                target = writer.worker_folder(slug) / "records.jsonl"
                known = files.get((bits, is_faulty))
                if known is None or facts:
                    lines = known.read_bytes() if known else _lines(records(tensors, bits, is_faulty=is_faulty))
                    target.write_bytes(lines + _lines(own_facts(facts, number * workers + place)))
                else:
                    os.link(known, target)
                if known is None and alike:
                    files[bits, is_faulty] = folder / f"records-{len(files)}.jsonl"
                    files[bits, is_faulty].write_bytes(lines)
            case = Case(name="made-up", base="base", adapter="adapter")
            host = f"node-{number:04}"
            written.append(
                writer.commit(
                    CaptureManifest(
                        schema=SCHEMA, tool="made up", created="2026-01-01T00:00:00+00:00", host=host, case=case,
                        workers=tuple(slugs),
                    )
                )
            )  # fmt: skip
    return written


def _lines(found: Iterable[TensorRecord]) -> bytes:
    return b"".join(encode_json(record) + b"\n" for record in found)


def own_facts(count: int, number: int) -> Iterator[TensorRecord]:
    """Yield facts whose figures no other worker has: memory held after a step, and the part of its limit."""
    for place in range(count):
        used = 2**30 + 4096 * (number * count + place)
        yield TensorRecord(
            stage="memory", layer=f"step {place}", tensor="resident", rule="limit", status="within",
            limit_ratio=Real(used / 2**33), evidence={"resident_bytes": used}, order=10**6 + place,
        )  # fmt: skip


def worker(name: str, number: int, architecture: str, model: str, *, program: str) -> WorkerInfo:
    """Make up who a worker was."""
    settings = {"matmul_allow_tf32": False, "cudnn_deterministic": True, "cudnn_benchmark": False, "threads": 4}
    return WorkerInfo(
        name=name,
        load_path="isolated",
        architecture=architecture,
        model=model,
        status="ok",
        uuid=f"GPU-{number:08x}",
        environment={"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "peft": "0.21.2", "threads": 4},
        asked=settings,
        in_force=settings,
        inputs_digest="1" * 32,
        stages_done=("base", "adapter", "merged", "forward"),
        kernel_key=program,
        elapsed_s=40.0,
        peak_bytes=2**30,
    )


def records(tensors: int, bits: str, *, is_faulty: bool) -> Iterator[TensorRecord]:
    """Yield the records of a worker: what was moved is the same for all, what was computed depends on `bits`.

    Per layer of the model 7 base weights, 8 tensors of the adapter, 8 merged ones and 3 activations; what is left to
    the number asked for are norms of the base.
    """
    layers = tensors // (len(BASE) + 4 * len(MODULES) + 3)
    norms = tensors - layers * (len(BASE) + 4 * len(MODULES) + 3)
    order = 0
    names: list[tuple[str, str, str]] = [("base", f"model.norms.{i}", "weight") for i in range(norms)]
    names += [("base", f"model.layers.{i}.{name}", "weight") for i in range(layers) for name in BASE]
    attention = [f"model.layers.{i}.self_attn.{name}" for i in range(layers) for name in MODULES]
    names += [("adapter", layer, tensor) for layer in attention for tensor in ("lora_A", "lora_B")]
    names += [("merged", layer, tensor) for layer in attention for tensor in ("delta", "weight")]
    modes = ("adapter_on", "adapter_off", "adapter_merged")
    names += [("forward", f"model.layers.{i}", mode) for i in range(layers) for mode in modes]
    make: dict[str, Callable[..., TensorRecord]] = {"merged": _bounded, "forward": _relative}
    for order, (stage, layer, tensor) in enumerate(names, start=1):
        where = {"stage": stage, "layer": layer, "tensor": tensor, "order": order}
        if stage in make:
            yield make[stage](where, bits, is_faulty=is_faulty)
        else:
            yield _moved(where, is_faulty=is_faulty)


def _moved(where: dict[str, Any], *, is_faulty: bool) -> TensorRecord:
    right, blocks = _digest(where, "file")
    is_adapter = where["stage"] == "adapter"
    kept: dict[str, Any] = {"blob": right * 2, "reference_blob": right * 2} if is_adapter else {}
    common = {
        **where,
        "rule": "bitwise",
        "shape": SHAPE,
        "dtype": "float32",
        "reference": "file",
        "reference_digest": right,
    }
    if not is_faulty or where["tensor"] != "lora_B":
        return TensorRecord(**common, **kept, status="equal", digest=right, blocks=blocks)
    elements = SHAPE[0] * SHAPE[1]
    return TensorRecord(
        **common,
        status="outside",
        digest=_digest(where, "zeros")[0],
        blocks="0" * 16 * BLOCKS,
        measure=_measure(-WORST, mismatched=elements, ratio=None),
        word=words.ZEROS,
        evidence={"nonzero_in_reference": elements, "blocks": list(range(BLOCKS))},
    )


def _bounded(where: dict[str, Any], bits: str, *, is_faulty: bool) -> TensorRecord:
    value, blocks = _digest(where, bits + str(is_faulty))
    ratio = 4e5 if is_faulty else 0.2 + int(value[:4], 16) / 2**17
    return TensorRecord(
        **where,
        shape=SHAPE,
        dtype="float32",
        rule="bound",
        status="outside" if is_faulty else "within",
        digest=value,
        blocks=blocks,
        reference="float64",
        measure=_measure(ratio * 1e-7, mismatched=int(value[:4], 16), ratio=ratio),
        word=words.DIFFERS if is_faulty else words.ACCUMULATION_ORDER,
    )


def _relative(where: dict[str, Any], bits: str, *, is_faulty: bool) -> TensorRecord:
    value, blocks = _digest(where, bits + str(is_faulty))
    is_off = is_faulty and where["tensor"] != "adapter_off"
    return TensorRecord(
        **where,
        shape=SHAPE,
        dtype="float32",
        rule="relative",
        status="measured",
        digest=value,
        blocks=blocks,
        reference="float64",
        rounding=RoundingError(largest=Real(1e-6), samples=128, drawn=256),
        measure=_measure(0.5 if is_off else 1e-6 + int(value[:4], 16) * 1e-12, mismatched=9000, ratio=None),
    )


def _measure(error: float, *, mismatched: int, ratio: float | None) -> Measure:
    return Measure(
        elements=SHAPE[0] * SHAPE[1],
        mismatched=mismatched,
        max_abs=Real(abs(error)),
        mean_abs=Real(abs(error) / 7),
        rms=Real(abs(error) / 5),
        max_rel=Real(abs(error / WORST)),
        max_ulp=1454,
        ratio=None if ratio is None else Real(ratio),
        worst_index=(18, 102),
        worst_actual=Real(WORST + error),
        worst_expected=Real(WORST),
        worst_actual_bits=f"0x{struct.unpack('<I', struct.pack('<f', WORST + error))[0]:08x}",
        worst_expected_bits="0xbd886208",
        flipped_bits={},
        first_byte=None,
        last_byte=None,
        magnitude=Real(0.17428456269915804),
    )


def _digest(where: dict[str, Any], bits: str) -> tuple[str, str]:
    """Return a digest and block digests that are as good as random."""
    name = f"{where['stage']} {where['layer']} {where['tensor']} {bits}"
    found = hashlib.blake2b(name.encode(), digest_size=8 * BLOCKS + 16).hexdigest()
    return found[:32], found[32:]


if __name__ == "__main__":
    raise SystemExit(main())
