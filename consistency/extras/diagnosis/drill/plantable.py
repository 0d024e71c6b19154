"""What a fault of the drill needs of a case, the sentence for a case that does not have it, and the second adapter.

Known from headers and from a healthy run of the case, so that no fault is planted where nothing would change.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from consistency.capture.claim import scratch_folder
from consistency.capture.names import WEIGHT
from consistency.case import standard
from consistency.case.adapter_fit import read_adapter
from consistency.case.builtin import BUILTIN_CASES, builtin_folder
from consistency.case.case import Case
from consistency.case.checkpoint import TensorHeader, read_checkpoint, read_json
from consistency.case.named_adapters import NamedAdapter
from consistency.case.stage import Stage
from consistency.case.stages import SPECS
from consistency.comparison.result import Comparison
from consistency.extras.training.tensor_parallel.spec import TENSOR_PARALLEL
from consistency.numerics.rules import Rule
from consistency.worker.faults.fault import Fault, Need

JUDGED = frozenset({"equal", "within", "outside"})
_PLAIN_INIT = frozenset({None, True, "gaussian"})  # with these PEFT starts lora_B at zero
_COUNTED = frozenset({"rope_parameters", "rope_theta", "max_position_embeddings", "n_positions"})
_HEADS = frozenset({"num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"})
_ON_TOKENS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The facts of a case that decide which faults can be planted in it."""

    has_adapter: bool
    dtype: str  # dtype that the base is loaded in
    workers: int  # number of devices that are compared
    ranks: int = 1  # number of devices of one type, which form a group
    config: Mapping[str, Any] = field(default_factory=dict)  # the adapter's; empty without an adapter
    tensors: Mapping[str, TensorHeader] = field(default_factory=dict)  # headers of the adapter; empty without one
    base_config: Mapping[str, Any] = field(default_factory=dict)  # empty where a function makes the base
    file_dtypes: frozenset[str] = frozenset()  # dtypes in the base's files, as their headers name them
    # stages that checked nothing of the case in a healthy run, with the reason
    unchecked: Mapping[Stage, str] = field(default_factory=dict)
    judged: frozenset[str] | None = None  # names of tensors that a healthy run judged; None without such a run
    has_form: bool = True  # whether merged weights have a closed form
    splits: bool = True  # whether ranks that hold one model by a plan hold parts of the adapter's tensors

    @property
    def of_text(self) -> Mapping[str, Any]:
        """Return the base's config, with what a model of images and text has of the text."""
        return {**self.base_config, **(self.base_config.get("text_config") or {})}

    def of_lora(self, part: str) -> list[str]:
        """Return the layers whose tensor of this part (`lora_A`, `lora_B`) the adapter's file holds."""
        return [
            name.partition(f".{part}")[0].removeprefix("base_model.model.")
            for name in self.tensors
            if f".{part}." in f"{name}."
        ]


def subject_of(case: Case, *, workers: int, ranks: int = 1, healthy: Comparison | None = None) -> Subject:
    """Read what a case is made of; `healthy` is a run of it without a fault."""
    config: Mapping[str, Any] = {}
    tensors: Mapping[str, TensorHeader] = {}
    if case.adapter is not None:
        config, tensors = read_adapter(Path(case.adapter), allow_pickle=case.allow_pickle)
    base_config: Mapping[str, Any] = {}
    file_dtypes: frozenset[str] = frozenset()
    if case.factory is None:
        folder = Path(case.base)
        base_config = read_json(folder / "config.json")
        files = read_checkpoint(folder, stem="model", pickle_stem="pytorch_model", allow_pickle=case.allow_pickle)
        file_dtypes = frozenset(header.dtype for header in files.tensors.values())
    return Subject(
        has_adapter=case.adapter is not None,
        dtype="float32" if healthy is None else healthy.dtype,
        workers=workers,
        ranks=ranks,
        config=config,
        tensors=tensors,
        base_config=base_config,
        file_dtypes=file_dtypes,
        **_healthy_fields(healthy, case),
    )


def _healthy_fields(healthy: Comparison | None, case: Case) -> dict[str, Any]:
    """Return the fields of a `Subject` that a run without a fault tells; none without such a run."""
    if healthy is None:
        return {}
    unchecked = {}
    for stage in case.stages:
        tensors = (tensor for tensor in healthy.tensors if tensor.stage == stage)
        outcomes = list(itertools.chain.from_iterable(tensor.outcomes for tensor in tensors))
        if not any(outcome.status in JUDGED for outcome in outcomes):
            reasons = (outcome.reason for outcome in outcomes if outcome.reason)
            unchecked[stage] = next(reasons, "it has nothing to check")
    judged = [tensor for tensor in healthy.tensors if any(outcome.status in JUDGED for outcome in tensor.outcomes)]
    merged = [tensor for tensor in judged if tensor.stage == standard.MERGED and tensor.tensor == WEIGHT]
    parallel = [tensor for tensor in judged if tensor.stage == TENSOR_PARALLEL]
    parallel_outcomes = itertools.chain.from_iterable(tensor.outcomes for tensor in parallel)
    return {
        "unchecked": unchecked,
        "judged": frozenset(tensor.name for tensor in judged),
        "has_form": all(tensor.rule == Rule.BOUND for tensor in merged),
        # where the model was not split, the stage's own reason says why
        "splits": not parallel or any(outcome.evidence.get("split") for outcome in parallel_outcomes),
    }


