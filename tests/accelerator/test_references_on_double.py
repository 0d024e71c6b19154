"""What devices are compared with is made of the files' bytes on the CPU, by way of no other device."""

from __future__ import annotations

import pytest

from .fixtures import Double

pytestmark = pytest.mark.slow

PUBLISHED = """
import functools, os, tempfile
from pathlib import Path
from consistency.capture.writer import CaptureWriter
from consistency.case.preflight import prepare_case
from consistency.case.reading import make_options
from consistency.numerics.digest import digest
from consistency.worker import session
from consistency.worker.protocol import EventLog, Job
from consistency.stages.forward import reference as forward
from consistency.stages.gradient import worker as gradient
from consistency.extras.training.trajectory import step_checks

def publish(real, scratch, exact, *rest):
    for name, tensor in sorted(exact.items()):
        print("published", *rest[1:], name, digest(tensor).value)
    return real(scratch, exact, *rest)

for module in (forward, gradient, step_checks):
    module.publish = functools.partial(publish, module.publish)
stages = "forward,gradient,trajectory,sharding"
case = prepare_case(make_options({"base": "builtin:llama", "stages": stages, "steps": 2, "devices": "npu:1"}))
with tempfile.TemporaryDirectory() as scratch, CaptureWriter(Path(scratch, "capture")) as writer:
    folder = writer.worker_folder("npu")
    job = Job(
        case=case, name="npu:1", device="npu:1", load_path="shared", folder=str(folder), blobs=str(writer.blobs),
        scratch=scratch, settings={}, makes_reference=True, threads=1, parent_pid=os.getpid(),
    )
    with EventLog(folder / "events.jsonl") as events:
        session.run(job, events)
"""


def published(double: Double, copies: list[dict[str, str]]) -> list[str]:
    """Return what the worker of a device published as exact, with some copies between devices wrong."""
    done = double.python("-c", PUBLISHED, devices=2, copies=copies)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("published ")]


def test_copies_of_devices_change_no_reference(double: Double) -> None:
    healthy = published(double, [])
    assert {"gradient.safetensors", "trajectory-0.safetensors"} <= {line.split()[1] for line in healthy}
    ends = ("npu:0", "npu:1")
    wrong = [{"from": end, "to": other, "does": "zero"} for end in ends for other in ("cpu", *ends)]
    assert published(double, wrong) == healthy
