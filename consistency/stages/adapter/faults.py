"""Planted faults of the stage `adapter`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.stages.adapter.planted"
_ON_LOAD_PATHS = "consistency.stages.adapter.planted_on_load_paths"
_STAGES = (standard.ADAPTER,)

ROWS: tuple[Fault, ...] = (
    Fault(name="adapter-zeros", plant=f"{_PLANTED}:zeros", expected="zeros", stages=_STAGES, case="C1"),
    Fault(
        name="adapter-missing-key", plant=f"{_PLANTED}:missing_key", expected="zeros", stages=_STAGES, case="C1",
        needs=(Need.ZERO_LORA_B,),
    ),
    Fault(name="adapter-half-a-page", plant=f"{_PLANTED}:half_a_page", expected="block", stages=_STAGES, case="C1"),
    Fault(
        name="adapter-other-tensor", plant=f"{_PLANTED}:other_tensor", expected="swapped", stages=_STAGES, case="C1",
        needs=(Need.TWO_OF_A_SHAPE,),
    ),
    Fault(
        name="adapter-layers-swapped", plant=f"{_PLANTED}:two_layers", expected="swapped", stages=_STAGES, case="C1",
        needs=(Need.TWO_OF_A_SHAPE,),
    ),
    Fault(
        name="adapter-copy-dropped", plant=f"{_PLANTED}:no_a", expected="fresh-init", stages=_STAGES, case="C1",
        needs=(Need.LORA_A,),
    ),
    Fault(
        name="adapter-copy-dropped-later", plant=f"{_PLANTED}:no_a_later", expected="never-written", stages=_STAGES,
        case="C1",
        needs=(Need.LORA_A,),
    ),
    Fault(
        name="adapter-old-bytes", plant=f"{_PLANTED}:old_bytes", expected="stale", stages=_STAGES, case="C1",
        needs=(Need.FLOAT32_ADAPTER, Need.FLOAT32_MODEL),
    ),
    Fault(
        name="load-path-copies-dropped", plant=f"{_ON_LOAD_PATHS}:no_b", expected="zeros", stages=_STAGES, case="C1",
        words="correct with torch_device=cpu: copies through the device",
        load_paths=(LoadPath.ISOLATED, LoadPath.ISOLATED_CPU, LoadPath.ISOLATED_LOW_MEMORY),
        needs=(Need.ZERO_LORA_B,),
    ),
    Fault(
        name="load-path-low-memory-rounds", plant=f"{_ON_LOAD_PATHS}:through_bfloat16", expected="rounded-to-bf16",
        stages=_STAGES, case="C1",
        words="with low_cpu_mem_usage=True, and correct without: a dtype conversion while loading",
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(
        name="load-path-transformers-zeros", plant=f"{_ON_LOAD_PATHS}:zeros", expected="zeros", stages=_STAGES,
        case="C1", words="transformers' loader", load_paths=(LoadPath.ISOLATED, LoadPath.ISOLATED_TRANSFORMERS),
        needs=(Need.LORA_B, Need.WEIGHT_FILE),
    ),
    Fault(name="adapter-bit-flip", plant=f"{_PLANTED}:one_bit", expected="bit-flip", stages=_STAGES),
    Fault(
        name="adapter-bit-flip-in-a", plant=f"{_PLANTED}:one_bit_of_a", expected="bit-flip", stages=_STAGES,
        needs=(Need.LORA_A,),
    ),
    Fault(
        name="adapter-through-bfloat16", plant=f"{_PLANTED}:through_bfloat16", expected="rounded-to-bf16",
        stages=_STAGES, case="C1",
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(
        name="adapter-through-float16", plant=f"{_PLANTED}:through_float16", expected="rounded-to-fp16", stages=_STAGES,
        case="C1",
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(
        name="adapter-through-tf32", plant=f"{_PLANTED}:through_tf32", expected="rounded-to-tf32", stages=_STAGES,
        needs=(Need.FLOAT32_ADAPTER,),
    ),
    Fault(name="adapter-nan", plant=f"{_PLANTED}:not_a_number", expected="non-finite", stages=_STAGES),
    Fault(
        name="adapter-inactive", plant=f"{_PLANTED}:inactive", expected="inactive", stages=_STAGES,
        needs=(Need.TUNED_LAYERS,),
    ),
    Fault(
        name="adapter-wrong-scaling", plant=f"{_PLANTED}:double_scaling", expected="settings", stages=_STAGES,
        needs=(Need.LORA_B, Need.ANOTHER_WORKER),
    ),
)  # fmt: skip
