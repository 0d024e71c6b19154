"""`suite.json`: the result of a suite for programs, schema `consistency.suite/1`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from consistency.capture.json_codec import encode_json
from consistency.capture.version import __version__
from consistency.comparison.suite import SuiteResult, common_findings
from consistency.report.formats import View
from consistency.report.json import worker_entry

SCHEMA = "consistency.suite/1"


def render(suite: SuiteResult, _: View) -> Iterator[bytes]:
    """Yield `suite.json`; `report` of a case is the path of its own report, null where it could not be checked."""
    table = msgspec.structs.asdict(suite)
    cases = table.pop("cases")
    yield encode_json(
        {
            "schema": SCHEMA,
            "tool": __version__,
            **{name: table.pop(name) for name in ("created", "host", "command", "elapsed_s")},
            "versions": suite.versions,
            **table,
            "verdict": suite.verdict,
            "sentence": suite.sentence,
            "exit_status": suite.exit_status,
            "simulated": suite.simulated,
            "planted": list(suite.planted),
            "counts": suite.counts,
            "not_checked": suite.not_checked,
            "findings": common_findings(suite.cases),
            "cases": [
                {
                    **msgspec.structs.asdict(case),
                    "workers": list(map(worker_entry, case.workers)),
                    "report": None if case.error else f"{case.folder}/report.json",
                }
                for case in cases
            ],
        },
        indent=1,
    ) + b"\n"  # fmt: skip
