"""What AMD's and Intel's tools report gets into the facts of a host; what they do not is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from msgspec.structs import replace

from consistency.devices.host import HostFacts, amd, intel, read_host, since
from consistency.devices.host.kernel_log import read_log
from consistency.devices.host.tools import Run, run
from consistency.devices.spec import DeviceSpec
from consistency.devices.vendors import Vendor
from tests.devices.host.made_host import ADDRESSES, gpus, make_host
from tests.devices.host.recorded import (
    WARNING,
    amd_metric,
    amd_static,
    answers,
    rocm_smi,
    xpu_device,
    xpu_list,
)

FIRST, SECOND = ADDRESSES[:2]


def read(root: Path, kind: str, tool: Run) -> HostFacts:
    """Read a host with two GPUs of AMD (`cuda`) or of Intel (`xpu`), where NVML must not be asked."""

    def nvml() -> NoReturn:
        raise AssertionError("NVML was asked")

    devices = [
        replace(info, spec=DeviceSpec(type=kind, index=i), capability="gfx942" if kind == "cuda" else None, driver=None)
        for i, info in enumerate(gpus(2))
    ]
    return read_host(devices, root=root, library=nvml, run=lambda _: None, tool=tool)


@pytest.mark.parametrize("wrapped", [True, False])
def test_amd_smi_is_read(tmp_path: Path, wrapped: bool) -> None:
    static, metric = amd_static(FIRST, SECOND), amd_metric(2)
    of = {"amd-smi static": static, "amd-smi metric": metric}
    tool = answers({name: {"gpu_data": rows} if wrapped else rows for name, rows in of.items()}, before=WARNING)
    found = read(make_host(tmp_path), "cuda", tool)
    instinct, radeon = found.gpus
    assert instinct.vendor is Vendor.AMD
    assert (instinct.driver, instinct.vbios, instinct.board) == ("6.18.3", "113-M350-01-1K0-920A", "102-G36212-0C")
    assert instinct.counters == {
        "ecc corrected, since boot": 2, "ecc uncorrected, since boot": 0, "ecc deferred, since boot": 0,
        "pcie replays": 0,
    }  # fmt: skip
    assert (radeon.vbios, radeon.board, "pcie replays" in radeon.counters) == ("00117772", None, False)
    reason = "amd-smi does not report it"
    assert found.unread == {
        "kernel log": "the kernel's log is not readable without root",
        "cuda:1: board": reason,
        "cuda:1: pcie replays": reason,
    }


def test_a_counter_of_amd_that_rises_during_a_run_is_noticed(tmp_path: Path) -> None:
    root = make_host(tmp_path)
    before, after = (
        read(root, "cuda", answers({"amd-smi static": amd_static(FIRST), "amd-smi metric": metric}))
        for metric in (amd_metric(1), amd_metric(1, uncorrected=3))
    )
    assert since(before, after).gpus[0].after == {"ecc uncorrected, since boot": 3}


def test_rocm_smi_answers_where_amd_smi_is_absent() -> None:
    cards, why = amd.read(answers({"rocm-smi": rocm_smi(FIRST)}))
    assert why is None
    assert set(cards) == {FIRST, "0000:c4:00.0"}
    assert (cards[FIRST].driver, cards[FIRST].vbios, cards[FIRST].counters) == (
        "6.10.5", "113-APM7199-002", {"pcie replays": 0},
    )  # fmt: skip
    assert set(cards[FIRST].unread) == {"board", "ecc"}
    assert set(cards["0000:c4:00.0"].unread) == {"board", "ecc", "pcie replays"}


@pytest.mark.parametrize("as_list", [True, False])
def test_xpu_smi_is_read(tmp_path: Path, as_list: bool) -> None:
    device = {"device_list": [xpu_device()]} if as_list else xpu_device()
    tool = answers({"xpu-smi discovery -j": xpu_list(FIRST), "xpu-smi discovery -d 0 -j": device})
    found = read(make_host(tmp_path), "xpu", tool)
    listed, unlisted = found.gpus
    assert (listed.vendor, listed.driver, listed.vbios) == (Vendor.INTEL, "7B7A46009E666C4D10E1134", "BMG__21.1180")
    assert (unlisted.driver, unlisted.vbios) == (None, None)
    assert found.unread["xpu:1: Intel"] == "its tool does not list the device"
    assert found.unread["xpu:0: error counters"] == "not read from xpu-smi"


def test_firmware_that_xpu_smi_does_not_know_is_left_out_and_said() -> None:
    of = {"xpu-smi discovery -j": xpu_list(FIRST), "xpu-smi discovery -d": xpu_device(gfx_firmware_version="unknown")}
    cards, _ = intel.read(answers(of))
    assert cards[FIRST].vbios is None
    assert cards[FIRST].unread["firmware"] == "xpu-smi does not report it"


@pytest.mark.parametrize("answer", [None, "", "ERROR: no permission", "{broken", "[1, 2]", "{}", '{"gpu_data": null}'])
def test_tools_that_do_not_answer_are_named(tmp_path: Path, answer: str | None) -> None:
    def tool(_: Sequence[str]) -> str | None:
        return answer

    root = make_host(tmp_path)
    assert read(root, "cuda", tool).unread["AMD"] == "neither amd-smi nor rocm-smi answers"
    assert read(root, "xpu", tool).unread["Intel"] == "xpu-smi does not answer"


def test_a_tool_that_is_not_installed_or_fails_has_no_answer() -> None:
    assert run(["no-such-tool-of-any-vendor"]) is None
    assert run(["false"]) is None


@pytest.mark.parametrize(
    ("line", "is_worth_reading"),
    [
        ("amdgpu 0000:03:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:8 pasid:32770)", True),
        ("[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=1, emitted seq=3", True),
        ("amdgpu 0000:03:00.0: amdgpu: GPU reset begin!", True),
        ("amdgpu 0000:c1:00.0: amdgpu: 1 uncorrectable hardware errors detected in UMC block", True),
        ("i915 0000:00:02.0: [drm] GPU HANG: ecode 12:1:85dffffb, in python [2041]", True),
        ("xe 0000:03:00.0: [drm] GT0: Timedout job: seqno=4294967169, lrc_seqno=4294967169", True),
        ("amdgpu 0000:03:00.0: amdgpu: VRAM: 16368M 0x0000008000000000", False),
        ("amdgpu 0000:03:00.0: amdgpu: RAS: optional ras ta ucode is not available", False),
        ("xe 0000:03:00.0: [drm] Using GuC firmware from xe/bmg_guc_70.bin version 70.44.1", False),
    ],
)
def test_errors_of_amd_and_intel_drivers_are_worth_reading(tmp_path: Path, line: str, is_worth_reading: bool) -> None:
    found, _ = read_log(tmp_path, lambda _: f"[    5.1] {line}\n")
    assert bool(found) is is_worth_reading
