"""Every planted fault, one row each; those of extras are beside what they break.

Drill, tests and documents read these rows. No torch here: a fault's module is imported when it is planted.
"""

from __future__ import annotations

from consistency import plugins
from consistency.case.load_path import LoadPath
from consistency.case.stages import Stage
from consistency.worker.faults.fault import Fault, Need

MIXTURE = "python:consistency.worker.faults.routing:mixture"

_ADAPTER, _MERGED, _MEMORY = (Stage.ADAPTER,), (Stage.MERGED,), (Stage.MEMORY,)
_TRANSFER, _OPERATORS, _GRADIENT = (Stage.TRANSFER,), (Stage.OPERATORS,), (Stage.GRADIENT,)
_ADAPTERS, _COLLECTIVES = (Stage.ADAPTERS,), (Stage.COLLECTIVES,)
_REPLICAS, _SHARDS, _TENSOR_PARALLEL = (Stage.REPLICAS,), (Stage.SHARDS,), (Stage.TENSOR_PARALLEL,)
_TRAJECTORY, _GENERATION = (Stage.TRAJECTORY,), (Stage.GENERATION,)
_BASE, _FORWARD, _SHARDING = (Stage.BASE,), (Stage.FORWARD,), (Stage.SHARDING,)

_ROWS: tuple[Fault, ...] = (
    Fault(name="adapter-zeros", plant="adapter:zeros", expected="zeros", stages=_ADAPTER, case="C1"),
    Fault(
        name="adapter-missing-key", plant="adapter:missing_key", expected="zeros", stages=_ADAPTER, case="C1",
        needs=(Need.ZERO_LORA_B,),
    ),
    Fault(name="adapter-half-a-page", plant="adapter:half_a_page", expected="block", stages=_ADAPTER, case="C1"),
    Fault(
        name="adapter-other-tensor", plant="adapter:other_tensor", expected="swapped", stages=_ADAPTER, case="C1",
        needs=(Need.TWO_OF_A_SHAPE,),
    ),
    Fault(
        name="adapter-layers-swapped", plant="adapter:two_layers", expected="swapped", stages=_ADAPTER, case="C1",
        needs=(Need.TWO_OF_A_SHAPE,),
    ),
    Fault(
        name="adapter-copy-dropped", plant="adapter:no_a", expected="fresh-init", stages=_ADAPTER, case="C1",
        needs=(Need.LORA_A,),
    ),
    Fault(
        name="adapter-copy-dropped-later", plant="adapter:no_a_later", expected="never-written", stages=_ADAPTER,
        case="C1",
        needs=(Need.LORA_A,),
    ),
    Fault(
        name="adapter-old-bytes", plant="adapter:old_bytes", expected="stale", stages=_ADAPTER, case="C1",
        needs=(Need.FLOAT32_ADAPTER, Need.FLOAT32_MODEL),
    ),
    Fault(
        name="load-path-copies-dropped", plant="load_paths:no_b", expected="zeros", stages=_ADAPTER, case="C1",
        words="correct with torch_device=cpu: copies through the device",
        load_paths=(LoadPath.ISOLATED, LoadPath.ISOLATED_CPU, LoadPath.ISOLATED_LOW_MEMORY),
        needs=(Need.ZERO_LORA_B,),
    ),
    Fault(
        name="load-path-low-memory-rounds", plant="load_paths:through_bfloat16", expected="rounded-to-bf16",
        stages=_ADAPTER, case="C1",
        words="with low_cpu_mem_usage=True, and correct without: a dtype conversion while loading",
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(
        name="load-path-transformers-zeros", plant="load_paths:zeros", expected="zeros", stages=_ADAPTER, case="C1",
        words="transformers' loader", load_paths=(LoadPath.ISOLATED, LoadPath.ISOLATED_TRANSFORMERS),
        needs=(Need.LORA_B, Need.WEIGHT_FILE),
    ),
    Fault(name="adapter-bit-flip", plant="adapter:one_bit", expected="bit-flip", stages=_ADAPTER),
    Fault(
        name="adapter-bit-flip-in-a", plant="adapter:one_bit_of_a", expected="bit-flip", stages=_ADAPTER,
        needs=(Need.LORA_A,),
    ),
    Fault(
        name="adapter-through-bfloat16", plant="adapter:through_bfloat16", expected="rounded-to-bf16",
        stages=_ADAPTER, case="C1",
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(
        name="adapter-through-float16", plant="adapter:through_float16", expected="rounded-to-fp16", stages=_ADAPTER,
        case="C1",
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(
        name="adapter-through-tf32", plant="adapter:through_tf32", expected="rounded-to-tf32", stages=_ADAPTER,
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(name="adapter-nan", plant="adapter:not_a_number", expected="non-finite", stages=_ADAPTER),
    Fault(
        name="adapter-inactive", plant="adapter:inactive", expected="inactive", stages=_ADAPTER,
        needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="adapter-wrong-scaling", plant="adapter:double_scaling", expected="settings", stages=_ADAPTER,
        needs=(Need.LORA_B, Need.ANOTHER_WORKER),
    ),
    Fault(name="transfer-dropped", plant="transfer:dropped", expected="never-written", stages=_TRANSFER, case="C1"),
    Fault(name="transfer-zeros", plant="transfer:zeros", expected="zeros", stages=_TRANSFER, case="C1"),
    Fault(name="transfer-corrupt", plant="transfer:corrupt", expected="bit-flip", stages=_TRANSFER, case="C1"),
    Fault(
        name="transfer-stale-beside-work", plant="transfer:stale_under_load", expected="stale", stages=_TRANSFER,
        case="C1", words="only under load",
    ),
    Fault(name="base-bit-flip", plant="base:one_bit", expected="bit-flip", stages=_BASE, needs=(Need.WEIGHT_FILE,)),
    Fault(
        name="base-through-bfloat16", plant="base:through_bfloat16", expected="rounded-to-bf16", stages=_BASE,
        needs=(Need.WEIGHT_FILE, Need.FLOAT32_FILE, Need.FLOAT32_MODEL),
    ),
    Fault(
        name="quantized-bit-flip", plant="base:one_bit_of_a_code", expected="bit-flip", stages=_BASE,
        needs=(Need.WEIGHT_FILE, Need.QUANTIZED),
    ),
    Fault(
        name="quantized-scales-dropped", plant="base:scales_dropped", expected="zeros", stages=_BASE,
        needs=(Need.WEIGHT_FILE, Need.QUANTIZED),
    ),
    Fault(
        name="offload-bit-flip", plant="base:one_bit_on_arrival", expected="bit-flip", stages=_BASE, offloads=True,
        needs=(Need.WEIGHT_FILE,),
    ),
    Fault(
        name="merge-bit-flip", plant="computed:one_bit_of_weight", expected="bit-flip", stages=_MERGED,
        without_form="differs", needs=(Need.TUNED_LAYERS, Need.FLOAT32_WEIGHT, Need.FLOATING_WEIGHT),
    ),
    Fault(
        name="merge-in-tf32", plant="computed:products_in_tf32", expected="tf32-products", stages=_MERGED,
        without_form="differs", needs=(Need.LORA_LINEAR, Need.FLOAT32_ADAPTER),
    ),
    Fault(
        name="merge-zeros", plant="computed:zero_delta", expected="zeros", stages=_MERGED, without_form="differs",
        needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="merge-off", plant="computed:delta_off", expected="wrong-scale", stages=_MERGED, without_form="differs",
        needs=(Need.TUNED_LAYERS, Need.LORA_LINEAR_OR_FLOAT32),
    ),
    Fault(
        name="merge-fails", plant="computed:kernel_fails", expected="missing", stages=_MERGED,
        needs=(Need.TUNED_LAYERS, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="forward-off", plant="computed:results_off", expected="wrong-scale", stages=_FORWARD,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="forward-layer-zero", plant="computed:layer_zero", expected="differs", stages=_FORWARD,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="forward-fails", plant="computed:operator_fails", expected="missing", stages=_FORWARD,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="router-flipped", plant="routing:smallest", expected="decision-flipped", stages=_FORWARD, base=MIXTURE,
    ),
    Fault(name="operator-off", plant="compute:softmax_off", expected="wrong-scale", stages=_OPERATORS),
    Fault(name="operator-in-tf32", plant="compute:products_in_tf32", expected="tf32-products", stages=_OPERATORS),
    Fault(name="operator-fails", plant="compute:softmax_fails", expected="missing", stages=_OPERATORS),
    Fault(
        name="gradient-off", plant="compute:gradients_off", expected="wrong-scale", stages=_GRADIENT,
        needs=(Need.EXACT_KERNELS, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="gradient-zeros", plant="compute:one_layer_lost", expected="zeros", stages=_GRADIENT,
        needs=(Need.TRAINED, Need.ANOTHER_WORKER),
    ),
    Fault(
        name="optimizer-off", plant="compute:step_off", expected="wrong-scale", stages=_GRADIENT,
    ),
    Fault(
        name="trajectory-gradient-scaled", plant="trajectory:gradient_scaled", expected="left-trajectory",
        stages=_TRAJECTORY, steps=6, words="at step 5, in the gradient of lora_B",
        needs=(Need.LORA_B,),
    ),
    Fault(
        name="trajectory-forward-off", plant="trajectory:forward_off", expected="left-trajectory", stages=_TRAJECTORY,
        steps=6, words="at step 4, in the gradient of ",
    ),
    Fault(
        name="trajectory-optimizer-off", plant="trajectory:optimizer_off", expected="left-trajectory",
        stages=_TRAJECTORY, steps=6, words="after the optimizer's step",
    ),
    Fault(
        name="merge-not-repeatable", plant="computed:flaky_delta", expected="not-repeatable", stages=_MERGED, repeat=2,
        without_form="differs",
        needs=(Need.TUNED_LAYERS, Need.LORA_LINEAR_OR_FLOAT32),
    ),
    Fault(
        name="adapter-left-after-delete", plant="adapters:left_after_delete", expected="left-behind", stages=_ADAPTERS,
        words="delete_adapter leaves", several=True, shows_in=".deleted", needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="adapter-stays-active", plant="adapters:stays_active", expected="inactive", stages=_ADAPTERS,
        several=True, shows_in=".active adapters", needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="combination-wrong-weights", plant="adapters:wrong_weights", expected="wrong-scale", stages=_ADAPTERS,
        several=True, shows_in="linear.lora_", needs=(Need.LORA_LINEAR,),
    ),
    Fault(
        name="combination-wrong-density", plant="adapters:wrong_density", expected="wrong-density", stages=_ADAPTERS,
        several=True, shows_in=".density", needs=(Need.LORA_LINEAR,),
    ),
    Fault(
        name="combination-cut-short", plant="adapters:cut_short", expected="differs", stages=_ADAPTERS, several=True,
        shows_in="svd.", needs=(Need.LORA_LINEAR, Need.TRAINED),
    ),
    Fault(
        name="hotswap-leaves-one", plant="adapters:leaves_one", expected="stale", stages=_ADAPTERS, several=True,
        shows_in=".hotswap.", needs=(Need.LORA_B,),
    ),
    Fault(
        name="unmerge-off", plant="adapters:unmerge_off", expected="drift", stages=_ADAPTERS, several=True,
        shows_in=".drift", needs=(Need.LORA_LINEAR,),
    ),
    # the case has one layer, so that twenty repeats take a part of the time
    Fault(
        name="merge-bit-flip-now-and-then", plant="soak:one_bit_of_weight", expected="not-repeatable", stages=_MERGED,
        words="single-bit flips", soak_s=3, one_layer=True,
        needs=(Need.LORA_LINEAR, Need.FLOATING_WEIGHT),
    ),
    Fault(
        name="labels-changed-on-hop", plant="sharding:old_bytes", expected="labels-changed", stages=_SHARDING,
        case="C4", words="labels changed during transfer to device", shows_in=".on the way",
        needs=(Need.TOKENS,),
    ),
    Fault(
        name="ids-past-vocabulary", plant="sharding:an_added_token", expected="ids-past-vocabulary",
        stages=_SHARDING, case="C4", words="ids past the vocabulary: largest id",
        needs=(Need.TOKENS,),
    ),
    Fault(
        name="cache-key-not-written", plant="generation:last_key_not_written", expected="wrong-with-cache",
        stages=_GENERATION, shows_in=".cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="cache-rows-exchanged", plant="generation:rows_exchanged", expected="wrong-with-cache",
        stages=_GENERATION, shows_in=".cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="cache-keys-in-float8", plant="generation:keys_in_float8", expected="wrong-with-cache",
        stages=_GENERATION, shows_in=".cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="cache-stale-keys", plant="generation:stale_keys", expected="wrong-with-cache", stages=_GENERATION,
        shows_in=".static_cache", needs=(Need.KEYS,),
    ),
    Fault(
        name="padding-not-masked", plant="generation:padding_is_seen", expected="wrong-with-padding",
        stages=_GENERATION, shows_in=".padded", needs=(Need.KEYS,),
    ),
    Fault(
        name="padding-counted", plant="generation:positions_of_padding", expected="wrong-with-padding",
        stages=_GENERATION, shows_in=".padded", needs=(Need.POSITIONS,),
    ),
    Fault(
        name="adapter-off-in-steps", plant="generation:off_in_steps", expected="wrong-with-cache",
        stages=_GENERATION, shows_in=".cache", needs=(Need.TRAINED, Need.LORA_LINEAR),
    ),
    Fault(
        name="generation-another-token", plant="generation:another_token", expected="other-token",
        stages=_GENERATION, shows_in="prompt 0.text",
    ),
    Fault(
        name="sum-last-elements", plant="collectives:last_elements", expected="block", stages=_COLLECTIVES,
        needs=(Need.RANKS,),
    ),
    Fault(  # as if a copy between devices were wrong: a bisection has to name the setting that turns them off
        name="sum-wrong-with-p2p", plant="collectives:with_p2p", expected="block", stages=_COLLECTIVES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-not-added", plant="collectives:own_numbers", expected="differs", stages=_COLLECTIVES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-one-bit", plant="collectives:one_bit", expected="differs", stages=_COLLECTIVES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-other-order-again", plant="collectives:other_order_again", expected="not-repeatable",
        stages=_COLLECTIVES, words="the order is not fixed", is_note=True,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-wrong-again", plant="collectives:wrong_again", expected="differs", stages=_COLLECTIVES,
        words="a second run", needs=(Need.RANKS,),
    ),
    Fault(
        name="sum-wrong-in-pairs", plant="collectives:wrong_in_pairs", expected="differs", stages=_COLLECTIVES,
        shows_in="+", needs=(Need.RANKS, Need.THREE_RANKS),
    ),
    Fault(
        name="parts-swapped", plant="collectives:swapped", expected="permuted", stages=_COLLECTIVES,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-killed", plant="collectives:killed", expected="lost-worker", stages=_COLLECTIVES, words="SIGKILL",
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-hangs", plant="collectives:hangs", expected="lost-worker", stages=_COLLECTIVES,
        words="no sign of life",
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-frozen", plant="collectives:frozen", expected="lost-worker", stages=_COLLECTIVES,
        words="no sign of life",
        needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-raises", plant="collectives:raises", expected="failed-stage", stages=_COLLECTIVES, words="planted",
        needs=(Need.RANKS,),
    ),
    Fault(
        name="gradient-not-averaged", plant="ranks:not_averaged", expected="unsynchronized", stages=_REPLICAS,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="gradient-averaged-twice", plant="ranks:averaged_twice", expected="wrong-scale", stages=_REPLICAS,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="adapter-not-broadcast", plant="ranks:not_broadcast", expected="differs", stages=_REPLICAS,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="training-rank-hangs", plant="ranks:hangs", expected="lost-worker", stages=_REPLICAS,
        words="no sign of life", needs=(Need.RANKS,),
    ),
    Fault(
        name="training-rank-raises", plant="ranks:raises", expected="failed-stage", stages=_REPLICAS,
        words="a kernel of this rank failed", needs=(Need.RANKS,),
    ),
    Fault(
        name="rank-with-other-seed", plant="ranks:other_seed", expected="differs", stages=_SHARDS,
        needs=(Need.RANKS,),
    ),
    Fault(
        name="shard-stale", plant="ranks:stale_part", expected="stale", stages=_SHARDS,
        needs=(Need.RANKS, Need.LORA_B),
    ),
    Fault(
        name="shards-swapped", plant="ranks:parts_swapped", expected="permuted", stages=_SHARDS,
        needs=(Need.RANKS, Need.LORA_B),
    ),
    Fault(
        name="split-part-of-another", plant="ranks:part_of_another", expected="swapped", stages=_TENSOR_PARALLEL,
        needs=(Need.RANKS, Need.SPLIT, Need.LORA_B),
    ),
    Fault(
        name="split-scaled-by-ranks", plant="ranks:scaled_by_ranks", expected="settings", stages=_TENSOR_PARALLEL,
        needs=(Need.RANKS, Need.LORA_B),
    ),
    Fault(name="setting-flipped", plant="memory:flip_setting", expected="setting-changed", stages=_MERGED),
    Fault(
        name="placed-elsewhere", plant="memory:one_elsewhere", expected="wrong-device", stages=_MEMORY, case="C2",
        needs=(Need.ADAPTER,),
    ),
    Fault(
        name="bytes-elsewhere", plant="memory:stray_bytes", expected="touched", stages=_MEMORY, case="C2",
        words="stay there", two_devices=True,
    ),
    Fault(
        name="merge-third-copy", plant="memory:third_copy", expected="third-copy", stages=_MEMORY, case="C5",
        shows_in="merge_peak", needs=(Need.LORA_LINEAR,),
    ),
    Fault(name="killed", plant="memory:kill", expected="lost-worker", stages=_MERGED, words="SIGKILL"),
    Fault(name="hung", plant="memory:hang", expected="lost-worker", stages=_MERGED, words="no sign of life"),
    Fault(name="stopped", plant="memory:stop", expected="lost-worker", stages=_MERGED, words="no sign of life"),
    Fault(
        name="out-of-memory", plant="memory:take_all_memory", expected="lost-worker", stages=_MERGED,
        words="out of memory",
    ),
)  # fmt: skip


_OF_PLUGINS = (fault for _, rows in plugins.offered("faults") for fault in rows)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*_ROWS, *_OF_PLUGINS)}
"""Every fault by its name, in the order of the drill."""
