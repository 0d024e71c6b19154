"""What explains a text that a model has not written as it is, in words. No torch here.

Each is tested by computing, in float64, what the model would have written if it were so (`alternatives.py`). Mistakes
of an engine with the adapter as a whole are those of `consistency.extras.serving.causes`.
"""

from __future__ import annotations

from consistency.capture.explanation import Explanation


class TextCause(Explanation):
    """A mistake that explains a text: its phrase continues "written …"."""

    def sentence(self, about: str = "") -> str:
        """Return a sentence on the text; `about` is what the phrase has a place for."""
        return f"this text was written {super().sentence(about)}"

    OTHER_ADAPTER = (
        "other-adapter",
        "by the adapter {}",
        "look which checkpoint the engine had loaded when it wrote this, and when the trainer sends it the next one",
    )
    OFF_FROM = (
        "adapter-off-from-token",
        "with the adapter on at first, and as the base alone from {} on",
        "look whether the engine applies the adapter in its decoding steps, or on the prompt alone",
    )
    BEGIN_TWICE = (
        "prompt-begins-twice",
        "after a prompt with the begin token twice",
        "the chat template writes the begin token already: encode its text with add_special_tokens=False, or send the "
        "engine token ids",
    )
    BEGIN_MISSING = (
        "prompt-without-begin",
        "after a prompt without the begin token",
        "encode the prompt with add_special_tokens=True, or send the engine token ids",
    )
    BEGIN_ADDED = (
        "prompt-begin-added",
        "after a prompt with a begin token that this tokenizer does not write",
        "compare add_bos_token of the engine's tokenizer with the base's, or send the engine token ids",
    )
    PROMPT_CUT = (
        "prompt-cut",
        "after a part of the prompt: {}",
        "raise the engine's length of prompts (max_model_len, max_prompt_length, truncate_prompt_tokens), or leave out "
        "what is too long",
    )
    PROMPT_SPACE = (
        "prompt-space",
        "after the prompt {}",
        "send the engine token ids, or the prompt as it was used here: a space at its end is a token of its own",
    )
    PROMPT_TEMPLATE = (
        "prompt-template",
        "after another prompt: {}",
        "compare the chat template and its options of the engine with the tokenizer's, or send the engine token ids",
    )
    PROMPT_PADDED = (
        "prompt-padded",
        "after padding before the prompt, which the model saw: {}",
        "pass attention_mask with padded prompts to generate(), or send the engine prompts without padding",
    )
    PREFIX = (
        "prefix-of-another",
        "with keys and values of the prompt that are those {}, as from a cache of another request",
        "look whether the engine's prefix cache tells adapters apart, and is emptied when weights are sent (vLLM: "
        "reset_prefix_cache, SGLang: flush_cache)",
    )
    PARTLY = (
        "partly-another-adapter",
        "with {}",
        "look whether the trainer sends weights while the engine writes, and whether all of them arrive",
    )
    WINDOW = (
        "other-window",
        "with each token seeing {}",
        "compare sliding_window and use_sliding_window of the engine's config with those of the base's config.json, "
        "and the length that the engine keeps (max_model_len, llama.cpp: --ctx-size), with what it drops where that is "
        "full",
    )
    POSITIONS = (
        "shifted-positions",
        "with positions {}",
        "look at the position_ids that the engine computes where decoding begins, and at prompts with padding",
    )
    SINGLE = (
        "single-tokens",
        "with single tokens by something else, and all others by the model",
        "look at the engine's speculative decoding: a token of the draft is kept only where the model agrees",
    )
    PENALTY = (
        "penalty",
        "with a {}",
        "state it by --sampling (temperature=0,repetition_penalty=1.1 where nothing is drawn), or leave it out in the "
        "engine: many take repetition_penalty from the base's generation_config.json",
    )
    CACHE = (
        "rounded-cache",
        "with errors as large as keys and values in {} make",
        "nothing else that was tried explains them. If the engine is meant to keep its cache so, say it by --kv-dtype; "
        "else look at its option (vLLM: kv_cache_dtype, llama.cpp: --cache-type-k and --cache-type-v), and at those "
        "for products in 8 bits, whose errors are as large",
    )
    COMPUTED_IN = (
        "computed-in-another-dtype",
        "with errors as large as computing in {} makes",
        "nothing else that was tried explains them. Say by --dtype in which dtype the engine computes, or by --engine "
        "which one it is; else look at its option (vLLM: dtype, OpenVINO: INFERENCE_PRECISION_HINT)",
    )
