"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_WATCHING = "consistency.extras.watching"

PLUGIN = Plugin(
    name="watching",
    api={"watch": f"{_WATCHING}.api"},
    kinds=(f"{_WATCHING}.kinds:KINDS",),
    statements={"watch": f"{_WATCHING}.report:statement"},
)
