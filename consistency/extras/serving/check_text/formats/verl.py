"""What verl has of rollouts, as lists (`tensor.tolist()`), one sample or a batch.

Fields as in verl 0.9.1: a `DataProto` of a rollout has `prompts` (padded left), `responses` (padded right),
`attention_mask` of both, `response_mask`, `rollout_log_probs` of the engine and `old_log_probs` of the trainer; an
`AgentLoopOutput` (`verl/experimental/agent_loop/agent_loop.py`) `prompt_ids`, `response_ids`, `response_mask` and
`response_logprobs`. `trainer.rollout_data_dir` writes `input` and `output` in words (`_dump_generations` in
`verl/trainer/ppo/ray_trainer.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

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
)
from consistency.extras.serving.check_text.written import Text

_OF_SAMPLES = ("prompts", "responses", "attention_mask", "response_mask", "rollout_log_probs", "old_log_probs")
"""Fields that a batch has one of for each sample."""

_WITHOUT_SPECIAL_TOKENS = "verl writes prompts and answers without their special tokens, which the model saw"


def _fits(record: Record) -> bool:
    return _is_in_words(record) or _is_of_agent(record) or _is_of_tensors(record)


def _is_in_words(record: Record) -> bool:
    return isinstance(record.get("input"), str) and isinstance(record.get("output"), str)


def _is_of_agent(record: Record) -> bool:
    return "prompt_ids" in record and "response_ids" in record


def _is_of_tensors(record: Record) -> bool:
    return "prompts" in record and "responses" in record


def _texts(record: Record) -> Iterator[Text]:
    if _is_of_tensors(record):
        is_batch = isinstance(record["prompts"], list) and any(isinstance(prompt, list) for prompt in record["prompts"])
        if is_batch and record.get("attention_mask") is None:
            raise InputError(
                "a batch does not say what is padding", wanted="attention_mask beside prompts and responses"
            )
        for sample in rows_of(record, _OF_SAMPLES, "responses"):
            yield _of_tensors(sample)
    elif _is_of_agent(record):
        yield _of_agent(record)
    else:
        yield Text(
            prompt=record["input"],
            text=record["output"],
            prompt_is_rendered=True,
            step=_step(record),
            doubt=_WITHOUT_SPECIAL_TOKENS,
        )


def _of_tensors(sample: Record) -> Text:
    prompts, responses = sample["prompts"], sample["responses"]
    # lists before anything is counted
    count = len(prompts) + len(responses) if isinstance(prompts, list) and isinstance(responses, list) else 0
    ids = [*token_ids(prompts, "prompts"), *token_ids(responses, "responses")]
    is_kept = marks(sample.get("attention_mask"), count, "attention_mask")
    response_mask = marks(sample.get("response_mask"), len(responses), "response_mask")
    wrote = [*[False] * len(prompts), *response_mask]
    engine, trainer = (
        after_prompt(prompts, log_probabilities(sample.get(key), len(responses), key))
        for key in ("rollout_log_probs", "old_log_probs")
    )
    if engine is None:
        engine, trainer = trainer, None
    kept = [place for place in range(count) if is_kept[place]]
    return rollout(
        [ids[place] for place in kept],
        [wrote[place] for place in kept],
        None if engine is None else [engine[place] for place in kept],
        trainer_logprobs=None if trainer is None else [trainer[place] for place in kept],
        step=_step(sample),
        sampling=sampling_of(sample.get("meta_info")),
    )


def _of_agent(record: Record) -> Text:
    prompt = token_ids(record["prompt_ids"], "prompt_ids")
    ids = token_ids(record["response_ids"], "response_ids")
    wrote = marks(record.get("response_mask"), len(ids), "response_mask")
    logprobs = log_probabilities(record.get("response_logprobs"), len(ids), "response_logprobs")
    return rollout(
        [*prompt, *ids], [*[False] * len(prompt), *wrote], after_prompt(prompt, logprobs), step=_step(record)
    )


def _step(record: Record) -> str:
    """Return the step of a record: where a rollout began and ended with other weights, both."""
    for source in (record, record.get("extra_fields"), record.get("meta_info")):
        if not isinstance(source, dict):
            continue
        if "min_global_steps" in source:
            return as_step([source["min_global_steps"], source.get("max_global_steps")])
        for key in ("step", "global_steps"):
            if key in source:
                return as_step(source[key])
    return ""


FORMAT = RolloutFormat(name="verl", fits=_fits, texts=_texts)
