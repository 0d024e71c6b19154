"""What this extra adds."""

from __future__ import annotations

from consistency.plugins import Plugin

_CHECK_ADAPTER = "consistency.extras.merging.check_adapter"
_CHECK_MERGED = "consistency.extras.merging.check_merged"
_DIFF = "consistency.extras.merging.diff"

PLUGIN = Plugin(
    name="merging",
    commands={
        "diff": f"{_DIFF}.command",
        "check-adapter": f"{_CHECK_ADAPTER}.command",
        "check-merged": f"{_CHECK_MERGED}.command",
    },
    kinds=(
        f"{_CHECK_MERGED}.causes:MergeCause",
        "consistency.extras.merging.kinds:KINDS",
    ),
    statements={
        "merged_folder": f"{_CHECK_MERGED}.result:statement",
        "saved_adapter": f"{_CHECK_ADAPTER}.result:statement",
        "file": f"{_DIFF}.result:statement",
    },
    api={
        "check_adapter": f"{_CHECK_ADAPTER}.result",
        "check_merged": f"{_CHECK_MERGED}.result",
        "diff": f"{_DIFF}.result",
    },
)
