"""Flaws of a saved adapter that every device shows, and their sentences. No torch here.

A run has these as findings about the stage `adapter`, and a check of a merged folder beside what the folder holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from consistency.capture.explanation import Explanation

REMARKS = "adapter_remarks"
"""Key in the evidence of a row: the flaws of the adapter, each as a table that `remarks_in` reads."""


class AdapterFlaw(Explanation):
    """A flaw that makes an adapter another one than its user believes; its phrase is only the text of the remark."""

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
        """Return `error` for an adapter that is another one on each load: it gives the same numbers nowhere."""
        return "error" if self.is_error or self.flaw is AdapterFlaw.DRAWN_ON_LOADING else "warning"

    @property
    def next(self) -> str:
        """Return what to do."""
        return self.todo or self.flaw.todo

    def as_table(self) -> dict[str, str]:
        """Return the remark as a table, for the evidence of a row."""
        table = {"flaw": str(self.flaw), "text": self.text}
        return {**table, "todo": self.todo} if self.todo else table


def remarks_in(evidence: Mapping[str, Any]) -> Sequence[AdapterRemark]:
    """Return the remarks in a row's evidence; flaws of a later version, which are not known here, are left out."""
    flaws = {str(flaw): flaw for flaw in AdapterFlaw}
    remarks = []
    for table in evidence.get(REMARKS) or ():
        # the capture may be a stranger's
        if isinstance(table, dict) and table.get("flaw") in flaws:
            flaw, text, todo = flaws[table["flaw"]], str(table.get("text")), str(table.get("todo", ""))
            remarks.append(AdapterRemark(flaw=flaw, text=text, todo=todo))
    return remarks
