"""What `--plan` prints of a budget."""

from __future__ import annotations

import dataclasses
import json
import tempfile

import pytest

from consistency.capture.json_codec import encode_json
from consistency.case.budget.estimate import StageEstimate, WorkerEstimate
from consistency.case.budget.fit import Budget
from consistency.case.budget.shape import Layer, Shape
from consistency.case.case import Case, Fit
from consistency.errors import InputError
from consistency.report.plan import as_table, render

GIB = 2**30


def worker(name: str, device_bytes: int | None = None) -> WorkerEstimate:
    stage = StageEstimate(
        stage="forward", host_private_bytes=3 * GIB, host_mapped_bytes=5 * GIB, device_bytes=device_bytes,
    )  # fmt: skip
    return WorkerEstimate(
        worker=name, makes_reference=name == "cpu", placement="host", host_private_bytes=3 * GIB,
        host_mapped_bytes=5 * GIB, device_bytes=device_bytes, device_memory_bytes=None, wave=0,
        stages=(stage,),
    )  # fmt: skip


@pytest.fixture
def budget() -> Budget:
    return Budget(
        case=Case(name="llama + \x1b[31mlora", base="b", fit=Fit(tokens=4)),
        shape=Shape(
            dtype="bfloat16", elements=8 * 10**9, mapped_bytes=16 * 10**9, blocks=32, largest_elements=2**29,
            adapter_bytes=2**27, method="LORA", layers=(Layer(name="q", elements=9, rank=16),),
        ),
        workers=(worker("cpu"), worker("cuda:0", 17 * GIB)),
        at_once=1,
        host_available_bytes=6 * GIB,
        host_private_bytes=3 * GIB,
        host_mapped_bytes=5 * GIB,
        changes=("1 of 2 workers at a time",),
        not_checked=("12 of 16 tokens of each, for lack of memory",),
        unknown=("whether cuda:0 has room",),
    )  # fmt: skip


def test_a_reader_sees_every_figure_what_was_changed_and_what_is_unknown(budget: Budget) -> None:
    text = render(budget)
    for expected in (
        "8 B parameters, 14.9 GiB in bfloat16; 32 blocks, largest tensor 1.0 GiB",
        "LORA of rank 16 on 1 layer, 128 MiB",
        "cpu (reference)",
        "3.0 GiB",
        "5.0 GiB",
        "17.0 GiB",
        "1 worker at a time: 3.0 GiB private and 5.0 GiB mapped, of 6.0 GiB available",
        "1 of 2 workers at a time",
        "12 of 16 tokens of each, for lack of memory",
        "whether cuda:0 has room",
    ):
        assert expected in text
    assert "fits:" not in text
    assert "\x1b" not in text, "a name cannot write to the terminal"


def test_what_fits_says_so(budget: Budget) -> None:
    whole = dataclasses.replace(budget, changes=(), not_checked=(), unknown=())
    assert "fits in memory: nothing will be skipped for lack of it" in render(whole)


def test_what_does_not_fit_is_shown_with_its_figures(budget: Budget) -> None:
    refused = dataclasses.replace(budget, refusal=InputError("does not fit", where="forward on cpu", got="9 GiB"))
    assert "would be refused\n    does not fit\n      where:  forward on cpu\n      got:    9 GiB" in render(refused)
    assert as_table(refused)["refusal"]["where"] == "forward on cpu"


def test_scratch_files_are_in_it(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/scratch")
    assert "scratch" not in render(budget)
    on_disk = render(dataclasses.replace(budget, scratch_bytes=2 * GIB))
    assert "2.0 GiB of temporary files (/scratch), on disk" in on_disk
    assert "TMPDIR" not in on_disk
    given = dataclasses.replace(budget, scratch_bytes=2 * GIB, scratch_in_memory=True)
    text = render(given)
    assert "(/scratch), in memory, and part of the private memory\n            set TMPDIR to a folder on a disk" in text
    assert as_table(given)["scratch"] == {"bytes": 2 * GIB, "in_memory": True}


def test_json_has_bytes_and_null_for_what_is_unknown(budget: Budget) -> None:
    table = json.loads(encode_json(as_table(budget)))
    assert table["schema"] == "consistency.plan/2"
    assert table["host"] == {"available_bytes": 6 * GIB, "private_bytes": 3 * GIB, "mapped_bytes": 5 * GIB}
    assert [(w["worker"], w["device_bytes"]) for w in table["workers"]] == [
        ("cpu", None),
        ("cuda:0", 17 * GIB),
    ]
    assert table["workers"][0]["stages"][0]["stage"] == "forward"
    assert table["fit"] == {"sequences": None, "tokens": 4, "long_tokens": None}
    assert table["workers_at_a_time"] == 1
    assert table["not_checked"] == ["12 of 16 tokens of each, for lack of memory"]
    assert table["refusal"] is None
    assert table["model"]["adapted_layers"] == 1


@pytest.mark.parametrize(
    ("elements", "text"),
    [(206, "206"), (206_000, "0.206 M"), (999_499_999, "999 M"), (999_500_000, "1 B"), (8_030_000_000, "8.03 B")],
)
def test_parameters_are_counted_in_a_unit_of_their_size(budget: Budget, elements: int, text: str) -> None:
    assert budget.shape is not None
    small = dataclasses.replace(budget, shape=dataclasses.replace(budget.shape, elements=elements))
    assert f"base      {text} parameters, " in render(small)
