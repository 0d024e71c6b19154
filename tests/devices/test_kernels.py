"""Which devices a build of torch has kernels for."""

from __future__ import annotations

import pytest

from consistency.devices.kernels import missing_kernels

WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
"""Of torch 2.13.0 for CUDA 13.0, as PyPI has it."""


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1"])
def test_a_binary_runs_on_later_devices_of_its_major_version(capability: str) -> None:
    assert missing_kernels(capability, WHEEL) is None


def test_a_device_without_kernels_has_one_sentence() -> None:
    assert missing_kernels("7.0", WHEEL) == (
        "this torch has kernels for sm_75, sm_80, sm_86, sm_90, sm_100, sm_120, the device is sm_70: "
        "install a build with sm_70"
    )
    assert missing_kernels("11.0", WHEEL)


@pytest.mark.parametrize(
    ("entry", "capability", "runs"),
    [
        ("compute_70", "12.1", True),  # PTX is compiled for the device when it is loaded
        ("compute_90", "8.6", False),
        ("compute_90a", "9.0", True),
        ("compute_90a", "10.0", False),
        ("sm_90a", "9.0", True),
        ("sm_100a", "10.3", False),
        ("sm_100f", "10.3", True),
        ("sm_86", "8.0", False),
        ("sm_101", "11.0", True),  # Thor, which CUDA 13 numbers anew
        ("sm_next", "8.0", True),  # a name of a later CUDA: not known
        ("gfx942", "gfx942:sramecc+:xnack-", True),
        ("gfx90a", "gfx942:sramecc+:xnack-", False),
        ("gfx90a:xnack+", "gfx90a:sramecc+:xnack+", True),
        ("gfx11-generic", "gfx1103", True),
        ("gfx10-3-generic", "gfx1031", True),
        ("gfx10-3-generic", "gfx1010", False),
        ("gfx9-generic", "gfx906:sramecc+:xnack-", True),
        ("gfx9-generic", "gfx942:sramecc+:xnack-", False),
        ("gfx9-4-generic", "gfx942:sramecc+:xnack-", True),
    ],
)
def test_each_kind_of_entry(entry: str, capability: str, runs: bool) -> None:
    assert (missing_kernels(capability, [entry]) is None) is runs


@pytest.mark.parametrize(("capability", "built_for"), [(None, WHEEL), ("7.0", ()), ("12.60.7", WHEEL)])
def test_what_is_not_known_is_no_fault(capability: str | None, built_for: tuple[str, ...]) -> None:
    assert missing_kernels(capability, built_for) is None
