"""The name that `import consistency` offers: the module with `Watch` and `Callback`."""

from __future__ import annotations

from consistency.extras.watching import watch

__all__ = ["watch"]
