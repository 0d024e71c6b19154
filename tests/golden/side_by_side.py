"""Run the same inputs with the code before and after a change, and compare all that they say.

    PYTHONPATH=OLD python -P -m tests.golden.side_by_side record before   # in the checkout of before
    PYTHONPATH=NEW python -P -m tests.golden.side_by_side record after
    python -m tests.golden.side_by_side compare before after --renamed bound_ratio=ratio --renamed road=load-path

`record` runs the built-in cases in three dtypes, models of several families (an encoder-decoder, a mixture of experts,
a state space, DoRA, several adapters; a trained one and a quantized base where their packages are installed), the
stages of several devices together, a suite of adapters of many methods, one with a damaged adapter, runs one after the
other into one history with another setting in the last, captures of many made-up workers, and the drill, each by the
command line. What it keeps of each is what a change of the code must not change: exit status, verdict, and for each
tensor and worker status, word, error over tolerance, ULP, classes of bits, and findings. Both have to run on one
machine: bits are those of its kernels. Some 25 minutes on two cores; `--only families` takes eight.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

DEVICES = ("--devices", "cpu,cpu@baseline")
METHODS = (
    "LORA", "ADALORA", "BOFT", "FOURIERFT", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "OFT", "VERA", "PREFIX_TUNING",
)  # fmt: skip
FAMILIES = {
    "encoder-decoder": ("t5", ""), "mixture": ("mixtral", "target_parameters"), "state-space": ("mamba", ""),
    "dora": ("llama", "use_dora"),
}  # fmt: skip
"""Tiny models by name, each with the variant of LoRA that it has."""

_OF_A_ROW = ("status", "word", "max_abs", "max_ulp", "ratio", "allowed", "mismatched", "reason")
_RECORDED = "recorded.json"

Inputs = Callable[[Path], Iterator[tuple[str, Sequence[object]]]]


# --- what is run ----------------------------------------------------------------------------------------------------


def builtin_cases(home: Path) -> Iterator[tuple[str, Sequence[object]]]:
    for case in ("llama", "gpt2", "bert"):
        for dtype in ("float32", "bfloat16", "float16"):
            name = f"{case}-{dtype}"
            yield name, ("run", "--base", f"builtin:{case}", "--dtype", dtype, *DEVICES, "--out", home / name)


def methods(home: Path) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield a suite with an adapter of each method; the models are made from their configurations."""
    from benchmarks import faults_by_method, zoo

    zoo.quiet()
    folders = faults_by_method.make(home / "zoo", METHODS)
    cases = "".join(f'[[case]]\nname = "{name}"\nadapter = "{path}"\n' for name, path in folders.items())
    base = home / "zoo" / faults_by_method.MODEL / "base"
    (home / "methods.toml").write_text(f'name = "methods"\nbase = "{base}"\n{cases}')
    yield "methods", ("run", home / "methods.toml", *DEVICES, "--out", home / "methods")
    damaged = home / "damaged"
    shutil.copytree(folders["LORA"], damaged, dirs_exist_ok=True)
    raw = bytearray((damaged / "adapter_model.safetensors").read_bytes())
    raw[-4:] = b"\x00\x00\xc0\x7f"
    (damaged / "adapter_model.safetensors").write_bytes(raw)
    two = "".join(f'[[case]]\nname = "{name}"\nadapter = "{path}"\n' for name, path in
                  (("whole", folders["LORA"]), ("damaged", damaged)))  # fmt: skip
    (home / "two.toml").write_text(f'name = "two"\nbase = "{base}"\n{two}')
    yield "two", ("run", home / "two.toml", *DEVICES, "--out", home / "two")


