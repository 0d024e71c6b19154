"""Rows that one cause explains are one finding, with what they rest on in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from consistency.comparison.findings.causes import causes_of
from consistency.comparison.findings.details import describe
from consistency.comparison.result import Finding, Outcome, TensorComparison
from consistency.numerics import words
from consistency.numerics.real import Real
from consistency.numerics.words import Word


def tensor(
    layer: str, name: str, *workers: str, rule: str = "bitwise", stage: str = "adapter", **row: Any
) -> TensorComparison:
    load_path = row.pop("load_path", "isolated")
    fields: dict[str, Any] = {"reference": "file", "status": "outside", **row}
    return TensorComparison(
        stage=stage, load_path=load_path, layer=layer, tensor=name, shape=(2, 2), dtype="float32", rule=rule,
        classes=(),
        outcomes=tuple(Outcome(workers=(worker,), **fields) for worker in workers),
    )  # fmt: skip


def causes(*tensors: TensorComparison) -> list[Finding]:
    def look(workers: Sequence[str]) -> str:
        return f"look at {','.join(workers)}"

    return list(causes_of(tensors, next_step=look, compare_file=lambda stage: f"diff {stage}"))


def test_256_tensors_are_one_finding() -> None:
    wrong = [tensor(f"layers.{i}", t, "cuda:1", word=words.ZEROS) for i in range(128) for t in ("lora_A", "lora_B")]
    (finding,) = causes(*wrong, tensor("layers.0", "lora_C", "cuda:1", status="equal"))
    assert finding.message == "adapter · cuda:1 · zeros where the file is nonzero in 256 of 257 tensors"
    assert (len(finding.tensors), len(finding.detail), finding.next) == (256, 5, "look at cuda:1")
    assert (finding.kind, finding.severity, finding.workers) == ("zeros", "error", ("cuda:1",))


def test_another_word_worker_stage_or_path_is_another_cause() -> None:
    found = causes(
        tensor("a", "w", "cuda:0", word=words.ZEROS),
        tensor("b", "w", "cuda:0", word=words.BIT_FLIP),
        tensor("c", "w", "cuda:1", word=words.ZEROS),
        tensor("d", "w", "cuda:0", word=words.ZEROS, stage="base"),
        tensor("e", "w", "cuda:0", word=words.ZEROS, load_path="shared"),
        tensor("f", "w", "cuda:0", "cuda:1", word=words.ZEROS),
    )
    assert len(found) == 6
    assert all("on load path" in f.message for f in found)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"evidence": {"ratio": 0.5}}, "0.5× the reference"),
        ({"evidence": {"offset_bytes": 4096, "length_bytes": 512}}, "from byte 4096 · 512 bytes long"),
        ({"evidence": {"bits": [3, 7], "fields": ["mantissa"]}}, "bit 3, 7 (mantissa)"),
        ({"evidence": {"holds": "layers.1.w"}}, "holds layers.1.w"),
        ({"evidence": {"when": "loaded again, over NaN"}}, "when loaded again, over NaN"),
        ({"evidence": {"also": "rounded-to-tf32"}}, "could also be rounded-to-tf32"),
        ({"evidence": {"unit": "bytes"}}, "counted in bytes: torch has no such dtype"),
        ({"evidence": {"got": [1], "wanted": [2]}}, "got [1] · wanted [2]"),
        ({"evidence": {"got": {"rank 8": 4}, "wanted": {"rank 4": 1}}}, "got rank 8 in 4 layers · wanted rank 4 in 1"),
        ({"evidence": {"ratio": 2.0, "of": "what was added"}}, "what was added is 2× the reference"),
        ({"evidence": {"tolerance": "atol=1e-9"}, "mismatched": 0}, "below one rounding of float32"),
        ({"mismatched": 3, "elements": 4}, "3 of 4 elements"),
        ({"ratio": Real(2.5)}, "2.5× tolerance"),
        ({"reason": "only the reference has it"}, "only the reference has it"),
        (
            {
                "worst_index": (0, 1),
                "evidence": {"actual": 1.0, "expected": "nan", "actual_bits": "0x1", "expected_bits": "0x2"},
            },
            "layers.0.w[0, 1] · got 1 (0x1), wanted nan (0x2)",
        ),
    ],
)  # fmt: skip
def test_evidence_in_words(row: dict[str, Any], words: str) -> None:
    one = tensor("layers.0", "w", "cuda:0", **row)
    text = describe(one, one.outcomes[0])
    assert text.startswith("layers.0.w")
    assert words in text


def test_the_number_of_layers_with_settings_is_no_peak_of_memory() -> None:
    one = tensor("adapter_settings", "rank_and_scaling", "cuda:0", evidence={"layers": 4})
    assert "peak" not in describe(one, one.outcomes[0])


@pytest.mark.parametrize("evidence", [{"bits": 3}, {"blocks": 5}, {"ratio": None}, {"inactive": "x"}, {"holds": {}}])
def test_evidence_of_a_stranger_is_shown_and_not_relied_on(evidence: dict[str, Any]) -> None:
    one = tensor("layers.0", "w", "cuda:0", evidence=evidence)
    assert describe(one, one.outcomes[0]).startswith("layers.0.w")


@pytest.mark.parametrize(
    ("rule", "word", "phrase"),
    [
        ("bound", "zeros", "zeros instead of a result"),
        ("bitwise", "zeros", "zeros where the file is nonzero"),
        ("bound", "rounded-to-bf16", "a result rounded through bfloat16"),
        ("relative", "block", "one contiguous range of values that exceed tolerance"),
        ("bound", "differs", "errors that exceed tolerance"),
        ("user", "differs", "errors that exceed tolerance"),
        ("bitwise", "differs", "bitwise differences"),
        ("user", "wrong-scale", "values off by one constant factor"),
        ("bound", "a-word-of-a-later-version", "a-word-of-a-later-version"),
    ],
)
def test_what_was_computed_has_phrases_of_its_own(rule: str, word: str, phrase: str) -> None:
    (finding,) = causes(tensor("layers.0", "w", "cuda:0", rule=rule, word=Word(word), stage="merged"))
    assert finding.message == f"merged · cuda:0 · {phrase} in w of layers.0"


def test_what_follows_from_wrong_bytes_is_told_below_them() -> None:
    (wrong,) = causes(
        tensor("a", "weight", "cuda:0", word=words.DIFFERS, stage="merged", rule="bound"),
        tensor("a", "w", "cuda:0", word=words.ZEROS),
    )
    assert (wrong.kind, wrong.tensors) == ("zeros", ("adapter::a.w", "merged::a.weight"))
    (led_to,) = wrong.consequences
    assert led_to.message == "merged · cuda:0 · errors that exceed tolerance in weight of a"
    assert (led_to.stage, led_to.workers, led_to.tensors) == ("merged", ("cuda:0",), ("merged::a.weight",))
    _, other = causes(
        tensor("a", "w", "cuda:0", word=words.ZEROS),
        tensor("a", "weight", "cuda:1", word=words.DIFFERS, stage="merged", rule="bound"),
    )
    assert (other.kind, other.workers) == ("differs", ("cuda:1",))


def test_choices_after_a_wrong_result_of_their_block_are_its_consequence() -> None:
    def flipped(layer: str) -> TensorComparison:
        name = f"layers.{layer}.mlp.gate"
        return tensor(name, "topk.decisions", "cuda:0", word=words.DECISION_FLIPPED, stage="forward", rule="limit")

    attention = tensor("layers.1.attn", "on", "cuda:0", word=words.DIFFERS, stage="forward", rule="block")
    (wrong,) = causes(flipped("1"), attention)
    assert (wrong.kind, [led_to.tensors for led_to in wrong.consequences]) == (
        "differs", [("forward::layers.1.mlp.gate.topk.decisions",)],
    )  # fmt: skip
    elsewhere = causes(flipped("2"), attention)
    of_the_chooser = causes(
        flipped("1"), tensor("layers.1.mlp", "on", "cuda:0", word=words.DIFFERS, stage="forward", rule="block")
    )
    on_another = causes(flipped("1"), tensor("layers.1.attn", "on", "cuda:1", word=words.DIFFERS, stage="forward"))
    for found in (elsewhere, of_the_chooser, on_another):
        assert [finding.kind for finding in found] == ["decision-flipped", "differs"]


def test_a_cpu_is_not_judged_with_the_devices_that_share_its_row() -> None:
    """It takes no load path on which other devices are visible: wrong there as well says nothing of it."""
    workers = ("cpu", "cuda:1")
    single = [tensor("a", "w", *workers, word=words.ZEROS, load_path=path) for path in ("isolated", "shared")]
    together = [
        msgspec.structs.replace(one, outcomes=(one.outcomes[0].of(workers),)) for one in single
    ]  # fmt: skip
    assert causes(*together) == causes(*single)
    assert [finding.workers for finding in causes(*together)] == [("cpu",), ("cuda:1",)]


def test_what_is_missing_everywhere_is_of_the_file_and_no_run_shows_more() -> None:
    everywhere = tensor("a", "w", "cuda:0", word=words.MISSING)
    (finding,) = causes(everywhere)
    assert finding.next == "diff adapter"
    right = tensor("a", "w", "cpu", status="equal").outcomes
    outcomes = (*everywhere.outcomes, *right)
    (finding,) = causes(msgspec.structs.replace(everywhere, outcomes=outcomes, workers=("cuda:0", "cpu")))
    assert finding.next == "look at cuda:0"


def test_an_adapter_for_a_deeper_base_is_told_so() -> None:
    fits = [tensor(f"model.layers.{n}.q", "lora_A", "cpu", status="equal") for n in range(2)]
    beyond = [tensor(f"model.layers.{n}.q", "lora_A", "cpu", word=words.UNEXPECTED) for n in (2, 3)]
    (finding,) = causes(*fits, *beyond)
    assert finding.message.endswith(": the adapter is for 4 layers, the base has 2")
    other = tensor("model.layers.0.r", "lora_A", "cpu", word=words.UNEXPECTED)
    (finding,) = causes(*fits, *beyond, other)
    assert "layers, the base" not in finding.message


def test_a_tolerance_that_fails_what_is_correctly_rounded_is_to_blame_itself() -> None:
    fields: dict[str, Any] = {"rule": "user", "stage": "merged", "evidence": {"tolerance": "atol=1e-9"}}
    (finding,) = causes(
        tensor("a", "w", "cpu", mismatched=0, **fields), tensor("b", "w", "cpu", mismatched=3, **fields)
    )
    why = "1 of them hold the exact values correctly rounded: the tolerance is below one rounding of float32"
    assert finding.message.endswith(why)
    (other,) = causes(tensor("b", "w", "cpu", mismatched=3, **fields))
    assert "rounding" not in other.message


@pytest.mark.parametrize(
    ("own", "wanted", "says"),
    [
        ("_orig_mod.base_model.model.model.layers.{}.q", "model.layers.{}.q", "without '_orig_mod.' in their names"),
        ("module.model.layers.{}.q", "model.layers.{}.q", "without 'module.' in their names they are the missing ones"),
        (
            "model.layers.{}.q", "model.language_model.layers.{}.q",
            "the file has 'model.' where the model has 'model.language_model.'",
        ),
        (
            "language_model.model.layers.{}.q", "model.language_model.layers.{}.q",
            "the file has 'language_model.model.' where the model has 'model.language_model.'",
        ),
    ],
)  # fmt: skip
def test_keys_that_differ_by_a_part_of_their_path_are_connected(own: str, wanted: str, says: str) -> None:
    """The same tensors stood as missing and as without a counterpart, side by side."""
    there = [tensor(own.format(n), "lora_A", "cpu", word=words.UNEXPECTED) for n in range(2)]
    lacks = [tensor(wanted.format(n), "lora_A", "cpu", word=words.MISSING) for n in range(2)]
    first, second = causes(*there, *lacks)
    assert f"without a counterpart: {says}" in first.message
    assert first.next == second.next
    assert str(first.next).startswith("rename the keys")
    other = tensor("model.layers.7.k", "lora_A", "cpu", word=words.MISSING)
    first, _ = causes(*there, lacks[0], other)
    assert first.message.endswith("without a counterpart")


def test_rows_that_say_what_mends_them_are_not_run_again() -> None:
    first: dict[str, Any] = {"evidence": {"to_do": "convert a"}, "word": words.BYTES_CHANGED}
    second: dict[str, Any] = {"evidence": {"to_do": "convert b"}, "word": words.BYTES_CHANGED}
    (finding,) = causes(tensor("x", "w", "cpu", **first), tensor("y", "w", "cpu", **first))
    assert finding.next == "convert a"
    (finding,) = causes(tensor("x", "w", "cpu", **first), tensor("y", "w", "cpu", **second))
    assert finding.next == "look at cpu"
