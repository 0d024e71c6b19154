"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_DIAGNOSIS = "consistency.extras.diagnosis"

PLUGIN = Plugin(
    name="diagnosis",
    commands={name: f"{_DIAGNOSIS}.{name}.command" for name in ("drill", "reproduce", "bisect")},
    remarks=(f"{_DIAGNOSIS}.upstream.remark:REMARK",),
)
