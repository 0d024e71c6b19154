"""Statuses made by hand, for every form that shows them."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec

from consistency.comparison.result import Comparison
from consistency.extras.operations.status.make import of_comparison
from consistency.extras.operations.status.record import Status

ENDED = datetime.datetime(2026, 11, 22, 2, 0, tzinfo=datetime.UTC)


def status(found: Comparison, **fields: Any) -> Status:
    """Return the status of a comparison that ended at `ENDED`."""
    return msgspec.structs.replace(of_comparison(found, created=ENDED), **{"elapsed_s": 41.0, **fields})
