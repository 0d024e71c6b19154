"""The library behind a group's collectives: its version, and what it was told by variables, as evidence."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from consistency.worker.ranks.group import Joined

_PREFIXES = ("NCCL_", "RCCL_", "TORCH_NCCL_", "GLOO_", "HCCL_", "CCL_")

_PRIVATE = frozenset({
    "ADDR", "COMM", "DIR", "FILE", "HOST", "HOSTID", "ID", "IP", "KEY", "PASSWORD", "PATH", "SECRET", "SERVER", "TOKEN",
    "WHITELIST",
})  # fmt: skip
"""Parts of the names of variables whose values may be a host, a place in its files, or a secret."""

_CHOICES = {"algorithm": "NCCL_ALGO", "protocol": "NCCL_PROTO"}


def variables() -> dict[str, str]:
    """Return the variables of this process that tell a library of collectives what to do."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_PREFIXES) and _PRIVATE.isdisjoint(name.split("_"))
    }


def facts(ranks: Joined) -> dict[str, Any]:
    """Return who talks, by which backend, and what is known of its choices: NCCL tells no caller what it chose."""
    backend = str(dist.get_backend(ranks.process_group))
    found: dict[str, Any] = {"ranks": list(ranks.names), "backend": backend}
    if backend == "nccl":
        found["version"] = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {what: os.environ.get(name) or "chosen by NCCL" for what, name in _CHOICES.items()}
    if told := variables():
        found["variables"] = told
    return found