def families(home: Path) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield models of several families with all that a run checks of them, and one with several adapters.

    Those whose packages are not installed (a trained model, a quantized base) are left out, before and after alike.
    """
    from benchmarks import trained, zoo

    zoo.quiet()
    for name, (model, variant) in FAMILIES.items():
        base, adapter = home / "families" / name / "base", home / "families" / name / "adapter"
        made = zoo.save_model(model, base)
        chosen = next(one for one in zoo.combinations((model,)) if (one.method, one.variant) == ("LORA", variant))
        refused = zoo.save_adapter(chosen, made, base, adapter)
        assert not refused, refused
        yield name, ("run", "--base", base, "--adapter", adapter, "--level", "thorough", *DEVICES, "--out", home / name)
    several = home / "families" / "several"
    base = home / "families" / "dora" / "base"
    given = []
    for name in ("", "use_rslora"):
        chosen = next(one for one in zoo.combinations(("llama",)) if (one.method, one.variant) == ("LORA", name))
        assert not zoo.save_adapter(chosen, zoo.build(zoo.MODELS["llama"]), base, several / (name or "plain"))
        given += ["--adapter", f"{name or 'plain'}={several / (name or 'plain')}"]
    yield "several", ("run", "--base", base, *given, *DEVICES, "--out", home / "several")
    yield "together", (
        "run", "--stages", "sharding,generation,collectives,replicas,shards,tensor-parallel,trajectory", *DEVICES,
        "--out", home / "together",
    )  # fmt: skip
    with suppress(trained.NotInstalledError):
        smollm2 = trained.make("smollm2", home / "trained")
        yield "smollm2", (
            "run", "--base", smollm2 / "base", "--adapter", smollm2 / "adapter", *DEVICES, "--out", home / "smollm2",
        )  # fmt: skip
    if importlib.util.find_spec("bitsandbytes") is not None:
        from tests.worker.model.made_quantized import quantized

        base, adapter = quantized("nf4", home / "families" / "quantized")
        yield "quantized", ("run", "--base", base, "--adapter", adapter, *DEVICES, "--out", home / "quantized")


def nights(home: Path) -> Iterator[tuple[str, Sequence[object]]]:
    for night in range(10):
        yield f"night-{night}", (
            "run", "--level", "quick", *DEVICES, "--history", home / "history", "--out", home / f"night-{night}",
            *(("--set", "mkldnn_matmul_fp32_precision=bf16") if night == 9 else ()),
        )  # fmt: skip


def drill(home: Path) -> Iterator[tuple[str, Sequence[object]]]:
    yield "drill", ("drill", *DEVICES, "--out", home / "drill")


INPUTS: tuple[Inputs, ...] = (builtin_cases, families, methods, nights, drill)


# --- what is kept ---------------------------------------------------------------------------------------------------


def record(home: Path, only: Sequence[str]) -> None:
    """Run everything, or only what these functions yield, and write what is kept of it to a file of the folder."""
    home.mkdir(parents=True)
    kept: dict[str, Any] = {}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    for inputs in INPUTS:
        if only and inputs.__name__ not in only:
            continue
        for name, words in inputs(home):
            command = [sys.executable, "-P", "-m", "consistency", *map(str, words)]
            status = subprocess.run(command, capture_output=True, check=False, env=environment).returncode
            kept[name] = {"exit status": status, "reports": dict(_reports(home / name))}
            print(f"{name}: exit status {status}", flush=True)
    if not only:
        kept["fleet"] = {"exit status": 0, "reports": {".": _fleet(home / "fleet")}}
    (home / _RECORDED).write_text(json.dumps(kept, indent=1, sort_keys=True), encoding="utf-8")


def _reports(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield what is kept of every report below a folder, by its place; of dated runs the date is left out."""
    from consistency import load_report

    for path in sorted(folder.rglob("report.json")):
        if path.parent.name != "latest" and "captures" not in path.parts:
            place = [part for part in path.parent.relative_to(folder).parts if not part[:2].isdigit()]
            yield "/".join(place) or ".", _kept(load_report(path).comparison)


def _fleet(home: Path) -> Any:
    """Return what is kept of captures of many workers, one of them with a fault, that are made up."""
    from benchmarks import scaling
    from consistency.capture.reader import read_capture
    from consistency.workflows.judging import compare_captures

    folders = scaling.write_captures(home, (16, 8, 60), alike=True)
    return _kept(compare_captures([read_capture(folder) for folder in folders]))


def _kept(comparison: Any) -> Any:
    return {
        "verdict": comparison.verdict,
        "findings": [
            {"kind": one.kind, "severity": one.severity, "workers": list(one.workers), "tensors": sorted(one.tensors)}
            for one in comparison.findings
        ],
        "tensors": {
            f"{one.load_path} {one.name}": {
                "rule": one.rule,
                "classes": [list(workers) for workers in one.classes],
                "rows": {
                    worker: {name: str(getattr(row, name)) for name in _OF_A_ROW} for worker, row in one.by_worker()
                },
            }
            for one in comparison.tensors
        },
        "first divergence": [
            [name, one.stage, one.layer, one.tensor] for one in comparison.first_divergence for name in one.workers
        ],
    }


# --- what differs ---------------------------------------------------------------------------------------------------


def differences(old: Any, new: Any, place: str = "") -> Iterator[str]:
    """Yield where two recorded values differ, and how."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            where = f"{place} · {key}" if place else key
            if key in old and key in new:
                yield from differences(old[key], new[key], where)
            else:
                yield f"{where}: only {'before' if key in old else 'after'}"
    elif old != new:
        yield f"{place}: {old!r} -> {new!r}"[:400]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW", help="a word that was renamed")
    names = [inputs.__name__ for inputs in INPUTS]
    parser.add_argument("--only", action="append", default=[], choices=names, help="record no more than this")
    given = parser.parse_args()
    if given.what == "record":
        record(given.folders[0].resolve(), given.only)
        return 0
    before, after = ((folder / _RECORDED).read_text(encoding="utf-8") for folder in given.folders)
    for word in given.renamed:
        before = re.sub(rf"\b{re.escape(word.partition('=')[0])}\b", word.partition("=")[2], before)
    old, new = json.loads(before), json.loads(after)
    found = list(differences(old, new))
    print("\n".join([*found[:100], f"{len(found)} differences in {len({*old, *new})} inputs"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
