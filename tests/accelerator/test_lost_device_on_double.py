"""Devices fail in each phase of a run: each is lost with its own words, and the others are compared.

`python -m benchmarks.lost_device` runs every phase with every error, of one device alone.
"""

from __future__ import annotations

import re
from collections.abc import Container

import pytest

from tests.reported import rows

from .fixtures import RunOnDouble, RunsOnDouble
from .lost_device import ERRORS, Loss, LossyRun

pytestmark = pytest.mark.slow

CHOSEN = (
    Loss(device="npu:1", phase="load", error="ecc"),
    Loss(device="npu:2", phase="adapter", error="no-kernel"),
    Loss(device="npu:3", phase="merge", error="memory"),
    Loss(device="npu:4", phase="forward", error="illegal-address"),
    Loss(device="npu:5", phase="gradient", error="ecc"),
)
"""Each phase of an isolated run, and each error at least once."""


@pytest.mark.parametrize("losses", [CHOSEN, (Loss(phase="transfer", error="illegal-address"),)], ids=["run", "copies"])
def test_a_lost_device_takes_nobody_with_it(run_on_double: RunsOnDouble, losses: tuple[Loss, ...]) -> None:
    lossy = LossyRun(*losses)
    run = run_on_double(lossy.settings, **lossy.options)
    there = (run.folder / "report.json").exists()
    assert lossy.wrong(run.process.returncode, run.report if there else None) == [], run.process.stderr


@pytest.mark.parametrize("error", ERRORS)
def test_the_first_device_that_fails_condemns_no_other(run_on_double: RunsOnDouble, error: str) -> None:
    """PEFT loads every adapter by way of it: the others go on straight to their own, and their cards are not named."""
    failure = {"device": "npu:0", "during": "model/loading.py:load_adapter", "from_call": 1, **ERRORS[error]}
    others = ("npu:1", "npu:2")
    run = run_on_double(
        {"devices": 3, "failures": [failure]}, devices="cpu,npu:0,npu:1,npu:2", load_paths="shared",
        stages="adapter,forward",
    )  # fmt: skip
    assert run.process.returncode == 3, run.process.stderr
    workers = {worker["name"]: worker for worker in run.report["workers"]}
    assert [workers[name]["status"] for name in ("npu:0", *others)] == ["lost", "ok", "ok"]
    text = (run.folder / "report.md").read_text(encoding="utf-8") + run.process.stdout
    condemned = text.partition("Environment")[0]
    assert not [name for name in others if workers[name]["uuid"] in condemned]
    for name in others:
        assert {row["status"] for row in rows(run.report, "forward") if row["worker"] == name} <= {"equal", "within"}
        adapter = [row for row in rows(run.report, "adapter") if row["worker"] == name]
        (blocked, *again) = sorted(
            (row for row in adapter if row["status"] != "equal"), key=lambda row: -len(row["reason"])
        )
        assert all("this load path goes through another device, which fails" in row["reason"] for row in again)
        assert blocked["reason"].endswith(f"; loaded with torch_device={name}")
        assert str(ERRORS[error]["says"]).partition("\n")[0] in blocked["reason"]


GONE = {"says": "CUDA error: no CUDA-capable device is detected", "sticky": True}
ANY_ERROR = {"ecc": ERRORS["ecc"], "memory": ERRORS["memory"], "gone": GONE}
ADVICE = re.compile("damaged|out of use|reseat|reset|replaced|dmesg|nvidia-smi")


@pytest.mark.parametrize("error", ANY_ERROR)
@pytest.mark.parametrize("card", ["npu:0", "npu:2"])
def test_a_card_that_fails_in_every_stage_condemns_no_other(run_on_double: RunsOnDouble, card: str, error: str) -> None:
    """With all devices visible the others load by way of it, copy from and to it, and split a model over it."""
    failure = {"device": card, "during": "worker/session.py:run", **ANY_ERROR[error]}
    run = run_on_double(
        {"devices": 3, "failures": [failure]}, devices="cpu,npu:0,npu:1,npu:2", load_paths="shared",
        stages="transfer,operators,base,adapter,memory,sharding",
    )  # fmt: skip
    assert _condemned(run, {card}) == []


