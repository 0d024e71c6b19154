"""The format of `status.json`, which is written beside every report and which `consistency status` reads."""

from __future__ import annotations

from consistency.report.formats import Chosen, Format
from consistency.report.runs import RUN_STATUS, SUITE_STATUS

STATUS = Format(
    name=RUN_STATUS,
    suite=SUITE_STATUS,
    chosen=Chosen.OUT,
    writer="consistency.extras.operations.status.make:render",
    help="for `status`",
)
