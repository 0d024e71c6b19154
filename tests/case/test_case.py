from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.case import standard
from consistency.case.case import Case, Fit
from consistency.case.load_path import LoadPath
from consistency.case.stage import Level
from consistency.case.stages import LEVELS, SPECS
from consistency.extras.peft_api.adapters.spec import ADAPTERS


def test_a_case_survives_json() -> None:
    case = Case(
        name="x", base="/b", adapter=None, stages=(standard.MERGED,), load_paths=(LoadPath.SHARED,), level=Level.QUICK
    )
    assert decode_json(encode_json(case), Case) == case


def test_a_case_from_elsewhere_has_no_further_fields() -> None:
    with pytest.raises(msgspec.ValidationError, match="evil"):
        decode_json(b'{"name": "x", "base": "/b", "evil": 1}', Case)


def test_the_factory_is_what_comes_after_python() -> None:
    assert Case(name="x", base="python:a.b:make").factory == "a.b:make"
    assert Case(name="x", base="/python:a").factory is None


def test_a_report_names_what_was_not_looked_at() -> None:
    quick = Case(name="x", base="/b", level=Level.QUICK, stages=LEVELS[Level.QUICK].stages)
    again = "the adapter loaded again over NaN"
    large = "copies of 256 MiB and more or with pinned memory"
    rest = (large, "most operators", "large operators", "safe_merge", again, "a second run on the same device")
    together = ("stage collectives", "stage replicas", "stage shards", "stage tensor-parallel")
    later = ("stage sharding", "stage generation", *together, "stage wrapping")
    trained = "stage trajectory"
    assert quick.not_checked() == ("stage forward", "stage gradient", trained, "stage memory", *later, *rest)
    widened = Case(name="x", base="/b", level=Level.QUICK)
    assert widened.not_checked() == (trained, *later, *rest)
    narrowed = Case(name="x", base="/b", level=Level.STANDARD, stages=(standard.ADAPTER,), repeat=2)
    others = [stage for stage in SPECS if stage not in (standard.ADAPTER, ADAPTERS)]  # one adapter has no such stage
    assert narrowed.not_checked() == tuple(f"stage {stage}" for stage in others)
    thorough = Case(name="x", base="/b", level=Level.THOROUGH, repeat=2, stages=LEVELS[Level.THOROUGH].stages)
    on_request = ("stage trajectory", *together, "stage wrapping")
    assert thorough.not_checked() == on_request, "which are run on request alone"


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (Case(name="x", base="/b", level=Level.QUICK), {0, 1, 2, 3, 4, 5}),
        (Case(name="x", base="/b", level=Level.QUICK, repeat=2), {0, 1, 2, 3}),
        (Case(name="x", base="/b", level=Level.QUICK, soak_s=1.0), {0, 1, 2, 3, 4}),
        (Case(name="x", base="/b", level=Level.QUICK, stages=(standard.TRANSFER,)), {0, 3, 4, 5}),
        (Case(name="x", base="/b", level=Level.QUICK, stages=(standard.OPERATORS,)), {1, 2, 3, 4, 5}),
    ],
)
def test_what_is_named_does_not_hang_on_its_words(case: Case, named: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = LEVELS[Level.QUICK]
    reworded = [dataclasses.replace(check, text=f"check {place}") for place, check in enumerate(plan.left_out)]
    monkeypatch.setitem(LEVELS, Level.QUICK, dataclasses.replace(plan, left_out=tuple(reworded)))
    checks = [text for text in case.not_checked() if text.startswith("check ")]
    assert checks == [f"check {place}" for place in sorted(named)]


def test_a_report_names_what_did_not_fit() -> None:
    whole = Case(name="x", base="/b")
    cut = msgspec.structs.replace(whole, fit=Fit(tokens=4, sequences=2))
    assert (cut.sequences(), cut.tokens) == (2, 4)
    added = ("6 of 8 sequences, for lack of memory", "12 of 16 tokens of each, for lack of memory")
    assert cut.not_checked() == (*whole.not_checked(), *added)
    bytes_alone = msgspec.structs.replace(cut, stages=(standard.ADAPTER,))
    assert not [text for text in bytes_alone.not_checked() if "memory" in text and not text.startswith("stage")]


def test_a_higher_level_looks_at_no_less() -> None:
    plans = [LEVELS[level] for level in Level]
    for less, more in itertools.pairwise(plans):
        assert set(less.stages) <= set(more.stages)
        assert less.safe_merge <= more.safe_merge
        assert (less.sequences, less.tokens, less.repeat) <= (more.sequences, more.tokens, more.repeat)
        assert set(more.not_checked) < set(less.not_checked)
