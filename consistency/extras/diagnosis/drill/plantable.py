"""Decide which faults can be planted in a case, and say in one sentence why a fault cannot; make a second adapter.

Headers of files and a healthy run of the case tell, so that no fault is planted where nothing would change.
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
"""Statuses of outcomes in which a tensor was compared."""

_ZERO_LORA_B_INITS = frozenset({None, True, "gaussian"})
"""Values of `init_lora_weights` with which PEFT starts lora_B at zero."""

_POSITION_KEYS = frozenset({"rope_parameters", "rope_theta", "max_position_embeddings", "n_positions"})
"""Keys of a base's config, of which a model has one if it counts the positions of tokens."""

_HEAD_KEYS = frozenset({"num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"})
"""Keys of a base's config, of which a model with attention has one."""

_TOKEN_CLASSES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
"""Ends of the names of classes that take token ids and return logits of token ids."""

_NO_ADAPTER = "the case has no adapter"
_NO_ADAPTER_OR_PICKLE = "the case has no adapter, or it is a pickle"


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
        """Return the base's config, with the keys for the text of a model of images and text."""
        return {**self.base_config, **(self.base_config.get("text_config") or {})}

    def of_lora(self, part: str) -> list[str]:
        """Return the layers whose tensor of this part (`lora_A`, `lora_B`) the adapter's file holds."""
        return [
            name.partition(f".{part}")[0].removeprefix("base_model.model.")
            for name in self.tensors
            if f".{part}." in f"{name}."
        ]


def subject_of(case: Case, *, workers: int, ranks: int = 1, healthy: Comparison | None = None) -> Subject:
    """Read the facts of a case from its files, and from `healthy`, a run of it without a fault."""
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
    """Return the fields of a `Subject` that a run without a fault tells; empty without such a run."""
    if healthy is None:
        return {}
    judged = [tensor for tensor in healthy.tensors if any(outcome.status in JUDGED for outcome in tensor.outcomes)]
    merged = [tensor for tensor in judged if tensor.stage == standard.MERGED and tensor.tensor == WEIGHT]
    parallel = [tensor for tensor in judged if tensor.stage == TENSOR_PARALLEL]
    parallel_outcomes = itertools.chain.from_iterable(tensor.outcomes for tensor in parallel)
    return {
        "unchecked": _unchecked_stages(healthy, case),
        "judged": frozenset(tensor.name for tensor in judged),
        "has_form": all(tensor.rule == Rule.BOUND for tensor in merged),
        # where the model was not split, the stage's own reason says why
        "splits": not parallel or any(outcome.evidence.get("split") for outcome in parallel_outcomes),
    }


def _unchecked_stages(healthy: Comparison, case: Case) -> dict[Stage, str]:
    """Return the reasons why stages checked nothing of a case in a healthy run, by stage."""
    reason_by_stage: dict[Stage, str] = {}
    for stage in case.stages:
        tensors = (tensor for tensor in healthy.tensors if tensor.stage == stage)
        outcomes = list(itertools.chain.from_iterable(tensor.outcomes for tensor in tensors))
        if not any(outcome.status in JUDGED for outcome in outcomes):
            reasons = (outcome.reason for outcome in outcomes if outcome.reason)
            reason_by_stage[stage] = next(reasons, "it has nothing to check")
    return reason_by_stage


def expected_in(fault: Fault, subject: Subject) -> str:
    """Return the kind of the finding that has to name a fault in a case."""
    # a repeat is compared with the first result, so a fault that shows in repeats is named without a closed form
    can_name_cause = subject.has_form or fault.repeat > 1
    return fault.expected if can_name_cause else fault.without_form or fault.expected


def why_not(fault: Fault, subject: Subject) -> str:
    """Return why a fault cannot be planted in a case, empty where it can."""
    if not subject.has_adapter and any(SPECS[stage].needs_adapter for stage in fault.stages):
        return _NO_ADAPTER
    for need in fault.needs:
        reason = _REASONS[need](subject)
        if reason:
            return reason
    unchecked = subject.unchecked.get(fault.stages[0])
    if unchecked:
        return f"stage {fault.stages[0]} checks nothing of this case: {unchecked}"
    if subject.judged is None:
        return ""
    prefixes = tuple(f"{stage}::" for stage in fault.stages)
    if any(fault.shows_in in name for name in subject.judged if name.startswith(prefixes)):
        return ""
    return "without a fault, nothing is checked in this case that would show it"


# Each function below that is named `_lacks_…` returns the reason why a case does not meet a need, empty if it does.


