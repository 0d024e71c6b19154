"""The words of a diagnosis; what each is called in a sentence is its phrase in `consistency.numerics.words`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from consistency.cli.glossary.entry import Explanation, Family, GlossaryEntry, entry
from consistency.numerics.words import Word

FAMILY = Family(name="word of a diagnosis", title="words of a diagnosis: what a difference looks like")

EXPLANATIONS: Mapping[Word, Explanation] = {
    Word.ZEROS: Explanation(
        meaning="Every element is zero, and the file or the exact result has other values. Of a merged weight or its "
        "delta it is what was added that is zero.",
        cause="A copy that did not arrive in zeroed memory; a lora_B that was never loaded and kept its initial zeros; "
        "a kernel that wrote nothing; a merge with the adapter switched off.",
        action="Read on which load paths it happens: correct when isolated means a copy between devices. "
        "`consistency doctor` checks the copies alone; torch_device='cpu' in PEFT avoids them.",
        example="adapter · npu:1, npu:3 · zeros where the file is nonzero in 28 of 28 lora_B tensors when all devices "
        "are visible, and correct when isolated or with torch_device=cpu",
    ),
    Word.BIT_FLIP: Explanation(
        meaning="At most 64 elements differ, each in exactly one bit. Of a computed tensor: at most 64 elements exceed "
        "tolerance, flipping one bit of each corrects it, and chance does not explain that.",
        cause="A memory or link fault, of the device or the host; a damaged copy of a file.",
        action="Read the device's ECC and link counters (`consistency doctor`), repeat with `--for 1h --load`, and "
        "compare the files' checksums. A device that does it again has to be tested or replaced.",
        example="file · b.safetensors · single-bit flips in 3 of 100 weight tensors",
    ),
    Word.SWAPPED: Explanation(
        meaning="The tensor holds, byte for byte, another one: of the adapter's file, of the other weight file, or of "
        "another copy under way at the same time. The detail `holds …` names it.",
        cause="Layers in the wrong order in a file or in a state dict that was edited; an offset or index that is "
        "wrong; copies that run at the same time and share a buffer.",
        action="Compare the names in the file with the model's. In stage `transfer`, load with one device visible, "
        "and report the copy to the vendor.",
        example="adapter · cpu · the bytes of another tensor in 2 of 28 lora_A tensors",
    ),
    Word.PERMUTED: Explanation(
        meaning="The right elements in another order: the same values, each as often. Where whole rows moved, the "
        "evidence names the rows.",
        cause="A transposed or otherwise strided layout that was copied as if it were contiguous; rows in another "
        "order, as in a fused projection whose parts were joined differently.",
        action="Look at what reshapes, fuses or shards the weight between its file and the device.",
        example="base · cuda:0 · the right elements in a different order in weight of model.layers.3.self_attn.q_proj",
    ),
    Word.BLOCK: Explanation(
        meaning="All wrong elements lie in one contiguous range, and nine of ten in it are wrong. The evidence has "
        "its first byte, its length, and whether it consists of whole pages.",
        cause="A copy that ended early or lost a part, a page that was not written, a damaged region of a file or of "
        "memory.",
        action="Whole pages point to the driver, the IOMMU or memory: run `consistency doctor`. Compare the file's "
        "checksum with its origin.",
        example="transfer · npu:1 · copies npu:0→npu:1 lose one contiguous range",
    ),
    Word.ROUNDED_TO_BF16: Explanation(
        meaning="Every element is the file's value rounded to bfloat16, to nearest or by cutting bits off. Of a "
        "computed tensor: every element of a result outside tolerance is a bfloat16 number.",
        cause="A cast on the way: a load path that casts to the base's dtype, autocast, a result computed or stored "
        "in bfloat16.",
        action="Find the cast: the load paths in the sentence narrow it down. Load without `low_cpu_mem_usage`, or "
        "set autocast_adapter_dtype and dtype explicitly.",
        example="adapter · npu:1 · the file's values rounded through bfloat16 in 28 of 28 lora_A tensors with "
        "low_cpu_mem_usage=True, and correct without: a dtype conversion while loading",
    ),
    Word.ROUNDED_TO_FP16: Explanation(
        meaning="Every element is the file's value rounded to float16; of a computed tensor, every element of a "
        "result outside tolerance is a float16 number.",
        cause="A cast to float16 on the way, or a result computed or stored in it. Values that float16 and TF32 "
        "round alike are also listed as such (`could also be`).",
        action="Find the cast: the load paths in the sentence narrow it down. Give `--dtype` what the model is used "
        "in.",
        example="merged · cuda:0 · a result rounded through float16 in 28 of 28 weight tensors",
    ),
    Word.ROUNDED_TO_TF32: Explanation(
        meaning="Every element is the file's value with the 10 mantissa bits of TF32, to nearest or cut off; of a "
        "computed tensor, every element of a result outside tolerance is such a number.",
        cause="A tensor that went through a TF32 unit: a multiplication by one, a fused load, a converted copy.",
        action="Compare with TF32 switched off (`--set float32_matmul_precision=highest`), and report the operation.",
        example="base · cuda:0 · the file's values rounded through TF32 in weight of lm_head",
    ),
    Word.RECOMPUTED: Explanation(
        meaning="Tensors that a device computes when the adapter is loaded differ bitwise from the reference worker's. "
        "There are three: weights of the base that loading rewrites; tensors of the method that are in no file; and, "
        "between captures made from different files, adapter tensors that are converted while they are loaded.",
        cause="Methods that compute on loading: PiSSA, OLoRA, FRoD, OSF and PSOFT decompose base weights, VeRA and "
        "others draw projections or build tables. Each device does so with its own kernels and random numbers. With "
        "different files the inputs of the conversion differ too.",
        action="Save what is computed (save_projection for VeRA, a converted LoRA for PiSSA and OLoRA), so that every "
        "device loads the same bytes.",
        example="base · cuda:0 · values recomputed on the device while the adapter was loaded in 14 of 28 "
        "weight_after_adapter tensors",
    ),
    Word.NEVER_WRITTEN: Explanation(
        meaning="Every element that differs still has the poison that was there before the copy: a NaN of known "
        "payload, or a known byte.",
        cause="A copy that reported success and wrote nothing, or only a part: peer copies behind a translating IOMMU "
        "or ACS, a driver, a loader that skips a tensor.",
        action="Run `consistency doctor --out DIR` before and after a reboot; it names what redirects or translates "
        "the copies. Load with torch_device='cpu' until then.",
        example="transfer · npu:1 · copies npu:0→npu:1 deliver nothing: the destination is never written",
    ),
    Word.FRESH_INIT: Explanation(
        meaning="The tensor has the value from before the file was loaded: its initialization.",
        cause="A tensor that was never loaded: a key that the model does not match, or a copy that was lost. An "
        "adapter with such A and zero B answers like the base.",
        action="Check the names in the adapter's file against the model. If other load paths are correct, it is a "
        "copy: see `zeros`.",
        example="adapter · npu:1, npu:3 · values still at initialization in 28 of 28 lora_A tensors when all devices "
        "are visible, and correct when isolated or with torch_device=cpu",
    ),
    Word.STALE: Explanation(
        meaning="The bytes are known from elsewhere: a part of the model that was in memory before, an earlier copy, "
        "the adapter that a hotswap replaced, or the file of another capture (not the worker's own).",
        cause="A copy that did not arrive over memory that was used before; a cache of an earlier version of the "
        "file, as on a shared disk; a hotswap that skipped a tensor.",
        action="The detail `holds …` says whose bytes they are. Clear caches and compare checksums of the files; if "
        "it is memory, run `consistency doctor`.",
        example="transfer · npu:1 · copies npu:0→npu:1 deliver the bytes of an earlier copy, but only under load",
    ),
    Word.WRONG_SCALE: Explanation(
        meaning="One constant factor explains every difference; the evidence has it (`…× the reference`). Of a merged "
        "weight it is the factor of what was added.",
        cause="A scaling that is applied twice, not at all, or by another formula: lora_alpha / r against "
        "lora_alpha / sqrt(r), alpha_pattern or rank_pattern, a scaling that was set on a loaded adapter.",
        action="Compare the factor with lora_alpha / r: a factor of that size is a scaling applied twice, its inverse "
        "one that was left out, and sqrt(r) is use_rslora.",
        example="merged · cuda:1 · values off by one constant factor in 28 of 28 weight tensors",
    ),
    Word.SIGNED_ZERO: Explanation(
        meaning="All differing elements are zeros, with the other sign.",
        cause="A tensor that was computed instead of copied: multiplied by −1 or by zero, or rounded from a tiny "
        "negative value.",
        action="No sum depends on it, but the bytes were not only moved: look for the operation. 1/x and atan2 "
        "do depend on the sign.",
        example="base · cuda:0 · zeros of the opposite sign in weight of model.norm",
    ),
    Word.NON_FINITE: Explanation(
        meaning="NaN or infinity stands where the file or the exact value has a number.",
        cause="Overflow, most often in float16 (65504 is its largest number); an inverse or logarithm of zero; "
        "uninitialized memory.",
        action="Repeat in bfloat16 or float32. If only one device has it, compare its kernels: `consistency bisect` "
        "switches settings one at a time.",
        example="forward · cuda:0 · NaN or infinity where the exact value is finite in adapter_on of model.layers.13",
    ),
    Word.ACCUMULATION_ORDER: Explanation(
        meaning="Bits differ, and the difference is within what rounding makes. No finding has this kind: it is the "
        "word of a row that passes.",
        cause="Libraries and devices add the same numbers in different orders.",
        action="Nothing. Whoever needs equal bits needs the same device model, the same software and pinned settings.",
        example="merged · cuda:0 · model.layers.0.self_attn.q_proj.weight: within, 0.31× tolerance",
    ),
    Word.TF32_PRODUCTS: Explanation(
        meaning="The error exceeds what float32 products allow, and not what TF32 products do, whose operands have 10 "
        "mantissa bits.",
        cause="TF32 was in use although the settings did not permit it, or a library ignores the setting.",
        action="Set float32_matmul_precision=highest and allow_tf32=False, and repeat: `consistency bisect` names the "
        "setting. If TF32 is intended, use `--profile deployed` or the variant `cuda:0@tf32`.",
        example="merged · cuda:0 · errors that exceed float32 tolerance but not that of TF32 products in 28 of 28 "
        "weight tensors",
    ),
    Word.DECISION_FLIPPED: Explanation(
        meaning="The model decided otherwise than in float64 (a router's top-k, a ReLU, an argmax, a mask), and the "
        "margin is larger than the rounding error of what was compared.",
        cause="Values that were already wrong before the decision, or a device that decides wrongly: a router that "
        "takes other experts.",
        action="Look at the first layer that is outside: the decision follows from it. If there is none, the "
        "operation itself is at fault; `consistency reproduce` writes a folder for a bug report.",
        example="forward · cuda:0 · 3 decisions of topk in model.layers.2.mlp.gate flipped: margin 0.21, where "
        "rounding explains 0.004 at most",
    ),
    Word.DIFFERS: Explanation(
        meaning="Bits differ, or errors exceed tolerance, and no other word applies. Also: the digest on the device "
        "and the bytes on the host disagree (`digest_only`), a quantized weight has other settings than its file, "
        "singular values or vectors of a cut decomposition are wrong.",
        cause="Anything that leaves no pattern: other files, other kernels, noise from a failing device.",
        action="Look at the worst element and at the first layer that differs; `consistency show DIR --finding 1` "
        "lists them, `consistency bisect` switches settings, `consistency diff` compares the files.",
        example="merged · cuda:1 · errors that exceed tolerance in 3 of 28 weight tensors",
    ),
    Word.MISSING: Explanation(
        meaning="A tensor that is expected is not there: in the model but not in the adapter's file, in the file but "
        "not in the model beside other adapters, on the device `meta`, only in the reference weight file, or made by "
        "the reference worker and not by this one. Of copies: they fail.",
        cause="A file that lacks keys; a parameter whose bytes never arrived; an operator or mode that fails on one "
        "device; captures with other stages or modes.",
        action="The reason follows the sentence. Compare the keys of the file with the model (`consistency diff`), "
        "or update the library that fails on this device.",
        example="adapter · cpu · lora_B of model.layers.0.self_attn.q_proj missing: in the model, but not in the "
        "adapter's file",
    ),
    Word.UNEXPECTED: Explanation(
        meaning="A tensor that nothing expects: in the adapter's file without a parameter in the model, only in the "
        "tested weight file, or recorded by this worker and not by the reference worker.",
        cause="An adapter for another base or another depth of it, other target_modules, a prefix in the names.",
        action="Check that this adapter was trained on this base: the sentence says where the adapter is for more "
        "layers than the base has.",
        example="adapter · cpu, cuda:0 · 8 of 64 tensors without a counterpart: the adapter is for 32 layers, the "
        "base has 28",
    ),
    Word.SHAPE: Explanation(
        meaning="A tensor has another shape than the one it is compared with: the file's, the reference worker's, "
        "one device's output, or the rank that was asked for in a combination of adapters.",
        cause="Another base or rank, a transposed weight, padded or resized embeddings, a split that was not undone.",
        action="Compare r, target_modules and the vocabulary's size of both sides: got and wanted are in the detail.",
        example="file · b.safetensors · a different shape in lm_head.weight: got [32064, 64], wanted [32000, 64]",
    ),
    Word.DTYPE: Explanation(
        meaning="A tensor has another dtype than the one it is compared with. Values are not compared then; "
        "`consistency diff` also says whether one is the other, rounded.",
        cause="A conversion: another `--dtype`, a load path that casts, a wrapper that calls `.half()`, a file saved "
        "in another dtype.",
        action="Load both in the same dtype. A wrapper has to leave the dtypes as they were loaded.",
        example="wrapping · cpu · 3 tensors change dtype through the wrapper",
    ),
    Word.INACTIVE: Explanation(
        meaning="In some adapted layers the adapter is not the active one, or adapters are disabled there.",
        cause="disable_adapter or set_adapter that reached only a part of the model, or layers whose active adapter "
        "was set by another one.",
        action="Call model.set_adapter(NAME) on the PEFT model itself, and look at the layers that the detail lists.",
        example="adapter · cpu · the adapter inactive in rank_and_scaling of adapter_settings",
    ),
    Word.SETTINGS: Explanation(
        meaning="Rank or scaling of adapted layers differ from the reference worker's, as they are in the loaded "
        "model.",
        cause="Other versions of PEFT, or captures of other adapters: rank_pattern, alpha_pattern and use_rslora are "
        "read differently.",
        action="Compare adapter_config.json and the versions of PEFT of both workers: got and wanted count the layers "
        "by rank and scaling.",
        example="adapter · host-b:cpu · a different rank or scaling in rank_and_scaling of adapter_settings",
    ),
    Word.LEFT_BEHIND: Explanation(
        meaning="After delete_adapter(NAME), tensors of that adapter, or its config, are still in the model.",
        cause="Layers or auxiliary modules (modules_to_save, trainable tokens) that PEFT's method does not delete.",
        action="Load the base again instead of deleting, and report it with `consistency reproduce`.",
        example="adapters · cpu · delete_adapter leaves 2 tensors of two in the model",
    ),
    Word.OTHERS_INTERFERE: Explanation(
        meaning="After a step with several adapters, the model gives other bits with one of them than it gave with "
        "that adapter alone, although its bytes are those of its file.",
        cause="A step that leaves something behind: an active adapter, a scaling, a hook, a merged weight.",
        action="The step is in the sentence. Load the adapters in separate models until it is fixed.",
        example="adapters · cpu · 3 results of one after set_adapter differ from those of one alone in the model",
    ),
    Word.DRIFT: Explanation(
        meaning="Ten cycles of merge and unmerge moved a weight further than rounding can: more than the bound for so "
        "many cycles.",
        cause="A merge or unmerge that is not the inverse of the other: another scaling, another dtype, a delta that "
        "is computed differently.",
        action="Keep the original weight, and merge into a copy of it. A finding of the kind `drift` is another "
        "matter: bits that differ from an earlier run.",
        example="adapters · cpu · 10 cycles of merge and unmerge move model.layers.0.self_attn.q_proj by up to 0.003, "
        "which rounding cannot",
    ),
    Word.WRONG_DENSITY: Explanation(
        meaning="A combination that leaves out elements by chance kept another share of them than chance explains, or "
        "draws the same elements of two adapters.",
        cause="A random generator that is seeded anew for each adapter, or a density that is applied twice.",
        action="Use a combination_type without random choice (linear, ties, magnitude_prune), and report it.",
        example="adapters · cpu · 512 of 2048 elements are kept, with a density of 0.5",
    ),
    Word.BYTES_CHANGED: Explanation(
        meaning="A step with several adapters changed bytes of an adapter, or of the base, that it has to leave alone.",
        cause="An operation in place on a tensor that is shared, a merge that was not undone, a hotswap into the wrong "
        "adapter.",
        action="The step and the tensors are in the sentence: load the adapter again after it.",
        example="adapters · cpu · hotswap changes 4 tensors of two, which it has to leave as they were loaded",
    ),
    Word.TOUCHED: Explanation(
        meaning="A worker used a device that is not its own: memory was allocated or reserved there, or a context was "
        "opened. Memory that only passes through is a warning; memory that stays, or is more than twice the adapter, "
        "is an error.",
        cause="PEFT reads an adapter's file onto device 0 unless torch_device is given; libraries that open device 0 "
        "when they are imported.",
        action="Give torch_device= the device of the base, or show one device to the process "
        "(CUDA_VISIBLE_DEVICES). The detail has the first operation and its caller.",
        example="memory · npu:1 · loading the adapter allocated 256 KiB on npu:0 and released it: give "
        "torch_device='npu:1'",
    ),
    Word.WRONG_DEVICE: Explanation(
        meaning="Adapter tensors are on another device than the model's, or on `meta`: never loaded.",
        cause="An adapter that was loaded after the model was moved, or before; a device_map that does not name its "
        "modules; low_cpu_mem_usage without weights for a key.",
        action="Move the PEFT model as a whole, after loading, or give torch_device=.",
        example="memory · cuda:1 · adapter tensors on a different device than their model in placement of "
        "model.layers.0.self_attn.q_proj",
    ),
    Word.THIRD_COPY: Explanation(
        meaning="Merging a layer took more memory than the weight, the delta and what computing the delta needs: a "
        "third tensor of the weight's size was alive.",
        cause="`weight = weight + delta` instead of an addition in place; safe_merge, which copies the weight, on top.",
        action="Merge layer by layer with safe_merge=False, or on the CPU; and report the peak with its figures.",
        example="memory · cpu · a new weight allocated beside the old one and the delta in merge_peak of "
        "model.layers.0.mlp.down_proj",
    ),
    Word.IDS_PAST_VOCABULARY: Explanation(
        meaning="Token ids of the inputs are negative or have no row in the embedding, found on the CPU before a "
        "device is asked for them.",
        cause="A tokenizer with more tokens than the model: added tokens without resize_token_embeddings, or another "
        "base.",
        action="Resize the embeddings, or use the tokenizer that was saved with the base. All table sizes are in the "
        "sentence.",
        example="forward · cpu · ids past the vocabulary: largest id 32005, embedding has 32000 rows, the config's "
        "vocab_size is 32000, the tokenizer has 32006 tokens; the first of 2 is 32005 at input_ids[0, 3]",
    ),
    Word.LABELS_PAST_VOCABULARY: Explanation(
        meaning="Labels, apart from −100, which a loss ignores, are negative or past the rows of the head.",
        cause="A padding label other than −100; ids of added tokens; class numbers of another task.",
        action="Replace padding by −100, and check num_labels of the head.",
        example="sharding · cpu · labels past the vocabulary: smallest label -1, head has 512 rows, ignore index is "
        "-100; the first of 8 is -1 at labels[0, 24]",
    ),
    Word.IDS_CHANGED: Explanation(
        meaning="Ids that were inside every table on the CPU arrived on a device, or at a shard, as others; or a "
        "kernel there asserted for a row that no table has.",
        cause="A copy to the device that is wrong, or a race with a buffer that is used again (non_blocking copies).",
        action="Run `consistency doctor`. If a copy staged through the host is right, it is the direct copy between "
        "devices.",
        example="sharding · npu:0 · ids changed during transfer to device npu:1, into model.layers.14",
    ),
    Word.LABELS_CHANGED: Explanation(
        meaning="Labels arrived at a shard as others.",
        cause="As of `ids-changed`: a wrong copy, or a buffer that is used again too early.",
        action="Run `consistency doctor`; compare the direct copy with one staged through the host.",
        example="sharding · npu:0 · labels changed during transfer to device npu:1",
    ),
    Word.CHANGED_ON_THE_WAY: Explanation(
        meaning="Hidden states or other values had other bytes after they moved from one shard to the next.",
        cause="A wrong copy between devices, inside accelerate's hooks.",
        action="Run `consistency doctor`: the pair of devices is in the sentence. Until it is fixed, put the model on "
        "one device.",
        example="sharding · npu:0 · hidden states changed during transfer to device npu:1, into model.layers.14",
    ),
    Word.OTHER_ANSWER: Explanation(
        meaning="A model on several devices gives other outputs than on one, and no rounding explains it; devices of "
        "one model with pinned settings have to agree bit for bit.",
        cause="Shards whose weights or inputs are wrong, tied weights that were split, a device that computes wrongly.",
        action="Look for findings of stages `transfer` and `base` first. Then compare layouts: `--device-map` takes a "
        "layout of your own.",
        example="sharding · npu:0 · a different result than on one device in logits of balanced",
    ),
    Word.DOES_NOT_RUN: Explanation(
        meaning="A model runs on one device and raises in a layout on several, or the adapter can be trained without "
        "the wrapper and not through it.",
        cause="Operations between tensors on different devices; a wrapper that hides what PEFT or the trainer needs.",
        action="The error is in the sentence. Keep modules that share inputs together (no_split_modules), or let the "
        "wrapper pass attributes on.",
        example="sharding · npu:0 · the model does not run in this layout, and does on one device: RuntimeError: "
        "Expected all tensors to be on the same device",
    ),
    Word.UNSYNCHRONIZED: Explanation(
        meaning="Ranks that should train one adapter train one each: a rank's optimizer gets its own gradient, or no "
        "library broadcasts and averages the adapter. The loss looks healthy, no error is raised, and one rank's is "
        "saved.",
        cause="An adapter that is added after fully_shard is a plain tensor of each rank; a hook that does not reduce; "
        "no_sync() that is never left.",
        action="Add the adapter before fully_shard, as accelerate and transformers' Trainer do. Compare the adapter of "
        "every rank after a step, not the loss.",
        example="replicas · cuda:1 · the rank's own gradient in place of the average in 56 of 168 tensors",
    ),
    Word.LAYERS_MISSED: Explanation(
        meaning="Through a wrapper PEFT finds fewer, other or more layers to adapt than in the plain model, or rejects "
        "it.",
        cause="Names with a prefix that target_modules does not match; layers that the wrapper replaces or copies; a "
        "wrapper that has no config.",
        action="Adapt the model first and wrap it then, or give target_modules that match through the wrapper.",
        example="wrapping · cpu · PEFT finds 0 of 28 adapted layers through the wrapper",
    ),
    Word.HIDDEN: Explanation(
        meaning="Something that PEFT or a trainer asks the model for is not there through the wrapper: config, "
        "get_input_embeddings, gradient checkpointing, a quantization's mark.",
        cause="A wrapper that does not pass attributes on.",
        action="Pass attributes on (`__getattr__`), or prepare and adapt the model before it is wrapped.",
        example="wrapping · cpu · the wrapper hides config: it is not passed on",
    ),
    Word.KEYS: Explanation(
        meaning="Keys of the model are missing in the wrapper's state dict, or are in it a second time, apart from one "
        "common prefix.",
        cause="Modules that the wrapper renames, leaves out, or holds under two names.",
        action="Save and load from the plain model, or let the wrapper hold it as one attribute without more.",
        example="wrapping · cpu · 56 of 56 keys of the model are not in the wrapper's state dict",
    ),
    Word.HELD_TWICE: Explanation(
        meaning="Through the wrapper, weights are held in two storages instead of one.",
        cause="A wrapper that copies the model or its weights (copy.deepcopy, `.clone()`).",
        action="Keep the model itself, not a copy of it or of its weights.",
        example="wrapping · cpu · 3 storages are held twice: 1572864 bytes",
    ),
    Word.MORE_MEMORY: Explanation(
        meaning="A training step through the wrapper peaks above the plain model's step and one copy of its output.",
        cause="Outputs or activations that the wrapper keeps; gradient checkpointing that it switches off.",
        action="Return outputs without keeping them, and enable checkpointing through the wrapper.",
        example="wrapping · cpu · a training step takes 1.42 times the memory",
    ),
}


def entries() -> Iterator[GlossaryEntry]:
    """Yield an entry per word: its phrases, and what the table says of it."""
    for word, explanation in EXPLANATIONS.items():
        first, *others = _phrases(word)
        yield entry(FAMILY, word.value, explanation, summary="; ".join([first, *others]), headline=first)


def _phrases(word: Word) -> Iterator[str]:
    """Yield how findings say it: of moved tensors, of computed ones, and of copies, where these differ."""
    yield word.phrase.replace("{}", "tensors")
    if word.computed != word.phrase:
        yield f"of results: {word.computed}"
    if word.value not in word.copies:
        yield f"copies that {word.copies}"
