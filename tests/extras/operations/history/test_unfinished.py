"""A run that has no entry in the history is known by its note."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from consistency.errors import CaptureError, InputError
from consistency.extras.operations.history.store import DID_NOT_END, NO_ENTRY, RUNNING, History, noted, unfinished
from consistency.extras.operations.history.table import run_rows

_KILLED = """
import os, signal, sys
from consistency.extras.operations.history.store import History
from consistency.extras.operations.history.store import noted
with noted(History(sys.argv[1]), "night", report="/runs/1"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def verdicts(history: History) -> list[tuple[str, tuple[str, ...]]]:
    return [(row.verdict, row.findings) for row in run_rows(history, 0)]


def test_run_is_in_the_list_while_it_works_and_its_note_goes_with_it(tmp_path: Path) -> None:
    history = History(str(tmp_path / "history"))
    with noted(history, "night"):
        history.require()
        assert verdicts(history) == [(RUNNING, ())]
    assert verdicts(history) == []
    assert not any((tmp_path / "history" / "started").iterdir())


@pytest.mark.process
def test_killed_run_did_not_end(tmp_path: Path) -> None:
    history = History(str(tmp_path / "history"))
    subprocess.run([sys.executable, "-c", _KILLED, tmp_path / "history"], check=False)
    assert verdicts(history) == [(DID_NOT_END, ())]
    ((_, note),) = unfinished(history)
    assert (note.case, note.report) == ("night", "/runs/1")


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyboardInterrupt(), "stopped"), (InputError("no room"), "InputError: no room")]
)
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_run_that_was_stopped_or_failed_says_why(error: BaseException, reason: str, kind: str, tmp_path: Path) -> None:
    history = History(str(tmp_path / "history") if kind == "disk" else f"memory:/{tmp_path}")
    with pytest.raises(type(error)), noted(history, "night"):
        raise error
    assert verdicts(history) == [(DID_NOT_END, (reason,))]


def test_of_a_run_elsewhere_only_its_start_is_known(tmp_path: Path) -> None:
    history = History(f"memory:/{tmp_path}")
    with noted(history, "night"):
        assert verdicts(history) == [(NO_ENTRY, ())]
    assert verdicts(history) == []


def test_history_that_cannot_be_written_is_known_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CaptureError, match="cannot write the history"), noted(History(str(tmp_path / "file")), "night"):
        pytest.fail("the work began")