def expected_in(fault: Fault, subject: Subject) -> str:
    """Return the kind of the finding that has to name a fault in a case."""
    # a repeat is compared with the first time, so that bits do not repeat takes no closed form
    can_name_cause = subject.has_form or fault.repeat > 1
    return fault.expected if can_name_cause else fault.without_form or fault.expected


def why_not(fault: Fault, subject: Subject) -> str:
    """Return why a fault cannot be planted in a case, empty where it can."""
    if not subject.has_adapter and any(SPECS[stage].needs_adapter for stage in fault.stages):
        return "the case has no adapter"
    for need in fault.needs:
        reason = _REASONS[need](subject)
        if reason:
            return reason
    unchecked = subject.unchecked.get(fault.stages[0])
    if unchecked:
        return f"stage {fault.stages[0]} checks nothing of this case: {unchecked}"
    if subject.judged is None:
        return ""
    stages = tuple(f"{stage}::" for stage in fault.stages)
    if any(fault.shows_in in name for name in subject.judged if name.startswith(stages)):
        return ""
    return "without a fault, nothing is checked in this case that would show it"


# Each of the functions below returns why a case does not have a need, empty where it has.


def _lora(part: str) -> Callable[[Subject], str]:
    def reason(subject: Subject) -> str:
        if len(subject.of_lora(part)) > 1:  # the faults are in the second one
            return ""
        return f"{_method(subject)} has no {part} in two layers"

    return reason


def _method(subject: Subject) -> str:
    return f"an adapter of the method {subject.config['peft_type']}" if subject.config else "a case without an adapter"


def _two_of_a_shape(subject: Subject) -> str:
    shapes = Counter(header.shape for header in changed_by_default(subject.tensors))
    return "" if max(shapes.values(), default=0) > 1 else "no two tensors of the adapter have the same shape"


def changed_by_default(tensors: Mapping[str, TensorHeader]) -> list[TensorHeader]:
    """Return the tensors of which the faults in an adapter's file choose: those of lora_B, else all."""
    of_b = [header for name, header in tensors.items() if "lora_B" in name]
    return of_b if len(of_b) > 1 else list(tensors.values())


def _zero_lora_b(subject: Subject) -> str:
    init = subject.config.get("init_lora_weights")
    if (init if isinstance(init, (bool, str)) else None) not in _PLAIN_INIT:
        return f"with init_lora_weights={init} lora_B does not start at zero"
    return _lora("lora_B")(subject)


def _trained(subject: Subject) -> str:
    if not subject.tensors:
        return "the case has no adapter, or it is a pickle"
    if "lora_" not in str([*subject.tensors]) or any(".0." in f".{layer}." for layer in subject.of_lora("lora_B")):
        return ""
    return _lora("lora_B")(subject) or "the adapter has no lora_B in a layer of number 0"


def _lora_linear(subject: Subject) -> str:
    matrices = [name for name, header in subject.tensors.items() if ".lora_A." in name and len(header.shape) == 2]
    targets = subject.config.get("target_modules")
    if subject.config.get("peft_type") == "LORA" and matrices and targets:
        return ""
    return f"{_method(subject)} has no LoRA on a linear layer, whose merge it changes"


def _float32_adapter(subject: Subject) -> str:
    dtypes = {header.dtype for header in subject.tensors.values()}
    if not subject.tensors:
        return "the case has no adapter, or it is a pickle"
    return "" if "F32" in dtypes else f"the adapter's file holds {_listed(dtypes)}: the rounding would change nothing"


def _listed(dtypes: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(dtypes)) or "no tensor that a header describes"


def _float32_model(subject: Subject) -> str:
    rounding = f"the base is loaded in {subject.dtype}, whose rounding is larger than this fault"
    return "" if subject.dtype == "float32" else rounding


def _not_quantized(why: str) -> Callable[[Subject], str]:
    return lambda subject: f"the base is quantized: {why}" if subject.base_config.get("quantization_config") else ""


def _tokens(subject: Subject) -> str:
    named = subject.base_config.get("architectures") or [""]
    reads = "vocab_size" in subject.base_config and str(named[0]).endswith(_ON_TOKENS)
    return "" if reads else "the base answers no token ids with token ids"


def _positions(subject: Subject) -> str:
    config = subject.of_text
    counts = not config.get("is_encoder_decoder") and not config.get("alibi") and not _COUNTED.isdisjoint(config)
    return "" if counts else "`generate` gives this base no positions of the tokens"


