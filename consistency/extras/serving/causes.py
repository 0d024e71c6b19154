"""What explains the numbers of an inference engine, in words. No torch here.

Each is tested by computing, in float64, what the engine would answer if it were so (`engine_outputs/`).
"""

from __future__ import annotations

from consistency.capture.explanation import Explanation

CAUSE, SEVERAL, PLACES, ROWS = "cause", "causes", "cause_places", "rows_outside"
"""Keys in the evidence of a row: the cause, or several causes that come to the same; the layers that it is about; and
the rows of the batch that are outside, if not all are."""


class Cause(Explanation):
    """A mistake that an engine can make with an adapter: its phrase continues "this engine answers …"."""

    IGNORED = (
        "adapter-ignored",
        "as the base alone: the adapter is not applied",
        "name the adapter in every request, and look for skipped modules in the engine's log; check a merged folder by "
        "`consistency check-merged`",
    )
    LEFT_ON = (
        "adapter-left-on",
        "with the adapter applied where it was to be off",
        "unload the adapter, or load the base alone, for the outputs without it",
    )
    SCALING_ONE = (
        "scaling-ignored",
        "as if scaling were 1",
        "check that the engine reads lora_alpha and r of adapter_config.json",
    )
    RSLORA_IGNORED = (
        "rslora-ignored",
        "as if scaling were lora_alpha / r: use_rslora is ignored",
        "set lora_alpha to lora_alpha * sqrt(r), and use_rslora to false, in a copy of the adapter for this engine",
    )
    RSLORA_ASSUMED = (
        "rslora-assumed",
        "as if scaling were lora_alpha / sqrt(r), although use_rslora is false",
        "check the engine's option for rank-stabilized LoRA",
    )
    PATTERNS_IGNORED = (
        "patterns-ignored",
        "as if every layer had the same scaling: alpha_pattern and rank_pattern are ignored",
        "use an adapter with one lora_alpha and one r for this engine, or merge it",
    )
    TWICE = (
        "adapter-twice",
        "as if the adapter were applied twice",
        "check whether the engine was given a merged base together with the adapter",
    )
    KIND = (
        "layers-repeated",
        "as if {} added the adapter several times",
        "look at what the engine does with the parts of these layers: each rank may add the whole of it",
    )
    DORA = (
        "variant-ignored",
        "as if the adapter were LoRA alone, without the variant that its config names, as DoRA",
        "merge the adapter for this engine: its LoRA has no magnitudes",
    )
    LAYERS = (
        "layers-ignored",
        "as if {} had no adapter",
        "look in the engine's log for modules that it skipped, and compare its names of layers with the adapter's",
    )
    SAVED_MODULES = (
        "saved-modules-ignored",
        "as if {} were the base's: what the adapter saves whole is not loaded",
        "merge the adapter, which takes its saved modules along",
    )
    HEAD_TIED = (
        "head-tied",
        "as if the head were the embeddings",
        "set tie_word_embeddings to false in the config.json of the merged model: one weight is loaded for both",
    )
    MERGED_BFLOAT16 = (
        "merged-in-bfloat16",
        "as if the adapter were merged in bfloat16",
        "merge in float32 and convert after it, or leave the adapter unmerged",
    )
    MERGED_FLOAT16 = (
        "merged-in-float16",
        "as if the adapter were merged in float16",
        "merge in float32 and convert after it, or leave the adapter unmerged",
    )

    ROTARY = (
        "other-rotary-positions",
        "with {}",
        "compare rope_theta and rope_scaling of the engine's config with those of the base's config.json",
    )
    FREQUENCIES = (
        "rounded-rotary-frequencies",
        "with rotary frequencies rounded to {}",
        "load the base in that dtype, by dtype of from_pretrained: converting a loaded model converts its buffers too",
    )
    WEIGHTS = (
        "rounded-weights",
        "as if weights were in {}",
        "look at the engine's option for weights (vLLM and SGLang: quantization; load_in_8bit), and at the folder that "
        "it loads: what trains and what writes need the same weights, or the trainer has to correct for it",
    )

    def sentence(self, about: str = "") -> str:
        """Return a sentence on the engine's mistake; `about` names the layers, if the phrase has a place for them."""
        return f"this engine answers {super().sentence(about)}"
