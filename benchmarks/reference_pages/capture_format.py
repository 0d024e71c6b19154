"""`docs/capture-format.md`: the files of a capture and their fields, from the types that write them."""

from __future__ import annotations

import inspect
import textwrap

from benchmarks.reference_pages.fields import LINKS, classes_of, schema_of, section
from benchmarks.reference_pages.markdown import fence, prose
from consistency.capture import folder
from consistency.capture.folder import SCHEMA, CaptureManifest
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.worker.protocol import Event

FILES: dict[str, type] = {
    "CaptureManifest": CaptureManifest, "WorkerInfo": WorkerInfo, "TensorRecord": TensorRecord, "Event": Event
}  # fmt: skip
_NAMES = {
    "CaptureManifest": "capture.json", "WorkerInfo": "worker.json", "TensorRecord": "records.jsonl",
    "Event": "events.jsonl",
}  # fmt: skip


def page() -> str:
    """Return the page."""
    before, _, rest = inspect.cleandoc(folder.__doc__ or "").partition("::\n\n")
    block, _, after = rest.partition("\n\n")
    lines = [
        "# Captures",
        "",
        prose(before),
        "",
        *fence(textwrap.dedent(block)),
        "",
        prose(after.partition(". `")[0]),
        "",
    ]
    lines[-2] = f"{lines[-2].rstrip('.')}. The schema is `{SCHEMA}`; every field is checked when a capture is read."
    schemas, classes = schema_of(*FILES.values()), classes_of(*FILES.values())
    ordered = {**FILES, **classes}
    for name, kind in ordered.items():
        if name not in LINKS:
            lines += section(name, kind, schemas[name], title=_title(name))
    return "\n".join(lines)


def _title(name: str) -> str:
    return f"{_NAMES[name]}: {name}" if name in _NAMES else name
