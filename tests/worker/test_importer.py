"""Nothing is decided in the process that imports the libraries, and a worker is forked there only if that is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="only there are workers forked"),
]

COMPUTES = "torch.mm(torch.empty(8, 8), torch.empty(8, 8))"
SUMS = "torch.ones(3).sum()"


def ran(tmp_path: Path, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on one thread; MKL and oneDNN print what they compute."""
    variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "2"}
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=240,
        env={"PYTHONPATH": root, "HF_HUB_OFFLINE": "1", **variables, **environment},
    )  # fmt: skip


IMPORT = """
import os
from consistency.worker.importer import import_libraries
import_libraries(models=True)
import torch
print("threads", len(os.listdir("/proc/self/task")), flush=True)
{then}
for capability in ("default", "avx2"):
    pid = os.fork()
    if not pid:
        os.environ["ATEN_CPU_CAPABILITY"] = capability
        print(torch.backends.cpu.get_cpu_capability(), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture(scope="module")
def native() -> str:
    found: str = torch.backends.cpu.get_cpu_capability()
    if found not in ("AVX2", "AVX512"):
        pytest.skip("this processor has no kernel variants")
    return found


@pytest.mark.slow
def test_importing_the_libraries_decides_nothing(tmp_path: Path, native: str) -> None:
    done = ran(tmp_path, IMPORT.format(then=""))
    assert done.stdout.splitlines() == ["threads 1", "DEFAULT", "AVX2"], done.stdout + done.stderr


@pytest.mark.slow
def test_a_library_that_decides_is_seen(tmp_path: Path, native: str) -> None:
    """The test above can fail, by either of the two ways in which it looks."""
    assert ran(tmp_path, IMPORT.format(then=SUMS)).stdout.splitlines() == ["threads 1", native, native]
    if torch.backends.mkl.is_available():
        assert "MKL_VERBOSE SGEMM" in ran(tmp_path, IMPORT.format(then=COMPUTES)).stdout


PLANT = """
import consistency.worker.session as session
import torch
session.import_models = lambda: {code}
from consistency.worker.importer import import_libraries
import_libraries(models=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "names"),
    [(SUMS, "aten.ones.default, aten.sum.default"), (COMPUTES, "aten.empty.memory_format, aten.mm.default")],
    ids=["ATen", "MKL"],
)
def test_an_operation_while_libraries_are_imported_is_named(code: str, names: str, tmp_path: Path) -> None:
    done = ran(tmp_path, PLANT.format(code=code))
    assert done.returncode == 1
    assert f"operations ran while the libraries were imported: {names}\n" in done.stderr


SERVE = """
import os, socket, sys, threading, time
from consistency.capture.json_codec import encode_json
from consistency.worker import importer
from consistency.worker.protocol import ForkRequest
import torch

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
report, told = os.pipe()
stdin, held = os.pipe()
log = os.open("log", os.O_RDWR | os.O_CREAT)
request = ForkRequest(jobs="JOBS", variables={{"ATEN_CPU_CAPABILITY": "default"}})
socket.send_fds(ours, [encode_json(request)], [stdin, log, told])
os.close(told)
if os.fork() == 0:
    ours.close()
    os.dup2(os.open("printed", os.O_RDWR | os.O_CREAT), 1)
    os.write(1, b"said meanwhile ")
    {before}
    sys.exit(importer.serve(theirs) != "JOBS" and "it is no worker")
with open(report) as lines:
    print(lines.read().split()[0::2], open("log").read())
"""


KERNELS = "said meanwhile torch has chosen its kernels before this worker was forked: {native}, not DEFAULT\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "told", "log"),
    [
        ("pass", ["started", "ended"], "said meanwhile "),
        (SUMS, ["ended"], KERNELS),
        ("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()", [], ""),
    ],
    ids=["sound", "kernels are chosen", "a thread"],
)
def test_a_worker_starts_only_where_it_can_choose_its_kernels(
    before: str, told: list[str], log: str, tmp_path: Path, native: str
) -> None:
    done = ran(tmp_path, SERVE.format(before=before))
    assert done.stdout == f"{told} {log.format(native=native)}\n", done.stderr
