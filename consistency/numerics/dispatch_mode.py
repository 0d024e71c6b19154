"""The class of all dispatch modes here, which do without torch's compiler in a process that does.

Torch wraps the `__torch_dispatch__` of a mode so that torch.compile never compiles it, and the wrapper imports
`torch._dynamo`, with SymPy, at its first call: seconds of processor time in each worker, and before the first
`assert_within_rounding` of a test session. Nothing is compiled in a process that has not imported it, so there the mode
is called directly. In one that has, the wrapper is called, as torch does.

A `TorchFunctionMode` has no such wrapper.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_COMPILER = "torch._dynamo"


class DispatchMode(TorchDispatchMode):
    """See and replace each operation that torch dispatches while the mode is active.

    A subclass defines `__torch_dispatch__(self, func, types, args=(), kwargs=None)`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Call what the subclass defines without torch's wrapper until torch's compiler has been imported."""
        dispatch = cls.__dict__.get("__torch_dispatch__")
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]  # torch leaves this class untyped
        wrapped = cls.__dict__.get("__torch_dispatch__")
        if wrapped is dispatch:  # nothing defined, or a version of torch without the wrapper, as 2.8
            return

        @functools.wraps(dispatch)  # type: ignore[arg-type]
        def dispatch_directly(*args: Any, **kwargs: Any) -> Any:
            # while it is being imported nothing is compiled yet, and the wrapper would find half of a module
            is_compiler_imported = hasattr(sys.modules.get(_COMPILER), "disable")
            if is_compiler_imported:
                return wrapped(*args, **kwargs)  # type: ignore[misc]
            return dispatch(*args, **kwargs)  # type: ignore[misc]

        cls.__torch_dispatch__ = dispatch_directly  # type: ignore[method-assign]