def _lacks_lora(part: str) -> Callable[[Subject], str]:
    """Return the check that a part of LoRA (`lora_A`, `lora_B`) is in two layers: faults are planted in the second."""

    def reason(subject: Subject) -> str:
        if len(subject.of_lora(part)) > 1:
            return ""
        return f"{_method_text(subject)} has no {part} in two layers"

    return reason


def _method_text(subject: Subject) -> str:
    """Return words for the adapter of a case, as the subject of a sentence."""
    if not subject.config:
        return "a case without an adapter"
    return f"an adapter of the method {subject.config['peft_type']}"


def _lacks_two_of_a_shape(subject: Subject) -> str:
    counts = Counter(header.shape for header in changed_by_default(subject.tensors))
    if max(counts.values(), default=0) > 1:
        return ""
    return "no two tensors of the adapter have the same shape"


def changed_by_default(tensors: Mapping[str, TensorHeader]) -> list[TensorHeader]:
    """Return the tensors among which faults in an adapter's file choose: several of lora_B, or else all tensors."""
    lora_b_headers = [header for name, header in tensors.items() if "lora_B" in name]
    if len(lora_b_headers) > 1:
        return lora_b_headers
    return list(tensors.values())


def _lacks_zero_lora_b(subject: Subject) -> str:
    init = subject.config.get("init_lora_weights")
    # a value of another type counts as none
    named_init = init if isinstance(init, (bool, str)) else None
    if named_init not in _ZERO_LORA_B_INITS:
        return f"with init_lora_weights={init} lora_B does not start at zero"
    return _lacks_lora("lora_B")(subject)


def _lacks_trained_lora_b(subject: Subject) -> str:
    if not subject.tensors:
        return _NO_ADAPTER_OR_PICKLE
    has_lora = "lora_" in str([*subject.tensors])
    if not has_lora or any(".0." in f".{layer}." for layer in subject.of_lora("lora_B")):
        return ""
    return _lacks_lora("lora_B")(subject) or "the adapter has no lora_B in a layer of number 0"


def _lacks_lora_linear(subject: Subject) -> str:
    matrices = [name for name, header in subject.tensors.items() if ".lora_A." in name and len(header.shape) == 2]
    targets = subject.config.get("target_modules")
    if subject.config.get("peft_type") == "LORA" and matrices and targets:
        return ""
    return f"{_method_text(subject)} has no LoRA on a linear layer, whose merge it changes"


def _lacks_float32_adapter(subject: Subject) -> str:
    if not subject.tensors:
        return _NO_ADAPTER_OR_PICKLE
    dtypes = {header.dtype for header in subject.tensors.values()}
    if "F32" in dtypes:
        return ""
    return f"the adapter's file holds {_dtypes_text(dtypes)}: the rounding would change nothing"


def _lacks_float32_file(subject: Subject) -> str:
    if "F32" in subject.file_dtypes:
        return ""
    return f"the base's files hold {_dtypes_text(subject.file_dtypes)}: the rounding would change nothing"


def _dtypes_text(dtypes: frozenset[str] | set[str]) -> str:
    return ", ".join(sorted(dtypes)) or "no tensor that a header describes"


def _lacks_float32_model(subject: Subject) -> str:
    if subject.dtype == "float32":
        return ""
    return f"the base is loaded in {subject.dtype}, whose rounding is larger than this fault"


def _lacks_float32_weight(subject: Subject) -> str:
    if subject.dtype == "float32":
        return ""
    return f"merged weights are in {subject.dtype}, whose rounding hides what a wrong value came from"


def _is_quantized(subject: Subject) -> bool:
    return bool(subject.base_config.get("quantization_config"))


def _lacks_plain_weights(why: str) -> Callable[[Subject], str]:
    """Return the check that a base is not quantized; `why` says what a quantized base would spoil."""

    def reason(subject: Subject) -> str:
        return f"the base is quantized: {why}" if _is_quantized(subject) else ""

    return reason


def _lacks_tuned_layers(subject: Subject) -> str:
    if any("prompt" not in name for name in subject.tensors):
        return ""
    return f"{_method_text(subject)} changes no layer"


def _lacks_tokens(subject: Subject) -> str:
    class_names = subject.base_config.get("architectures") or [""]
    if "vocab_size" in subject.base_config and str(class_names[0]).endswith(_TOKEN_CLASSES):
        return ""
    return "the base answers no token ids with token ids"