@pytest.mark.parametrize("error", ANY_ERROR)
def test_a_card_that_fails_in_a_stage_of_its_own_is_lost_by_itself(run_on_double: RunsOnDouble, error: str) -> None:
    """With all devices visible too: none but its own worker computes on it then."""
    stages = ("operators/stage.py", "base.py", "merged/stage.py", "forward.py", "gradient/stage.py")
    cards = [f"npu:{number}" for number in range(1, len(stages) + 1)]
    failures = [
        {"device": card, "during": f"stages/{stage}:run", "from_call": 3, **ANY_ERROR[error]}
        for card, stage in zip(cards, stages, strict=True)
    ]
    run = run_on_double(
        {"devices": len(cards) + 1, "failures": failures}, devices=",".join(("cpu", "npu:0", *cards)),
        load_paths="shared", stages="operators,base,merged,forward,gradient",
    )  # fmt: skip
    assert _condemned(run, set(cards)) == []


def _condemned(run: RunOnDouble, cards: Container[str]) -> list[str]:
    """Return what a run says of devices beside those that fail, and what it does not say of these."""
    found = [] if run.process.returncode == 3 else [f"exit {run.process.returncode}"]
    workers = {worker["name"]: worker for worker in run.report["workers"]}
    found += [
        f"{name} is {one['status']}" for name, one in workers.items() if (one["status"] == "lost") != (name in cards)
    ]
    text = ((run.folder / "report.md").read_text(encoding="utf-8") + run.process.stdout).partition("Environment")[0]
    found += [name for name, one in workers.items() if name not in cards and one["uuid"] and one["uuid"] in text]
    for finding in run.report["findings"]:
        others = [name for name in finding["workers"] if name not in cards]
        said = f"{finding['message']} {finding['cause']} {finding['next']}"
        found += [f"{name}: {said}" for name in others if ADVICE.search(said)]
    return found


def test_a_load_that_is_slow_is_waited_for_and_one_that_is_frozen_is_not(run_on_double: RunsOnDouble) -> None:
    """Both write no event for longer than the limit: one waits for its disk, the other for its device."""
    during = "model/loading.py:load_base"
    slow = {"device": "npu:0", "during": during, "seconds": 16, "reads": True}
    frozen = {"device": "npu:1", "during": during, "seconds": 600}
    settings = {"devices": 2, "waits": [slow, frozen]}
    run = run_on_double(settings, devices="cpu,npu:0,npu:1", load_paths="isolated", stages="base", stall="12")
    assert run.process.returncode == 3, run.process.stderr
    workers = {worker["name"]: worker for worker in run.report["workers"]}
    assert workers["npu:0"]["status"] == "ok"
    assert workers["npu:1"]["status"] == "lost"
    assert "gave no sign of life for 12 s" in workers["npu:1"]["reason"]


def test_a_model_that_does_not_run_is_no_device_that_fails(run_on_double: RunsOnDouble) -> None:
    """Torch raises the same `RuntimeError` for both; the device still computes."""
    base = "python:tests.worker.model.made_models:a_llama_that_does_not_run"
    options = {"base": base, "devices": "cpu,npu:0", "load_paths": "isolated", "stages": "base,forward"}
    run = run_on_double({"devices": 1}, **options)
    assert run.process.returncode == 0, run.process.stdout
    forward = list(rows(run.report, "forward"))
    assert {(row["worker"], row["status"]) for row in forward} == {("cpu", "skipped"), ("npu:0", "skipped")}
    assert all("does not run on inputs made from its config" in row["reason"] for row in forward)


def test_nobody_waits_for_the_reference_of_a_device_that_is_lost(run_on_double: RunsOnDouble) -> None:
    failure = {"device": "npu:0", "during": "model/loading.py:load_base", "from_call": 3, **ERRORS["ecc"]}
    options = {"devices": "npu:0,npu:1", "load_paths": "isolated", "stages": "base,forward"}
    run = run_on_double({"devices": 2, "failures": [failure]}, **options)
    assert run.process.returncode == 3, run.process.stderr
    workers = {worker["name"]: worker for worker in run.report["workers"]}
    assert (workers["npu:0"]["status"], workers["npu:1"]["status"]) == ("lost", "ok")
    forward = list(rows(run.report, "forward"))
    blocked = {row["reason"] for row in forward if row["worker"] == "npu:1"}
    assert {row["status"] for row in forward} == {"blocked"}
    assert all("npu:0" in reason and "float64 reference" in reason for reason in blocked)
