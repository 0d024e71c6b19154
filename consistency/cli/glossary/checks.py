"""Stages, rules, levels and load paths: what is checked, how it is judged, how much, and on which way to the device.

What a stage's row in `consistency.case.stages` says (its rule, levels and needs) is taken from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from consistency.case.load_path import LoadPath
from consistency.case.stages import LEVELS, SPECS, Level, Model, Stage
from consistency.cli.glossary.entry import Explanation, Family, GlossaryEntry, entry
from consistency.cli.glossary.entry import entries as entries_of
from consistency.numerics.rules import Rule

STAGE = Family(name="stage", title="stages: what is checked")
RULE = Family(name="rule", title="rules: how a row is judged")
LEVEL = Family(name="level", title="levels: how much is checked")
LOAD_PATH = Family(name="load path", title="load paths: how the adapter's bytes reach the device")

STAGES: Mapping[Stage, Explanation] = {
    Stage.TRANSFER: Explanation(
        summary="copies between devices, and between each and the host",
        meaning="Known bytes are copied over poison, contiguous, strided, with a cast, staged and under load, and read "
        "back twice: as a digest on the device and as bytes on the host.",
        cause="No model is needed: it checks drivers, links, IOMMU and memory.",
        action="A finding here comes first: everything above uses these copies. `consistency doctor` says what to fix.",
        example="transfer · npu:1 · copies npu:0→npu:1 deliver nothing: the destination is never written",
    ),
    Stage.OPERATORS: Explanation(
        summary="a fixed list of operations, each against its float64 value",
        meaning="Products, sums, norms, softmax, convolutions and others on inputs made by NumPy, each within a bound "
        "that follows the computation.",
        cause="No model is needed: it checks the libraries and kernels of a device.",
        action="Report a wrong operation to the library: `consistency reproduce` writes it as a script.",
        example="operators · cuda:1 · errors that exceed tolerance in float32 of matmul",
    ),
    Stage.BASE: Explanation(
        summary="every parameter and buffer of the base, against the bytes of its files",
        meaning="Digests on the device are compared with the file's; tables that are in no file are made again in "
        "float64. After the adapter is loaded, all digests are taken again.",
        cause="Loading with the Auto class that the config names, as a user would.",
        action="Wrong bytes here explain what later stages compute.",
        example="base · cuda:1 · single-bit flips in weight of model.layers.3.mlp.up_proj",
    ),
    Stage.ADAPTER: Explanation(
        summary="every tensor of the adapter, against the bytes of its file",
        meaning="Tensors, rank, scaling and active adapters after PeftModel.from_pretrained; then loaded again over "
        "poison, and on the alternative load paths.",
        cause="An adapter is given.",
        action="The load paths in the sentence say which way to the device is wrong.",
        example="adapter · npu:1, npu:3 · zeros where the file is nonzero in 28 of 28 lora_B tensors",
    ),
    Stage.MERGED: Explanation(
        summary="each merged weight and its delta, against their exact values",
        meaning="PEFT's own merge, into a copy, compared element by element with the float64 value computed from the "
        "files.",
        cause="An adapter is given that can be merged.",
        action="If base and adapter are right and this is not, the product or the merge is: see the word.",
        example="merged · cuda:1 · values off by one constant factor in 28 of 28 weight tensors",
    ),
    Stage.FORWARD: Explanation(
        summary="every block of the model on equal inputs, and the logits, with the adapter on, off and merged",
        meaning="A float64 pass on a text, or on random inputs where the base has no tokenizer, rounds what enters "
        "each block; every device computes the block on that, so that the module that is outside is the wrong one. The "
        "outputs from end to end are shown beside. Outputs of inference engines are judged here too.",
        cause="Level standard and above, or --engine-outputs.",
        action="Look at the first module that is outside: `consistency show DIR` names where workers diverge.",
        example="forward · cuda:0 · errors that exceed tolerance in adapter_on of model.layers.13.self_attn",
    ),
    Stage.GRADIENT: Explanation(
        summary="the gradients of what the adapter trains, and one step of AdamW",
        meaning="A backward pass by blocks: each on what a float64 pass gives to all, values and the gradients that "
        "come in from above. The gradient of what enters a block, and of each tensor of the adapter, is judged by what "
        "rounding makes, the optimizer's step by a bound.",
        cause="Level standard and above, with an adapter.",
        action="If stage forward is right, look at the backward kernels of the block that is outside.",
        example="gradient · cuda:0 · errors that exceed tolerance in lora_A.gradient of model.layers.0.mlp.up_proj",
    ),
    Stage.TRAJECTORY: Explanation(
        summary="some steps of training by each device alone, each judged by itself",
        meaning="The adapter is trained with the same data and seeds on every device. The gradients of each step are "
        "judged by blocks, at the parameters of an exact training; the optimizer's result from the gradients that the "
        "device computed. Loss, norm of the gradients and the adapter's distance from the exact training are shown "
        "beside those of trainings with rounding noise, and judge nothing.",
        cause="--steps, or --stages trajectory (20 steps).",
        action="The finding names step, layer and part: gradient or optimizer. Look there first; what "
        "follows from it in later steps is no fault of its own.",
        example="trajectory · cuda:1 · leaves the float64 trajectory at step 5, in the gradient of lora_B of "
        "model.layers.1.mlp.up_proj: 14× tolerance; loss 4.312 there, 4.301 in float64; steps 1 to 4 are within "
        "tolerance",
    ),
    Stage.ADAPTERS: Explanation(
        summary="several adapters in one model",
        meaning="Set, combined, merged, swapped and deleted; after each step every adapter has the bytes of its file, "
        "and gives the results that it gave alone.",
        cause="Several --adapter NAME=PATH.",
        action="The step is in the sentence; a step that PEFT refuses is skipped with its reason.",
        example="adapters · cpu · delete_adapter leaves 2 tensors of two in the model",
    ),
    Stage.MEMORY: Explanation(
        summary="use of other devices, placement of the adapter, and the peak of a merge",
        meaning="Allocations and contexts on devices that should be idle, the device of each tensor, and the most that "
        "merging a layer takes.",
        cause="Level standard and above.",
        action="Give torch_device= for use of another device; see `touched` and `third-copy`.",
        example="memory · npu:1 · loading the adapter allocated 256 KiB on npu:0 and released it",
    ),
    Stage.SHARDING: Explanation(
        summary="the model split over devices, against one device",
        meaning="Ids and labels are checked against all tables; what moves between shards is compared on both sides; "
        "logits and loss are compared with one device.",
        cause="Level thorough, or --device-map.",
        action="See findings of stage transfer first.",
        example="sharding · npu:0 · ids changed during transfer to device npu:1, into model.layers.14",
    ),
    Stage.COLLECTIVES: Explanation(
        summary="what devices send each other and add up as the ranks of one group",
        meaning="all_reduce, all_gather, reduce_scatter, broadcast, all_to_all and send/receive by torch.distributed, "
        "with NumPy's numbers in several dtypes and sizes. What is moved has to be the same bits, a sum is within the "
        "bound of any order, and all ranks have to hold the same bits. Each rank judges its own answer.",
        cause="--stages collectives, and two devices of one type side by side; without an accelerator, kernel variants "
        "of the CPU.",
        action="Try other sizes and other paths between the devices: with NCCL, NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1 "
        "and NCCL_NVLS_ENABLE=0, one at a time. Report what explains it to the library.",
        example="collectives · cuda:3 · one contiguous range of values that exceed tolerance in 18 of 530 tensors",
    ),
    Stage.REPLICAS: Explanation(
        summary="the adapter trained by DistributedDataParallel, each rank on its own batch",
        meaning="All ranks start with the bytes of the file. In each of three steps the gradient that an optimizer "
        "gets is the average of all ranks' gradients, within the bound of any order, and the parameter afterwards that "
        "of the optimizer's exact steps. How far replicas drift apart on unlike devices is a note.",
        cause="--stages replicas, and two devices of one type side by side.",
        action="The sentence names the rank and the tensor. See `unsynchronized` and `replica-drift`.",
        example="replicas · cuda:1 · the rank's own gradient in place of the average in 56 of 168 tensors",
    ),
    Stage.SHARDS: Explanation(
        summary="the adapter trained by FSDP2 (fully_shard), each rank holding a part of every tensor",
        meaning="Each rank holds its part of the files' bytes, and computes with the parts of all, put together. The "
        "first gradient, the optimizer's steps and the saved adapter are judged part by part. A second model gets its "
        "adapter after fully_shard: a note says whether the ranks then train one adapter, or each its own.",
        cause="--stages shards, and two devices of one type side by side.",
        action="The sentence names the rank whose part, or whose view of the others' parts, is wrong.",
        example="shards · cuda:1 · stale bytes that were already in memory in lora_B.gathered of 28 of 28 layers",
    ),
    Stage.TENSOR_PARALLEL: Explanation(
        summary="the model split by transformers' tensor parallel plan, with the adapter, against one device",
        meaning="Each rank holds its part of the files' bytes; the adapter's parts put together are the file. "
        "Blocks, logits and gradients are judged as those of one device are, by what rounding makes in them. Experts "
        "are split too where the model has a plan for them.",
        cause="--stages tensor-parallel, and as many devices of one type side by side as divide the attention heads.",
        action="The note says whether the difference from one device is healthy. Where a tensor is outside, compare "
        "with stage collectives, and with forward and gradient on one device.",
        example="tensor-parallel · cuda:0, cuda:1 · logits are at most 3.3e-07 off float64, and rounding makes up to "
        "1.6e-06 on one device: healthy",
    ),
    Stage.WRAPPING: Explanation(
        summary="a wrapper around the base, against the plain base",
        meaning="What PEFT and trainers ask a model for: attributes, keys, adapted layers, storages, dtypes, and the "
        "memory of a training step.",
        cause="--wrapper.",
        action="Let the wrapper pass on what is named.",
        example="wrapping · cpu · PEFT finds 0 of 28 adapted layers through the wrapper",
    ),
}

RULES: Mapping[Rule, Explanation] = {
    Rule.BITWISE: Explanation(
        summary="bytes were moved: they must be equal",
        meaning="No byte may differ from the file's, or from what was sent.",
        cause="Stages that move bytes: transfer, base, adapter.",
        action="No tolerance applies to it.",
        example="outside with 1 of 1048576 elements, bit 3 (mantissa)",
    ),
    Rule.BOUND: Explanation(
        summary="a bound per element, derived for the computation",
        meaning="For results with a closed form: each element may be off by what rounding in the dtype can make of it "
        "at most, and the worst error over that is the ratio.",
        cause="Operators, deltas and merged weights, the optimizer's step.",
        action="A ratio above 1 is no rounding. --tolerance replaces it.",
        example="merged · weight: within, 0.31× tolerance",
    ),
    Rule.RELATIVE: Explanation(
        summary="at most about twice the error that rounding makes in the same tensor",
        meaning="For results without a closed form: what rounding makes is measured in passes on the CPU with random "
        "rounding errors, and multiplied by a factor for luck, which is at least 2.",
        cause="Logits of engines, merges of methods without a closed form.",
        action="A ratio above 1 has, in healthy devices, a chance of one in 10⁹. --tolerance replaces it.",
        example="forward · engine vllm · logits: outside, 14.2× tolerance",
    ),
    Rule.BLOCK: Explanation(
        summary="the error of a block on equal inputs, in units of what rounding makes in each element",
        meaning="For what blocks compute, forward and backward: by rows, by elements, and along the exact values, as a "
        "wrong scale is. What rounding makes, and how much it varies, is measured in passes on the CPU with random "
        "rounding errors; the ratio is the largest of the three figures over its limit.",
        cause="Stages forward, gradient, trajectory, shards and tensor-parallel.",
        action="A ratio above 1 has, in healthy devices, a chance of one in 10⁹. The evidence has the ratio of each "
        "figure. --tolerance replaces it.",
        example="forward · model.layers.13.self_attn · adapter_on: outside, 14.2× tolerance",
    ),
    Rule.USER: Explanation(
        summary="a user's tolerance: |actual − exact| ≤ atol + rtol·|exact|",
        meaning="Judges a computed tensor in place of `bound`, `relative` or `block` where its pattern matches. The "
        "last match wins; the report lists what each judged.",
        cause="--tolerance, [[tolerance]] or --consistency-tolerance.",
        action="Prefer the derived rule; give a tolerance where you know what is acceptable.",
        example='--tolerance "stage=merged,layer=*.q_proj,atol=1e-3,rtol=1e-2"',
    ),
    Rule.PEER: Explanation(
        summary="no reference outside the devices: compared bitwise with the reference worker",
        meaning="Two devices that read the same file have to make the same bytes. Of computed values that differ, "
        "nothing is known: they are skipped.",
        cause="Tensors that loading computes, settings, tables that are in no file.",
        action="Add a device, if there is one worker alone.",
        example="base · cuda:0 · values recomputed on the device while the adapter was loaded",
    ),
    Rule.LIMIT: Explanation(
        summary="a fact about a device, a process or a wrapper, and its limit",
        meaning="Not a tensor: unexpected bytes on a device, the peak of a merge, ids beyond a vocabulary, a key that "
        "is missing. The worker that observes it judges it.",
        cause="Stages memory, sharding, wrapping, checks of several adapters, and what one rank of a group holds.",
        action="The sentence has what was seen and what is allowed.",
        example="memory · merge_peak: outside, 1.48× the limit",
    ),
}

LEVEL_TEXTS: Mapping[Level, Explanation] = {
    Level.QUICK: Explanation(
        summary="about a minute",
        meaning="One short sequence, and no alternative load paths.",
        cause="--level quick.",
        action="Use it before each start of a service, or in a test.",
        example="consistency run --level quick",
    ),
    Level.STANDARD: Explanation(
        summary="some minutes: the default",
        meaning="Two alternative load paths, safe_merge, and the adapter loaded again over poison.",
        cause="The default.",
        action="Use it after every update of hardware, driver or library.",
        example="consistency run --base ./llama --adapter ./my-lora",
    ),
    Level.THOROUGH: Explanation(
        summary="overnight: everything",
        meaning="All alternative load paths, a second run on each device, longer inputs, large copies, and the peak of "
        "every merge.",
        cause="--level thorough.",
        action="Use it for nightly runs, and to accept new hardware.",
        example="consistency run --level thorough --for 2h",
    ),
}

_MAIN = {
    LoadPath.ISOLATED: "one device is visible",
    LoadPath.SHARED: "all devices are visible",
}
_SIDES = {
    "cpu": ("torch_device='cpu'", "PEFT reads the file onto the CPU"),
    "target": ("torch_device=", "PEFT reads the file onto the model's device"),
    "transformers": ("transformers' load_adapter", "The loader is that of transformers"),
    "low-memory": ("low_cpu_mem_usage=True", "Parameters are made on the meta device first"),
}
_DEFAULT = ("PEFT's defaults", "PEFT reads the file onto device 0 of those, and copies from there")
_CAUSES = {
    LoadPath.ISOLATED: "The default; copies between devices cannot happen on it, and one that is broken does not show.",
    LoadPath.SHARED: "The default beside `isolated` where there are several accelerators: PEFT's loading goes through "
    "device 0.",
}
_ALTERNATIVE = "Level standard takes two alternatives, thorough all; --load-paths names them."


def _load_path(path: LoadPath) -> Explanation:
    """Return the explanation of a load path from those of its parts."""
    sides = [_SIDES[side] for side in path.side.split("+") if side] or [_DEFAULT]
    main = path.main
    options = ", ".join(option for option, _ in sides)
    between = f"paths with and without {options}" if path.side else "isolated and shared: a copy between devices"
    return Explanation(
        summary=f"{_MAIN[main]}; {options}",
        meaning=f"In the worker {_MAIN[main]}. {'. '.join(text for _, text in sides)}.",
        cause=_ALTERNATIVE if path.side else _CAUSES[main],
        action="Read which load paths are wrong and which are correct: what they do not share is the cause. Compare "
        f"{between}.",
        example=f"adapter · npu:1 · zeros where the file is nonzero in 28 of 28 lora_B tensors on load path {path}",
    )


def entries() -> tuple[GlossaryEntry, ...]:
    """Return an entry per stage, rule, level and load path."""
    return tuple(chain(_of_stages(), entries_of(RULE, RULES.items()), _of_levels(), _of_load_paths()))


def _of_stages() -> Iterator[GlossaryEntry]:
    """Yield an entry per stage; one whose code was deleted is none."""
    for stage, spec in SPECS.items():
        levels = ", ".join(spec.levels) or "none unless asked for"
        needs = "" if spec.model is Model.REQUIRED else "; it needs no model"
        text = STAGES[stage]
        meaning = f"{text.meaning} It {spec.kind.value}. Rule `{spec.rule}`; levels: {levels}{needs}."
        told = Explanation(meaning=meaning, cause=text.cause, action=text.action, example=text.example)
        yield entry(STAGE, stage.value, told, summary=text.summary)


def _of_levels() -> Iterator[GlossaryEntry]:
    """Yield an entry per level, with its stages and what it does not check."""
    for level, text in LEVEL_TEXTS.items():
        plan = LEVELS[level]
        left = f" Not checked: {', '.join(plan.not_checked)}." if plan.not_checked else ""
        meaning = f"{text.meaning} Stages: {', '.join(plan.stages)}.{left}"
        told = Explanation(meaning=meaning, cause=text.cause, action=text.action, example=text.example)
        yield entry(LEVEL, level.value, told, summary=text.summary)


def _of_load_paths() -> Iterator[GlossaryEntry]:
    return (entry(LOAD_PATH, path.value, _load_path(path)) for path in LoadPath)
