"""Tell whether the same base model and the same adapter are the same numbers on every device.

Importing this package imports no torch: that happens in the workers.
"""

from __future__ import annotations

__version__ = "0.1.0"

from consistency.api import Comparison, Report, compare, run
from consistency.case import Case, Options
from consistency.errors import ConsistencyError

__all__ = ["Case", "Comparison", "ConsistencyError", "Options", "Report", "__version__", "compare", "run"]