def _lacks_positions(subject: Subject) -> str:
    config = subject.of_text
    # ALiBi adds a distance to the scores of attention, and needs no positions
    counts_positions = not config.get("is_encoder_decoder") and not config.get("alibi")
    if counts_positions and not _POSITION_KEYS.isdisjoint(config):
        return ""
    return "`generate` gives this base no positions of the tokens"


def _lacks_keys(subject: Subject) -> str:
    has_states = "state_size" in subject.of_text  # Mamba's heads have states in place of keys
    if not has_states and not _HEAD_KEYS.isdisjoint(subject.of_text):
        return ""
    return "the base keeps no keys of its tokens"


def _unless(is_met: Callable[[Subject], bool], reason: str) -> Callable[[Subject], str]:
    """Return the function that returns a reason for a case in which a need is not met."""
    return lambda subject: "" if is_met(subject) else reason


_REASONS: dict[Need, Callable[[Subject], str]] = {
    Need.ADAPTER: _unless(lambda subject: subject.has_adapter, _NO_ADAPTER),
    Need.ANOTHER_WORKER: _unless(lambda subject: subject.workers > 1, "one device only: nothing to compare it with"),
    Need.RANKS: _unless(lambda subject: subject.ranks > 1, "no two devices of one type: they form no group"),
    Need.THREE_RANKS: _unless(
        lambda subject: subject.ranks > 2,
        "no three devices of one type: no two of them form a group beside that of all",
    ),
    Need.SPLIT: _unless(lambda subject: subject.splits, "the plan splits no tensor of the adapter"),
    Need.WEIGHT_FILE: _unless(
        lambda subject: bool(subject.base_config), "a function makes the base, not a weight file"
    ),
    Need.FLOAT32_FILE: _lacks_float32_file,
    Need.FLOAT32_MODEL: _lacks_float32_model,
    Need.FLOAT32_WEIGHT: _lacks_float32_weight,
    Need.FLOATING_WEIGHT: _lacks_plain_weights("a merge leaves codes, and no floating-point numbers"),
    Need.EXACT_KERNELS: _lacks_plain_weights("its kernels may compute in a half type, which hides this fault"),
    Need.FLOAT32_ADAPTER: _lacks_float32_adapter,
    Need.TUNED_LAYERS: _lacks_tuned_layers,
    Need.TWO_OF_A_SHAPE: _lacks_two_of_a_shape,
    Need.LORA_A: _lacks_lora("lora_A"),
    Need.LORA_B: _lacks_lora("lora_B"),
    Need.ZERO_LORA_B: _lacks_zero_lora_b,
    Need.TRAINED: _lacks_trained_lora_b,
    Need.LORA_LINEAR: _lacks_lora_linear,
    Need.LORA_LINEAR_OR_FLOAT32: lambda subject: _lacks_lora_linear(subject) and _lacks_float32_model(subject),
    Need.TOKENS: _lacks_tokens,
    Need.POSITIONS: _lacks_positions,
    Need.KEYS: _lacks_keys,
    Need.QUANTIZED: _unless(_is_quantized, "the base is not quantized"),
}
"""For each need of a fault, the function that returns why a case does not meet it, empty if it does."""


_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LAYER_PREFIX = "base_model.model."

_LENGTH_BYTES = 8
"""Bytes at the beginning of a safetensors file that hold the length of its header."""

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes per element of the dtypes that are reversed: an integer is an index, and has to stay one."""


@contextmanager
def several_adapters(first: Path | None = None, keep: Path | None = None) -> Iterator[tuple[NamedAdapter, ...] | None]:
    """Yield an adapter and a second one made from it; None where the first one's weights are in no safetensors file.

    Parameters
    ----------
    first : Path, optional
        Folder of the adapter; unless given, that of the first built-in case.
    keep : Path, optional
        Folder that the second adapter is written to and stays in; without it, it is removed at the end of the `with`
        block.
    """
    first = first or builtin_folder(BUILTIN_CASES[0]) / "adapter"
    if not (first / _WEIGHTS).is_file():
        yield None
        return
    opened = scratch_folder("second-adapter") if keep is None else nullcontext(keep)
    with opened as folder:
        second = second_adapter(first, folder / "second")
        yield NamedAdapter(name="first", path=str(first)), NamedAdapter(name="second", path=str(second))


def second_adapter(first: Path, folder: Path) -> Path:
    """Make a folder with a second adapter, the first one with its numbers in reversed order, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(first / _CONFIG, folder / _CONFIG)
    data = bytearray((first / _WEIGHTS).read_bytes())
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    tensors = json.loads(data[_LENGTH_BYTES:start])
    # tensors that layers share, as with VeRA, have to be the same in all adapters of a model
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
