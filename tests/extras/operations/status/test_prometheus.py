"""Metrics as node_exporter's textfile collector takes them."""

from __future__ import annotations

import math
import re

import pytest

from consistency.extras.operations.status.make import of_suite
from consistency.extras.operations.status.printed import metrics
from consistency.extras.operations.status.record import DeviceStatus
from consistency.numerics.real import Real
from tests.extras.operations.status.made_statuses import status
from tests.report.made_comparisons import HOSTILE, comparison, faulty, hostile, tensor, worker
from tests.report.made_fleets import many as many_devices
from tests.report.made_suites import good, lost, many

_LABEL = r'[A-Za-z_]\w*="(?:[^"\\\n]|\\["\\n])*"'
_SAMPLE = re.compile(rf"(?P<name>[a-z_]+)\{{{_LABEL}(?:,{_LABEL})*\}} (?P<value>-?[0-9.e+-]+|NaN|[+-]Inf)")


def families(lines: list[str]) -> dict[str, list[str]]:
    """Check the exposition format; return the samples by metric."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in found, "the lines of a metric stand together"
            found[name] = []
        elif line.startswith("# TYPE "):
            assert line == f"# TYPE {name} gauge"
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample is not None, line
            assert sample["name"] == name
            found[name].append(line)
    assert all(found.values()), "a metric without a sample is left out"
    labels = [line.rpartition(" ")[0] for lines in found.values() for line in lines]
    assert len(labels) == len(set(labels)), "node_exporter refuses a series that is there twice"
    return found


def test_the_labels_are_those_of_the_dcgm_exporter() -> None:
    workers = (
        worker("cpu", "x86-64", model="EPYC", host="node-7"),
        worker("cuda:1", uuid="GPU-6f2d", host="node-7"),
        worker("cuda:1", uuid="GPU-6f2d", host="node-7", load_path="shared"),
        worker("cuda:1@tf32", uuid="GPU-6f2d", host="node-7"),
    )
    names = ["cpu", "cuda:1", "cuda:1@tf32"]
    found = comparison([tensor([names], ratio=0.5, statuses=dict.fromkeys(names, "within"))], workers=workers)
    lines = families(list(metrics(status(found), stale=None)))
    gpu = 'gpu="1",UUID="GPU-6f2d",modelName="RTX A6000",Hostname="node-7"'
    assert lines["consistency_bound_ratio"] == [
        'consistency_bound_ratio{modelName="EPYC",Hostname="node-7",worker="cpu",case="llama"} 0.5',
        f'consistency_bound_ratio{{{gpu},worker="cuda:1",case="llama"}} 0.5',
        f'consistency_bound_ratio{{{gpu},worker="cuda:1@tf32",case="llama"}} 0.5',
    ]
    assert lines["consistency_last_run_timestamp_seconds"] == [
        'consistency_last_run_timestamp_seconds{Hostname="node-7",case="llama"} 1795312800'
    ]
    assert lines["consistency_last_run_duration_seconds"][0].endswith(" 41")


def test_verdicts_are_exit_statuses() -> None:
    for found, verdict, device in ((good(), 0, 0), (faulty(), 1, 1), (lost(), 3, 3)):
        lines = families(list(metrics(status(found), stale=None)))
        assert [line.rpartition(" ")[2] for line in lines["consistency_verdict"]] == [str(verdict)]
        (of_device,) = [line for line in lines["consistency_device_verdict"] if 'worker="cuda:1"' in line]
        assert of_device.endswith(f" {device}")


def test_a_suite_has_a_verdict_per_case_and_one_series_per_device() -> None:
    lines = families(list(metrics(of_suite(many()), stale=None)))
    assert len(lines["consistency_case_verdict"]) == 100
    assert len(lines["consistency_device_verdict"]) == 4
    assert 'case="nightly"' in lines["consistency_verdict"][0]


@pytest.mark.parametrize(("stale", "value"), [(True, "1"), (False, "0"), (None, None)])
def test_staleness_is_said_where_there_is_a_limit(stale: bool | None, value: str | None) -> None:
    lines = families(list(metrics(status(good()), stale=stale)))
    assert [line[-1] for line in lines.get("consistency_stale", [])] == ([] if value is None else [value])


def test_hostile_names_stay_labels() -> None:
    made = status(hostile(), case='a"b\\c\nd', host=HOSTILE)
    lines = families(list(metrics(made, stale=False)))
    assert r'case="a\"b\\c\nd"' in lines["consistency_verdict"][0]


@pytest.mark.parametrize(("ratio", "text"), [(math.nan, "NaN"), (math.inf, "+Inf"), (0.25, "0.25"), (2.0, "2")])
def test_numbers(ratio: float, text: str) -> None:
    device = DeviceStatus(
        name="cuda:0", host="h", architecture="a", model="m", uuid=None, verdict="consistent", ratio=Real(ratio)
    )
    lines = families(list(metrics(status(good(), devices=(device,)), stale=None)))
    assert lines["consistency_bound_ratio"][0].endswith(f"}} {text}")


def test_a_device_that_does_not_describe_hardware_is_marked() -> None:
    made = status(faulty(), marks=("planted fault", "simulated"))
    assert 'planted_fault="true",simulated="true"' in families(list(metrics(made, stale=None)))["consistency_info"][0]


def test_of_many_devices_the_consistent_ones_are_counted() -> None:
    lines = families(list(metrics(status(many_devices(9, 1, wrong=("node-0001:cuda:3",))), stale=None)))
    assert [line.rpartition(" ")[2] for line in lines["consistency_device_verdict"]] == ["1"]
    assert lines["consistency_devices"][-1] == (
        'consistency_devices{Hostname="node-0000",case="llama",architecture="Hopper sm_90",modelName="RTX A6000",'
        'verdict="inconsistent"} 1'
    )
    assert sum(int(line.rpartition(" ")[2]) for line in lines["consistency_devices"]) == 72
