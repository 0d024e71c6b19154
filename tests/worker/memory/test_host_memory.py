from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

TELL = "from consistency.worker.memory.host_memory import peak_bytes; print(peak_bytes())"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux starts a process with its parent's mark")
def test_the_peak_of_a_process_is_not_that_of_its_parent() -> None:
    ours = np.ones(2**25)  # 256 MiB that this process holds and the other does not
    done = subprocess.run([sys.executable, "-c", TELL], capture_output=True, text=True, check=True)
    assert 2**20 < int(done.stdout) < ours.nbytes


def test_what_is_taken_counts() -> None:
    code = f"taken = bytearray(b'x') * (100 * 2**20); {TELL}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100 * 2**20
