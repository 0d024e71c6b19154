"""The kinds of findings that are no word of a diagnosis; `consistency.comparison.kinds` lists them."""

from __future__ import annotations

from collections.abc import Mapping

from consistency.cli.glossary.entry import Explanation, Family, GlossaryEntry
from consistency.cli.glossary.entry import entries as entries_of
from consistency.comparison.kinds import FindingKind

FAMILY = Family(name="kind of finding", title="kinds of findings that are no word of a diagnosis")

EXPLANATIONS: Mapping[FindingKind, Explanation] = {
    FindingKind.LOST_WORKER: Explanation(
        summary="a worker's process was killed, ended, or gave no sign of life",
        meaning="The process of a worker did not end by itself with a result. What it recorded until then is compared; "
        "the rest is `blocked`, and the verdict is `incomplete`.",
        cause="The kernel's out-of-memory killer, a crash in a driver or library, memory of the device that ran out, a "
        "hang that --stall or --timeout ended.",
        action="The sentence has the signal and the last thing the worker did, the detail its stack: look into dmesg, "
        "give it more memory or time, or run that device alone.",
        example="worker cuda:1 was lost: killed by SIGKILL: out of memory, by the kernel; last event: merged",
    ),
    FindingKind.FAILED_WORKER: Explanation(
        summary="a worker ended with an error of its input, its disk or its device",
        meaning="A worker ended by itself and says why: what it was given cannot be used there. The verdict is "
        "`incomplete`.",
        cause="A device that torch cannot open or has no kernels for, another device than was listed, a full disk, a "
        "file that cannot be read on this host.",
        action="Do what the reason says; leave the device out with --devices if it cannot be used.",
        example="worker cuda:2 failed: cuda:2 cannot be used: its compute mode is prohibited: nvidia-smi -c 0 lets "
        "processes use it",
    ),
    FindingKind.FAILED_STAGE: Explanation(
        summary="a stage ended with an error of the model's code, of PEFT's or of its own",
        meaning="A stage raised and ended alone. What it had recorded is compared, the rest is `blocked`, and the "
        "other stages ran. The verdict is `incomplete`.",
        cause="Code of the model or of a library that fails on this device or with this adapter; a mistake of this "
        "tool.",
        action="The error and its place are in the sentence. Repeat that stage alone with --stages; if the model runs "
        "by itself, report it.",
        example="forward · not complete on cuda:0: RuntimeError: no such kernel (in forward, models/modeling.py:214)",
    ),
    FindingKind.NOTHING_COMPARED: Explanation(
        summary="nothing was compared, in all or for some captures or tensors",
        meaning="There was no tensor to compare: none at all, none that a capture has in common with the others, or "
        "only values that are NaN or infinite in float64 too. Agreement cannot be claimed: the verdict is "
        "`incomplete`.",
        cause="One worker without a file or an exact value; captures of different models or stages; a file or model "
        "full of NaN.",
        action="Choose other --stages, add a device, or capture again with the base, the adapter and the --stages of "
        "the others.",
        example="the 2 captures have no tensor in common: host-a:cpu (adapter, base), host-b:cpu (operators)",
    ),
    FindingKind.SKIPPED: Explanation(
        summary="a part of a stage was left out, with the reason",
        meaning="A note: rows of a stage are `skipped` on some workers. No verdict depends on it.",
        cause="A kernel or counter that the device does not have, a layer that PEFT does not merge, no float64 value, "
        "too little memory for another copy.",
        action="Nothing, unless the reason is something that should be there: a counter, a library, a stage's input.",
        example="memory · 3 checks skipped on npu:1: contexts cannot be observed on npu",
    ),
    FindingKind.UNEXPLAINED: Explanation(
        summary="a mismatch that no other finding names",
        meaning="Tensors are `outside`, `missing` or `unexpected`, and no rule made a finding of them. It exists so "
        "that no verdict is `consistent` over a mismatch.",
        cause="A mismatch of a form that the tool does not group: a capture of another version, or a mistake here.",
        action="Look at the tensors with `consistency show DIR --finding 1`, and report it.",
        example="merged · cuda:1 · 2 tensors with a mismatch of no known cause",
    ),
    FindingKind.ENVIRONMENT: Explanation(
        summary="software or the profile differs between workers",
        meaning="Workers have different versions of torch, CUDA, transformers, PEFT, NumPy or Python, or another "
        "profile. They are compared nevertheless, and this finding comes first, because it may explain the others. "
        "In a fleet, nodes with other software are left out, which is an error.",
        cause="Hosts, images or containers that were updated at different times.",
        action="Install the same versions everywhere (`consistency env` prints those of a host), then capture again.",
        example="torch differs between workers: 2.13.0: host-a:cpu; 2.12.1: host-b:cpu",
    ),
    FindingKind.INPUTS: Explanation(
        summary="workers had different inputs: outputs cannot be compared",
        meaning="The digests of the inputs differ between captures, so stages that run the model on inputs compare "
        "different questions.",
        cause="Captures with another --inputs file, --level or base, whose tokenizer, vocabulary and length the inputs "
        "follow, or versions of transformers whose tokenizers differ.",
        action="Give the same --inputs, --level and base to every capture.",
        example="forward · host-b:cpu had different inputs than host-a:cpu: outputs cannot be compared",
    ),
    FindingKind.SETTING_CHANGED: Explanation(
        summary="a setting of torch changed during a stage",
        meaning="After a stage, a setting was not as before. It was restored and the run went on. A warning where it "
        "had been requested, a note where the profile leaves it.",
        cause="Code of the model or of a library that sets flags: TF32, deterministic algorithms, threads.",
        action="Find who sets it: the stage is in the sentence. Your own runs have it set as well.",
        example="matmul_allow_tf32 changed to True during forward on cuda:0; False was requested",
    ),
    FindingKind.SETTING_REFUSED: Explanation(
        summary="a requested setting is not in force",
        meaning="A setting was asked for, by the profile, a variant or --set, and torch reports another value.",
        cause="A backend without that setting, or a build of torch that ignores it.",
        action="Choose a value that this backend has; results follow the setting that is in force.",
        example="float32_matmul_precision is highest on xpu:0; high was requested",
    ),
    FindingKind.TOLERANCE: Explanation(
        summary="what a user's tolerance judged, or that it judged nothing",
        meaning="A note per --tolerance: how many tensors it judged instead of the tool's own rule, that it matched "
        "none, or that captures were made with different ones.",
        cause="--tolerance, [[tolerance]] or --consistency-tolerance.",
        action="Check a pattern that matched nothing for a misspelling; leave out a tolerance that is not needed any "
        "more.",
        example="tolerance stage=merged,atol=0.001,rtol=0.01: 28 tensors judged by it instead of the tool's own rule",
    ),
    FindingKind.UNKNOWN_HOSTS: Explanation(
        summary="the file of --groups names none of the compared hosts",
        meaning="A note: the site's groups were not used, because no host of the comparison is in the file.",
        cause="Another spelling of host names (short against fully qualified), or the file of another cluster.",
        action="Use the names that the report prints.",
        example="--groups racks.csv names none of the compared hosts, such as node-7: it was not used",
    ),
    FindingKind.DAMAGED_CAPTURE: Explanation(
        summary="a capture, or a part of it, cannot be read",
        meaning="Files of a capture are missing, cut short or not as their seal says. What can be read is compared; "
        "the verdict is `incomplete`.",
        cause="A copy that was interrupted, a full disk, a file that was edited, another version of the format.",
        action="Copy or capture it again.",
        example="host-b: worker cpu: line 3 is damaged",
    ),
    FindingKind.UNWRITTEN: Explanation(
        summary="a part of the result cannot be written, or compared with a history",
        meaning="A warning: a file, or the entry in a history, could not be written, or earlier runs could not be "
        "read. No verdict depends on it.",
        cause="A full disk, missing permissions, a store that does not answer.",
        action="Free the space or repair the store, then run again or write the report anew with `consistency show`.",
        example="this run is not in the history: cannot write: is the disk full?",
    ),
    FindingKind.PLANTED: Explanation(
        summary="a fault was planted on purpose",
        meaning="A note in the report of a drill, so that it is not mistaken for one of a real fault.",
        cause="`consistency drill`.",
        action="Nothing: findings of this report describe the planted fault.",
        example="the fault adapter-zeros was planted in cpu@baseline on purpose",
    ),
    FindingKind.NOT_REPEATABLE: Explanation(
        summary="the same computation gave other bits on the same device",
        meaning="A repeat on one device, in one process, with the same bytes, differs bitwise: in a second run of a "
        "stage, or in a repeat of a soak. A note where an operation without a deterministic version ran before, or "
        "where the profile `deployed` promises no equal bits.",
        cause="A failing device or memory, often when hot; atomics and other operations whose order is free.",
        action="Repeat with `--for 1h --load`; if it comes back, read ECC counters and have the device tested. The "
        "soak's detail has temperature and clocks.",
        example="merged · cuda:1 · weight of model.layers.3.mlp.up_proj changed in 1 of 412 repeats, right again "
        "afterwards",
    ),
    FindingKind.SAME_DEVICE_TYPE: Explanation(
        summary="devices of one model with the same program differ bitwise",
        meaning="Devices of one model, with the same software, settings and bytes, run one program and are expected to "
        "agree bit for bit. Where a majority agrees, the others are named, with what they have in common.",
        cause="A failing device; a driver, firmware or clock setting that only some have.",
        action="Swap or test the devices that are named. Where all differ, look for an unordered operation.",
        example="merged · gpu-07:cuda:3 differs bitwise in 2 tensors from 31 others of the same device type with the "
        "same software, which agree; it has driver 580.65, and no other has",
    ),
    FindingKind.WRONG_DIGEST: Explanation(
        summary="a device gets the test words of the digest wrong",
        meaning="Integer arithmetic on the device, or copying its result, gave wrong digests of known words. Its "
        "tensors were copied to the host and digested there.",
        cause="A failing device, or a compiler or driver that miscompiles integer arithmetic.",
        action="Test its integer arithmetic and its copies with the vendor's own tool.",
        example="cuda:1 · digests computed on the device are wrong: the device's sums are wrong in 3 of 8 test rows; "
        "tensors were copied to the host and digested there",
    ),
    FindingKind.MEMORY_GROWTH: Explanation(
        summary="memory grew over the repeats of a soak",
        meaning="The memory of the worker's process and of its accelerator together grew in every quarter of a soak, "
        "and altogether by more than is allowed.",
        cause="A leak: tensors that are kept, a cache without an end, handles of a library.",
        action="Repeat with a longer --for: a leak goes on growing. Look for what a forward pass keeps.",
        example="soak · cuda:0 · memory grew by 48 MiB over 900 repeats: 2.10 GiB, 2.12 GiB, 2.13 GiB and 2.15 GiB; "
        "16 MiB are allowed",
    ),
    FindingKind.REPLICA_DRIFT: Explanation(
        summary="replicas on unlike devices drift apart",
        meaning="All ranks got the same bits of each averaged gradient, and their optimizers rounded differently. The "
        "figure is the distance over twice the bound of the optimizer's steps: up to 1 it is rounding.",
        cause="Devices of several types, or kernel variants, in one group: each rank runs its own optimizer.",
        action="Nothing, for a short training. Broadcast the parameters now and then, or shard them: a part that is "
        "updated once is the same everywhere.",
        example="replicas · cpu@baseline · 56 of 56 tensors of the adapter differ after 3 steps, by at most 0.16 of "
        "what the optimizer may round",
    ),
    FindingKind.HEALTHY_SPLIT: Explanation(
        summary="a model in parts differs from one device by no more than rounding",
        meaning="The logits of a tensor parallel model against float64, and what rounding makes on one device.",
        cause="Sums over parts are added in another order.",
        action="Nothing.",
        example="tensor-parallel · cuda:0, cuda:1 · logits are at most 3.3e-07 off float64, and rounding makes up to "
        "1.6e-06 on one device: healthy",
    ),
    FindingKind.LEFT_TRAJECTORY: Explanation(
        summary="the first step, layer and part at which a device's training goes wrong",
        meaning="A device made gradients, or a parameter after the optimizer's step, that rounding does not explain, "
        "judged at the parameters of an exact training, or from its own gradients. The steps before it are within "
        "tolerance.",
        cause="A kernel that is wrong for some values or sizes, an optimizer whose state is lost or changed, memory "
        "that was overwritten in between.",
        action="Repeat it with --steps of that number. In a gradient look at that block's operations, "
        "forward and backward, after the optimizer's step at its state; the page has both curves.",
        example="trajectory · cuda:1 · leaves the float64 trajectory at step 5, in the gradient of lora_B of "
        "model.layers.1.mlp.up_proj: 14× tolerance; loss 4.312 there, 4.301 in float64; steps 1 to 4 are within "
        "tolerance",
    ),
    FindingKind.KEPT_TRAJECTORY: Explanation(
        summary="how far trainings are from one in float64 in which every step was right",
        meaning="A note: every step of these devices is what rounding makes, how far their adapters are from the "
        "float64 training after the last one, and how far trainings with rounding noise alone are.",
        cause="--steps, or --stages trajectory.",
        action="Nothing. If a device learns and another does not, and both are in this note, the device is not why: "
        "compare data, seeds and settings.",
        example="trajectory · cuda:0, cpu · 20 steps: every step is what rounding makes; after the last one the "
        "adapter is 0.00012 from the float64 trajectory (noise alone: 8e-05 to 0.00016), loss 3.21 against 3.21",
    ),
    FindingKind.NO_EFFECT: Explanation(
        summary="the adapter changes nothing",
        meaning="A warning: no layer is adapted, the scaling or the weights are zero, every delta is zero, or all "
        "outputs are bitwise equal with the adapter and without it.",
        cause="An adapter that was never trained (lora_B starts at zero), target_modules that match nothing, a file "
        "that lost its weights.",
        action="Check that this is the trained adapter: a new one changes nothing with most methods.",
        example="adapter · cpu, cuda:0 · the adapter changes nothing: 28 of 28 lora_B are zero",
    ),
    FindingKind.OTHER_BASE: Explanation(
        summary="adapter_config.json names another base",
        meaning="A note: base_model_name_or_path is not the name of this base, nor what its config says. That shapes "
        "fit is no proof.",
        cause="An adapter for another base, or a folder that was renamed.",
        action="Check which base it was trained on.",
        example="adapter · adapter_config.json names another base: Llama-3.1-8B, this one is Llama-3-8B; that the "
        "shapes fit is no proof",
    ),
    FindingKind.IGNORED_FIELDS: Explanation(
        summary="adapter_config.json has fields that the installed PEFT does not know",
        meaning="A warning: PEFT drops what it does not know, so the adapter may compute something else than where it "
        "was trained.",
        cause="An adapter that a newer PEFT saved.",
        action="Load it with the PEFT that saved it, or a later one: peft_version in adapter_config.json.",
        example="adapter · PEFT ignores what it does not know of adapter_config.json: use_new_variant",
    ),
    FindingKind.NON_FINITE_VALUES: Explanation(
        summary="a file, or an exact result, holds NaN or infinities beside numbers",
        meaning="Values are NaN or infinite in a file (a warning), or in a part of a float64 result (a note). The "
        "other values were compared; equal NaN are no agreement of numbers.",
        cause="A training run whose loss was not finite; an output that rules words out by −∞, which is right.",
        action="Save the adapter again from a run whose loss is finite: PEFT merges no such layer with "
        "safe_merge=True.",
        example="values are NaN or infinite in the adapter's file: 2 of 1024 values of lora_A of "
        "model.layers.0.self_attn.q_proj",
    ),
    FindingKind.DTYPE_ON_THE_WAY: Explanation(
        summary="a load path casts the adapter, or stores it in another dtype",
        meaning="On an alternative load path the values went through another dtype, or are stored in one. On every "
        "device: a note on the load path. On some devices only: an error.",
        cause="PEFT with low_cpu_mem_usage=True casts to the base's dtype while loading.",
        action="Use the default path, or save the adapter in the dtype that it is used in.",
        example="adapter · cpu, cuda:0 · the file's values rounded through bfloat16 in 28 tensors with "
        "low_cpu_mem_usage=True (isolated+low-memory), on every device: PEFT casts them to the dtype of the base while "
        "loading",
    ),
    FindingKind.REQUANTIZED: Explanation(
        summary="what merging into a quantized base costs",
        meaning="A note: PEFT merges by dequantizing, adding and quantizing again. The error is given in steps, the "
        "distance of two neighbouring levels, and beside the size of what the adapter adds.",
        cause="A merge into a 4-bit or 8-bit base.",
        action="To keep all of the adapter, leave it unmerged, or merge it into the base that was not quantized.",
        example="merged · cpu · merging quantizes 14 weights again: error at most 0.50 steps, RMS 0.29 steps; that is "
        "1.1 to 2.4 times the RMS of what the adapter adds",
    ),
    FindingKind.REPACKED_WEIGHTS: Explanation(
        summary="a forward pass rewrites quantized weights, which are then read wrongly",
        meaning="After a pass, the library holds the weights in another form and dequantizes other values from it. "
        "Here every stage starts from the weights as they were loaded.",
        cause="bitsandbytes repacks 4-bit weights on some CPUs at the first pass in eval mode.",
        action="Merge, save and train before the first pass in eval mode, or load the model again for it.",
        example="base · cpu · a forward pass rewrites quantized weights, and the library then dequantizes other values",
    ),
    FindingKind.BATCH_VARIANT: Explanation(
        summary="an inference engine's answer depends on the batch",
        meaning="A row alone and the same row in a batch give other bits: a note within the rule, an error where it is "
        "outside or where the engine promises batch invariance.",
        cause="Kernels that are chosen by the batch size; in an error, padding or positions that leak into other rows.",
        action="Switch the engine's batch invariance on, if it has one; an error is a bug to report.",
        example="forward · vllm · row 0 has other bits in 3 of 6 batches than alone, by at most 1.4e-06, which the "
        "rule allows; the engine promises no batch invariance",
    ),
    FindingKind.PART_COMPARED: Explanation(
        summary="the file of an inference engine has a part of the outputs",
        meaning="A note: only some places, or only the largest values of each place, were compared, because the file "
        "has no others.",
        cause="An engine that returns log-probabilities of the top tokens, or of the last place, alone.",
        action="Nothing, or let the engine write all logits if it can.",
        example="forward · vllm · compared in the 20 largest of 512 values of each place: the engine's file has no "
        "others",
    ),
    FindingKind.NO_ACCELERATOR: Explanation(
        summary="torch is built for accelerators and finds none",
        meaning="A warning: devices `auto` became the CPU alone, and no card for this build was seen on the host.",
        cause="A driver that is missing or too old; a container without its devices; a host without such cards.",
        action="Install or repair the driver; if no accelerator is meant, hide them in the environment "
        "(CUDA_VISIBLE_DEVICES= for CUDA).",
        example="node-7: torch is built for CUDA and finds no device (NVML: driver not loaded): the CPU alone was "
        "checked",
    ),
    FindingKind.UNUSED_CARD: Explanation(
        summary="torch finds no device on a host that has such cards",
        meaning="As `no-accelerator`, but the PCI bus shows cards that this build of torch could use.",
        cause="A driver that is gone after an update, a card that fell off the bus, a container that was not given "
        "its devices.",
        action="Install or repair the driver; a container has to be given its devices.",
        example="node-7: torch is built for CUDA and finds no device, although there are 8 cards for it: the CPU alone "
        "was checked",
    ),
    FindingKind.KERNEL_LOG: Explanation(
        summary="the kernel logged device errors during the run",
        meaning="A warning: lines on Xid, page faults or bus errors appeared in the kernel's log between begin and end "
        "of the run. They are in the detail.",
        cause="Bus errors, page faults of a device, a reset, a card that fell off the bus.",
        action="Look the lines up; Xid numbers are in NVIDIA's documentation. Repeat the run and see whether they "
        "return.",
        example="node-7: the kernel logged Xid, page faults or bus errors during the run",
    ),
    FindingKind.ECC: Explanation(
        summary="memory error counters of a device rose during the run",
        meaning="ECC or row-remapping counters rose. Uncorrected errors and failed remappings are an error, because "
        "data was lost; corrected ones are a warning.",
        cause="Failing memory of the device.",
        action="Test the device with its vendor's tool, and replace it when uncorrected errors return.",
        example="node-7: cuda:3 (GPU-…): counters rose during the run: ecc corrected, since boot from 0 to 14",
    ),
    FindingKind.BUS_ERRORS: Explanation(
        summary="bus error counters of a device rose during the run",
        meaning="Replay or link error counters rose: transfers had to be repeated.",
        cause="A bad riser, cable or slot, a card that is not seated, too long a link for its speed.",
        action="Reseat the card, check its riser, and compare its link width and speed with the others'.",
        example="node-7: cuda:3 (0000:3b:00.0): counters rose during the run: pcie replays from 2 to 31",
    ),
    FindingKind.REBOOTED: Explanation(
        summary="a host was rebooted between two captures",
        meaning="A note: captures of one host have different boot ids, so a difference between them may be one that a "
        "reboot cured.",
        cause="A reboot between the captures.",
        action="Keep both captures: the older one is the evidence.",
        example="node-7 was rebooted between these captures: a reboot may have fixed what differs",
    ),
    FindingKind.DRIFT: Explanation(
        summary="a device's bits differ from those of an earlier run, inputs and software being equal",
        meaning="A device is compared with its latest run without a drift. A difference in any bit is an error even "
        "within tolerance, and stays one until the device is fixed or the finding accepted. With the profile "
        "`deployed` it is a note.",
        cause="A failing device; a change that no version shows, such as firmware, clocks or a BIOS setting.",
        action="Run again: a device whose results change between runs is failing. If the change is known, "
        "`consistency baseline accept`.",
        example="drift · cuda:3 · 2 of 84 merged tensors differ bitwise from the run of 2026-11-21 02:00:00 UTC: same "
        "inputs, same software",
    ),
    FindingKind.GONE_DEVICE: Explanation(
        summary="a host no longer has an accelerator that an earlier run had",
        meaning="With --devices auto, a host shows fewer accelerators than in its earlier run, and none in their "
        "place. Until it is accepted, the verdict is `incomplete`.",
        cause="A card that fell off the bus, a driver that does not list it, a card that was removed.",
        action="Check it, its driver and the kernel's log; where it was removed on purpose, `consistency baseline "
        "accept`.",
        example="node-7 no longer has cuda:3 (GPU-…), which the run of 2026-11-21 02:00:00 UTC had: not checked",
    ),
    FindingKind.SOFTWARE: Explanation(
        summary="software or settings changed since the previous run, so bits are not compared",
        meaning="A note of a history: other versions may give other bits, so this run is compared with none before "
        "it. The next ones are compared with this.",
        cause="An update, another driver, another setting.",
        action="Nothing, if the update was meant.",
        example="cpu, cuda:0: software or settings changed since the previous run (torch 2.12.1 -> 2.13.0); bits not "
        "compared",
    ),
    FindingKind.DAMAGED_RUN: Explanation(
        summary="a run in the history cannot be read",
        meaning="A warning: one record of the history is damaged and left out; the others count.",
        cause="A run that was interrupted while it was written, a damaged disk.",
        action="Remove the file that is named, if it cannot be restored.",
        example="history: 20261121T020000-1f2e3d4c.json cannot be read: left out",
    ),
    FindingKind.STALE_BASELINE: Explanation(
        summary="an accepted finding no longer occurs",
        meaning="A note: the baseline accepts a finding that this run of the same devices and stages does not have.",
        cause="What was accepted is fixed.",
        action="Take the entry out of the baseline, so that the fault fails again if it returns.",
        example="accepted on 2026-10-02 (card swapped, ticket 4711), and not found in this run: adapter · cuda:1 · "
        "zeros in 3 of 3 lora_B tensors",
    ),
    FindingKind.LOST_NODE: Explanation(
        summary="nodes of a fleet have no capture that can be compared",
        meaning="An error per reason: these nodes were down, died, fell silent or delivered something unreadable. All "
        "others are compared; the verdict is `incomplete`.",
        cause="A node that is down or drained, a task that was killed or never began, a full disk, a store that does "
        "not answer.",
        action="The reason is in the sentence. Run `consistency fleet` again for these nodes with --nodes.",
        example="n3, n4 · not compared: its capture cannot be read: line 3 is damaged",
    ),
    FindingKind.UNCHECKED: Explanation(
        summary="a case of a suite could not be checked",
        meaning="The input of a case cannot be used, so it has no verdict of its own; the other cases ran.",
        cause="A folder that is missing, an adapter that does not fit the base, a case that does not fit the memory.",
        action="Do what the error says, and run the case alone with --case NAME.",
        example="case unusable · could not be checked: no such folder for the adapter",
    ),
    FindingKind.SETTINGS: Explanation(
        summary="adapter_config.json or config.json of two folders differ",
        meaning="Of `consistency diff`: a setting that changes values is an error, because equal weights with another "
        "lora_alpha are another adapter. Names and versions are notes.",
        cause="Another training run, an edited config, a file that only one side has.",
        action="Decide which one is right: both values are in the sentence.",
        example="adapter_config.json of b differs: lora_alpha is 32, was 16",
    ),
    FindingKind.ROUNDED: Explanation(
        summary="whether tensors of another dtype are the other file's, rounded",
        meaning="A note of `consistency diff` on tensors whose dtypes differ: how many are exactly the other file's "
        "values rounded to nearest, or that none is.",
        cause="A file that was saved in another dtype.",
        action="If they are, the files hold the same weights in two dtypes. If not, the weights differ.",
        example="28 of 28 tensors of another dtype in b are exactly a's, rounded to nearest",
    ),
    FindingKind.NAMES: Explanation(
        summary="no name is common, and names differ by a prefix",
        meaning="A note of `consistency diff`: every tensor is missing or without a counterpart, because the names on "
        "one side begin with more components.",
        cause="A file saved from a wrapper or from a PeftModel (`base_model.model.`).",
        action="Rename the tensors, and compare again.",
        example="no name is common: only the names in b begin with 'base_model.model.'",
    ),
}


def entries() -> tuple[GlossaryEntry, ...]:
    """Return an entry per kind."""
    return entries_of(FAMILY, EXPLANATIONS.items())
