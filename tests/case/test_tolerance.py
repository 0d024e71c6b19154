"""Tolerances of the user's own: what can be written, what is refused, and which one is meant for a tensor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consistency.capture.json_codec import decode_json, encode_json
from consistency.case.case import Case
from consistency.case.options import Edge, Options
from consistency.case.reading import gather_options, make_options
from consistency.case.stages import SPECS
from consistency.case.tolerance import COMPUTED, Override, as_overrides, choose, of_architecture
from consistency.errors import UsageError
from consistency.numerics.rules import UNIT_ROUNDOFF

WIDE = Override(atol=1.0, rtol=1.0)
OVERRIDES = st.builds(
    Override,
    atol=st.floats(0, allow_infinity=False),
    rtol=st.floats(0, allow_infinity=False),
    stage=st.sampled_from([None, *COMPUTED]),
    layer=st.sampled_from([None, "*.q_proj", "hidden_states.?", "model.layers.[0-3].*", "[!a]=b", "logits"]),
    dtype=st.sampled_from([None, *UNIT_ROUNDOFF]),
    arch=st.sampled_from([None, "sm_90", "x86-64 AVX-512", "Hopper*"]),
)


def tolerances(given: object) -> tuple[Override, ...]:
    return make_options({"tolerance": given}).tolerance


# --- what can be written ----------------------------------------------------------------------------------------------


def test_tables_of_a_file_and_texts_of_the_command_line_say_the_same(tmp_path: Path) -> None:
    path = tmp_path / "consistency.toml"
    path.write_text(
        """
        [[tolerance]]
        atol = 0
        rtol = 1e-6

        [[tolerance]]
        stage = "merged"
        layer = "*.q_proj"
        dtype = "bfloat16"
        atol = 1e-3
        rtol = 1e-2
        """
    )
    wanted = (
        Override(atol=0.0, rtol=1e-6),
        Override(stage="merged", layer="*.q_proj", dtype="bfloat16", atol=1e-3, rtol=1e-2),
    )
    assert gather_options(path, {}, Edge.COMMAND_LINE).tolerance == wanted
    texts = ["atol=0,rtol=1e-6", " stage = merged, layer=*.q_proj ,dtype=bfloat16,atol=1e-3,rtol=1e-2,"]
    assert tolerances(texts) == wanted
    assert tolerances(list(wanted)) == wanted
    assert Options().tolerance == ()


@given(OVERRIDES)
@settings(deadline=None)
def test_what_is_shown_can_be_given_again(override: Override) -> None:
    assert tolerances([str(override)]) == (override,)


def test_a_case_with_tolerances_survives_json() -> None:
    case = Case(name="x", base="/b", tolerance=(WIDE, Override(atol=0.0, rtol=0.0, stage="forward")))
    assert decode_json(encode_json(case), Case) == case


@pytest.mark.parametrize("what", ['"atol": -1, "rtol": 0', '"atol": 1, "rtol": 1, "stage": "base"', '"atol": 1'])
def test_a_case_from_elsewhere_is_checked_alike(what: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"tolerance\[0\]"):
        decode_json(f'{{"name": "x", "base": "/b", "tolerance": [{{{what}}}]}}', Case)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"atol": 1.0}, "a tolerance without rtol"),
        ({"rtol": 1.0, "layer": "x"}, "a tolerance without atol"),
        ({"layer": "x"}, "a tolerance without atol and rtol"),
        ({}, "a tolerance without atol and rtol"),
        ({"atol": -1e-9, "rtol": 0}, "atol is a finite number of 0 or more"),
        ({"atol": 0, "rtol": -1}, "rtol is a finite number of 0 or more"),
        ({"atol": math.nan, "rtol": 0}, "atol is a finite number"),
        ({"atol": 0, "rtol": math.inf}, "rtol is a finite number"),
        ({"atol": True, "rtol": 0}, "atol of a tolerance is not a number\n  where:  tolerance\n  got:    True"),
        ({"atol": "1", "rtol": 0}, "atol of a tolerance is not a number\n  where:  tolerance\n  got:    '1'"),
        ({"atol": 1, "rtol": 1, "stage": "base"}, "the stage base only moves bytes, and no byte may differ"),
        ({"atol": 1, "rtol": 1, "stage": "adapter"}, "the stage adapter only moves bytes"),
        (
            {"atol": 1, "rtol": 1, "stage": "merge"},
            "unknown stage: merge; did you mean merged?",
        ),
        (
            {"atol": 1, "rtol": 1, "stage": "x"},
            "unknown stage: x; a tolerance is for operators, merged, forward, gradient, trajectory, adapters, ",
        ),
        ({"atol": 1, "rtol": 1, "stage": 3}, "stage of a tolerance is not a text"),
        ({"atol": 1, "rtol": 1, "arch": ""}, "an empty arch matches nothing"),
        ({"atol": 1, "rtol": 1, "arch": ["sm_90"]}, "arch of a tolerance is not a text"),
        ({"atol": 1, "rtol": 1, "dtype": "bf16"}, "no dtype that has a tolerance: bf16"),
        ({"atol": 1, "rtol": 1, "dtype": "int8"}, "one of float64, float32, float16, bfloat16"),
        ({"atol": 1, "rtol": 1, "layer": " "}, "an empty layer matches nothing"),
        ({"atol": 1, "rtol": 1, "layer": "*.q_proj,*.v_proj"}, "give one tolerance per pattern"),
        ({"atol": 1, "rtol": 1, "tensor": "delta"}, "has no field tensor"),
        ({"atol": 1, "rtol": 1, "tensor": "delta"}, "wanted: stage, arch, layer, dtype, atol, rtol"),
        ({"atol": 1, "rtol": 1, "architecture": "sm_90"}, "did you mean arch?"),
        (7, "a tolerance is a table"),
    ],
)
def test_a_table_that_cannot_be_meant_is_refused(table: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_options({"tolerance": [table]})
    assert words in str(caught.value)
    assert caught.value.where == "tolerance"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a tolerance without atol and rtol"),
        ("stage=merged", "a tolerance without atol and rtol"),
        ("atol=1", "a tolerance without rtol"),
        ("merged,atol=1,rtol=1", "a tolerance is made of name=value"),
        ("layer=,atol=1,rtol=1", "a tolerance is made of name=value"),
        ("atol=much,rtol=1", "atol of a tolerance is not a number"),
        ("atol=nan,rtol=1", "atol is a finite number"),
        ("atol=1,rtol=1e999", "rtol is a finite number"),
        ("atol=1,atol=2,rtol=1", "a tolerance with two of atol"),
        ("layers=x,atol=1,rtol=1", "did you mean layer?"),
        ("stage=base,atol=1,rtol=1", "only moves bytes"),
    ],
)
def test_a_text_that_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        tolerances([text])
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["atol=1,rtol=1", {"atol": 1, "rtol": 1}])
def test_one_tolerance_needs_no_list(value: object) -> None:
    """A marker of pytest was refused the form that the message of its error suggests."""
    assert as_overrides(value, where="here") == (Override(atol=1.0, rtol=1.0),)


@pytest.mark.parametrize("value", [3, None])
def test_what_is_no_tolerance_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="tolerances are a list of tables"):
        as_overrides(value, where="here")


# --- which one is meant -----------------------------------------------------------------------------------------------


def test_the_last_that_matches_wins() -> None:
    first, second = Override(atol=1.0, rtol=0.0), Override(atol=2.0, rtol=0.0, layer="*.q_proj")
    place = {"stage": "merged", "layer": "model.layers.0.self_attn.q_proj", "dtype": "float32"}
    assert choose((first, second), **place) is second
    assert choose((second, first), **place) is first
    assert choose((first, second), **{**place, "layer": "model.layers.0.mlp.up_proj"}) is first
    assert choose((), **place) is None


@pytest.mark.parametrize(
    ("changes", "matches"),
    [
        ({}, True),
        ({"stage": "merged"}, True),
        ({"stage": "forward"}, False),
        ({"dtype": "float32"}, True),
        ({"dtype": "bfloat16"}, False),
        ({"layer": "*.q_proj"}, True),
        ({"layer": "model.*"}, True),
        ({"layer": "model.layers.?.self_attn.q_proj"}, True),
        ({"layer": "q_proj"}, False),
        ({"layer": "*.Q_proj"}, False),
        ({"layer": "*.q_proj", "stage": "merged", "dtype": "bfloat16"}, False),
    ],
)
def test_every_field_that_is_given_has_to_match(changes: dict[str, Any], matches: bool) -> None:
    override = Override(atol=0.0, rtol=0.0, **changes)
    assert override.matches(stage="merged", layer="model.layers.0.self_attn.q_proj", dtype="float32") is matches


@pytest.mark.parametrize(
    ("arch", "architecture", "applies"),
    [
        (None, "Hopper sm_90", True),
        ("sm_90", "Hopper sm_90", True),
        ("SM_90", "Hopper sm_90", True),
        ("hopper", "Hopper sm_90", True),
        ("Hopper sm_90", "Hopper sm_90", True),
        ("sm_9?", "Hopper sm_90", True),
        ("sm_9", "Hopper sm_90", False),
        ("sm_90", "Ampere sm_86", False),
        ("sm_8*", "Ada Lovelace sm_89", True),
        ("avx-512", "x86-64 AVX-512", True),
        ("x86-64", "x86-64 AVX2", True),
        ("x86-64", "x86-64", True),
    ],
)
def test_an_architecture_is_named_whole_or_by_a_word(arch: str | None, architecture: str, applies: bool) -> None:
    override = Override(atol=0.0, rtol=0.0, arch=arch)
    assert override.is_for(architecture) is applies
    assert of_architecture((WIDE, override), architecture) == ((WIDE, override) if applies else (WIDE,))


@pytest.mark.parametrize("stage", ["base", "adapter"])
def test_bytes_that_were_moved_are_out_of_reach(stage: str) -> None:
    assert not WIDE.matches(stage=stage, layer="x", dtype="float32")


def test_every_stage_computes_or_moves_bytes_or_has_limits_of_its_own() -> None:
    moves, limits = {"transfer", "base", "adapter"}, {"memory", "sharding", "generation", "wrapping"}
    assert set(SPECS) - moves - limits == set(COMPUTED)
