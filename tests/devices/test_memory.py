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


def test_the_kernel_counts_what_is_available(tmp_path: Path) -> None:
    assert available_bytes(host(tmp_path, MEMINFO)) == 8000 * 1024


def test_a_control_group_leaves_less(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        **GROUP,
        "sys/fs/cgroup/slice/job/memory.max": "max\n",
        "sys/fs/cgroup/slice/job/memory.current": "1000\n",
        "sys/fs/cgroup/slice/memory.max": "500000\n",
        "sys/fs/cgroup/slice/memory.current": "300000\n",
        "sys/fs/cgroup/slice/memory.stat": "anon 1\nfile 90000\ninactive_file 50000\n",
    }
    assert available_bytes(host(tmp_path, files)) == 500000 - 300000 + 50000


def test_a_container_mounts_its_group_as_the_root(tmp_path: Path) -> None:
    files = {**MEMINFO, **GROUP, "sys/fs/cgroup/memory.max": "70000", "sys/fs/cgroup/memory.current": "20000"}
    assert available_bytes(host(tmp_path, files)) == 50000


def test_a_group_of_the_first_version(tmp_path: Path) -> None:
    files = {
        **MEMINFO,
        "proc/self/cgroup": "4:cpu,cpuacct:/\n3:memory:/docker/a\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "90000",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "95000",
    }
    assert available_bytes(host(tmp_path, files)) == 0


def test_a_host_that_reports_nothing_is_unknown(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


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
