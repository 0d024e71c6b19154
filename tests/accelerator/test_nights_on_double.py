"""Two nights of one host with a history, of which the second has a device less."""

from __future__ import annotations

from typing import Any

import pytest

from tests.accelerator.fixtures import RunOnDouble, RunsOnDouble

Nights = tuple[RunOnDouble, RunOnDouble]


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
    print(second.process.stdout, second.process.stderr)
    (finding,) = [f for f in second.report["findings"] if f["kind"] == "gone-device"]
    assert finding["severity"] == "error"
    (lost,) = [w for w in first.report["workers"] if w["name"] == "npu:1"]
    assert finding["detail"] == [f"npu:1 ({lost['uuid']})"]
