"""The words of a diagnosis, each with the phrase that puts it into a sentence. No torch here.

A new word is one member of `Word`: records, rows and findings carry it, and every report shows its phrase.
"""

from __future__ import annotations

import enum


class Word(enum.StrEnum):
    """What a difference looks like.

    A capture may come from another version, or from a stranger. A word that has no member here is kept as it is and is
    its own phrase, so the capture stays readable and the report shows the word.

    Attributes
    ----------
    phrase : str
        Names the difference; `{}` stands for the tensors, which otherwise follow as "*phrase* in *tensors*".
    computed : str
        The same for tensors that were computed rather than moved.
    copies : str
        What copies between devices do that leave this behind: "copies npu:0→npu:1 *deliver zeros*".
    """

    def __new__(cls, value: str, *_phrases: str) -> Word:
        member = str.__new__(cls, value)
        member._value_ = value
        return member

    def __init__(self, value: str, phrase: str = "", computed: str = "", copies: str = "") -> None:
        self.phrase = phrase or value
        self.computed = computed or self.phrase
        self.copies = copies or f"deliver wrong bytes ({value})"

    @classmethod
    def _missing_(cls, value: object) -> Word | None:
        if not isinstance(value, str):
            return None
        foreign = str.__new__(cls, value)
        foreign._name_ = foreign._value_ = value
        cls.__init__(foreign, value)
        return foreign

    def about(self, tensors: str, *, computed: bool = False) -> str:
        """Return the phrase with the tensors that it is about: `zeros instead of a result in 3 of 4 weight tensors`."""
        text = self.computed if computed else self.phrase
        return text.replace("{}", tensors) if "{}" in text else f"{text} in {tensors}"

    # values
    ZEROS = "zeros", "zeros where the file is nonzero", "zeros instead of a result", "deliver zeros"
    BIT_FLIP = "bit-flip", "single-bit flips", "single-bit flips after the computation", "flip single bits"
    SWAPPED = "swapped", "the bytes of another tensor", "", "deliver the bytes of another copy in progress"
    PERMUTED = "permuted", "the right elements in a different order"
    BLOCK = (
        "block", "one contiguous range of wrong bytes", "one contiguous range of values that exceed tolerance",
        "lose one contiguous range",
    )  # fmt: skip
    ROUNDED_TO_BF16 = (
        "rounded-to-bf16", "the file's values rounded through bfloat16", "a result rounded through bfloat16"
    )  # fmt: skip
    ROUNDED_TO_FP16 = (
        "rounded-to-fp16", "the file's values rounded through float16", "a result rounded through float16"
    )  # fmt: skip
    ROUNDED_TO_TF32 = "rounded-to-tf32", "the file's values rounded through TF32", "a result rounded through TF32"
    RECOMPUTED = "recomputed", "values recomputed on the device while the adapter was loaded"
    NEVER_WRITTEN = (
        "never-written", "destinations never written", "", "deliver nothing: the destination is never written"
    )  # fmt: skip
    FRESH_INIT = "fresh-init", "values still at initialization"
    STALE = "stale", "stale bytes that were already in memory", "", "deliver the bytes of an earlier copy"
    WRONG_SCALE = "wrong-scale", "values off by one constant factor"
    SIGNED_ZERO = "signed-zero", "zeros of the opposite sign"
    NON_FINITE = (
        "non-finite", "NaN or infinity where the reference is finite", "NaN or infinity where the exact value is finite"
    )  # fmt: skip
    ACCUMULATION_ORDER = "accumulation-order", "a different order of accumulation"
    TF32_PRODUCTS = "tf32-products", "errors that exceed float32 tolerance but not that of TF32 products"
    DECISION_FLIPPED = "decision-flipped", "decisions that rounding does not explain"
    DIFFERS = "differs", "bitwise differences", "errors that exceed tolerance", "deliver wrong bytes"

    # structure
    MISSING = "missing", "{} missing", "", "fail"
    UNEXPECTED = "unexpected", "{} without a counterpart"
    SHAPE = "shape", "a different shape"
    DTYPE = "dtype", "a different dtype"
    INACTIVE = "inactive", "the adapter inactive"
    SETTINGS = "settings", "a different rank or scaling"

    # several adapters in one model
    LEFT_BEHIND = "left-behind", "tensors of a deleted adapter left in the model"
    OTHERS_INTERFERE = "others-interfere", "results that change with what else was loaded, set or deleted"
    DRIFT = "drift", "weights that merging and unmerging moves further than rounding can"
    WRONG_DENSITY = "wrong-density", "another share of elements kept than chance explains"
    BYTES_CHANGED = "bytes-changed", "bytes that a step changed which should leave them alone"

    # memory
    TOUCHED = "touched", "unexpected device use"
    WRONG_DEVICE = "wrong-device", "adapter tensors on a different device than their model"
    THIRD_COPY = "third-copy", "a new weight allocated beside the old one and the delta"

    # inputs, and a model on several devices
    IDS_PAST_VOCABULARY = "ids-past-vocabulary", "ids past the vocabulary"
    LABELS_PAST_VOCABULARY = "labels-past-vocabulary", "labels past the vocabulary"
    IDS_CHANGED = "ids-changed", "ids changed during transfer to a device"
    LABELS_CHANGED = "labels-changed", "labels changed during transfer to a device"
    CHANGED_ON_THE_WAY = "changed-on-the-way", "values changed during transfer to a device"
    OTHER_ANSWER = "other-answer", "a different result than on one device"
    OTHER_TOKEN = "other-token", "a token that rounding does not explain"
    WRONG_ALONE = "wrong-alone", "a wrong result for one sequence at a time, and a right one for all together"
    WRONG_WITH_CACHE = "wrong-with-cache", "a wrong result with a cache, and a right one without"
    WRONG_WITH_PADDING = "wrong-with-padding", "a wrong result with padding, and a right one without"
    BATCH_CHANGES_MODEL = "batch-changes-the-model", "in float64 too another result for one sequence at a time"
    CACHE_CHANGES_MODEL = "cache-changes-the-model", "in float64 too another result with a cache"
    PADDING_CHANGES_MODEL = "padding-changes-the-model", "in float64 too another result with padding"
    DOES_NOT_RUN = "does-not-run", "a model that does not run"

    # a model that several devices train or hold together
    UNSYNCHRONIZED = (
        "unsynchronized", "an adapter that each rank trains alone", "the rank's own gradient in place of the average"
    )  # fmt: skip

    # a user's wrapper around the model
    LAYERS_MISSED = "layers-missed", "adapter layers that PEFT does not find through the wrapper"
    HIDDEN = "hidden", "attributes hidden by the wrapper"
    KEYS = "keys", "different keys through the wrapper"
    HELD_TWICE = "held-twice", "storages held twice"
    MORE_MEMORY = "more-memory", "more memory in a training step than without the wrapper"
