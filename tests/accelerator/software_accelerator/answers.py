"""What a device answers to each call: nothing, an error of its runtime, or nothing for a long time."""

from __future__ import annotations

import mmap
import sys
import time
from collections import Counter
from collections.abc import Iterator

from . import NAME, _native
from .settings import DeviceFailure, DeviceWait, Settings

_BLOCK = 1 << 20
_STEP_S = 0.25


class Answers:
    """The failures and waits of this process's devices, and how far each has come."""

    def __init__(self, settings: Settings) -> None:
        self._visible = settings.visible
        self._failures = settings.failures
        self.waits = list(settings.waits)
        self._calls: Counter[DeviceFailure] = Counter()
        self._lost: dict[str, DeviceFailure] = {}

    def __call__(self, index: int) -> tuple[str, str] | None:
        name = f"{NAME}:{self._visible[index]}"
        for wait in [one for one in self.waits if one.device == name and _is_during(one.during)]:
            self.waits.remove(wait)
            _wait(wait)
        failure = self._lost.get(name) or next((one for one in self._failures if self._hits(one, name)), None)
        if failure is None:
            return None
        if failure.sticky:
            self._lost[name] = failure
        return failure.raises, failure.says

    def _hits(self, failure: DeviceFailure, name: str) -> bool:
        if failure.device != name or not _is_during(failure.during):
            return False
        self._calls[failure] += 1
        return self._calls[failure] == failure.from_call


_now: Answers | None = None


def install(settings: Settings) -> None:
    """Let the devices answer as the settings say."""
    global _now
    _now = Answers(settings)
    _native.set_answer(_now)


def left() -> int:
    """Return how many waits have not come."""
    return 0 if _now is None else len(_now.waits)


def _is_during(part: str) -> bool:
    """Tell whether a function is on the stack of some thread: autograd calls a device from a thread of its own."""
    return not part or any(part in function for function in _on_stacks())


def _on_stacks() -> Iterator[str]:
    for top in sys._current_frames().values():
        frame = top
        while frame is not None:
            yield f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
            frame = frame.f_back  # type: ignore[assignment]


def _wait(wait: DeviceWait) -> None:
    end = time.monotonic() + wait.seconds
    if not wait.reads:
        _native.spin(wait.seconds)
    while time.monotonic() < end:
        with mmap.mmap(-1, _BLOCK) as memory:
            memory.write(bytes(_BLOCK))
        time.sleep(_STEP_S)
