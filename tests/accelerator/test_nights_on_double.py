"""Two nights of one host with a history, of which the second has a device less."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.accelerator.fixtures import RunOnDouble, RunsOnDouble

pytestmark = pytest.mark.slow

Nights = tuple[RunOnDouble, RunOnDouble]


def report(night: RunOnDouble) -> dict[str, Any]:
    """Read the report of a run, which is in a folder of its own beside those of other nights."""
    path = night.folder / "latest" / "report.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def nights(run_on_double: RunsOnDouble, tmp_path_factory: pytest.TempPathFactory) -> Nights:
    """Run with three devices, and then with the first and the last of them, which has one number less."""
    history = tmp_path_factory.mktemp("history")

    def night(threads: int, **settings: Any) -> RunOnDouble:
        return run_on_double(
            {"devices": 3, **settings}, history=str(history), stages="base,merged", load_paths="isolated",
            level="quick", devices="auto", threads=str(threads),
        )  # fmt: skip

    # as many threads as a host with three cores has for each worker, and for one worker less
    return night(1), night(2, lost=[1])


def test_a_device_that_is_gone_since_the_night_before_is_an_error(nights: Nights) -> None:
    first, second = nights
    assert first.process.returncode == 0, first.process.stdout + first.process.stderr
    assert second.process.returncode == 3, second.process.stdout + second.process.stderr
    (finding,) = [f for f in report(second)["findings"] if f["kind"] == "gone-device"]
    assert finding["severity"] == "error"
    (lost,) = [w for w in report(first)["workers"] if w["name"] == "npu:1"]
    assert finding["detail"] == [f"npu:1 ({lost['uuid']})"]


def test_the_other_devices_are_still_compared_with_the_night_before(nights: Nights) -> None:
    """They have more threads of the processor than before: that is no part of what an accelerator computes."""
    others = [f for f in report(nights[1])["findings"] if f["kind"] == "software"]
    assert [name for finding in others for name in finding["workers"]] == ["cpu"]
