"""How texts were written, as the user states it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from consistency.errors import InputError, did_you_mean
from consistency.extras.serving.check_text.arithmetic import EngineArithmetic, of_engine
from consistency.extras.serving.check_text.sampling import Sampling
from consistency.extras.serving.engines import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How texts were written, as the user states it.

    Attributes
    ----------
    sampling : Sampling or None
        How tokens were drawn, of all texts that do not say it themselves; None where nothing is said.
    processed : bool or None
        Log probabilities were taken after the sampler's processing, as `sampling` says; None: as the engine takes them
        by default, and the model's own where no engine is stated.
    kv_dtype : str
        Dtype in which the engine keeps keys and values, such as `float16`; empty for the engine's default, and the
        model's own where no engine is stated.
    engine : str
        Engine that wrote them, such as `llama.cpp`: its arithmetic by default is what rounding is taken from.
    """

    sampling: Sampling | None = None
    processed: bool | None = None
    kv_dtype: str = ""
    engine: str = ""

    def __post_init__(self) -> None:
        """Refuse an engine that is not known."""
        if self.engine and self.engine not in ENGINES:
            raise InputError(
                "this engine's arithmetic is not known",
                got=self.engine,
                wanted=", ".join(ENGINES),
                hint=did_you_mean(self.engine, tuple(ENGINES)),
            )


NOTHING_STATED = TextOptions()
"""Nothing is known of how texts were written."""


def stated_arithmetic(options: TextOptions, dtype: str) -> EngineArithmetic:
    """Return how the writer computes with a model in a dtype, as far as it is stated."""
    arithmetic = of_engine(options.engine, dtype)
    return replace(arithmetic, kv_dtype=options.kv_dtype) if options.kv_dtype else arithmetic


def sampling_of_logprobs(options: TextOptions, sampling: Sampling | None) -> Sampling | None:
    """Return the part of a sampler that log probabilities were taken after; None where they are the model's own."""
    if sampling is None or options.processed:
        return sampling
    if options.processed is False or not options.engine:
        return None
    settings = ENGINES[options.engine].processed_by
    return Sampling(**{name: getattr(sampling, name) for name in settings}) if settings else None
