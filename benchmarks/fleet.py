"""A fleet on a real cluster of this machine: what the engine costs per node, and what three broken nodes cost.

    python -m benchmarks.fleet --engine slurm
    python -m benchmarks.fleet --engine ray

The captures are real, of the built-in case at level quick on one CPU device. The overhead of a node is the time from
the submission of its task until the fleet sees its capture, less the time of the own process of the capture.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.extras.operations.fleet.schedulers.ray_cluster import RayCluster, ray_cluster
from tests.extras.operations.fleet.schedulers.slurm_cluster import SlurmCluster, slurm_cluster

WRAPPER = """\
#!/bin/sh
node=${{SLURMD_NODENAME:-$NODE}}
date +%s.%N > {home}/$node.begin
[ "$node" = "{without_disk}" ] && export TMPDIR={home}/small
{python} -P -m consistency "$@"
status=$?
date +%s.%N > {home}/$node.end
exit $status
"""

Cluster = SlurmCluster | RayCluster


def run(
    cluster: Cluster, engine: str, home: Path, *, killed: str = "", frozen: str = "", without_disk: str = ""
) -> None:
    """Run a fleet, break nodes of it as soon as they run, and print what came of it."""
    wrapper, out = home / "node.sh", home / "out"
    wrapper.write_text(WRAPPER.format(home=home, python=sys.executable, without_disk=without_disk))
    command = [
        sys.executable, "-P", "-m", "consistency", "fleet", "--engine", engine, "--nodes", "all", "--out", str(out),
        "--command", f"sh {wrapper}", "--level", "quick", "--stages", "base,adapter,merged", "--devices", "cpu",
        "--threads", "1",
    ]  # fmt: skip
    began = time.time()
    process = subprocess.Popen(
        command, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    submitted: dict[str, float] = {}
    delivered: dict[str, float] = {}
    for line in process.stderr:
        node, _, state = line.strip().partition(": ")
        if state == "waiting":
            submitted.setdefault(node, time.time())
        elif state.startswith("running: import") and node in (killed, frozen):
            (cluster.kill if node == killed else cluster.freeze)(node)
            killed, frozen = (killed if node != killed else ""), (frozen if node != frozen else "")
        elif state == "delivered":
            delivered[node] = time.time()
        if "lost" in state:
            print(f"  {line.strip()}")
    status, total_s = process.wait(), time.time() - began
    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    captures = {node: _time(home / f"{node}.end") - _time(home / f"{node}.begin") for node in delivered}
    overheads = [delivered[node] - submitted[node] - captures[node] for node in delivered]
    print(
        f"  exit status {status}, {len(report['workers'])} nodes compared; {total_s:.1f} s in all, the longest capture "
        f"{max(captures.values()):.1f} s ({total_s - max(captures.values()):+.1f} s); overhead per node: median "
        f"{statistics.median(overheads):.1f} s, most {max(overheads):.1f} s"
    )


def _time(path: Path) -> float:
    return float(path.read_text())


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Mount a disk that a capture fills."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("slurm", "ray"), default="slurm")
    parser.add_argument("--nodes", type=int, default=8)
    parsed = parser.parse_args()
    with ExitStack() as stack:
        cluster: Cluster
        if parsed.engine == "slurm":
            cluster = stack.enter_context(slurm_cluster(parsed.nodes))
        else:
            cluster = stack.enter_context(ray_cluster(parsed.nodes))
        for title, broken in (
            ("healthy", []),
            ("one node killed, one frozen, one without disk", [cluster.nodes[index] for index in (1, 2, 3)]),
        ):
            print(f"{parsed.engine}, {parsed.nodes} nodes, {title}:", flush=True)
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-")))
            if not broken:
                run(cluster, parsed.engine, home)
                continue
            killed, frozen, without_disk = broken
            with _small_disk(home / "small"):
                run(cluster, parsed.engine, home, killed=killed, frozen=frozen, without_disk=without_disk)


if __name__ == "__main__":
    main()
