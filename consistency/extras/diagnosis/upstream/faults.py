"""The known faults of other libraries: the one table that findings, `consistency explain` and docs/upstream.md read.

Each is settled by a script in docs/upstream/, which needs that library and what it imports. A version outside of those
that the script was run with does not match: nobody knows whether it has the fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from consistency.extras.diagnosis.upstream.fault import Sign, UpstreamFault

_LOADING = "upstream-peft"
_METHODS = "upstream-peft-methods"
_OTHERS = "upstream"

_PEFT = ("0.18.0", "0.21.2")
_TRANSFORMERS = ("5.0.0", "5.23.0")

FAULTS: Sequence[UpstreamFault] = (
    UpstreamFault(
        title="PEFT loads through device 0",
        page=_LOADING,
        library="peft",
        outcome="true",
        helps="Give PeftModel.from_pretrained the device of the model: `torch_device=`",
        seen=("0.21.2", "0.21.2"),
    ),
    UpstreamFault(
        title="`low_cpu_mem_usage=True` rounds a float32 adapter",
        page=_LOADING,
        library="peft",
        outcome="true",
        helps="Load the adapter without `low_cpu_mem_usage=True`",
        seen=_PEFT,
        sign=Sign(stage="adapter", kinds=("dtype-on-the-way",), load_path="low-memory"),
    ),
    UpstreamFault(
        title="transformers drops DoRA's magnitudes",
        page=_OTHERS,
        library="transformers",
        outcome="found by the load paths",
        helps="Load the adapter with PeftModel.from_pretrained",
        seen=_TRANSFORMERS,
        sign=Sign(
            stage="adapter",
            kinds=("never-written",),
            tensor=r"\.lora_magnitude_vector$",
            load_path="transformers",
        ),
    ),
    UpstreamFault(
        title="Hotswap ignores `alpha_pattern` and `rank_pattern`",
        page=_LOADING,
        library="peft",
        outcome="found by the stage `adapters`",
        helps="Load such an adapter anew, and do not swap it in",
        seen=_PEFT,
        sign=Sign(stage="adapters", kinds=("skipped",), tensor=r"^hotswap", message="another scaling than .* has"),
    ),
    UpstreamFault(
        title="Hotswap clears other adapters",
        page=_LOADING,
        library="peft",
        outcome="found by the stage `adapters`",
        helps="Name the adapters so that the name of none is a part of another's",
        seen=_PEFT,
        sign=Sign(stage="adapters", kinds=("bytes-changed",), tensor=r"^hotswap\(.* over .*\)\.bytes of "),
    ),
    UpstreamFault(
        title="`add_weighted_adapter` scales rank-stabilized LoRA twice",
        page=_LOADING,
        library="peft",
        outcome="found by the stage `adapters`",
        helps="Set `use_rslora` of the combination's config to False, and the scaling of its layers to 1",
        seen=_PEFT,
        sign=Sign(
            stage="adapters",
            kinds=("skipped",),
            tensor=r"^add_weighted_adapter\(\w+\)\.scaling$",
            message="although its factors contain it",
        ),
    ),
    UpstreamFault(
        title="AdaLoRA with pruned ranks loads once",
        page=_LOADING,
        library="peft",
        outcome="true",
        helps="Load the adapter onto a base that has not had it",
        seen=_PEFT,
        sign=Sign(
            stage="adapter", kinds=("skipped",), message="IndexError: The shape of the mask", methods=("ADALORA",)
        ),
    ),
    UpstreamFault(
        title="A prompt on a model that does not generate is not disabled",
        page=_METHODS,
        library="peft",
        outcome="true",
        helps="Use the base without PEFT for results without the prompt",
        seen=_PEFT,
        sign=Sign(
            stage="forward",
            kinds=("skipped",),
            message="UnboundLocalError: .*'old_prepare_inputs_for_generation'",
            methods=("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
        ),
    ),
    UpstreamFault(
        title="X-LoRA is saved without its classifier",
        page=_LOADING,
        library="peft",
        outcome="true",
        helps="Save `internal_xlora_classifier` of the model with safetensors, and load it by hand",
        seen=("0.20.0", "0.21.2"),
        sign=Sign(stage="adapter", kinds=("no-effect",), methods=("XLORA",)),
    ),
    UpstreamFault(
        title="FRoD forgets the projection that it saved",
        page=_LOADING,
        library="peft",
        outcome="found by the stage `adapter`",
        helps="Merge the adapter on the machine that trained it, or compute `frod_U` from the file's V after loading",
        seen=("0.20.0", "0.21.2"),
        sign=Sign(stage="adapter", kinds=("recomputed",), tensor=r"\.frod_U$", methods=("FROD",)),
    ),
    UpstreamFault(
        title="Poly without a task type gets no tasks",
        page=_METHODS,
        library="peft",
        outcome="true",
        helps="Set `task_type` in the adapter's config",
        seen=_PEFT,
        sign=Sign(stage="forward", kinds=("skipped",), message="task_ids should not be None", methods=("POLY",)),
    ),
    UpstreamFault(
        title="`MultiheadAttention` gets the delta of `out_proj` twice",
        page=_METHODS,
        library="peft",
        outcome="true",
        helps="Adapt the attention as a whole, and not `out_proj` inside of it",
        seen=_PEFT,
        issue="peft#3774",
    ),
    UpstreamFault(
        title="LoKr on `Conv1d` is no Kronecker product of its channels",
        page=_METHODS,
        library="peft",
        outcome="true",
        helps="Use such an adapter with PEFT alone",
        seen=_PEFT,
    ),
    UpstreamFault(
        title="Arrow routes by vectors that each device draws",
        page=_LOADING,
        library="peft",
        outcome="true",
        helps="Compute the vectors once, and give them to every device",
        seen=_PEFT,
    ),
    UpstreamFault(
        title="A merge into a parametrized weight is lost",
        page=_METHODS,
        library="peft",
        outcome="found by the stage `merged`",
        helps="Remove the parametrization with torch.nn.utils.parametrize.remove_parametrizations before the merge",
        seen=_PEFT,
        sign=Sign(stage="merged", kinds=("zeros",), tensor=r"\.pos_conv_embed\.conv\.weight"),
    ),
    UpstreamFault(
        title="LoRA on rows of a tensor parallel plan",
        page=_LOADING,
        library="peft",
        outcome="found by the stage `tensor-parallel`",
        helps="Adapt no layer that the plan splits by rows (`o_proj`, `down_proj`), or train without the plan",
        seen=("0.21.2", "0.21.2"),
        sign=Sign(stage="tensor-parallel", kinds=("skipped",), message="is invalid for input of size"),
    ),
    UpstreamFault(
        title="A forward pass rewrites 4-bit weights",
        page=_OTHERS,
        library="bitsandbytes",
        outcome="found by the stage `base`",
        helps="Load the base anew before merging, saving or training on a CPU",
        seen=("0.50.2", "0.50.2"),
        sign=Sign(stage="base", kinds=("repacked-weights",)),
    ),
    UpstreamFault(
        title="Lily mixes the sequences of a batch",
        page=_METHODS,
        library="peft",
        outcome="found by the stage `generation`",
        helps="Give sequences one at a time, and generate with `use_cache=False`",
        seen=("0.19.1", "0.21.2"),
        sign=Sign(
            stage="generation",
            kinds=("batch-changes-the-model", "cache-changes-the-model", "padding-changes-the-model"),
            methods=("LILY",),
        ),
    ),
    UpstreamFault(
        title="RWKV adds up the states of a batch",
        page=_OTHERS,
        library="transformers",
        outcome="found by the stage `generation`",
        helps="Generate for one sequence at a time",
        seen=_TRANSFORMERS,
        sign=Sign(stage="generation", kinds=("cache-changes-the-model",), model_class="Rwkv"),
    ),
    UpstreamFault(
        title="A prompt stands before the padding",
        page=_METHODS,
        library="peft",
        outcome="true",
        helps="Give sequences of one length, so that there is no padding",
        seen=_PEFT,
        issue="peft#1093",
        sign=Sign(stage="generation", kinds=("padding-changes-the-model",), methods=("PROMPT_TUNING", "P_TUNING")),
    ),
    UpstreamFault(
        title="A prompt loses the cache",
        page=_METHODS,
        library="transformers",
        outcome="found by the stage `generation`",
        helps="Generate with `use_cache=False`, or install transformers 5.23",
        seen=("5.24.0", "5.24.0"),
        sign=Sign(
            stage="generation",
            kinds=("cache-changes-the-model", "other-token"),
            methods=("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
        ),
    ),
    UpstreamFault(
        title="LongT5's mask is infinite in float16",
        page=_OTHERS,
        library="transformers",
        outcome="true, but blamed on the padding by the device",
        helps="Use bfloat16",
        seen=_TRANSFORMERS,
        sign=Sign(stage="generation", kinds=("non-finite",), tensor=r"\.padded$", model_class="LongT5"),
    ),
    UpstreamFault(
        title="A merge of MiSS rounds the weight",
        page=_METHODS,
        library="peft",
        outcome="true",
        helps="Load the adapter in float32, which is PEFT's default, before the merge",
        seen=_PEFT,
    ),
    UpstreamFault(
        title="torchtune saves DoRA's magnitudes in another order",
        page=_OTHERS,
        library="torchtune",
        outcome="found by check-merged",
        helps="Put the magnitudes of `q_proj` and `k_proj` into the order of the rows of their `lora_B`",
        seen=("0.6.1", "0.6.1"),
    ),
    UpstreamFault(
        title="A group that DistributedDataParallel still holds",
        page=_OTHERS,
        library="torch",
        outcome="found by running our own example a hundred times",
        helps="Delete the wrapped model before `destroy_process_group`",
        seen=("2.13.0", "2.13.0"),
    ),
    UpstreamFault(
        title="`set_adapter` changes the base's results",
        page=_OTHERS,
        library="torch",
        outcome="a false alarm of the stage `adapters`",
        helps="Give `set_adapter` the argument `inference_mode=True`",
        seen=("2.13.0", "2.13.0"),
    ),
)
