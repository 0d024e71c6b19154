"""The accelerators that a test runs on: the GPUs of this machine, or the software accelerator in their place."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_INSIDE = Path(__file__).with_name("inside.py")

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
on_gpus = pytest.mark.parametrize("machine", [GPU], indirect=True, scope="session")
on_gpus_and_the_double = pytest.mark.parametrize("machine", [GPU, "npu"], indirect=True, scope="session")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One accelerator, as torch knows it in PCI order: `capability` is empty on the double."""

    name: str
    model: str
    uuid: str
    capability: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Accelerators of one type, what torch is built for, the environment that sees them, and the tool there."""

    kind: str
    cards: tuple[Card, ...]
    built_for: str
    environment: Mapping[str, str]
    command: tuple[str, ...] = ("-m", "consistency")

    @property
    def is_double(self) -> bool:
        return self.kind != "cuda"

    def python(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", *map(str, arguments)], env={**self.environment, **variables}, cwd=ROOT,
            capture_output=True, text=True, check=False, timeout=1800,
        )  # fmt: skip

    def consistency(self, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.python(*self.command, *words, **variables)

    def inside(self, task: str, *arguments: object, **variables: str) -> Any:
        """Do a task of `tests/gpu/inside.py` in a process of its own, and return what it found."""
        done = self.python(_INSIDE, task, *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def start_consistency(self, *words: object) -> subprocess.Popen[str]:
        return self._start("-m", "consistency", *words)

    @contextmanager
    def full(self, card: Card) -> Iterator[None]:
        """Let another process hold all memory of a card."""
        holder = self._start(_INSIDE, "hold", card.name)
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            lines = []
            for line in holder.stdout:
                lines.append(line)
                if line == "full\n":
                    break
            assert lines[-1:] == ["full\n"], "".join(lines)
            yield
        finally:
            holder.stdin.close()
            holder.wait(60)

    def _start(self, *arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", *map(str, arguments)], env=dict(self.environment), cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip


def machine_with(kind: str, environment: Mapping[str, str], **more: tuple[str, ...]) -> Machine:
    """Ask torch, in a process of its own, so that this one opens no device; skip where there is none."""
    environment = {**environment, "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # as workers have it
    done = Machine(kind=kind, cards=(), built_for="", environment=environment).python(_INSIDE, "cards", kind)
    if done.returncode != 0:
        pytest.skip(f"torch cannot list {kind} devices: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["cards"]:
        pytest.skip(f"torch {found['torch']}, built for {found['built_for']}, sees no {kind} device")
    cards = tuple(Card(**{**card, "capability": tuple(card["capability"])}) for card in found["cards"])
    return Machine(kind=kind, cards=cards, built_for=found["built_for"], environment=environment, **more)


def report_of(folder: Path) -> dict[str, Any]:
    """Read the report that a run left."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return found


def workers_of(report: dict[str, Any], card: Card | None = None) -> list[dict[str, Any]]:
    """Return the workers of a report on one card, or on any accelerator."""
    return [w for w in report["workers"] if (w["name"] != "cpu" if card is None else w["name"] == card.name)]
