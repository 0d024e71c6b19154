"""What each tool writes is read as the same tokens, by its own format alone; what is broken is refused plainly."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from consistency.errors import InputError
from consistency.extras.serving.check_text.files import read_records
from consistency.extras.serving.check_text.formats.registry import all_formats, texts_of
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.texts import Text, read_texts
from tests.launch.warm import ROOT

SAMPLES = Path(__file__).parent.parent / "samples"
FILES = sorted(path.name for path in SAMPLES.glob("*.json*"))
PROMPT, IDS, LOGPROBS = [5, 9, 33, 2], [7, 7, 60], [-0.25, -1.5, -0.0625]


def records_of(name: str) -> list[Any]:
    return [record for _, record in read_records(SAMPLES / name)]


def texts(name: str) -> list[Text]:
    return read_texts(SAMPLES / name)


def same(first: list[float] | None, second: list[float | None] | None) -> bool:
    """Compare log probabilities, None of the second for NaN."""
    if first is None or second is None:
        return first is second
    numbers = [None if math.isnan(value) else round(value, 6) for value in first]
    return numbers == second


@pytest.mark.parametrize("name", FILES)
def test_one_format_alone_fits_a_sample(name: str) -> None:
    for record in records_of(name):
        for one in record if isinstance(record, list) else [record]:
            body = one["response"] if isinstance(one.get("response"), dict) else one
            body = body.get("body", body)
            assert len([each.name for each in all_formats() if each.fits(body)]) == 1


@pytest.mark.parametrize(
    "name",
    [
        "vllm.jsonl", "vllm_completions.jsonl", "vllm_chat.jsonl", "sglang.jsonl", "sglang_chat.jsonl",
        "trl_client.json", "trl_async.jsonl", "verifiers_trajectory.jsonl", "slime.jsonl", "slime_train.json",
    ],
)  # fmt: skip
def test_ids_win_over_words(name: str) -> None:
    first = texts(name)[0]
    assert (first.prompt, first.text, first.judged) == (PROMPT, IDS, None)
    assert first.logprobs == LOGPROBS


def test_every_sample_is_a_text_and_named_by_its_place() -> None:
    assert [(text.name, text.text) for text in texts("vllm.jsonl")] == [
        ("line 1, sample 1", IDS), ("line 1, sample 2", [8, 2]), ("line 2", IDS),
    ]  # fmt: skip
    assert [text.name for text in texts("vllm_completions.jsonl")] == ["line 1, sample 1", "line 1, sample 2"]
    assert [text.name for text in texts("trl_client.json")] == ["record 1, sample 1", "record 1, sample 2"]
    assert [text.name for text in texts("sglang.jsonl")[2:]] == ["line 3, sample 1", "line 3, sample 2"]


def test_the_chosen_token_has_the_log_probability_not_the_most_likely() -> None:
    (record,) = records_of("vllm.jsonl")[1:]
    flat = record["outputs"][0]["logprobs"]
    flat["token_ids"][2], flat["token_ids"][3] = flat["token_ids"][3], flat["token_ids"][2]
    flat["logprobs"][2], flat["logprobs"][3] = flat["logprobs"][3], flat["logprobs"][2]
    assert texts_of(record, "line 1")[0].logprobs == LOGPROBS
    assert texts("trl_client.json")[1].logprobs == [-2.0, -0.125], "sorted by probability there"
    flat["token_ids"][0] = 11
    with pytest.raises(InputError, match="have not the token that was chosen") as caught:
        texts_of(record, "line 1")
    assert caught.value.got == "none of id 7 at place 1"


@pytest.mark.parametrize(
    ("name", "ids", "judged", "logprobs"),
    [
        ("trl_batch.json", [7, 8, 41, 42, 60], [1, 1, 0, 0, 1], [-0.25, -0.5, None, None, -0.0625]),
        ("verl_batch.json", [7, 8, 41, 42, 60], [1, 1, 0, 0, 1], [-0.25, -0.5, None, None, -0.0625]),
        ("verl_agent.jsonl", [7, 8, 41, 42, 60], [1, 1, 0, 0, 1], [-0.25, -0.5, None, None, -0.0625]),
        ("prime_rl_export.jsonl", [7, 8, 41, 42, 60], [1, 1, 0, 0, 1], [-0.25, -0.5, None, None, -0.0625]),
        (
            "prime_rl_traces.jsonl",
            [7, 8, 41, 42, 43, 60],
            [1, 1, 0, 0, 0, 1],
            [-0.2501, -0.5, None, None, None, -0.0625],
        ),
    ],
)
def test_what_a_tool_said_between_is_kept_and_not_judged(
    name: str, ids: list[int], judged: list[int], logprobs: list[float | None]
) -> None:
    first = texts(name)[0]
    assert (first.prompt, first.text, first.judged) == (PROMPT, ids, [bool(one) for one in judged])
    assert same(first.logprobs, logprobs)
    if name in ("trl_batch.json", "verl_batch.json", "prime_rl_export.jsonl"):
        of_engine = [-0.2502, -0.4999] if name.startswith("prime") else [-0.2501, -0.5]
        assert same(first.trainer_logprobs, [*of_engine, None, None, -0.0625])


def test_padding_is_left_out() -> None:
    second = texts("trl_batch.json")[1]
    assert (second.prompt, second.text, second.judged) == ([5, 9], IDS, None)
    assert same(second.logprobs, [-0.25, None, -0.0625]), "NaN is none"
    second = texts("verl_batch.json")[1]
    assert (second.prompt, second.text, second.logprobs) == ([5, 9], IDS, LOGPROBS)


def test_a_batch_of_verl_without_a_mask_of_padding_is_refused() -> None:
    (record,) = records_of("verl_batch.json")
    del record["attention_mask"]
    with pytest.raises(InputError, match="does not say what is padding"):
        texts_of(record, "record 1")


def test_each_way_through_a_trace_is_a_text_and_what_they_share_is_judged_once() -> None:
    first, second = texts("prime_rl_traces.jsonl")
    assert isinstance(first.text, list)
    assert first.text[:2] == [7, 8]
    assert (second.prompt, second.text, second.judged) == ([*PROMPT, 7, 8, 44, 43], [61, 2], None)
    assert first.logprob_rounding == 0.5e-4, "four digits behind the point"
    (record,) = records_of("prime_rl_traces.jsonl")
    record["traces"][0]["nodes"][1]["parent"] = 1
    with pytest.raises(InputError, match="follows none that stands before it"):
        texts_of(record, "line 1")


def test_rollouts_that_were_given_up_are_left_out_and_a_user_line_is_not() -> None:
    assert [text.name for text in texts("slime.jsonl")] == ["line 1", "line 2"], "of three"
    assert texts("slime.jsonl")[1].text == [7, 8, 41, 42, 43, 60, 2]
    assert [text.text for text in texts_of({"prompt": "a", "text": ""}, "line 1")] == [""]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("trl_completions.jsonl", "10"), ("trl_async.jsonl", "12"), ("verl_dump.jsonl", "12"),
        ("verl_batch.json", "12"), ("verl_agent.jsonl", "11, 12"), ("prime_rl_export.jsonl", "12"),
        ("prime_rl_traces.jsonl", "11, 12"),
        ("sglang.jsonl", "12"), ("sglang_chat.jsonl", "12"), ("slime.jsonl", "12"), ("vllm.jsonl", ""),
    ],
)  # fmt: skip
def test_the_step_is_read(name: str, step: str) -> None:
    assert texts(name)[0].step == step


def test_versions_that_changed_in_a_text_are_all_read() -> None:
    assert [text.step for text in texts("sglang.jsonl")] == ["12", "12, 13", "", ""]
    assert texts("slime.jsonl")[1].step == "12, 13"


def test_sampling_is_read_where_it_is_stated() -> None:
    assert texts("vllm.jsonl")[0].sampling == Sampling(temperature=0.7, top_p=0.9)
    assert texts("openai_chat.jsonl")[0].sampling == Sampling(temperature=0.7, top_p=0.9)
    assert texts("sglang.jsonl")[1].sampling == Sampling(temperature=0.7), "its top-k of all tokens"
    of_llama = texts("llama_cpp.jsonl")[0].sampling
    assert of_llama is not None
    assert (of_llama.top_k, round(of_llama.min_p, 6)) == (40, 0.05)
    assert texts("vllm.jsonl")[2].sampling is None


@pytest.mark.parametrize("name", ["openai_chat.jsonl", "ollama.jsonl", "llama_cpp_2024.jsonl"])
def test_where_only_words_are_given_each_token_has_its_own(name: str) -> None:
    first = texts(name)[0]
    assert (first.text, first.pieces) == (" blue sky.", [b" blue", b" sky", b"."])
    assert first.logprobs is not None
    assert len(first.logprobs) == 3


def test_an_end_without_words_is_no_token() -> None:
    (record,) = records_of("openai_chat.jsonl")
    content = record["response"]["body"]["choices"][0]["logprobs"]["content"]
    content.append({"token": "", "logprob": -0.5, "bytes": [], "top_logprobs": []})
    assert texts_of(record, "line 1")[0].logprobs == LOGPROBS


def test_a_prompt_is_found_or_asked_for() -> None:
    assert texts("llama_cpp_chat.jsonl")[0].prompt == [{"role": "user", "content": "The sky is"}]
    first = texts("llama_cpp.jsonl")[0]
    assert (first.prompt, first.prompt_is_rendered) == ("<s>The sky is", True)
    assert not texts("llama_cpp_2024.jsonl")[0].prompt_is_rendered, "what was asked, then"
    for name, key in (("llama_cpp_chat.jsonl", "messages"), ("sglang_chat.jsonl", "")):
        (record,) = records_of(name)
        record.pop(key, None)
        record["choices"][0].pop("prompt_token_ids", None)
        with pytest.raises(InputError, match="does not say what it was asked"):
            texts_of(record, "line 1")


def test_several_prompts_of_one_request_are_told_apart() -> None:
    choices = [{"index": place, "text": f" {place}", "logprobs": None} for place in range(4)]
    record = {"object": "text_completion", "choices": choices, "prompt": ["a", "b"]}
    assert [text.prompt for text in texts_of(record, "line 1")] == ["a", "a", "b", "b"]


def test_the_echo_of_a_prompt_is_left_out_where_ids_say_how_much() -> None:
    (record,) = records_of("vllm_completions.jsonl")
    for choice in record["choices"]:
        choice["logprobs"]["tokens"] = [*(f"token_id:{one}" for one in PROMPT), *choice["logprobs"]["tokens"]]
        choice["logprobs"]["token_logprobs"] = [None, -1.0, -1.0, -1.0, *LOGPROBS]
    assert texts_of(record, "line 1")[0].logprobs == LOGPROBS


@pytest.mark.parametrize("name", ["verl_dump.jsonl", "trl_completions.jsonl"])
def test_words_without_special_tokens_are_doubted(name: str) -> None:
    assert "special tokens" in texts(name)[0].doubt


def test_words_that_are_not_all_are_refused() -> None:
    (record,) = records_of("openai_chat.jsonl")
    choice = record["response"]["body"]["choices"][0]
    choice["logprobs"] = None
    assert texts_of(record, "line 1")[0].text == " blue sky."
    choice["message"]["reasoning_content"] = "Hm."
    with pytest.raises(InputError, match="the words are not all that the model wrote"):
        texts_of(record, "line 1")


@pytest.mark.parametrize(
    ("record", "message", "got"),
    [
        ({"question": "a", "answer": "b"}, "line 3 is no text", "fields question, answer"),
        ({}, "line 3 is no text", "fields (none)"),
        ([1], "line 3 is no text", "int"),
        ({"prompt": "a", "text": 1}, "a field is not as it should be", "Expected"),
        ({"prompt": [1], "text": [2, -1]}, "text has what is no token id", "-1 at place 2"),
        ({"prompt_ids": [1], "completion_ids": ["2"]}, "completion_ids has what is no token id", "'2' at place 1"),
        (
            {"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1, -2]},
            "logprobs has not one for each token",
            "2 of",
        ),
        ({"tokens": [1, 2], "response_length": 3}, "response_length is no number of tokens", "3"),
        ({"tokens": [1, 2], "response_length": 1, "loss_mask": [2]}, "loss_mask is no list of 0 and 1", "[2]"),
        ({"choices": [], "prompt": "a", "completion": "b"}, "line 3 has fields of", "choices, prompt, completion"),
        ({"object": "chat.completion.chunk", "choices": [{}]}, "a piece of a stream", None),
        ({"prompt": "a", "completion": [{}, {}]}, "the completion is more than words", "2 messages"),
    ],
)
def test_what_is_no_record_is_refused_plainly(record: Any, message: str, got: str | None) -> None:
    with pytest.raises(InputError) as caught:
        texts_of(record, "line 3")
    assert message in caught.value.what
    assert "line 3" in caught.value.what
    assert got is None or got in str(caught.value.got)


def test_the_simplest_form_is_told(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": [1], "text": [2]}\n{"question": "a"}\n')
    with pytest.raises(InputError) as caught:
        read_texts(path)
    assert str(caught.value).splitlines()[:3] == [
        "line 2 is no text", f"  where:  {path}", "  got:    fields question",
    ]  # fmt: skip
    assert '{"prompt": "…", "text": "…", "logprobs": […]}' in str(caught.value)
    assert "vLLM" in str(caught.value)


def test_the_page_names_every_tool() -> None:
    page = (ROOT / "docs/rollout-formats.md").read_text(encoding="utf-8")
    assert len(all_formats()) >= 10
    assert [one.name for one in all_formats() if not one.keeps_empty and one.name not in page] == []


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*above, key))


RUBBISH = [None, "x", 3, -1, 1.5, True, [], {}, [1], ["a"], [[1]], [None], {"a": 1}, 10**30, math.nan, [[[1]]]]


def test_rubbish_in_any_field_is_refused_or_read_with_one_value_for_each_token() -> None:
    drawn, refused = random.Random(0), []
    samples = [record for name in FILES if name != "plain.jsonl" for record in records_of(name)]
    for _ in range(1500):
        record = copy.deepcopy(drawn.choice(samples))
        *above, last = drawn.choice([one for one in places(record) if one])
        holder = record
        for key in above:
            holder = holder[key]
        if drawn.random() < 0.7:
            holder[last] = drawn.choice(RUBBISH)
        else:
            del holder[last]
        try:
            found = texts_of(record, "line 1")
        except InputError as error:
            refused.append(error.what)
            continue
        for text in found:
            tokens = text.pieces if text.pieces is not None else text.text
            for values in (text.logprobs, text.trainer_logprobs, text.judged):
                assert values is None or len(values) == len(tokens), json.dumps(record)
    assert len(refused) > 200
    assert all("line 1" in what for what in refused)
