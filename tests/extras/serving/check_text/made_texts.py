"""Texts that a small model writes, drawn or greedily, with log probabilities as an engine gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import peft
import torch
import transformers

from consistency.case.case import Case
from consistency.extras.serving.check_text.texts import Text
from tests.versions import CACHE

LORA = peft.LoraConfig(r=8, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])
PROMPTS = [[5, 9, 33, 2], [7, 7, 60], [1, 2, 3, 4, 5, 6], [40, 41, 3], [8, 30, 12, 9, 21], [50, 2, 4, 6]]


def loaded(case: Case) -> Any:
    """Return the model with its adapter, as `from_pretrained` makes it."""
    base = transformers.AutoConfig.from_pretrained(case.base)
    model = getattr(transformers, base.architectures[0]).from_pretrained(case.base, dtype=getattr(torch, case.dtype))
    return peft.PeftModel.from_pretrained(model, case.adapter).eval()


def texts_of(
    model: Any,
    prompts: Sequence[list[int]] = PROMPTS,
    *,
    tokens: int = 16,
    drawn: bool = False,
    with_logprobs: bool = True,
    given: Callable[[list[int]], list[int]] = list,
    change: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext(),
    also: Callable[[int, int], dict[str, torch.Tensor]] = lambda _place, _length: {},
    seed: int = 3,
) -> list[Text]:
    """Return texts that a model writes token by token.

    Parameters
    ----------
    drawn : bool
        Tokens are drawn, and not the most likely ones.
    given : callable
        The prompt that the model is given, in place of the one that the text names.
    change : callable
        A change of the model while it computes a token, by the token's place.
    also : callable
        What the model is passed besides, by the token's place and how many tokens there are before it.
    """
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for prompt in prompts:
        ids, logprobs = list[int](), list[float]()
        new, cache = given(prompt), None
        length = len(new)
        for place in range(tokens):
            with torch.no_grad(), change(place):
                output = model(torch.tensor([new]), use_cache=True, **{CACHE: cache}, **also(place, length + place))
            logits, cache = output.logits[0, -1].double(), output[CACHE]
            own = logits.log_softmax(-1)
            logits[model.config.eos_token_id] = -torch.inf
            if drawn:
                ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
            else:
                ids.append(int(logits.argmax()))
            logprobs.append(float(own[ids[-1]]))
            new = ids[-1:]
        texts.append(Text(prompt=prompt, text=ids, logprobs=logprobs if with_logprobs else None))
    return texts
