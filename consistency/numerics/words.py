"""The words of a diagnosis, each with the phrase that puts it into a sentence. No torch here.

Records, rows and findings carry a word, and every report shows its phrase. A stage declares its own in its `spec`, as
does a plug-in. A capture may come from another version, or from a stranger: a word that nobody here declares is kept as
it is, and is its own phrase.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

Word = NewType("Word", str)
"""The name of a kind of difference (`stale-values`); `registered` checks that a text is one."""


class _Phrases(NamedTuple):
    """How reports put a word into sentences; the fields are the parameters of `declare`."""

    phrase: str
    computed: str
    copies: str
    of_device: Word | None


_DECLARED: dict[str, _Phrases] = {}


def declare(
    name: str, *, phrase: str = "", computed: str = "", copies: str = "", of_device: Word | None = None
) -> Word:
    """Declare a word, and return it.

    Parameters
    ----------
    phrase : str, optional
        Names the difference; `{}` stands for the tensors, which otherwise follow as "*phrase* in *tensors*".
    computed : str, optional
        The same for tensors that were computed rather than moved.
    copies : str, optional
        Says what copies between devices do that leave this behind: "copies npu:0→npu:1 *deliver zeros*".
    of_device : Word, optional
        The word that a device is accused of instead, where this word accuses the model's code and another worker got
        it right by the same code.

    Raises
    ------
    ValueError
        The word is declared already with other phrases.
    """
    phrases = _Phrases(
        phrase=phrase or name,
        computed=computed or phrase or name,
        copies=copies or f"deliver wrong bytes ({name})",
        of_device=of_device,
    )
    if _DECLARED.setdefault(name, phrases) != phrases:
        raise ValueError(f"the word {name} is declared already, with another meaning")
    return Word(name)


def declared() -> tuple[Word, ...]:
    """Return every word that is declared, in the order of their declarations."""
    return tuple(map(Word, _DECLARED))


def registered(name: str) -> Word:
    """Return the word of a name.

    Raises
    ------
    ValueError
        Nothing here declares it.
    """
    if name not in _DECLARED:
        raise ValueError(f"no word of a diagnosis: {name}")
    return Word(name)


def phrase_of(word: Word, *, computed: bool = False) -> str:
    """Return the phrase that names the difference; `{}` in it stands for the tensors."""
    phrases = _phrases_of(word)
    return phrases.computed if computed else phrases.phrase


def about(word: Word, tensors: str, *, computed: bool = False) -> str:
    """Return the phrase with the tensors that it is about: `zeros instead of a result in 3 of 4 weight tensors`."""
    phrase = phrase_of(word, computed=computed)
    if "{}" in phrase:
        return phrase.replace("{}", tensors)
    return f"{phrase} in {tensors}"


def of_copies(word: Word) -> str:
    """Return the phrase for copies between devices that leave this behind."""
    return _phrases_of(word).copies


def of_device(word: Word | None) -> Word | None:
    """Return the word that a device is accused of, for a word that accuses the model's code; None for any other."""
    return None if word is None else _phrases_of(word).of_device


def _phrases_of(word: Word) -> _Phrases:
    """Return the phrases of a word; a word of another version is its own phrase."""
    unknown = _Phrases(phrase=word, computed=word, copies=f"deliver wrong bytes ({word})", of_device=None)
    return _DECLARED.get(word, unknown)


# values
ZEROS = declare(
    "zeros", phrase="zeros where the file is nonzero", computed="zeros instead of a result", copies="deliver zeros"
)
BIT_FLIP = declare(
    "bit-flip", phrase="single-bit flips", computed="single-bit flips after the computation", copies="flip single bits"
)
SWAPPED = declare(
    "swapped", phrase="the bytes of another tensor", copies="deliver the bytes of another copy in progress"
)
PERMUTED = declare("permuted", phrase="the right elements in a different order")
BLOCK = declare(
    "block",
    phrase="one contiguous range of wrong bytes",
    computed="one contiguous range of values that exceed tolerance",
    copies="lose one contiguous range",
)
ROUNDED_TO_BF16 = declare(
    "rounded-to-bf16", phrase="the file's values rounded through bfloat16", computed="a result rounded through bfloat16"
)
ROUNDED_TO_FP16 = declare(
    "rounded-to-fp16", phrase="the file's values rounded through float16", computed="a result rounded through float16"
)
ROUNDED_TO_TF32 = declare(
    "rounded-to-tf32", phrase="the file's values rounded through TF32", computed="a result rounded through TF32"
)
RECOMPUTED = declare("recomputed", phrase="values recomputed on the device while the adapter was loaded")
NEVER_WRITTEN = declare(
    "never-written", phrase="destinations never written", copies="deliver nothing: the destination is never written"
)
FRESH_INIT = declare("fresh-init", phrase="values still at initialization")
STALE = declare(
    "stale", phrase="stale bytes that were already in memory", copies="deliver the bytes of an earlier copy"
)
WRONG_SCALE = declare("wrong-scale", phrase="values off by one constant factor")
SIGNED_ZERO = declare("signed-zero", phrase="zeros of the opposite sign")
NON_FINITE = declare(
    "non-finite",
    phrase="NaN or infinity where the reference is finite",
    computed="NaN or infinity where the exact value is finite",
)
ACCUMULATION_ORDER = declare("accumulation-order", phrase="a different order of accumulation")
TF32_PRODUCTS = declare("tf32-products", phrase="errors that exceed float32 tolerance but not that of TF32 products")
DECISION_FLIPPED = declare("decision-flipped", phrase="decisions that rounding does not explain")
DIFFERS = declare(
    "differs", phrase="bitwise differences", computed="errors that exceed tolerance", copies="deliver wrong bytes"
)

# structure
MISSING = declare("missing", phrase="{} missing", copies="fail")
UNEXPECTED = declare("unexpected", phrase="{} without a counterpart")
SHAPE = declare("shape", phrase="a different shape")
DTYPE = declare("dtype", phrase="a different dtype")
INACTIVE = declare("inactive", phrase="the adapter inactive")
SETTINGS = declare("settings", phrase="a different rank or scaling")

# several adapters in one model
BYTES_CHANGED = declare("bytes-changed", phrase="bytes changed by a step that should leave them alone")

# memory
TOUCHED = declare("touched", phrase="unexpected device use")

# inputs, and a model on several devices
IDS_PAST_VOCABULARY = declare("ids-past-vocabulary", phrase="ids past the vocabulary")
LABELS_PAST_VOCABULARY = declare("labels-past-vocabulary", phrase="labels past the vocabulary")
IDS_CHANGED = declare("ids-changed", phrase="ids changed during transfer to a device")
DOES_NOT_RUN = declare("does-not-run", phrase="a model that does not run")
