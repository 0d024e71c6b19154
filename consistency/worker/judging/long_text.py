"""The long text of a case: its tokens, the blocks that compute it, and the rows that are compared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from consistency.capture.names import LONG
from consistency.worker.context import Context
from consistency.worker.model.inputs import long_input
from consistency.worker.model.running import Activations
from consistency.worker.model.sampled_rows import chosen_blocks, rows_to_judge, windows_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LongText:
    """A long text, the blocks that compute it, and the tokens whose rows are compared.

    Attributes
    ----------
    inputs : dict of str to torch.Tensor
        Ids and mask of one sequence, on the CPU.
    rows : torch.Tensor
        `(sampled,)`: the tokens whose rows are compared, ascending.
    blocks : list of str
        Names of the blocks that stand for all.
    """

    inputs: Activations
    rows: torch.Tensor
    blocks: list[str]

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].shape[1]


def long_mode(mode: str) -> str:
    """Return the name of the long text in a mode, as rows and the reference have it."""
    return f"{mode}.{LONG}"


def long_text(context: Context) -> tuple[LongText | None, str]:
    """Return the long text of a case; None and why there is none. Without a reason none is asked for."""
    model = context.model
    inputs, reason = long_input(context.job.case, context.base.model)
    if inputs is None:
        return None, reason
    configs = getattr(model, "peft_config", {}).values()
    if any(config.is_prompt_learning for config in configs):
        return None, "the adapter puts tokens or keys of its own before the text"
    if any(getattr(config, "alora_invocation_tokens", None) for config in configs):
        return None, "the adapter acts from a place in the text on, which a sample of its rows does not have"
    blocks = chosen_blocks(model)
    if not blocks:
        return None, "the model has no list of blocks"
    tokens = inputs["input_ids"].shape[1]
    return LongText(inputs=inputs, rows=rows_to_judge(tokens, windows_of(model)), blocks=blocks), ""
