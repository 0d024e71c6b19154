"""What slime writes of rollouts: files of `torch.save`, or `Sample.to_dict()` of each sample as JSON lines.

Fields as in `slime/utils/types.py` (`Sample`) and `slime/observability/` of THUDM/slime 0.3.1.
`--save-debug-rollout-data` leaves `{"rollout_id", "samples"}`, samples with `tokens`, `response_length`, `loss_mask`,
`rollout_log_probs` and `weight_versions`; `--save-debug-train-data` the same with `response_lengths`, `loss_masks`, and
`log_probs` of the trainer.
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
    token_ids,
)
from consistency.extras.serving.check_text.written import Text

_LENGTHS = ("response_length", "response_lengths")


def _fits(record: Record) -> bool:
    return _is_sample(record) or (isinstance(record.get("samples"), list) and "rollout_id" in record)


def _is_sample(record: Record) -> bool:
    return "tokens" in record and any(key in record for key in _LENGTHS)


def _texts(record: Record) -> Iterator[Text]:
    samples = [record] if _is_sample(record) else record["samples"]
    for sample in samples:
        if not isinstance(sample, dict) or not _is_sample(sample):
            raise InputError("a sample has no tokens and response_length")
        yield _of_sample(sample)


def _of_sample(sample: Record) -> Text:
    tokens = token_ids(sample["tokens"], "tokens")
    length = _first(sample, _LENGTHS)
    if not isinstance(length, int) or not 0 <= length <= len(tokens):
        raise InputError("response_length is no number of tokens", got=length, wanted=f"0 to {len(tokens)}")
    prompt, response = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    wrote = marks(_first(sample, ("loss_mask", "loss_masks")), length, "loss_mask")
    logprobs = log_probabilities(sample.get("rollout_log_probs"), length, "rollout_log_probs")
    trainer = log_probabilities(sample.get("log_probs"), length, "log_probs")
    if logprobs is None:
        logprobs, trainer = trainer, None
    return rollout(
        [*prompt, *response],
        [*[False] * len(prompt), *wrote],
        after_prompt(prompt, logprobs),
        trainer_logprobs=after_prompt(prompt, trainer),
        step=as_step(sample.get("weight_versions")),
    )


def _first(sample: Record, keys: tuple[str, ...]) -> Any:
    """Return the first of these fields that is there and is not None."""
    for key in keys:
        if sample.get(key) is not None:
            return sample[key]
    return None


FORMAT = RolloutFormat(name="slime", fits=_fits, texts=_texts)
