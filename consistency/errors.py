"""The one family of errors that reaches a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from consistency.text import one_line, without_credentials


class ConsistencyError(Exception):
    """An error that a user can act on: it says the problem, the place, the value found and expected, and the remedy.

    Parameters
    ----------
    what : str
        One sentence without a full stop.
    where : object, optional
        File, field, layer or device concerned.
    got, wanted : object, optional
        What was found, and what is expected.
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
        self.where, self.got, self.wanted = map(_as_text, (where, got, wanted))
        self.hint = hint

    @property
    def parts(self) -> dict[str, str | None]:
        """The parts of the error by name, as its constructor takes them."""
        return {"what": self.what, "where": self.where, "got": self.got, "wanted": self.wanted, "hint": self.hint}

    def reword(self, change: Callable[[str], str]) -> None:
        """Replace the text of every part by the text that `change` returns for it."""

        def changed(part: str | None) -> str | None:
            return None if part is None else change(part)

        self.what = change(self.what)
        self.where, self.got = changed(self.where), changed(self.got)
        self.wanted, self.hint = changed(self.wanted), changed(self.hint)

    def __str__(self) -> str:
        lines = [one_line(self.what)]
        for name, value in self.parts.items():
            if name != "what" and value is not None:
                label = f"{name}:"
                lines.append(f"  {label:<8}{one_line(value)}")
        return without_credentials("\n".join(lines))


def _as_text(value: object) -> str | None:
    """Return a part of an error as text; another error of this family as one line."""
    if isinstance(value, ConsistencyError):
        return "; ".join(line.strip() for line in str(value).splitlines())
    return None if value is None else str(value)


class UnwrittenOutputError(ConsistencyError):
    """The output of a command cannot be written, such as on a full disk; its verdict is not lost with it.

    Parameters
    ----------
    exit_status : int
        That of the verdict; the error has it too, unless it is 0: what was asked for is not there.
    """

    def __init__(self, what: str, *, exit_status: int = 0, got: object = None) -> None:
        super().__init__(what, got=got)
        self.exit_status = exit_status or ConsistencyError.exit_status


class UsageError(ConsistencyError):
    """An unknown option, device or stage, or a value that cannot be used."""


class InputError(ConsistencyError):
    """A model, adapter or inputs file that cannot be used as it is."""


class CaptureError(ConsistencyError):
    """A capture folder that cannot be written or read."""


class UnusableDeviceError(ConsistencyError):
    """A device that cannot be checked: its worker fails, and no other."""


class StructureError(ConsistencyError):
    """Two tensors whose shape or dtype differ were given to a comparison of values."""


class InterruptedRunError(ConsistencyError):
    """The user stopped the run; no process and no half-written capture is left."""

    exit_status = 130


def did_you_mean(given: str, known: Iterable[str]) -> str | None:
    """Return a hint at the known name that is closest to a wrong one; None where no name is close."""
    import difflib

    names_by_form = {name.lower().replace("_", "-"): name for name in known}
    form = given.lower().replace("_", "-")
    close = difflib.get_close_matches(form, names_by_form, n=1)
    if not close:  # a part of a word is far from the whole by difflib's measure
        close = [known_form for known_form in names_by_form if _is_part(form, known_form)]
    return f"did you mean {names_by_form[close[0]]}?" if close else None


def _is_part(a: str, b: str) -> bool:
    """Return whether one of two words is a part of the other; two letters are no part."""
    return min(len(a), len(b)) > 2 and (a in b or b in a)


def extra_hint(extra: str) -> str:
    """Return how the libraries of an extra are installed; no index has this package."""
    return f"in the folder of its source: pip install '.[{extra}]'"


def first_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message, at most 300 characters of them."""
    message_lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {message_lines[0]}"[:300]
