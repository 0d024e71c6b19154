"""A worker never outlives the process that started it.

The parent holds the writing end of the worker's standard input. When the parent dies, by any signal, the kernel
closes it and the worker reads its end. On Linux the kernel is also asked to kill the worker at once, because a thread
cannot run while native code holds the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends, where it can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the request above was in force
        os._exit(1)


def hold(parent_pid: int) -> None:
    """Tie this process's life to its parent's."""
    end_with(parent_pid)
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    try:
        while os.read(0, 1):
            pass
    except OSError:
        pass
    os._exit(1)
