"""The simplest record: prompt and text, by any hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from consistency.errors import InputError, first_line
from consistency.extras.serving.check_text.formats.rollout_format import Record, RolloutFormat, token_ids
from consistency.extras.serving.check_text.written import Text

_OF_TOOLS = ("choices", "meta_info", "outputs", "content", "done")
"""Fields of engines, whose records may have a prompt or a text too."""


def _fits(record: Record) -> bool:
    return "prompt" in record and "text" in record and not any(key in record for key in _OF_TOOLS)


def _texts(record: Record) -> Iterator[Text]:
    fields = dict(record)
    for key in ("logprobs", "trainer_logprobs"):
        if isinstance(record.get(key), list):
            fields[key] = [math.nan if value is None else value for value in record[key]]
    for key in ("prompt", "text"):
        if isinstance(record[key], list) and any(isinstance(token, int) for token in record[key]):
            fields[key] = token_ids(record[key], key)
    fields.pop("pieces", None)  # bytes, which JSON has none of
    try:
        yield msgspec.convert(fields, Text)
    except msgspec.ValidationError as error:
        raise InputError("a field is not as it should be", got=first_line(error)) from error


FORMAT = RolloutFormat(name="prompt and text", fits=_fits, texts=_texts, keeps_empty=True)