def _keys(subject: Subject) -> str:
    has_states = "state_size" in subject.of_text  # Mamba's heads have states in place of keys
    has_keys = not has_states and not _HEADS.isdisjoint(subject.of_text)
    return "" if has_keys else "the base keeps no keys of its tokens"


_REASONS: dict[Need, Callable[[Subject], str]] = {
    Need.ADAPTER: lambda subject: "" if subject.has_adapter else "the case has no adapter",
    Need.ANOTHER_WORKER: lambda subject: "" if subject.workers > 1 else "one device only: nothing to compare it with",
    Need.RANKS: lambda subject: "" if subject.ranks > 1 else "no two devices of one type: they form no group",
    Need.THREE_RANKS: lambda subject: (
        "" if subject.ranks > 2 else "no three devices of one type: no two of them form a group beside that of all"
    ),
    Need.SPLIT: lambda subject: "" if subject.splits else "the plan splits no tensor of the adapter",
    Need.WEIGHT_FILE: lambda subject: "" if subject.base_config else "a function makes the base, not a weight file",
    Need.FLOAT32_FILE: lambda subject: (
        "" if "F32" in subject.file_dtypes
        else f"the base's files hold {_listed(subject.file_dtypes)}: the rounding would change nothing"
    ),
    Need.FLOAT32_MODEL: _float32_model,
    Need.FLOAT32_WEIGHT: lambda subject: (
        "" if subject.dtype == "float32"
        else f"merged weights are in {subject.dtype}, whose rounding hides what a wrong value came from"
    ),
    Need.FLOATING_WEIGHT: _not_quantized("a merge leaves codes, and no floating-point numbers"),
    Need.EXACT_KERNELS: _not_quantized("its kernels may compute in a half type, which hides this fault"),
    Need.FLOAT32_ADAPTER: _float32_adapter,
    Need.TUNED_LAYERS: lambda subject: (
        "" if any("prompt" not in name for name in subject.tensors) else f"{_method(subject)} changes no layer"
    ),
    Need.TWO_OF_A_SHAPE: _two_of_a_shape,
    Need.LORA_A: _lora("lora_A"),
    Need.LORA_B: _lora("lora_B"),
    Need.ZERO_LORA_B: _zero_lora_b,
    Need.TRAINED: _trained,
    Need.LORA_LINEAR: _lora_linear,
    Need.LORA_LINEAR_OR_FLOAT32: lambda subject: _lora_linear(subject) and _float32_model(subject),
    Need.TOKENS: _tokens,
    Need.POSITIONS: _positions,
    Need.KEYS: _keys,
    Need.QUANTIZED: lambda subject: (
        "" if subject.base_config.get("quantization_config") else "the base is not quantized"
    ),
}  # fmt: skip


_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LAYER_PREFIX = "base_model.model."
_HEADER_SIZE = 8
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that are reversed: an integer is an index, and has to stay one."""


@contextmanager
def several_adapters(first: Path | None = None, keep: Path | None = None) -> Iterator[tuple[NamedAdapter, ...] | None]:
    """Yield an adapter and a second one, which exists for as long as a `with` block takes, or is kept in a folder.

    Without an argument the first is that of the first built-in case. None where its weights are in no safetensors file.
    """
    first = first or builtin_folder(BUILTIN_CASES[0]) / "adapter"
    if not (first / _WEIGHTS).is_file():
        yield None
        return
    placing = scratch_folder("second-adapter") if keep is None else nullcontext(keep)
    with placing as folder:
        second = second_adapter(first, folder / "second")
        yield NamedAdapter(name="first", path=str(first)), NamedAdapter(name="second", path=str(second))


def second_adapter(first: Path, folder: Path) -> Path:
    """Make a folder with a second adapter, the first one with its numbers in reversed order, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(first / _CONFIG, folder / _CONFIG)
    data = bytearray((first / _WEIGHTS).read_bytes())
    start = _HEADER_SIZE + int.from_bytes(data[:_HEADER_SIZE], "little")
    tensors = json.loads(data[_HEADER_SIZE:start])
    # what methods as VeRA share between layers has to be the same in all adapters of a model
    names_in_layers = [name for name in tensors if name.startswith(_LAYER_PREFIX)] or list(tensors)
    for name, header in tensors.items():
        element_bytes = _BYTES.get(header.get("dtype"))
        if name not in names_in_layers or not element_bytes:
            continue
        begin, end = header["data_offsets"]
        count = (end - begin) // element_bytes
        # the same numbers in reversed order are finite, and of the same size as the first adapter's
        tensor = np.frombuffer(data, dtype=f"u{element_bytes}", count=count, offset=start + begin)
        tensor[:] = tensor[::-1].copy()
    (folder / _WEIGHTS).write_bytes(data)
    return folder
