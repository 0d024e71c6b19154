"""What prime-rl and its environments (verifiers) write.

* `trainer.enable_token_export` leaves `token_exports/step_12/rank_0.jsonl` (`src/prime_rl/trainer/rl/token_export.py`
  of PrimeIntellect-ai/prime-rl 0.8.1): `token_ids`, `loss_mask`, `inference_logprobs` and `trainer_logprobs`, one for
  each token.
* The file monitor leaves `rollouts/step_12/train/all/traces.jsonl`: an episode of verifiers 0.4 in each line
  (`verifiers/v1/episode.py`, `trace.py`, `graph.py`). Nodes of a trace are messages with their tokens; each way from
  the first message to a last one is a conversation. Log probabilities have four digits behind the point there.
* Before verifiers' v1 (`verifiers/types.py`): steps of a `trajectory`, each with `tokens`.
"""

from __future__ import annotations

import math
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
    sampling_of,
    token_ids,
)
from consistency.extras.serving.check_text.written import Text

_ROUNDING_OF_TRACES = 0.5e-4
"""Half of the last digit, of `RECORD_FLOAT_DECIMALS = 4` in `verifiers/v1/graph.py`."""


def _fits(record: Record) -> bool:
    is_trace = any(isinstance(record.get(key), list) for key in ("traces", "nodes", "trajectory"))
    return is_trace or _is_export(record) or _is_step(record)


def _is_export(record: Record) -> bool:
    return "token_ids" in record and ("loss_mask" in record or "mask" in record) and "message" not in record


def _is_step(record: Record) -> bool:
    return all(key in record for key in ("prompt_ids", "completion_ids", "completion_logprobs"))


def _texts(record: Record) -> Iterator[Text]:
    if _is_export(record):
        yield _of_export(record)
    elif _is_step(record):
        yield _of_step(record)
    elif isinstance(record.get("trajectory"), list):
        for step in record["trajectory"]:
            tokens = step.get("tokens") if isinstance(step, dict) else None
            if not isinstance(tokens, dict) or not _is_step(tokens):
                raise InputError("a step of the trajectory has no tokens", wanted="prompt_ids, completion_ids, …")
            yield _of_step(tokens)
    else:
        step = _policy(record)
        for trace in record.get("traces", [record]):
            yield from _of_trace(trace, step)


def _of_export(record: Record) -> Text:
    ids = token_ids(record["token_ids"], "token_ids")
    mask_key = "loss_mask" if "loss_mask" in record else "mask"
    wrote = marks(record[mask_key], len(ids), mask_key)
    engine_key = "inference_logprobs" if "inference_logprobs" in record else "logprobs"
    return rollout(
        ids,
        wrote,
        log_probabilities(record.get(engine_key), len(ids), engine_key),
        trainer_logprobs=log_probabilities(record.get("trainer_logprobs"), len(ids), "trainer_logprobs"),
        step=as_step(record.get("step")),
        sampling=_sampling(record.get("temperatures"), wrote),
    )


def _sampling(temperatures: Any, wrote: list[bool]) -> Any:
    """Return how a sample was drawn, where all tokens of the model have one temperature."""
    if not isinstance(temperatures, list) or len(temperatures) != len(wrote):
        return None
    of_model = {value for value, is_of_model in zip(temperatures, wrote, strict=True) if is_of_model}
    return sampling_of({"temperature": of_model.pop()}) if len(of_model) == 1 else None


def _of_step(tokens: Record) -> Text:
    prompt = token_ids(tokens["prompt_ids"], "prompt_ids")
    ids = token_ids(tokens["completion_ids"], "completion_ids")
    wrote = marks(tokens.get("completion_mask"), len(ids), "completion_mask")
    logprobs = log_probabilities(tokens["completion_logprobs"], len(ids), "completion_logprobs")
    return rollout([*prompt, *ids], [*[False] * len(prompt), *wrote], after_prompt(prompt, logprobs))


def _policy(episode: Record) -> str:
    """Return the versions of the weights between which an episode ran: `run.work.policy`."""
    span: Any = episode
    for key in ("run", "work", "policy"):
        span = span.get(key) if isinstance(span, dict) else None
    return as_step([span.get("start"), span.get("end")]) if isinstance(span, dict) else ""


def _of_trace(trace: Any, step: str) -> Iterator[Text]:
    """Yield each conversation of a trace; what several share is judged in the first of them."""
    nodes = trace.get("nodes") if isinstance(trace, dict) else None
    if not isinstance(nodes, list) or any(not isinstance(node, dict) for node in nodes):
        raise InputError("a trace has no nodes", wanted="a list of JSON objects")
    judged_nodes: set[int] = set()
    for way in _ways(nodes):
        ids, wrote = [], []
        columns: dict[str, list[float]] = {"logprobs": [], "trainer_logprobs": []}
        for place in way:
            node = nodes[place]
            of_node = token_ids(node.get("token_ids"), "token_ids of a node")
            mask = marks(node.get("mask", [0] * len(of_node)), len(of_node), "mask of a node")
            for key, column in columns.items():
                column += _spread(node.get(key), mask, key)
            ids += of_node
            wrote += mask if place not in judged_nodes else [False] * len(mask)
        judged_nodes.update(way)
        engine, trainer = columns.values()
        yield rollout(
            ids,
            wrote,
            engine if _has_number(engine) else None,
            trainer_logprobs=trainer if _has_number(trainer) else None,
            step=step,
            logprob_rounding=_ROUNDING_OF_TRACES,
        )


def _ways(nodes: list[Record]) -> Iterator[list[int]]:
    """Yield the places of the nodes from a first one to each that no other follows."""
    parents = [node.get("parent") for node in nodes]
    for last in range(len(nodes)):
        if last in parents:
            continue
        way: list[int] = []
        place: int | None = last
        while place is not None:
            # nodes are written after what they follow: else a way would have no end
            if not isinstance(place, int) or not 0 <= place < (way[-1] if way else len(nodes)):
                raise InputError("a node follows none that stands before it", got=f"parent {place}")
            way.append(place)
            place = parents[place]
        yield way[::-1]


def _spread(values: Any, mask: list[bool], key: str) -> list[float]:
    """Return values of the marked tokens as of all, NaN of the others."""
    count = sum(mask)
    marked = iter(log_probabilities(values or None, count, f"{key} of a node") or [math.nan] * count)
    return [next(marked) if is_marked else math.nan for is_marked in mask]


def _has_number(values: list[float]) -> bool:
    return not all(math.isnan(value) for value in values)


FORMAT = RolloutFormat(name="prime-rl", fits=_fits, texts=_texts)
