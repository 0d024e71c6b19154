"""The one family of errors that reaches a user."""

from __future__ import annotations


class ConsistencyError(Exception):
    """Say what is wrong, where, what was found, what was wanted, and what to do.

    Parameters
    ----------
    what : str
        One sentence without a final stop.
    where : object, optional
        File, field, layer or device concerned.
    got, wanted : object, optional
        What was found, and what would have been right.
    hint : str, optional
        What the reader can do about it.
    """

    exit_status = 2

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        wanted: object = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.got = None if got is None else str(got)
        self.wanted = None if wanted is None else str(wanted)
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.what]
        for label, value in (("where", self.where), ("got", self.got), ("wanted", self.wanted), ("hint", self.hint)):
            if value is not None:
                parts.append(f"  {label + ':':<8}{value}")
        return "\n".join(parts)


class UsageError(ConsistencyError):
    """An option, device, stage or configuration that the tool does not know."""


class InputError(ConsistencyError):
    """A model, adapter or inputs file that cannot be used as it is."""


class CaptureError(ConsistencyError):
    """A capture folder that cannot be written or read."""


class StructureError(ConsistencyError):
    """Two tensors whose shape or dtype differ were given to a comparison of values."""


class InterruptedRunError(ConsistencyError):
    """The user stopped the run; no process and no half-written capture is left."""

    exit_status = 130


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, at most 300 characters of them."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"[:300]
