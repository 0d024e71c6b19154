"""`report.json` keeps its contract."""

from __future__ import annotations

import datetime
import json
import platform

from tests.conftest import FinishedRun
from tests.report.contract import FINDING, HEAD, LAYER, LAYER_CELL, OUTCOME, SOURCE, WORKER, no_constant


def test_every_field_of_the_contract_is_there(finished_run: FinishedRun) -> None:
    text = (finished_run.folder / "report.json").read_text()
    report = json.loads(text, parse_constant=no_constant)
    assert report["schema"] == "consistency.report/1"
    assert tuple(report)[: len(HEAD)] == HEAD
    assert report["command"]
    assert all(isinstance(word, str) for word in report["command"])
    assert datetime.datetime.fromisoformat(report["created"]).utcoffset() == datetime.timedelta(0)
    assert report["host"] == platform.node()
    assert {"python", "torch", "transformers", "peft", "safetensors"} <= set(report["versions"])
    assert [set(source) for source in report["sources"]] == [SOURCE]
    assert report["verdict"] in ("consistent", "inconsistent", "incomplete")
    assert all(set(worker) >= WORKER for worker in report["workers"])
    assert all(set(group) >= {"name", "workers"} for group in report["architectures"])
    assert [cohort["number"] for cohort in report["cohorts"]] == list(range(len(report["cohorts"])))
    assert all(set(outcome) >= OUTCOME for outcome in report["outcomes"])
    assert all(set(layer) >= LAYER for layer in report["layers"])
    assert all(set(c) >= LAYER_CELL for layer in report["layers"] for c in layer["architectures"].values())
    assert all(set(finding) >= FINDING for finding in report["findings"])
    assert isinstance(report["not_checked"], list)
    assert report["tolerances"] == []


def test_asked_for_and_in_force_are_both_there(finished_run: FinishedRun) -> None:
    report = json.loads((finished_run.folder / "report.json").read_text())
    for kind in report["environments"]:
        assert kind["asked"]["cudnn_allow_tf32"] is False
        assert kind["asked"] == kind["in_force"]
        assert kind["environment"]["torch"]
        assert kind["environment"]["threads"] >= 1
    named = [(name, kind["load_path"]) for kind in report["environments"] for name in kind["workers"]]
    assert sorted(named) == sorted((worker["name"], worker["load_path"]) for worker in report["workers"])
