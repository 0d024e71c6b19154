"""Comparing captures that were made by hand: classes, statuses, findings, verdicts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.names import GIVEN
from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.comparison.compare import compare
from consistency.numerics import words
from consistency.numerics.real import Real
from consistency.worker.judging.block_rule import OTHER_HOST
from tests.comparison.made_records import (
    compared,
    computed,
    digest,
    errors,
    forward,
    measured,
    moved,
    only_row,
    rounding,
)
from tests.conftest import MakeCapture


def test_classes_begin_with_the_reference_and_tell_who_agrees(make_capture: MakeCapture) -> None:
    workers = {"cuda:1": [moved("x")], "cpu": [moved()], "cuda:0": [moved()], "cuda:3": [moved("x")]}
    found = compared(make_capture("a", workers))
    assert found.reference == "cpu"
    assert found.tensors[0].classes == (("cpu", "cuda:0"), ("cuda:1", "cuda:3"))
    (finding,) = errors(found)
    assert finding.workers == ("cuda:1", "cuda:3")
    assert finding.tensors == ("adapter::layers.0.q.lora_B",)
    assert {name for d in found.first_divergence for name in d.workers} == {"cuda:1", "cuda:3"}


def test_other_bits_within_the_bound_are_fine_between_models(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [computed()], "cuda:0": [computed("b")]}))
    assert found.verdict == "consistent"
    assert [(d.workers, d.stage, d.status) for d in found.first_bitwise_difference] == [
        (("cuda:0",), "merged", "within")
    ]
    assert found.first_divergence == ()


def test_other_bits_within_the_bound_are_a_finding_on_one_model(make_capture: MakeCapture) -> None:
    program = {"kernel_key": "torch 2 cuda 13", "architecture": "Hopper sm_90", "model": "H200"}
    workers = {"cuda:0": [computed()], "cuda:1": [computed("b")]}
    found = compared(make_capture("a", workers, info=dict.fromkeys(workers, program)))
    (finding,) = errors(found)
    assert finding.kind == "same-device-type"
    assert finding.workers == ("cuda:0", "cuda:1")
    assert found.exit_status == 1
    other = {"cuda:0": program, "cuda:1": {**program, "model": "H100"}}
    assert compared(make_capture("b", workers, info=other)).verdict == "consistent"


@pytest.mark.parametrize(
    ("error", "status"),
    [(1e-7, "within"), (2e-7 + 2**-24, "within"), (2.1e-7 + 2**-24, "outside"), (math.nan, "outside")],
)
def test_relative_rule_takes_the_error_of_rounding(make_capture: MakeCapture, error: float, status: str) -> None:
    found = compared(make_capture("a", {"cpu": [forward()], "cuda:0": [forward("b", error)]}))
    row = only_row(found, "cuda:0")
    assert row.status == status
    assert row.reference == "float64"
    assert only_row(found, "cpu").status == "within"
    if status == "outside":
        assert row.word == ("non-finite" if math.isnan(error) else "differs")


def test_relative_rule_without_a_cpu_is_skipped_not_passed(make_capture: MakeCapture) -> None:
    """A device that is held against its own error alone would always pass."""
    found = compared(make_capture("a", {"cuda:0": [forward(made=None)]}))
    assert only_row(found, "cuda:0").status == "skipped"
    found = compared(make_capture("b", {"cuda:0": [forward()]}))
    assert only_row(found, "cuda:0").status == "within"


def few(bits: str, error: float, *, samples: int = 1, magnitude: float = 1.0, mismatched: int = 2) -> TensorRecord:
    """Make an activation of which so many independent errors of rounding are known."""
    found = measured(ratio=None, max_abs=Real(error), magnitude=Real(magnitude), mismatched=mismatched if error else 0)
    return msgspec.structs.replace(forward(bits), measure=found, rounding=rounding(1e-7, samples))


def test_an_allowance_that_zeros_would_pass_judges_nothing(make_capture: MakeCapture) -> None:
    """Of one number luck allows 6·10⁸ times the error: here 60 where the tensor is no larger than 1."""
    found = compared(make_capture("a", {"cpu": [few("a", 1e-7)], "cuda:0": [few("b", 1.0)]}))
    row = only_row(found, "cuda:0")
    assert row.status == "skipped"
    assert row.ratio is None
    assert row.word is None
    assert row.max_abs == 1.0, "what was measured is still told"
    assert only_row(found, "cpu").status == "skipped"
    assert found.verdict == "incomplete", "nothing was compared"
    note = found.findings[-1]
    assert (note.severity, note.kind) == ("note", "skipped")
    assert "too few values to tell rounding from a wrong result" in note.message
    assert "on cpu, cuda:0" in note.message


@pytest.mark.parametrize(("error", "samples"), [(100.0, 1), (math.nan, 1), (math.inf, 1), (1.0, 2)])
def test_outside_of_the_widest_allowance_stays_outside(make_capture: MakeCapture, error: float, samples: int) -> None:
    # of two numbers luck allows 32 278 times the error, which is 0.003 here: less than the tensor, so it judges
    found = compared(
        make_capture("a", {"cpu": [few("a", 1e-7, samples=samples)], "cuda:0": [few("b", error, samples=samples)]})
    )
    assert only_row(found, "cuda:0").status == "outside"
    assert only_row(found, "cpu").status == ("skipped" if samples == 1 else "within")


def test_exact_bits_and_true_zeros_need_no_allowance(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [few("a", 1e-7)], "cuda:0": [few("b", 0.0)]}))
    assert only_row(found, "cuda:0").status == "equal"
    zeros = {"cpu": [few("a", 0.0, magnitude=0.0)], "cuda:0": [few("b", 2.0**-151, magnitude=0.0)]}
    assert only_row(compared(make_capture("b", zeros)), "cuda:0").status == "within"


def test_an_error_as_large_as_the_tensor_judges_nothing(make_capture: MakeCapture) -> None:
    def large(bits: str, error: float, made: float) -> TensorRecord:
        return msgspec.structs.replace(few(bits, error), rounding=rounding(made))

    workers = {"cpu": [large("a", 0.1, 0.5)], "cuda:0": [large("b", 0.1, 0.5)]}
    row = only_row(compared(make_capture("a", workers)), "cuda:0")
    assert row.status == "skipped"
    assert (
        row.reason == "rounding in float32 makes such large errors that a tolerance of twice those would let zeros pass"
    )
    less = {"cpu": [large("a", 0.1, 0.4999)], "cuda:0": [large("b", 0.1, 0.4999)]}
    assert only_row(compared(make_capture("b", less)), "cuda:0").status == "within"


def test_a_short_table_with_the_reference_workers_bits_is_equal(make_capture: MakeCapture) -> None:
    def table(bits: str) -> TensorRecord:
        return msgspec.structs.replace(few(bits, 1e-7), stage="base", layer="rotary", tensor="inv_freq")

    found = compared(make_capture("a", {"cpu": [table("a")], "cuda:0": [table("a")], "cuda:1": [table("b")]}))
    assert [only_row(found, name).status for name in ("cpu", "cuda:0", "cuda:1")] == ["equal", "equal", "skipped"]


def test_settings_are_held_against_the_reference_worker(make_capture: MakeCapture) -> None:
    def settings(bits: str, scaling: float) -> TensorRecord:
        values = {f"rank 8, scaling {scaling}": 4}
        return TensorRecord(
            stage="adapter", layer="adapter_settings", tensor="rank_and_scaling", rule="peer", status="measured",
            dtype="uint8", digest=digest(bits), evidence={"values": values},
        )  # fmt: skip

    found = compared(make_capture("a", {"cpu": [settings("a", 2.0)], "cuda:0": [settings("b", 4.0)]}))
    (finding,) = errors(found)
    assert finding.kind == "settings"
    assert "scaling 4.0" in finding.detail[0]
    assert "scaling 2.0" in finding.detail[0]


def test_table_without_a_reference_is_skipped_never_passed(make_capture: MakeCapture) -> None:
    def table(bits: str) -> TensorRecord:
        return TensorRecord(
            stage="base", layer="rotary", tensor="inv_freq", rule="peer", status="measured", dtype="float32",
            digest=digest(bits), buffer=True,
        )  # fmt: skip

    found = compared(make_capture("a", {"cpu": [table("a"), moved()], "cuda:0": [table("b"), moved()]}))
    assert found.tensors[0].outcomes[1].status == "skipped"
    assert found.verdict == "consistent"
    assert [f.kind for f in found.findings] == ["skipped"]


def test_hosts_whose_float64_passes_rounded_otherwise_are_told_so(make_capture: MakeCapture) -> None:
    def given(bits: str) -> TensorRecord:
        return TensorRecord(
            stage="forward", layer="model", tensor=f"adapter_on.{GIVEN}", rule="peer", status="measured",
            dtype="float64", digest=digest(bits), reason=OTHER_HOST,
        )  # fmt: skip

    hosts = [make_capture(host, {"cpu": [given(host), moved()]}) for host in ("a", "b")]
    found = compared(*hosts)
    assert found.verdict == "consistent"
    (row,) = (t.outcomes[1] for t in found.tensors if t.tensor.endswith(GIVEN))
    assert row.status == "skipped"
    assert "float64 that rounds differently on this host" in (row.reason or "")
    same = compared(*(make_capture(host, {"cpu": [given("x"), moved()]}) for host in ("c", "d")))
    assert {outcome.status for t in same.tensors for outcome in t.outcomes} == {"equal"}


def test_weight_without_a_file_that_differs_is_a_finding(make_capture: MakeCapture) -> None:
    def weight(bits: str, **changes: Any) -> TensorRecord:
        return TensorRecord(
            stage="base", layer="layers.0.q", tensor="weight_after_adapter", rule="peer", status="measured",
            dtype="float32", digest=digest(bits), word=words.RECOMPUTED, **changes,
        )  # fmt: skip

    found = compared(make_capture("a", {"cpu": [weight("a")], "cuda:0": [weight("b")]}))
    assert [f.kind for f in errors(found)] == ["recomputed"]
    found = compared(make_capture("b", {"cpu": [], "cuda:0": [weight("b")]}))
    assert found.verdict == "inconsistent"


def test_missing_unexpected_and_skipped(make_capture: MakeCapture) -> None:
    absent: dict[str, Any] = {"digest": None, "measure": None, "reason": "so it is"}
    records = [
        moved(tensor="lora_A", status="missing", word=words.MISSING, **absent),
        moved(tensor="lora_B", status="unexpected", word=words.UNEXPECTED, **absent),
        moved(tensor="lora_C", status="skipped", word=None, **absent),
    ]
    found = compared(make_capture("a", {"cpu": records}))
    assert [row.status for t in found.tensors for row in t.outcomes] == ["missing", "unexpected", "skipped"]
    assert {f.kind for f in errors(found)} == {"missing", "unexpected"}


def test_worker_may_not_skip_what_the_reference_worker_could_make(make_capture: MakeCapture) -> None:
    failed = computed(status="skipped", digest=None, measure=None, word=None, reason="RuntimeError: a kernel")
    found = compared(make_capture("a", {"cpu": [computed()], "cuda:0": [failed]}))
    assert found.verdict == "inconsistent"
    assert [f.kind for f in errors(found)] == ["missing"]
    assert "RuntimeError: a kernel" in (only_row(found, "cuda:0").reason or "")
    neither = {name: [moved(), failed] for name in ("cpu", "cuda:0")}
    assert compared(make_capture("b", neither)).verdict == "consistent"


def test_worker_that_lacks_a_tensor_of_the_others(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [moved(), moved(tensor="lora_A")], "cuda:0": [moved()]}))
    assert [f.kind for f in errors(found)] == ["missing"]
    assert errors(found)[0].tensors == ("adapter::layers.0.q.lora_A",)


def test_lost_worker_blocks_what_it_did_not_see(make_capture: MakeCapture) -> None:
    lost = {"cuda:0": {"status": "lost", "reason": "was killed by SIGKILL", "stack": "File x\n  line"}}
    found = compared(make_capture("a", {"cpu": [moved(), computed()], "cuda:0": [moved("x")]}, info=lost))
    assert found.verdict == "incomplete"
    assert found.exit_status == 3
    assert {f.kind for f in errors(found)} == {"lost-worker", "bit-flip"}, "what it saw is still compared"
    merged = next(t for t in found.tensors if t.stage == "merged").outcome("cuda:0")
    assert merged is not None
    assert merged.status == "blocked"
    assert "SIGKILL" in (merged.reason or "")


@pytest.mark.parametrize(
    ("status", "reason", "todo"),
    [
        ("lost", "killed by SIGKILL; last event: merged", "look for the kernel's out-of-memory killer: dmesg -T"),
        ("lost", "exceeded --timeout 3 s and was killed; last event: merged", "give it more time with --timeout"),
        ("lost", "gave no sign of life for 60 s and was killed", "look at the stack above for what it waits for"),
        ("lost", "killed by SIGSEGV; last event: merged", None),
        ("failed", "killed by SIGKILL is what it says", None),
    ],
)
def test_a_lost_worker_has_a_next_step(make_capture: MakeCapture, status: str, reason: str, todo: str | None) -> None:
    lost = {"cuda:0": {"status": status, "reason": reason}}
    found = compared(make_capture("a", {"cpu": [moved()], "cuda:0": []}, info=lost))
    (finding,) = errors(found)
    verb = "was lost" if status == "lost" else "failed"
    assert finding.message == f"worker cuda:0 {verb}: {reason}"
    assert finding.next is None if todo is None else (finding.next or "").startswith(todo)


def test_groups_of_different_sizes_are_not_compared_with_each_other(make_capture: MakeCapture) -> None:
    captures = []
    for ranks, value in ((2, "a"), (3, "b")):
        row = TensorRecord(
            rule="bitwise", status="equal", stage="collectives", layer="all_gather", tensor=f"int8 1 of {ranks} ranks",
            digest=digest(value), reference="file", reference_digest=digest(value),
        )  # fmt: skip
        fact = msgspec.structs.replace(row, rule="limit", tensor=f"{row.tensor}, same bits on all ranks")
        folder = make_capture(str(ranks), {"cuda:0": [row, fact], "cuda:1": [row, fact]})
        captures.append(folder)
    assert errors(compared(*captures)) == []


@pytest.mark.parametrize(
    "stack",
    [
        "Current thread 1 (most recent call first):\n  in wait\n\nThread 2 (most recent call first):\n  in hangs\n"
        + "  in outer\n" * 20,
        "Traceback (most recent call last):\n" + "  in outer\n" * 20 + "  in hangs",
    ],
)
def test_a_lost_worker_shows_where_it_was(make_capture: MakeCapture, stack: str) -> None:
    lost = {"cuda:0": {"status": "lost", "reason": "gave no sign of life for 60 s and was killed", "stack": stack}}
    (finding,) = errors(compared(make_capture("a", {"cpu": [moved()], "cuda:0": []}, info=lost)))
    assert "  in hangs" in finding.detail
    assert "  in wait" not in finding.detail


def test_a_stage_that_failed_blocks_what_it_did_not_reach(make_capture: MakeCapture) -> None:
    failed = TensorRecord(
        stage="merged", layer="model", tensor="everything", status="blocked", rule="bound",
        reason="the stage failed: IndexError: x", evidence={"raised": "IndexError: x"},
    )  # fmt: skip
    records = [moved(), computed(), computed(tensor="delta")]
    found = compared(make_capture("a", {"cpu": records, "cuda:0": [moved(), computed(), failed]}))
    assert (found.verdict, found.exit_status) == ("incomplete", 3)
    (finding,) = errors(found)
    assert (finding.kind, finding.workers) == ("failed-stage", ("cuda:0",))
    assert finding.message == "merged · not complete on cuda:0: the stage failed: IndexError: x"
    assert [row.status for t in found.tensors for worker, row in t.by_worker() if worker == "cuda:0"] == [
        "equal", "within", "blocked", "blocked",
    ]  # fmt: skip
    of_reference = compared(make_capture("b", {"cpu": [moved(), failed], "cuda:0": records}))
    assert (of_reference.verdict, {f.kind for f in errors(of_reference)}) == ("incomplete", {"failed-stage"})


def test_bits_that_do_not_repeat(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [computed("a", repeats=(digest("a"), digest("c")))]}))
    assert only_row(found, "cpu").repeated is False
    assert [f.kind for f in errors(found)] == ["not-repeatable"]
    found = compared(make_capture("b", {"cpu": [computed("a", repeats=(digest("a"),))]}))
    assert only_row(found, "cpu").repeated is True
    assert found.verdict == "consistent"


def test_inputs_and_settings(make_capture: MakeCapture) -> None:
    change: dict[str, Any] = {"setting": "cudnn_allow_tf32", "asked": False, "in_force": True, "stage": "merged"}
    from consistency.capture.records import SettingChange

    info = {
        "cpu": {"inputs_digest": "1", "asked": {"threads": 1}, "in_force": {"threads": 1}},
        "cuda:0": {
            "inputs_digest": "2",
            "changes": (SettingChange(**change),),
            "asked": {"threads": 1},
            "in_force": {"threads": 2},
        },
    }
    found = compared(make_capture("a", {"cpu": [moved()], "cuda:0": [moved()]}, info=info))
    assert [f.kind for f in found.findings] == ["inputs", "setting-changed", "setting-refused"]
    assert found.verdict == "inconsistent"
    assert "cudnn_allow_tf32 changed to True during merged on cuda:0" in found.findings[1].message


# --- captures made apart ----------------------------------------------------------------------------------------------


def test_workers_of_equal_name_get_their_folders_name(make_capture: MakeCapture) -> None:
    found = compared(make_capture("host-a", {"cpu": [moved()]}), make_capture("host-b", {"cpu": [moved()]}))
    assert [worker.name for worker in found.workers] == ["host-a:cpu", "host-b:cpu"]
    assert found.reference == "host-a:cpu"
    assert found.tensors[0].classes == (("host-a:cpu", "host-b:cpu"),)
    apart = compared(make_capture("host-c", {"cpu": [moved()]}), make_capture("host-d", {"cuda:0": [moved()]}))
    assert [worker.name for worker in apart.workers] == ["cpu", "cuda:0"]


def test_folders_of_equal_name_are_told_apart(make_capture: MakeCapture, tmp_path: Path) -> None:
    one, two = make_capture("x/night", {"cpu": [moved()]}), make_capture("y/night", {"cpu": [moved()]})
    assert [w.name for w in compared(one, two).workers] == ["x/night:cpu", "y/night:cpu"]
    assert [w.name for w in compared(one, one).workers] == ["night:cpu", "night#2:cpu"]


def test_files_that_differ_without_kept_tensors_tell_the_block(make_capture: MakeCapture) -> None:
    def weight(text: str, second_block: int) -> TensorRecord:
        blocks = f"{1:016x}{second_block:016x}"
        return moved(text, text, stage="base", tensor="weight", blocks=blocks)

    found = compared(make_capture("a", {"cpu": [weight("x", 2)]}), make_capture("b", {"cpu": [weight("y", 3)]}))
    row = only_row(found, "b:cpu")
    assert row.status == "outside"
    assert row.evidence["blocks"] == [1]
    assert errors(found)[0].message.endswith(": the files differ, and nothing tells which is right")


def test_other_shape_or_dtype_is_structure(make_capture: MakeCapture) -> None:
    one = make_capture("a", {"cpu": [moved("x", "x")]})
    shape = make_capture("b", {"cpu": [moved("y", "y", shape=(2, 4))]})
    dtype = make_capture("c", {"cpu": [moved("z", "z", dtype="bfloat16")]})
    assert only_row(compared(one, shape), "b:cpu").word == "shape"
    found = only_row(compared(one, dtype), "c:cpu")
    assert found.word == "dtype"
    assert (found.evidence["got"], found.evidence["wanted"]) == ("bfloat16", "float32")


def test_other_software_is_said_first(make_capture: MakeCapture) -> None:
    def host(name: str, torch: str, held: str) -> Path:
        info = {"cpu": {"environment": {"torch": torch, "peft": "0.21"}}}
        return make_capture(name, {"cpu": [moved(held)]}, info=info)

    found = compared(host("a", "2.8.0", "file"), host("b", "2.13.0", "file"))
    assert [f.kind for f in found.findings] == ["environment"]
    assert found.findings[0].message == "torch differs between workers: 2.8.0: a:cpu; 2.13.0: b:cpu"
    assert found.verdict == "consistent"
    differs = compared(host("c", "2.8.0", "file"), host("d", "2.13.0", "other"))
    assert [f.severity for f in differs.findings][:2] == ["warning", "error"]
    assert differs.findings[0].kind == "environment"  # it may explain what follows


def test_stage_that_one_capture_did_not_ask_for_is_not_missing(make_capture: MakeCapture) -> None:
    one = make_capture("a", {"cpu": [moved(), computed()]})
    two = make_capture("b", {"cpu": [moved()]}, case={"stages": ("base", "adapter")})
    assert compared(one, two).verdict == "consistent"


def test_damaged_worker_makes_it_incomplete(make_capture: MakeCapture) -> None:
    folder = make_capture("a", {"cpu": [moved()], "cuda:0": [moved()]})
    (folder / "workers" / "cuda_0.isolated" / "worker.json").write_text("{")
    found = compared(folder)
    assert found.verdict == "incomplete"
    assert [f.kind for f in errors(found)] == ["damaged-capture"]
    assert [w.name for w in found.workers] == ["cpu"]


# --- load paths --------------------------------------------------------------------------------------------------


def test_wrong_only_when_shared_is_the_copy(make_capture: MakeCapture) -> None:
    alone = make_capture("alone", {"cpu": [moved()], "cuda:1": [moved()]})
    info = {"cuda:1": {"load_path": "shared"}}
    shared = make_capture("shared", {"cuda:1": [moved("x", word=words.ZEROS)]}, info=info)
    found = compared(alone, shared)
    assert found.load_paths == ("isolated", "shared")
    (finding,) = errors(found)
    assert finding.message.endswith(
        "when all devices are visible, and correct when isolated: peer copies 0→1 drop data"
    )
    shared_tensor = next(t for t in found.tensors if t.load_path == "shared")
    assert shared_tensor.classes == (("cpu",), ("cuda:1",)), "the reference worker stands in every load path"


def test_wrong_on_both_paths_is_not_blamed_on_the_copy(make_capture: MakeCapture) -> None:
    wrong = [moved("x", word=words.ZEROS)]
    alone = make_capture("alone", {"cpu": [moved()], "cuda:1": wrong})
    shared = make_capture("shared", {"cuda:1": wrong}, info={"cuda:1": {"load_path": "shared"}})
    (finding,) = errors(compared(alone, shared))
    assert finding.message.endswith("lora_B of layers.0.q on every load path taken (isolated, shared)")


def test_bytes_of_an_earlier_run_are_stale(make_capture: MakeCapture) -> None:
    """The second's file is another one, and its device holds what the first's file does."""
    first = make_capture("first", {"cpu": [moved("old", "old")]})
    second = make_capture("second", {"cpu": [moved("new", "new")], "cuda:0": [moved("old", "new")]})
    found = compared(first, second)
    row = next(r for worker, r in found.tensors[0].by_worker() if worker.endswith("cuda:0"))
    assert (row.status, row.word) == ("outside", "stale")
    assert row.evidence["holds"] == "the bytes of first:cpu's file, not those of its own"
    assert only_row(found, "first:cpu").status == "equal"
    right = only_row(found, "second:cpu")
    assert (right.status, right.word) != ("outside", "stale")
    assert right.evidence["own_file"] == "matches its own file"
    assert found.exit_status == 1


def loaded_again(status: str = "measured") -> TensorRecord:
    fields: dict[str, Any] = {
        "layer": "adapter_settings",
        "tensor": "loaded_again",
        "stage": "adapter",
        "shape": (),
        "rule": "bitwise",
    }
    if status == "skipped":
        return TensorRecord(status="skipped", reason="PEFT cannot load this adapter twice: IndexError: x", **fields)
    return TensorRecord(**fields | {"dtype": "uint8", "rule": "peer", "status": "measured", "digest": digest("done")})


def test_an_adapter_that_one_device_alone_cannot_load_again_is_a_finding(make_capture: MakeCapture) -> None:
    found = compared(make_capture("a", {"cpu": [loaded_again()], "cuda:0": [loaded_again("skipped")]}))
    row = only_row(found, "cuda:0")
    assert (row.status, row.word) == ("missing", "missing")
    assert "PEFT cannot load this adapter twice" in (row.reason or "")
    (finding,) = errors(found)
    assert (finding.kind, finding.workers) == ("missing", ("cuda:0",))
    assert found.exit_status == 1


def test_an_adapter_that_no_device_can_load_again_is_a_note(make_capture: MakeCapture) -> None:
    workers = {"cpu": [moved(), loaded_again("skipped")], "cuda:0": [moved(), loaded_again("skipped")]}
    found = compared(make_capture("a", workers))
    assert found.verdict == "consistent"
    (note,) = found.findings
    assert (note.severity, note.kind) == ("note", "skipped")
    assert "PEFT cannot load this adapter twice" in note.message


def test_bits_that_the_reference_worker_never_had_are_nobodys_other_bits(make_capture: MakeCapture) -> None:
    narrow = make_capture("a", {"cpu": [moved()]}, case={"stages": ("base", "adapter")})
    wide = make_capture("b", {"cpu": [moved(), computed(digest="x")], "cuda:0": [moved(), computed(digest="y")]})
    assert compared(narrow, wide).first_bitwise_difference == ()


def test_adapter_that_came_wrong_over_poison_is_one_finding(make_capture: MakeCapture) -> None:
    wrong = moved("zeros", repeats=("poison",))
    found = compared(make_capture("a", {"cpu": [moved()], "cuda:0": [wrong]}))
    assert "not-repeatable" not in {f.kind for f in found.findings}


def test_what_each_worker_computes_from_its_own_file_is_recomputed_not_another_file(make_capture: MakeCapture) -> None:
    made = {"converted": "computed from the file when the adapter is loaded"}
    records = {name: [moved(name, name, evidence=made)] for name in ("cpu", "cpu@baseline")}
    found = compared(make_capture("a", records))
    row = only_row(found, "cpu@baseline")
    assert (row.status, row.word) == ("outside", "recomputed")
    assert "files differ" not in errors(found)[0].message


def test_no_more_tensors_are_missing_than_there_are(make_capture: MakeCapture) -> None:
    """A row of the whole model is missing too, and is no tensor."""
    names = ("lora_A", "lora_B")
    whole = [*(moved(tensor=name) for name in names), loaded_again()]
    found = compared(make_capture("a", {"cpu": whole, "cuda:0": []}))
    (finding,) = errors(found)
    assert finding.kind == "missing"
    assert "2 of 2 tensors missing" in finding.message


def test_of_files_that_differ_the_odd_ones_are_named(make_capture: MakeCapture) -> None:
    """The first capture is the reference, whoever of them has the flipped bit."""
    odd, usual = ([moved(held=file, file=file)] for file in ("odd", "usual"))
    captures = [
        read_capture(make_capture(name, {"cpu": records}))
        for name, records in (("b", odd), ("a", usual), ("a2", usual))
    ]
    three = compare(captures)
    (finding,) = three.findings
    assert (three.reference, finding.workers) == ("b:cpu", ("a:cpu", "a2:cpu"))
    assert finding.message.endswith(": the files differ, and those of b:cpu are the odd ones")
    three = compare([captures[1], captures[0], captures[2]])
    (finding,) = three.findings
    assert (three.reference, finding.workers) == ("a:cpu", ("b:cpu",))
    assert finding.message.endswith(": the files differ")
    two = compare(captures[:2])
    (finding,) = two.findings
    assert (two.reference, finding.workers) == ("b:cpu", ("a:cpu",))
    assert finding.message.endswith(": the files differ, and nothing tells which is right")
    assert "sha256sum" in str(finding.next)


@pytest.mark.parametrize(
    ("worker", "info", "evidence", "said"),
    [
        ("cuda:1", {}, {}, ("fused kernels of attention (cuda:1@sdpa runs those that torch chooses)",)),
        ("cuda:1@sdpa", {"in_force": {"sdpa_flash": True}}, {}, ("fused kernels of attention (torch chose none)",)),
        ("cuda:1@sdpa", {"in_force": {"sdpa_flash": True}}, {"attention": "flash"}, ()),
        ("cpu@avx2", {}, {}, ()),
        ("xla:0", {}, {}, ()),
        ("part", {"engine": "vllm 0.11"}, {}, ()),
    ],
)
def test_attention_that_accelerators_ran_by_the_formula_alone_is_not_checked(
    make_capture: MakeCapture, worker: str, info: dict[str, Any], evidence: dict[str, str], said: tuple[str, ...]
) -> None:
    rows = {"cpu": [computed(stage="forward")], worker: [computed(stage="forward", evidence=evidence)]}
    found = compared(make_capture("a", rows, info={worker: info})).not_checked
    assert tuple(text for text in found if "attention" in text) == said
