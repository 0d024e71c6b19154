"""The formats, found by their files, and the texts of a record by the one that fits it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

import msgspec

from consistency.errors import InputError
from consistency.extras.serving.check_text import formats
from consistency.extras.serving.check_text.formats.rollout_format import Record, RolloutFormat
from consistency.extras.serving.check_text.written import Text

_FORM = (
    '{"prompt": "…", "text": "…", "logprobs": […]}, prompt and text as token ids where known, or a record of '
    "{tools} (docs/rollout-formats.md)"
)


@functools.cache
def all_formats() -> tuple[RolloutFormat, ...]:
    """Return the format of each file of this folder that has one, by the names of the files."""
    modules = (
        importlib.import_module(f"{formats.__name__}.{module.name}")
        for module in pkgutil.iter_modules(formats.__path__)
    )
    return tuple(module.FORMAT for module in modules if hasattr(module, "FORMAT"))


def texts_of(record: Any, place: str) -> list[Text]:
    """Return the texts of a record, each named by the place of the record, and by its sample where it has several.

    Raises
    ------
    InputError
        No format fits it, or more than one do, or a field of it is not as it should be.
    """
    records = record if isinstance(record, list) else [record]
    samples: list[Text] = []
    is_of_user = False
    for one in records:
        body = _unwrapped(one, place)
        format_of_record = _format_of(body, place)
        is_of_user = is_of_user or format_of_record.keeps_empty
        samples += _samples_of(body, format_of_record, place, len(samples))
    names = [f"{place}, sample {number}" for number in range(1, len(samples) + 1)]
    if len(samples) == 1:
        names = [place]
    named = [msgspec.structs.replace(text, name=name) for text, name in zip(samples, names, strict=True)]
    # a rollout that was given up has no token; a user's own line without one is refused where it becomes token ids
    return [text for text in named if text.text or is_of_user]


def _samples_of(record: Record, format_of_record: RolloutFormat, place: str, count: int) -> list[Text]:
    """Return all texts of a record; `count` samples stand before them at the same place."""
    texts: list[Text] = []
    try:
        texts.extend(format_of_record.texts(record))  # keeps those before an error, which says how many they are
    except InputError as error:
        error.what = f"{place}, sample {count + len(texts) + 1}: {error.what} ({format_of_record.name})"
        raise
    return texts


def _unwrapped(record: Any, place: str) -> Record:
    """Return what an engine answered where a record holds it beside its request, as files of OpenAI's batches do."""
    if not isinstance(record, dict):
        raise InputError(f"{place} is no text", got=type(record).__name__, wanted="a JSON object")
    response = record.get("response")
    if not isinstance(response, dict):
        return record
    body = response.get("body", response)
    if not isinstance(body, dict):
        raise InputError(f"{place} is no text", got="a response without an object in its body")
    request = record.get("request", {})
    return {**body, "request": request.get("body", request)} if isinstance(request, dict) and request else body


def _format_of(record: Record, place: str) -> RolloutFormat:
    fitting = [one for one in all_formats() if one.fits(record)]
    if len(fitting) == 1:
        return fitting[0]
    tools = ", ".join(one.name for one in all_formats() if not one.keeps_empty)
    if fitting:
        names = " and of ".join(one.name for one in fitting)
        raise InputError(f"{place} has fields of {names}", got=", ".join(map(str, record)), wanted="those of one tool")
    raise InputError(
        f"{place} is no text",
        got=f"fields {', '.join(map(str, record)) or '(none)'}",
        wanted=_FORM.replace("{tools}", tools),
    )
