"""The mistakes of an inference engine that explain its outputs; phrase and advice are `Cause`'s own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from consistency.capture.engine_causes import Cause
from consistency.cli.glossary.entry import Explanation, Family, GlossaryEntry, entry

FAMILY = Family(name="mistake of an inference engine", title="mistakes of an inference engine, which are kinds too")

WHY: Mapping[Cause, str] = {
    Cause.IGNORED: "The adapter is not named in the request, is not loaded, or its modules have names that the engine "
    "does not know.",
    Cause.LEFT_ON: "An adapter that was merged into the engine's base, or that stays active from an earlier request.",
    Cause.SCALING_ONE: "The engine reads A and B, and not lora_alpha and r.",
    Cause.RSLORA_IGNORED: "The engine divides by r, and does not know use_rslora.",
    Cause.RSLORA_ASSUMED: "An option of the engine, or its reading of the config, switches rank-stabilized LoRA on.",
    Cause.PATTERNS_IGNORED: "The engine takes one rank and one alpha for all layers.",
    Cause.TWICE: "A merged base was given together with the adapter.",
    Cause.LAYERS: "The engine skips modules that it does not adapt, or whose names it does not match.",
    Cause.SAVED_MODULES: "modules_to_save of the adapter, such as a head or embeddings, are not loaded.",
    Cause.MERGED_BFLOAT16: "The delta was added to the weights in bfloat16, which rounds it away in part.",
    Cause.MERGED_FLOAT16: "The delta was added to the weights in float16, which rounds it.",
}
"""What brings each about."""

_PLACES = "layers 2–3"


def entries() -> Iterator[GlossaryEntry]:
    """Yield an entry per mistake."""
    for cause, why in WHY.items():
        summary = cause.sentence("layers or modules")
        explanation = Explanation(
            meaning="The engine's outputs are outside their rule, and a float64 pass with this mistake in it is within "
            f"the same rule of them, while no other mistake that was tried is: {cause.sentence('some layers')}.",
            cause=why,
            action=f"{cause.todo[0].upper()}{cause.todo[1:]}.",
            example=f"forward · vllm · adapter_on: {cause.sentence(_PLACES)}",
        )
        yield entry(FAMILY, cause.value, explanation, summary=summary)
