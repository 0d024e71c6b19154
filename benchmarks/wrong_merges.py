"""Time `check-merged` on folders that are wrong, against the right one: an explanation may take 5 times as long.

    OMP_NUM_THREADS=1 python -m benchmarks.wrong_merges BASE ADAPTER

Folders are made from a base in safetensors and a plain LoRA, in the base's own dtype, and checked one after the other
in one process, after one check that warms up. Seconds are those of the processor, the fewest of two checks; what was
named is printed beside.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from consistency.extras.merging.check_merged.result import check_merged

Tensors = dict[str, torch.Tensor]

_CHECKS = 2
"""Checks of each folder."""


class Merger:
    """A base and the deltas of an adapter, from which wrong folders are made."""

    def __init__(self, base: Path, adapter: Path) -> None:
        self.base_folder = base
        self.base: Tensors = {}
        for file in sorted(base.glob("*.safetensors")):
            self.base |= load_file(file)
        factors = load_file(adapter / "adapter_model.safetensors")
        config = json.loads((adapter / "adapter_config.json").read_text())
        scaling = config["lora_alpha"] / config["r"]
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for key, b in factors.items():
            if key.endswith(".lora_B.weight"):
                name = key.removeprefix("base_model.model.").replace(".lora_B.weight", ".weight")
                self.factors[name] = scaling * b.float(), factors[key.replace("lora_B", "lora_A")].float()

    def delta(self, name: str) -> torch.Tensor:
        b, a = self.factors[name]
        return b @ a

    def merged(self, changed: Callable[[str], torch.Tensor]) -> Tensors:
        """Return the base with the adapted tensors that a function of their names returns, in the base's dtype."""
        return {**self.base, **{name: changed(name).to(self.base[name].dtype) for name in self.factors}}

    def right(self, name: str) -> torch.Tensor:
        return self.base[name].float() + self.delta(name)

    def folders(self) -> Iterator[tuple[str, Tensors]]:
        """Yield the right folder, and then each wrong one, by the mistake."""
        base, right = self.base, self.right
        yield "right", self.merged(right)
        yield "base alone", self.merged(lambda name: base[name])
        yield "merged twice", self.merged(lambda name: right(name).to(base[name].dtype).float() + self.delta(name))
        yield "unscaled by half", self.merged(lambda name: base[name].float() + self.delta(name) / 2)
        yield "scaled by 0.37", self.merged(lambda name: base[name].float() + self.delta(name) * 0.37)
        yield "layers reversed", self.merged(self._of_the_last)
        yield "first ranks alone", self.merged(self._first_ranks)
        yield "rows of rotary pairs", self.merged(lambda name: base[name].float() + in_pairs(self.delta(name)))
        yield "half of the rows", self.merged(self._half_of_the_rows)
        yield "half of the columns", self.merged(self._half_of_the_columns)
        yield "delta alone", self.merged(self.delta)
        yield "int8 after", self.merged(lambda name: in_eight_bits(right(name)))
        yield "another adapter", self.merged(lambda name: base[name].float() + self._other(name))
        yield "another adapter too", self.merged(lambda name: right(name) + self._other(name))
        yield "noise of 1 %", self.merged(lambda name: right(name) * (1 + 0.01 * torch.randn(base[name].shape)))
        yield "one unit off", self.merged(lambda name: one_unit_off(right(name).to(base[name].dtype)))

    def _of_the_last(self, name: str) -> torch.Tensor:
        alike = [other for other in self.factors if other.split(".")[-2] == name.split(".")[-2]]
        return self.base[name].float() + self.delta(alike[-1 - alike.index(name)])

    def _first_ranks(self, name: str) -> torch.Tensor:
        b, a = self.factors[name]
        ranks = max(1, a.shape[0] // 2)
        return self.base[name].float() + b[:, :ranks] @ a[:ranks]

    def _half_of_the_rows(self, name: str) -> torch.Tensor:
        delta = self.delta(name)
        delta[len(delta) // 2 :] = 0
        return self.base[name].float() + delta

    def _half_of_the_columns(self, name: str) -> torch.Tensor:
        delta = self.delta(name)
        delta[:, delta.shape[1] // 2 :] = 0
        return self.base[name].float() + delta

    def _other(self, name: str) -> torch.Tensor:
        b, a = self.factors[name]
        stream = torch.Generator().manual_seed(len(name))
        other_b = torch.randn(b.shape, generator=stream) * b.std()
        return other_b @ (torch.randn(a.shape, generator=stream) * a.std())


def in_pairs(delta: torch.Tensor, head: int = 64) -> torch.Tensor:
    """Return rows with the two halves of each head interleaved, where the rows are whole heads."""
    if len(delta) % head:
        return delta
    return delta.view(-1, 2, head // 2, delta.shape[1]).transpose(1, 2).reshape(delta.shape)


def in_eight_bits(values: torch.Tensor) -> torch.Tensor:
    scale = values.abs().amax(dim=1, keepdim=True) / 127
    return (values / scale).round() * scale


def one_unit_off(values: torch.Tensor) -> torch.Tensor:
    """Return values of which every hundredth is the next number of their dtype."""
    if values.dtype != torch.float32:
        values.view(torch.int16).view(-1)[::100] += 1
    else:
        values.view(torch.int32).view(-1)[::100] += 1 << 8
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--only", help="a part of the names of the wrong folders")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the folders (default: the base's)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    merger = Merger(arguments.base, arguments.adapter)
    if arguments.dtype:
        merger.base = {name: tensor.to(getattr(torch, arguments.dtype)) for name, tensor in merger.base.items()}
    healthy = 0.0
    print(f"{'folder':24}{'cpu s':>8}{'ratio':>8}  named")
    for mistake, tensors in merger.folders():
        if healthy and arguments.only and arguments.only not in mistake:
            continue
        with tempfile.TemporaryDirectory() as home:
            merged = Path(home)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, merged / "model.safetensors")
            shutil.copy(arguments.base / "config.json", merged)
            del tensors
            every = []
            for _ in range(_CHECKS if healthy else _CHECKS + 1):  # the first check of all imports and warms up
                started = time.process_time()
                found = check_merged(merged, base=arguments.base, adapter=arguments.adapter)
                every.append(time.process_time() - started)
            seconds = min(every)
        healthy = healthy or seconds
        worst = [finding for finding in found.findings if finding.severity == "error"]
        said = "; ".join(f"{finding.kind}: {finding.message}"[:150] for finding in worst)
        print(f"{mistake:24}{seconds:8.2f}{seconds / healthy:8.1f}  {said or found.verdict}", flush=True)
    print("wanted: 5 at most")


if __name__ == "__main__":
    main()
