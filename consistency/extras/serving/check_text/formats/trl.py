"""What TRL has of rollouts, as lists (`tensor.tolist()`), one sample or a batch.

Fields as in trl 1.16: `VLLMClient.generate` (`trl/generation/vllm_client.py`) and a `rollout_func` give `prompt_ids`,
`completion_ids`, `logprobs`, `logprob_token_ids`, `env_mask`; a batch of `GRPOTrainer` (`trl/trainer/grpo_trainer.py`)
has masks of padding, `sampling_per_token_logps` of the engine, `old_per_token_logps` of the trainer, and `tool_mask`;
`RolloutSample` (`trl/experimental/async_grpo/async_rollout_worker.py`) `input_ids`, `completion_mask`, `old_log_probs`;
`log_completions` leaves `completions/completions_00010.parquet` with `step`, `prompt` and `completion` in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from consistency.errors import InputError
from consistency.extras.serving.check_text.formats.rollout_format import (
    Record,
    RolloutFormat,
    after_prompt,
    as_step,
    log_probabilities,
    marks,
    rollout,
    rows_of,
    sampling_of,
    token_ids,
    unmasked,
)
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.check_text.written import Text

_OF_SAMPLES = (
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "logprobs", "logprob_token_ids", "env_mask",
    "sampling_per_token_logps", "old_per_token_logps", "tool_mask",
)  # fmt: skip
"""Fields that a batch has one of for each sample."""


def _fits(record: Record) -> bool:
    if "completion_logprobs" in record or "trajectory" in record:  # verifiers'
        return False
    return _has_ids(record) or _is_whole_row(record) or _is_in_words(record)


def _has_ids(record: Record) -> bool:
    return "prompt_ids" in record and "completion_ids" in record


def _is_whole_row(record: Record) -> bool:
    return all(key in record for key in ("input_ids", "completion_mask", "old_log_probs"))


def _is_in_words(record: Record) -> bool:
    return "prompt" in record and "completion" in record


def _texts(record: Record) -> Iterator[Text]:
    step = as_step(record.get("step", record.get("model_version")))
    sampling = sampling_of(record)
    if _is_whole_row(record):
        ids = token_ids(record["input_ids"], "input_ids")
        wrote = marks(record["completion_mask"], len(ids), "completion_mask")
        logprobs = log_probabilities(record["old_log_probs"], len(ids), "old_log_probs")
        yield rollout(ids, wrote, logprobs, step=step, sampling=sampling)
        return
    if not _has_ids(record):
        yield _in_words(record, step)
        return
    for sample in rows_of(_with_prompt_of_each(record), _OF_SAMPLES, "completion_ids"):
        yield _of_sample(sample, step, sampling)


def _of_sample(sample: Record, step: str, sampling: Sampling | None) -> Text:
    prompt, _ = _without_padding(sample, "prompt_ids", "prompt_mask")
    ids, mask = _without_padding(sample, "completion_ids", "completion_mask")

    def of_text(key: str) -> Any:
        """Return a field of the completion without padding."""
        values = sample.get(key)
        is_padded = isinstance(values, list) and len(values) == len(mask) != len(ids)
        return unmasked(values, mask) if is_padded else values

    def numbers(key: str) -> list[float] | None:
        return log_probabilities(of_text(key), len(ids), key)

    chosen = _of_chosen(of_text("logprobs"), sample.get("logprob_token_ids"), ids)
    engine = log_probabilities(chosen, len(ids), "logprobs")
    if engine is None:
        engine = numbers("sampling_per_token_logps")
    trainer = numbers("old_per_token_logps")
    if engine is None:
        engine, trainer = trainer, None
    of_model = marks(of_text("tool_mask"), len(ids), "tool_mask")
    of_text_alone = marks(of_text("env_mask"), len(ids), "env_mask")
    wrote = [first and second for first, second in zip(of_model, of_text_alone, strict=True)]
    return rollout(
        [*prompt, *ids],
        [*[False] * len(prompt), *wrote],
        after_prompt(prompt, engine),
        trainer_logprobs=after_prompt(prompt, trainer),
        step=step,
        sampling=sampling,
    )


def _with_prompt_of_each(record: Record) -> Record:
    """Repeat prompts for their samples: vLLM's client gives each prompt once, and n completions of it."""
    prompts, completions = record["prompt_ids"], record["completion_ids"]
    is_batch = isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list)
    if not is_batch or not isinstance(completions, list) or len(completions) % len(prompts):
        return record
    samples = len(completions) // len(prompts)
    repeated = {}
    for key in ("prompt_ids", "prompt_mask"):
        values = record.get(key)
        if isinstance(values, list) and len(values) == len(prompts):
            repeated[key] = [value for value in values for _ in range(samples)]
    return {**record, **repeated}


def _without_padding(sample: Record, key: str, mask_key: str) -> tuple[list[int], list[bool]]:
    """Return ids that are no padding, and the mask of all."""
    values = sample[key]
    if not isinstance(values, list):
        return token_ids(values, key), []
    mask = marks(sample.get(mask_key), len(values), mask_key)
    return token_ids(unmasked(values, mask), key), mask


def _of_chosen(logprobs: Any, ids_of_places: Any, ids: list[int]) -> Any:
    """Return the log probability of each chosen token, of lists of the most likely ones."""
    if not isinstance(logprobs, list) or not any(isinstance(of_place, list) for of_place in logprobs):
        return logprobs
    chosen = []
    for place, of_place in enumerate(logprobs):
        values = of_place if isinstance(of_place, list) else [of_place]
        position = 0
        if isinstance(ids_of_places, list) and place < min(len(ids_of_places), len(ids)):
            of_place_ids = ids_of_places[place]
            if not isinstance(of_place_ids, list) or ids[place] not in of_place_ids:
                got = f"none of id {ids[place]} at place {place + 1}"
                raise InputError("logprobs have not the token that was chosen", got=got)
            position = of_place_ids.index(ids[place])
        elif len(values) != 1:
            raise InputError("logprobs are of several tokens at each place", wanted="logprob_token_ids beside them")
        if position >= len(values):
            raise InputError("logprobs and logprob_token_ids have other lengths", got=f"at place {place + 1}")
        chosen.append(values[position])
    return chosen


_WITHOUT_SPECIAL_TOKENS = "TRL logs completions without their special tokens, which the model may have written"


def _in_words(record: Record, step: str) -> Text:
    completion = record["completion"]
    if not isinstance(record["prompt"], str | list):
        raise InputError("the prompt is neither words nor messages", got=type(record["prompt"]).__name__)
    if isinstance(completion, str):
        return Text(prompt=record["prompt"], text=completion, step=step, doubt=_WITHOUT_SPECIAL_TOKENS)
    messages = completion if isinstance(completion, list) else []
    words = messages[0].get("content") if messages and isinstance(messages[0], dict) else None
    if len(messages) != 1 or not isinstance(words, str) or messages[0].get("tool_calls"):
        raise InputError(
            "the completion is more than words",
            got=f"{len(messages)} messages" if messages else type(completion).__name__,
            wanted="prompt_ids and completion_ids",
        )
    return Text(prompt=record["prompt"], text=words, step=step, doubt=_WITHOUT_SPECIAL_TOKENS)


FORMAT = RolloutFormat(name="TRL", fits=_fits, texts=_texts)
