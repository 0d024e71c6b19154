"""What merging an adapter does to a model's outputs, as one worker measured it. No torch here."""

from __future__ import annotations

import msgspec

from consistency.numerics.real import Real


class MergeEffect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The model merged against the model with its adapter beside it.

    `W` is a layer's weight and `dW` what the method adds to it. Every figure of logits is a largest absolute
    difference, in their own unit; None where it was not measured.

    Attributes
    ----------
    dtype : str
        Of the merged weights.
    output : str
        Name of the output that was compared: `logits`, or that of a model without them.
    reason : str
        Why the model cannot be merged.
    computed : float or None
        Merged against unmerged, both computed in the dtype.
    unmerged_error, merged_error : float or None
        Of either, against the unmerged model in float64.
    positions : int or None
        That have a largest logit.
    top1_changed : int or None
        Positions in which that is another one once merged, both computed in the dtype.
    top1_unmerged : int or None
        The same, the unmerged model in the dtype against float64.
    adapter : float or None
        The adapter on against off, in float64.
    moved : float or None
        The weights that PEFT merges in the dtype against the unmerged model, both run in float64.
    must : float or None
        What rounding alone does: dW added in float64 and rounded once, against the same without the rounding.
    exact : float or None
        The weights that PEFT merges in float64 against the unmerged model: zero but for float64's own rounding where a
        merged model is the same function.
    float32 : float or None
        The same, merged and kept in float32; None where that is the dtype.
    left_out : str
        Why the figures in float64 were not measured.
    shared : tuple of str
        Each weight that a merge changes for another layer too, by all its names: `model.embed_tokens.weight and
        lm_head.weight`.
    """

    dtype: str
    output: str = "logits"
    reason: str = ""
    computed: Real | None = None
    unmerged_error: Real | None = None
    merged_error: Real | None = None
    positions: int | None = None
    top1_changed: int | None = None
    top1_unmerged: int | None = None
    adapter: Real | None = None
    moved: Real | None = None
    must: Real | None = None
    exact: Real | None = None
    float32: Real | None = None
    left_out: str = ""
    shared: tuple[str, ...] = ()
