"""Planted faults of the stage `generation`. No torch here."""

from __future__ import annotations

from consistency.extras.serving.generation.spec import GENERATION
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.extras.serving.generation.planted"
_STAGES = (GENERATION,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="cache-key-not-written", plant=f"{_PLANTED}:last_key_not_written", expected="wrong-with-cache",
        stages=_STAGES, shows_in=".cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="cache-rows-exchanged", plant=f"{_PLANTED}:rows_exchanged", expected="wrong-with-cache",
        stages=_STAGES, shows_in=".cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="cache-keys-in-float8", plant=f"{_PLANTED}:keys_in_float8", expected="wrong-with-cache",
        stages=_STAGES, shows_in=".cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="cache-stale-keys", plant=f"{_PLANTED}:stale_keys", expected="wrong-with-cache", stages=_STAGES,
        shows_in=".static_cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="padding-not-masked", plant=f"{_PLANTED}:padding_is_seen", expected="wrong-with-padding",
        stages=_STAGES, shows_in=".padded", needs=(Need.KEYS, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="padding-counted", plant=f"{_PLANTED}:positions_of_padding", expected="wrong-with-padding",
        stages=_STAGES, shows_in=".padded", needs=(Need.POSITIONS, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="adapter-off-in-steps", plant=f"{_PLANTED}:off_in_steps", expected="wrong-with-cache",
        stages=_STAGES, shows_in=".cache", needs=(Need.TRAINED, Need.LORA_LINEAR),
    ),
    Fault(
        name="generation-another-token", plant=f"{_PLANTED}:another_token", expected="other-token",
        stages=_STAGES, shows_in="prompt 0.text",
    ),
)  # fmt: skip
