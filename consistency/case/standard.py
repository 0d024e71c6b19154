"""The stages of the level `standard`: the only ones that the rest of the package names."""

from __future__ import annotations

from consistency.case.stage import Stage

TRANSFER = Stage("transfer")
OPERATORS = Stage("operators")
BASE = Stage("base")
ADAPTER = Stage("adapter")
MERGED = Stage("merged")
FORWARD = Stage("forward")
GRADIENT = Stage("gradient")
MEMORY = Stage("memory")
