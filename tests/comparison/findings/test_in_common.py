"""What odd devices have in common is stated where it tells them from the others, and nothing else is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import consistency
from consistency.capture.records import TensorRecord
from consistency.comparison.findings.same_program import in_common
from consistency.comparison.result import Comparison, Finding
from consistency.devices.host.facts import Gpu, HostFacts
from tests.comparison.made_records import compared, computed
from tests.conftest import MakeCapture

H100 = {"architecture": "Hopper sm_90", "model": "H100", "kernel_key": "torch 2"}


def same_model(found: Comparison) -> Finding:
    (finding,) = [finding for finding in found.findings if finding.kind == "same-device-type"]
    return finding


def hosts(
    make_capture: MakeCapture, of_hosts: Sequence[str], info: Mapping[int, dict[str, Any]], name: str = "gpu"
) -> list[Path]:
    """Write a capture per host, of two devices each, with one letter of bits per device."""
    folders = []
    for place, digests in enumerate(of_hosts):
        workers: dict[str, Sequence[TensorRecord]] = {f"cuda:{n}": [computed(bit)] for n, bit in enumerate(digests)}
        facts = {key: {**H100, "driver": "570", **info.get(place, {})} for key in workers}
        folders.append(make_capture(f"{name}-{place}", workers, info=facts))
    return folders


def test_another_driver(make_capture: MakeCapture) -> None:
    folders = hosts(make_capture, ("aa", "bb", "aa", "bb", "aa"), {1: {"driver": "580"}, 3: {"driver": "580"}})
    finding = same_model(compared(*folders))
    assert finding.workers == ("gpu-1:cuda:0", "gpu-1:cuda:1", "gpu-3:cuda:0", "gpu-3:cuda:1")
    assert finding.message.endswith("; all of them have driver 580, and no other has")
    assert finding.detail[2:] == ("in common: driver 580, as none of 6 others",)


@pytest.mark.parametrize("digests", ["ba", "b"])
def test_one_odd_device_is_not_explained_by_its_own_host(make_capture: MakeCapture, digests: str) -> None:
    finding = same_model(compared(*hosts(make_capture, ("aa", digests, "aa"), {})))
    assert finding.workers == ("gpu-1:cuda:0",)
    assert finding.detail[2:] == ("no recorded fact sets them apart",)
    assert finding.message.endswith("which agree")


def test_all_devices_of_a_host(make_capture: MakeCapture) -> None:
    finding = same_model(compared(*hosts(make_capture, ("aa", "bb", "aa"), {})))
    assert finding.message.endswith("; all of them have host gpu-1, and no other has")


def test_an_environment_variable_that_is_not_set(make_capture: MakeCapture) -> None:
    usual: dict[str, Any] = {"environment": {"variables": {"NCCL_ALGO": "Ring"}}}
    info = {0: usual, 1: {"environment": {"variables": {}}}, 2: usual}
    one, both = (hosts(make_capture, ("aa", digests, "aa"), info, name=digests) for digests in ("ba", "bb"))
    assert "NCCL_ALGO" not in same_model(compared(*one)).message, "the other device of its host has it too"
    assert "variable NCCL_ALGO not set" in same_model(compared(*both)).message


def test_facts_of_the_host_and_its_slots(make_capture: MakeCapture) -> None:
    folders = []
    for place, digests in enumerate(("ab", "ab", "aa", "aa")):
        gpus = tuple(
            Gpu(name=f"cuda:{n}", pci_bus_id=f"0000:0{n}:00.0", link={"width": 8 if bit == "b" else 16})
            for n, bit in enumerate(digests)
        )
        facts = HostFacts(host=f"gpu-{place}", kernel="6.12", gpus=gpus)
        workers: dict[str, Sequence[TensorRecord]] = {f"cuda:{n}": [computed(bit)] for n, bit in enumerate(digests)}
        info = dict.fromkeys(workers, H100)
        folders.append(make_capture(f"gpu-{place}", workers, info=info, host_facts=facts))
    finding = same_model(compared(*folders))
    assert finding.workers == ("gpu-0:cuda:1", "gpu-1:cuda:1")
    assert finding.detail[2:] == ("in common: PCIe lanes 8, as none of 6 others",), "slot 01 is that of 2 healthy ones"


def test_firmware_and_board(make_capture: MakeCapture) -> None:
    folders = []
    for place, digest in enumerate("abab"):
        old = place == 1
        gpu = Gpu(
            name="cuda:0", pci_bus_id="0000:17:00.0", vbios="94.02.5C" if old else "96.00.30", board=f"900-{digest}"
        )
        facts = HostFacts(host=f"n{place}", gpus=(gpu,))
        workers = {"cuda:0": [computed("b" if old else "a")]}
        folders.append(make_capture(f"n{place}", workers, info={"cuda:0": H100}, host_facts=facts))
    finding = same_model(compared(*folders))
    assert finding.workers == ("n1:cuda:0",)
    assert finding.message.endswith("; it has VBIOS 94.02.5C, and no other has"), "another has its board"


RACKS = "host,rack\ngpu-0,r1\ngpu-1,r2\ngpu-2,r1\ngpu-3,r2\n"


def test_a_group_of_the_site(make_capture: MakeCapture, tmp_path: Path) -> None:
    (tmp_path / "racks.csv").write_text(RACKS)
    folders = hosts(make_capture, ("aa", "bb", "aa", "bb", "aa"), {})
    finding = same_model(consistency.compare(folders, groups=tmp_path / "racks.csv"))
    assert finding.message.endswith("; all of them have rack r2, and no other is known to have")
    assert finding.detail[2:] == ("in common: rack r2, as none of 4 others; not recorded of 2",)
    assert "rack" not in same_model(consistency.compare(folders)).message


def test_a_file_that_names_no_host_is_said(make_capture: MakeCapture, tmp_path: Path) -> None:
    (tmp_path / "racks.csv").write_text("host,rack\nelsewhere,r1\n")
    found = consistency.compare(hosts(make_capture, ("aa", "aa"), {}), groups=tmp_path / "racks.csv")
    assert [finding.kind for finding in found.findings] == ["unknown-hosts"]
    assert found.verdict == "consistent"


@pytest.mark.parametrize(
    ("odd", "others", "stated"),
    [
        (("x",), ("y", "y"), "x none of 2"),
        (("x",), ("y", "z"), None),  # it differs from device to device anyway
        (("x",), ("x", "y", "y"), None),
        (("x", "x"), ("y", "z"), "x none of 2"),
        (("x", "x"), ("x", "y", "z"), "x 1 of 3"),
        (("x", "x"), ("x", "x", "y", "y", "y"), None),  # no more than half of those that have it are odd
        (("x", "y"), ("z", "z", "z"), None),
        (("x", None), ("z", "z", "z"), None),
        (("x", "x"), (None, None, None), None),  # of no other it is known
        (("x", "x"), ("y", None, None), "x none of 1"),
    ],
)
def test_rule(odd: Sequence[str | None], others: Sequence[str | None], stated: str | None) -> None:
    values = {f"odd{n}": value for n, value in enumerate(odd)} | {f"n{n}": value for n, value in enumerate(others)}
    facts = {name: {} if value is None else {"board": value} for name, value in values.items()}
    found = in_common(facts, [f"odd{n}" for n in range(len(odd))], [f"n{n}" for n in range(len(others))])
    said = [f"{one.fact.removeprefix('board ')} {one.having or 'none'} of {one.others - one.unknown}" for one in found]
    assert said == ([] if stated is None else [stated])
