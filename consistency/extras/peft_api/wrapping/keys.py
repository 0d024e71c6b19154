"""Compare the keys of a model through a wrapper: the same ones, each behind the same prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from consistency.capture.wording import some
from consistency.extras.peft_api.wrapping.report import WrapperFinding
from consistency.extras.peft_api.wrapping.spec import KEYS
from consistency.numerics.identity import Start, start_of

_MOST_NAMED = 4
_TRIED = 8  # keys that determine the prefix: a single one could belong to the wrapper by chance
HINT = "let the wrapper register the model as one submodule, under one name"


def prefix_of(wrapped: Collection[str], plain: Collection[str]) -> str | None:
    """Return the prefix of the plain model's keys in the wrapper; None where no key is found.

    Of several prefixes the one with the most keys is returned, and of those the shortest.
    """
    counts: Counter[str] = Counter()
    # the longest keys are the least likely to be a wrapper's own
    for key in sorted(plain, key=len, reverse=True)[:_TRIED]:
        for name in wrapped:
            if name == key or name.endswith(f".{key}"):  # a prefix ends with a dot, or is empty
                counts[name.removesuffix(key)] += 1
    return min(counts, key=lambda prefix: (-counts[prefix], len(prefix)), default=None)


def other_keys(wrapped: Mapping[str, Any], plain: Collection[str], prefix: str | None) -> Iterator[WrapperFinding]:
    """Yield findings of keys that are missing through the wrapper, and of keys that are there twice."""
    names = set(wrapped)
    missing = [key for key in plain if prefix is None or prefix + key not in names]
    if missing:
        sentence = f"{len(missing)} of {len(plain)} keys of the model are not in the wrapper's state dict"
        got = "none" if len(missing) == len(plain) else f"{len(plain) - len(missing)} keys"
        yield _finding(sentence, missing, got=got, wanted=f"{len(plain)} keys behind one prefix")
    if prefix is None:
        return
    expected = {prefix + key for key in plain}
    starts = {_start(wrapped[name]) for name in expected & names} - {None}
    doubled = [name for name in wrapped if name not in expected and _start(wrapped[name]) in starts]
    if doubled:
        sentence = f"{len(doubled)} keys of the model are in the wrapper's state dict a second time"
        wanted = f"{len(plain)} keys behind {prefix or 'no prefix'}"
        yield _finding(sentence, doubled, got=f"{len(plain) + len(doubled)} keys", wanted=wanted)


def _finding(sentence: str, names: list[str], *, got: str, wanted: str) -> WrapperFinding:
    return WrapperFinding(
        check="keys", kind=KEYS, what=sentence, where=some(names, _MOST_NAMED), got=got, wanted=wanted, hint=HINT
    )


def _start(value: Any) -> Start | None:
    """Return where a tensor begins in memory; None for a tensor without memory and for other values."""
    has_memory = isinstance(value, torch.Tensor) and value.numel() > 0 and not value.is_meta
    return start_of(value) if has_memory else None
