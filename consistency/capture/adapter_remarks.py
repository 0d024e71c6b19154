"""The flaws of a saved adapter that every device shows, and the sentences that say them. No torch here.

A run has these as findings about the stage `adapter`, and a check of a merged folder beside what the folder holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from consistency.capture.explanation import Explanation

REMARKS = "adapter_remarks"
"""Evidence of a row: what is wrong with the adapter, each as a table that `remarks_in` reads."""


class AdapterFlaw(Explanation):
    """Something that makes an adapter another one than its user believes; its phrase is all of the sentence."""

    UNTRAINED_LAYERS = (
        "untrained-layers",
        "{}",
        "look in the training for why no gradient reached these layers: with gradient checkpointing, call "
        "model.enable_input_require_grads()",
    )
    ONE_SHARD = (
        "one-shard",
        "{}",
        "gather the weights of all processes before saving: under FSDP, ZeRO-3 or tensor parallel each has its part "
        "alone",
    )
    DRAWN_ON_LOADING = (
        "drawn-on-loading",
        "{}",
        "convert it where it was trained, before it is saved: PEFT's save_pretrained() does that with "
        "path_initial_model_for_weight_conversion; of a method that has no conversion, save the merged model",
    )
    CONFIG_MISMATCH = (
        "config-mismatch",
        "{}",
        "make adapter_config.json and the file say the same: PEFT makes the layers that the one names, and fills them "
        "from the other",
    )
    COMPUTED_ON_LOADING = (
        "computed-on-loading",
        "{}",
        "convert it where it was trained: PEFT's save_pretrained() does that with "
        "path_initial_model_for_weight_conversion",
    )
    OTHER_TRAINING = (
        "other-training",
        "{}",
        "check that the training was resumed from this checkpoint: its factors are not in the new one",
    )
    ODD_MAGNITUDE = (
        "odd-magnitude",
        "{}",
        "compare with an earlier checkpoint: a step may have diverged in this layer, or its factors were scaled twice",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRemark:
    """A flaw of one adapter.

    Attributes
    ----------
    text : str
        One sentence about this adapter.
    todo : str
        What to do, where it is not what its flaw says.
    is_error : bool
        Whether the adapter loads as another one than was trained, or not at all.
    """

    flaw: AdapterFlaw
    text: str
    todo: str = ""
    is_error: bool = False

    @property
    def severity(self) -> Literal["error", "warning"]:
        """Return how grave it is: an adapter that is another one on each load is the same numbers nowhere."""
        return "error" if self.is_error or self.flaw is AdapterFlaw.DRAWN_ON_LOADING else "warning"

    @property
    def next(self) -> str:
        """Return what to do."""
        return self.todo or self.flaw.todo

    def as_table(self) -> dict[str, str]:
        """Return it as evidence has it."""
        table = {"flaw": str(self.flaw), "text": self.text}
        return {**table, "todo": self.todo} if self.todo else table


def remarks_in(evidence: Mapping[str, Any]) -> Sequence[AdapterRemark]:
    """Return the remarks in a row's evidence; those of a later version, which are not known here, are left out."""
    known = {str(flaw): flaw for flaw in AdapterFlaw}
    tables = [table for table in evidence.get(REMARKS) or () if isinstance(table, dict)]
    return [
        AdapterRemark(flaw=known[table["flaw"]], text=str(table.get("text")), todo=str(table.get("todo", "")))
        for table in tables
        if table.get("flaw") in known
    ]
