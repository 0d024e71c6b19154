from __future__ import annotations

from pathlib import Path

import pytest

from consistency.devices.memory import available_bytes, is_in_memory


def host(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable: 8000 kB\n"}
GROUP = {"proc/self/cgroup": "0::/slice/job\n"}


JOB, SLICE, V1 = "sys/fs/cgroup/slice/job/memory.", "sys/fs/cgroup/slice/memory.", "sys/fs/cgroup/memory/memory."
HOSTS: dict[str, tuple[dict[str, str], int | None]] = {
    "the kernel counts what is available": (MEMINFO, 8000 * 1024),
    "a control group leaves less": (
        {
            **MEMINFO, **GROUP, f"{JOB}max": "max\n", f"{JOB}current": "1000\n", f"{SLICE}max": "500000\n",
            f"{SLICE}current": "300000\n", f"{SLICE}stat": "anon 1\nfile 90000\ninactive_file 50000\n",
        },
        500000 - 300000 + 50000,
    ),
    "a container mounts its group as the root": (
        {**MEMINFO, **GROUP, "sys/fs/cgroup/memory.max": "70000", "sys/fs/cgroup/memory.current": "20000"}, 50000,
    ),
    "a group of the first version": (
        {
            **MEMINFO, "proc/self/cgroup": "4:cpu,cpuacct:/\n3:memory:/docker/a\n",
            f"{V1}limit_in_bytes": "90000", f"{V1}usage_in_bytes": "95000",
        },
        0,
    ),
    "a host that reports nothing is unknown": ({}, None),
}  # fmt: skip


@pytest.mark.parametrize("which", HOSTS)
def test_memory_is_what_the_kernel_and_control_groups_leave(which: str, tmp_path: Path) -> None:
    files, expected = HOSTS[which]
    assert available_bytes(host(tmp_path, files)) == expected


MOUNTS = """21 1 254:0 / / rw shared:1 - ext4 /dev/vda rw
22 21 0:20 / /run rw - tmpfs tmpfs rw
23 22 254:0 / /run/disk rw - xfs /dev/vdb rw
24 21 0:30 / /with\\040space rw - ramfs none rw
25 21 0:31 / /covered rw - ext4 /dev/vdc rw
26 21 0:32 / /covered rw shared:2 master:3 - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/home/x", False),
        ("/run", True),
        ("/run/user/1", True),
        ("/runs", False),
        ("/run/disk/x", False),
        ("/with space/x", True),
        ("/covered", True),
    ],
)
def test_the_file_system_of_a_folder_tells_whether_files_take_memory(
    folder: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "resolve", lambda path: path)  # the folders of this host may be links
    assert is_in_memory(Path(folder), host(tmp_path, {"proc/self/mountinfo": MOUNTS})) is expected


def test_a_host_that_does_not_tell_has_disks(tmp_path: Path) -> None:
    assert not is_in_memory(tmp_path, host(tmp_path, {}))
