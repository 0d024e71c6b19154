"""What explains a folder of merged weights that is wrong, in words. No torch here.

Each is tested by computing what the folder would hold if it were so (`extras/merging/check_merged/explain.py`).
"""

from __future__ import annotations

from consistency.capture.explanation import Explanation

MERGED_FOLDER = "merged_folder"
"""Stage and load path of the rows of `consistency check-merged`: the tensors of a folder that anybody's writer made."""

ROLE, CAUSES, ZERO_DELTA = "role", "causes", "zero_delta"
"""Evidence of such a row: whether the adapter changes the tensor, has it whole or leaves it alone; what explains it;
that what the adapter adds is zero."""


class MergeCause(Explanation):
    """A mistake of a merge, of how its result was saved, or of what it was made from."""

    NOT_MERGED = (
        "not-merged",
        "{} hold the base alone",
        "look in the log of the merge for layers and keys that it skipped, and merge again",
    )
    ADAPTER_LEFT_OUT = (
        "adapter-left-out",
        "{} hold the base and not all of the adapters",
        "merge what is left out too, or check the folder without it",
    )
    TOWER_LEFT_OUT = (
        "tower-left-out",
        "a whole part of the model holds the base alone, {}",
        "compare the names of the adapter with those of this part, and merge again with a version that maps them",
    )
    EXPERTS_LEFT_OUT = (
        "experts-left-out",
        "experts hold the base alone, {}",
        "merge with PEFT of the version that saved the adapter, which knows how this model packs its experts",
    )
    PART_LEFT_OUT = (
        "part-left-out",
        "a part of the rows holds the base alone in {}",
        "the parts of a fused weight each have a delta of their own: merge them all",
    )
    TWICE = (
        "merged-twice",
        "{} hold base + 2 × adapter: it was merged twice",
        "merge into the base again, once",
    )
    WRONG_SCALE = (
        "wrong-merge-scale",
        "{} hold base + adapter × another scaling",
        "check lora_alpha, r, use_rslora and the patterns that the merge read",
    )
    EXCHANGED = (
        "base-and-merged-exchanged",
        "{} hold base − adapter, as where base and MERGED are exchanged, or what was never merged is unmerged",
        "give the merged folder as MERGED, and the one that it was merged from as --base",
    )
    TRANSPOSED = (
        "transposed-delta",
        "{} hold base + the transposed delta",
        "the merge has the layout of the weight wrong (fan_in_fan_out): transpose the delta",
    )
    OTHER_PART = (
        "delta-of-another-part",
        "rows of a fused weight hold the delta of other rows in {}",
        "check the order in which the merge takes the parts of a fused weight: one after the other, or row by row",
    )
    OTHER_LAYER = (
        "delta-of-another-layer",
        "{} hold base + the delta of another layer",
        "compare how the merge numbers and orders the blocks, and names their layers, with the keys of the adapter",
    )
    ROW_ORDER = (
        "row-order",
        "{} hold base + the delta with its rows in another order",
        "compare the layout that the merge converts to with that of the base: convert both, or none",
    )
    SOME_RANKS = (
        "part-of-the-rank",
        "{} hold base + a part of the ranks of the delta",
        "merge all ranks: look for a largest rank in the settings, and for factors that were split among processes",
    )
    DELTA_ALONE = (
        "delta-alone",
        "{} hold the delta without the base",
        "add the delta to the base's weights: the merge began from zeros, or saved what it adds",
    )
    EXPERT_ORDER = (
        "expert-order",
        "{} hold base + the factors of experts read in another order",
        "PEFT packs lora_B with the expert as the faster index, (out, rank, expert): read it so",
    )
    MAGNITUDE = (
        "magnitude-not-applied",
        "{} hold base + LoRA, without DoRA's magnitude",
        "merge with a version that knows DoRA: weight = magnitude / norm(base + delta) * (base + delta)",
    )
    BIAS_UNSCALED = (
        "bias-unscaled",
        "{} hold base + the adapter's bias, without its scaling",
        "update PEFT, or multiply the adapter's bias by the scaling",
    )
    SAVED_DROPPED = (
        "saved-modules-dropped",
        "{} hold the base, and the adapter has a whole tensor in their place",
        "save what modules_to_save, a trained embedding or head, or a trained bias has, too",
    )
    OTHER_BASE = (
        "merged-into-another-base",
        "this is another base, or another revision of it: {} differ",
        "give the base that the merge read, and check whether it is the one that the adapter was trained on",
    )
    RESIDUAL_BASE = (
        "residual-base",
        "{} hold the plain base + adapter, and this adapter needs the base without what its factors began as",
        "load it by PEFT, which computes that base anew, or save it converted: PEFT's save_pretrained() does that with "
        "path_initial_model_for_weight_conversion",
    )
    BACKBONE = (
        "another-backbone",
        "{} are not base + adapter, and the adapter is one of LoftQ, which is for a backbone of its own",
        "give the backbone that LoftQ left as --base: the base that it began from is another model",
    )
    PART_OF_ADAPTER = (
        "part-of-the-adapter",
        "{} are changed, of layers that adapter_config.json names and its file has nothing for",
        "give the adapter that was merged: this file is a part of it, as one stage of a pipeline saves",
    )
    FOUR_BIT_BASE = (
        "merged-into-4-bit",
        "{} hold the base rounded to 4 bits + adapter",
        "right where the adapter was trained on that; else merge into the base in 16 bits",
    )
    EIGHT_BIT_BASE = (
        "merged-into-8-bit",
        "{} hold the base rounded to 8 bits + adapter",
        "right where the adapter was trained on that; else merge into the base in 16 bits",
    )
    ROUNDED_AFTER = (
        "rounded-after-merge",
        "{} hold base + adapter, rounded to fewer bits after the merge",
        "save the merged weights in 16 bits, and quantize a copy",
    )
    OTHER_ADAPTER = (
        "another-adapter",
        "{} hold base + another adapter in the place of this one",
        "give the adapter that was merged, or merge this one into the base",
    )
    FURTHER_ADAPTER = (
        "further-adapter",
        "{} hold base + adapter + another adapter",
        "if it is meant to be there, give the base that holds it; else load the base anew and merge once",
    )
    ROUNDINGS = (
        "off-by-roundings",
        "{} hold base + adapter but for more roundings than one merge makes",
        "load the base anew and merge once: merging and unmerging in 16 bits leaves such residue",
    )
    SIXTEEN_BIT_BASE = (
        "merged-into-16-bit",
        "{} hold another base, in 16 bits, + adapter, where the base given is quantized",
        "dequantize the base that the adapter was trained on, merge, and keep 16 bits",
    )
    CODES = (
        "codes-without-scales",
        "{} hold codes that changed with the scales of the base, or the other way round",
        "dequantize, add the delta, and quantize the sum with scales of its own",
    )
    QUANTIZED_AWAY = (
        "delta-quantized-away",
        "quantizing after the merge took the adapter's effect: {}",
        "keep the merged weights in 16 bits, or quantize to more bits",
    )
    OVERFLOW = (
        "merge-overflow",
        "{} hold NaN or infinity, and base + adapter is finite there",
        "merge in float32, and save in bfloat16 or float32, which have the range",
    )
    ADAPTER_NOT_FINITE = (
        "adapter-not-finite",
        "the adapter itself holds NaN or infinity: {}",
        "take an earlier checkpoint of the adapter: its training diverged, or its file was damaged",
    )
    EMPTY_ADAPTER = (
        "empty-adapter",
        "the adapter changes nothing: {}",
        "was it trained, and saved from gathered weights? A rank of ZeRO-3 or FSDP has its part alone",
    )
    ADAPTER_BESIDE = (
        "adapter-beside",
        "{}: loading the folder by transformers adds the adapter a second time",
        "remove these files from the merged folder",
    )
    KEYS = (
        "adapter-keys",
        "keys of the adapter match nothing in the base: {}",
        "rename them so, or give the base that the adapter was trained on",
    )
    TIED = (
        "tied-weights",
        "embedding and head are tied by config.json: {}",
        "set tie_word_embeddings to false and save both, or train with ensure_weight_tying",
    )
    OTHER_HEAD = (
        "another-head",
        "{}",
        "nothing: a classifier has a head of its own, which is in the adapter's file",
    )
    RESIZED = (
        "resized",
        "{}",
        "resize the base before the merge, as for the training, or give the resized base",
    )
    DOES_NOT_LOAD = (
        "does-not-load",
        "{}",
        "save the merged model again by save_pretrained(), which writes weights and config.json for each other",
    )
    FILES = (
        "weight-files",
        "{}",
        "save the merged model again into an empty folder, by save_pretrained()",
    )
    OFF = (
        "off",
        "{} hold neither base + adapter nor the result of a known mistake",
        "merge again by PEFT in float32 and compare the two folders by `consistency diff`",
    )
    CHANGED = (
        "changed-untouched",
        "{} are neither the base's nor part of the adapter",
        "give the base that the merge read; a merge changes nothing else",
    )
    LOSS = (
        "rounding-loss",
        "{}",
        "merge and save in float32, or leave the adapter unmerged",
    )
