"""`docs/report-format.md`: the fields of `report.json`, from its schema and the docstrings of its types."""

from __future__ import annotations

from benchmarks.reference_pages.fields import LINKS, classes_of, section
from consistency.report.json import SCHEMA, ReportFile, schema

_HEAD = f"""# report.json

What `--out` writes for programs, of schema `{SCHEMA}`. [report.schema.json](report.schema.json) is the same as a JSON
schema. `outcomes` is the table of a comparison: a row per tensor and cohort, which is the workers of which the same is
true, bits included. A list of more than 16 workers is written as `["@3"]`: the workers of cohort 3. What the
environments of like devices share is written once. A number that JSON cannot write is `"nan"`, `"inf"` or `"-inf"`.
"""


def page() -> str:
    """Return the page."""
    schemas, classes = schema()["$defs"], classes_of(ReportFile)
    lines = [_HEAD]
    for name, kind in classes.items():
        if name not in LINKS:
            lines += section(name, kind, schemas[name])
    return "\n".join(lines)
