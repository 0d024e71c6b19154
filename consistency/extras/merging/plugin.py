"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_CHECK_MERGED = "consistency.extras.merging.check_merged"
_DIFF = "consistency.extras.merging.diff"

PLUGIN = Plugin(
    name="merging",
    commands={"diff": f"{_DIFF}.command", "check-merged": f"{_CHECK_MERGED}.command"},
    kinds=(f"{_CHECK_MERGED}.causes:MergeCause", "consistency.extras.merging.kinds:KINDS"),
    statements={"merged_folder": f"{_CHECK_MERGED}.result:statement", "file": f"{_DIFF}.result:statement"},
    api={"check_merged": f"{_CHECK_MERGED}.result", "diff": f"{_DIFF}.result"},
)
