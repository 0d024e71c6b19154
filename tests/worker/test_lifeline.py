"""A worker must not outlive its parent, however the parent dies. All processes here are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

WORKER = """
import sys, time
from consistency.worker import lifeline
{before}
lifeline.hold(int(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""
# either of the two ways must be enough
ONLY_THE_PIPE = "sys.platform = 'other'"
ONLY_THE_SIGNAL = "lifeline.threading.Thread.start = lambda self: None"

PARENT = """
import os, subprocess, sys
worker = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
worker.stdout.readline()
print(worker.pid, flush=True)
sys.stdin.read()
"""


def is_alive(pid: int) -> bool:
    """Report whether a process runs: one that nobody waits for stays in the table as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("before", [ONLY_THE_SIGNAL, ONLY_THE_PIPE], ids=["death signal", "pipe"])
def test_a_worker_whose_parent_is_killed_ends(before: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, WORKER.format(before=before)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        try:
            assert is_alive(pid)
            parent.kill()
            parent.wait()
            until = time.monotonic() + 20
            while is_alive(pid) and time.monotonic() < until:
                time.sleep(0.02)
            assert not is_alive(pid)
        finally:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_worker_whose_parent_is_already_gone_ends_at_once() -> None:
    not_the_parent = "1" if os.getpid() != 1 else "2"
    command = [sys.executable, "-c", WORKER.format(before=""), not_the_parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b""
    assert worker.returncode == 1
