"""Find what an adapter changes in each tensor of the base: by the names in its file, or by PEFT's own layers.

A plain LoRA whose keys name tensors of the base needs no model. All others are put on transformers' model without
weights (device `meta`) by PEFT itself, which maps the keys of its file and gives each layer its settings; only a
method without a closed form has the base loaded, for PEFT to merge it layer by layer in float64.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from consistency.capture.adapter_remarks import AdapterRemark
from consistency.capture.names import module_place
from consistency.case.adapter_fit import PLAIN, read_adapter
from consistency.case.case import Case
from consistency.errors import ConsistencyError
from consistency.extras.merging.check_merged.folder import Stored
from consistency.extras.merging.check_merged.names import common_prefix
from consistency.numerics.exact import Float64Mode
from consistency.stages.merged.forms.bias import Bias
from consistency.stages.merged.forms.low_rank_product import LoraConvolution, factors_of_experts
from consistency.stages.merged.forms.registry import Make, files_of, maker_of
from consistency.stages.merged.forms.source import Source
from consistency.worker import determinism
from consistency.worker.model.drawn_on_loading import remark_on_draws
from consistency.worker.model.expected_adapter import expected_adapter
from consistency.worker.model.head_class import HEAD
from consistency.worker.model.loading import ADAPTER_NAME, UNUSABLE, library_missing, load_adapter, load_base
from consistency.worker.model.low_rank import Expected, low_rank_of
from consistency.worker.model.merging import NO_MERGE, adapted_layers
from consistency.worker.model.weight_files import WeightFiles

_PREFIX = "base_model.model."
_KEY = re.compile(r"^(?P<module>.+)\.lora_(?P<part>A\.weight|B\.weight|B\.bias|embedding_A|embedding_B)$")
_NEEDS_MODEL = (
    "use_dora",
    "use_qalora",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "ensure_weight_tying",
    "megatron_config",
)
_RESIDUAL = re.compile(r"^(pissa|olora|corda|lora_ga)")
"""Initialisations of a LoRA that subtract the product of its first factors from the base.

LoftQ leaves a base of its own too, its backbone, which is another folder: its adapter is judged on the base that is
given, and whether this is a backbone is asked of its weights (`accused.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRankTarget:
    """A tensor that gets a low-rank delta, `scaling * left @ right`: `(stack, rows, rank)`, `(stack, rank, columns)`.

    Attributes
    ----------
    name : str
        Name of the tensor in the base.
    alpha, rank : float, int
        Settings from which the scaling is computed.
    flat : tuple of torch.Tensor
        A and B as in the file, where they hold the factors of several experts.
    """

    name: str
    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    alpha: float = 0.0
    rank: int = 0
    flat: tuple[torch.Tensor, ...] = ()
    is_bias: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return `(stack, rows, columns)` of the delta."""
        return self.left.shape[0], self.left.shape[1], self.right.shape[2]

    @property
    def is_zero(self) -> bool:
        """Return whether the delta is zero everywhere."""
        return not self.left.any() or not self.right.any() or not self.scaling

    @property
    def scalings(self) -> dict[str, float]:
        """Return the scalings that a merge may take by mistake, in words."""
        alpha, r = self.alpha, max(1, self.rank)
        return {
            "1": 1.0,
            f"lora_alpha ({alpha:g})": alpha,
            f"lora_alpha / r ({alpha / r:g})": alpha / r,
            f"lora_alpha / sqrt(r) ({alpha / math.sqrt(r):g})": alpha / math.sqrt(r),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A tensor that the adapter's file holds whole, or of which it holds the rows with the indices `rows`."""

    name: str
    value: torch.Tensor
    rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByForm:
    """A weight with a closed form of another kind; for DoRA, `plain` is its LoRA without the magnitude."""

    name: str
    layer: Any
    files: Mapping[str, torch.Tensor]
    make: Make
    plain: LowRankTarget | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ByPeft:
    """A parameter of a layer that PEFT merges in float64.

    Attributes
    ----------
    layers : tuple
        PEFT's layer as it loads it onto the base in its own dtype, and in that of the folder where that is another:
        some methods compute a part of themselves from the base.
    plain : LowRankTarget or None
        Its LoRA alone, where the base has to be changed before: the product of the first factors is taken out of it.
    """

    name: str
    layers: tuple[Any, ...]
    part: str
    plain: LowRankTarget | None = None

    def merged(self, layer: Any, weight: torch.dtype, adapter: torch.dtype) -> torch.Tensor | None:
        """Return the parameter after the merge of a layer in these dtypes; None where PEFT does not merge it."""
        twin = copy.deepcopy(layer)
        for name, parameter in chain(twin.named_parameters(), twin.named_buffers()):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(weight if name.startswith("base_layer.") else adapter)
        try:
            with torch.no_grad(), Float64Mode() if weight == torch.float64 else torch.no_grad():
                twin.merge(safe_merge=False, adapter_names=[ADAPTER_NAME])
                found: torch.Tensor = dict(twin.get_base_layer().named_parameters())[self.part].detach()
                return found
        except (*NO_MERGE, KeyError):
            return None


Target = LowRankTarget | Replaced | ByForm | ByPeft


@dataclass(slots=True, kw_only=True)
class Adapter:
    """The changes that an adapter makes to the base.

    Attributes
    ----------
    targets : dict of str to Target
        The change of each tensor, by its name in the base.
    unmatched : tuple of str
        Modules that its file adapts, and the base does not have.
    renaming : str
        In words, the renaming that would make them match.
    bases : dict of str to torch.Tensor
        Tensors that take the place of the base's before they are adapted.
    shared : dict of str to int
        Number of adapted modules that have a tensor in common, by its name.
    drawn : AdapterRemark or None
        Remark that loading the adapter draws at random, so that no two loads merge to the same.
    """

    targets: dict[str, Target] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()
    renaming: str = ""
    bases: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    drawn: AdapterRemark | None = None

    def add(self, target: Target) -> None:
        """Add a target; a tensor that is saved whole and adapted too is the base of its other target."""
        earlier = self.targets.get(target.name)
        if isinstance(target, Replaced) and target.rows is None and earlier is not None:
            self.bases[target.name] = target.value
            return
        if earlier is not None:
            self.shared[target.name] = self.shared.get(target.name, 1) + 1
        self.targets[target.name] = target


def open_adapter(path: Path, base: Mapping[str, Stored], *, allow_pickle: bool) -> Adapter | None:
    """Return a plain LoRA by the names in its file; None where that takes a model."""
    config, _ = read_adapter(path, allow_pickle=allow_pickle)
    files = WeightFiles.of_adapter(str(path), allow_pickle=allow_pickle)
    simple = (
        config["peft_type"] == "LORA"
        and not _needs_residual(config)
        and all(name in PLAIN and name not in _NEEDS_MODEL for name, given in config.items() if given)
    )
    if not simple:
        return None
    found = Adapter()
    modules: dict[str, dict[str, torch.Tensor]] = {}
    whole = []
    for key in files.names():
        name = key.removeprefix(_PREFIX)
        match = _KEY.match(name)
        if match is not None:
            modules.setdefault(match["module"], {})[match["part"]] = files.read(key)
        elif (name := name.replace(".base_layer.", ".")) in base:
            whole.append(Replaced(name=name, value=files.read(key)))
        else:
            return None
    for module, parts in modules.items():
        target = _target(module, parts, base, config)
        if target is None:
            return None
        found.add(target)
        if "B.bias" in parts:
            if f"{module}.bias" not in base:
                return None
            found.add(_bias(target, f"{module}.bias", parts["B.bias"]))
    for one in whole:
        found.add(one)
    return found


def _needs_residual(config: Mapping[str, Any]) -> bool:
    return _RESIDUAL.match(str(config.get("init_lora_weights"))) is not None


def _setting(config: Mapping[str, Any], name: str, patterns: str, module: str) -> Any:
    """Return `lora_alpha` or `r` of one module."""
    usual, given = config.get(name, 8), config.get(patterns)
    if not given:
        return usual
    from peft.utils.other import get_pattern_key

    return given.get(get_pattern_key(given.keys(), module), usual)


def _target(
    module: str, parts: Mapping[str, torch.Tensor], base: Mapping[str, Stored], config: Mapping[str, Any]
) -> LowRankTarget | None:
    stored, transposed = base.get(f"{module}.weight"), bool(config.get("fan_in_fan_out"))
    if stored is None:
        return None
    alpha = float(_setting(config, "lora_alpha", "alpha_pattern", module))
    rank = int(_setting(config, "r", "rank_pattern", module))
    shape = stored.shape
    if {"A.weight", "B.weight"} <= parts.keys():
        a, b = parts["A.weight"], parts["B.weight"]
        if _are_of_convolution(a, b, shape):
            a, b, shape = a.flatten(1), b.flatten(1), (shape[0], math.prod(shape[1:]))
    elif {"embedding_A", "embedding_B"} <= parts.keys():
        a, b, transposed = parts["embedding_A"], parts["embedding_B"], True
    else:
        return None
    left, right = (a.T, b.T) if transposed else (b, a)
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != rank or shape != (left.shape[0], right.shape[1]):
        return None
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRankTarget(name=stored.name, left=left[None], right=right[None], scaling=scaling, alpha=alpha, rank=rank)


def _are_of_convolution(a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return whether the factors are those of a convolution without groups, whose weight has this shape.

    A has its kernel, B one of a single point: they are the factors of the weight as a matrix, `(out, in * kernel)`.
    """
    return a.dim() > 2 and tuple(shape) == (b.shape[0], *a.shape[1:]) and b.shape[1:].numel() == a.shape[0]


def _bias(of: LowRankTarget, name: str, bias: torch.Tensor) -> LowRankTarget:
    one = torch.ones(1, 1, 1, dtype=bias.dtype)
    return replace(of, name=name, left=bias.reshape(1, -1, 1), right=one, flat=(), is_bias=True)


def on_model(case: Case, model: Any, base: Mapping[str, Stored], stored: str) -> Adapter:
    """Return the changes that an adapter makes to a base, by PEFT's layers on a model without weights.

    `stored` is the dtype of the merged folder.

    Raises
    ------
    InputError
        PEFT cannot put it on this base.
    """
    import peft

    assert case.adapter is not None
    files = WeightFiles.of_adapter(case.adapter, allow_pickle=case.allow_pickle)
    found, residual = Adapter(), False
    if model is not None:
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        config: Any = _config(case.adapter)
        residual = _needs_residual(config.to_dict())
        if isinstance(getattr(config, "init_lora_weights", None), str):
            config.init_lora_weights = True  # the factors come from their file, and not from the base's weights
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of missing keys, which are looked at here
                adapted = peft.PeftModel.from_pretrained(
                    model,
                    case.adapter,
                    adapter_name=ADAPTER_NAME,
                    config=config,
                    low_cpu_mem_usage=True,
                    torch_device="cpu",
                    autocast_adapter_dtype=False,
                )
                expected = expected_adapter(adapted, files)
            state = adapted.state_dict()
            foreign = [name.replace(f".{ADAPTER_NAME}", "") for name in expected if name not in state]
            _note_unmatched(found, foreign, own.values())
            complete = _collect(found, adapted, {key: expected[key] for key in expected if key in state}, own, base)
            if complete and not residual:
                return found
            residual = residual and complete
        except (ConsistencyError, NotImplementedError, *UNUSABLE):  # loaded again below, and raised there
            _note_unmatched(found, files.names(), own.values())
            if found.unmatched and len(found.unmatched) == len(_modules(files.names())):
                return found
    return _loaded(case, stored, found.targets if residual else {})


def _config(adapter: str) -> Any:
    """Return an adapter's config.

    Raises
    ------
    InputError
        It takes a library that is not installed.
    """
    import peft

    try:
        return peft.PeftConfig.from_pretrained(adapter)
    except ImportError as error:
        raise library_missing(error, adapter) from error


def _loaded(case: Case, stored: str, plain: Mapping[str, Target]) -> Adapter:
    """Load base and adapter, for methods that PEFT has to merge, or that take what they began as out of the base."""
    found = Adapter(drawn=remark_on_draws(case))
    layers: dict[tuple[str, str], tuple[Any, ...]] = {}
    of_base = ""
    for dtype in ("auto", stored):
        loaded = load_base(msgspec.structs.replace(case, dtype=dtype), "cpu")
        if loaded.dtype == of_base:
            break
        of_base = loaded.dtype
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with determinism.seeded():  # every call says the same
                adapted = load_adapter(loaded, case)  # in float32, as autocast_adapter_dtype has it
        model, origins = adapted.model, adapted.origins
        taken: set[tuple[str, str]] = set()
        for name, layer in adapted_layers(model):
            for part, _ in layer.get_base_layer().named_parameters():
                inside = (f"{name}.base_layer.{part}", f"{name}.{part}")
                own = next((origins[one] for one in inside if one in origins), None)
                if own is not None and (own, part) in taken:
                    found.shared[own] = 2
                elif own is not None:
                    taken.add((own, part))
                    judged = () if part.startswith("parametrizations.") else (layer,)  # computed from its parts
                    layers[own, part] = (*layers.get((own, part), ()), *judged)
        if dtype == "auto":
            files = WeightFiles.of_adapter(str(case.adapter), allow_pickle=case.allow_pickle)
            expected = expected_adapter(model, files)
    for (own, part), of in layers.items():
        lora = plain.get(own)
        found.add(ByPeft(name=own, layers=of, part=part, plain=lora if isinstance(lora, LowRankTarget) else None))
    for name, (_, tensor) in expected.items():
        if (whole := _whole(name)) is not None:
            found.add(Replaced(name=whole, value=tensor))
    return found


def _collect(
    found: Adapter, model: Any, expected: Expected, own: Mapping[int, str], base: Mapping[str, Stored]
) -> bool:
    """Add the targets of PEFT's layers; return whether all of them have a form."""
    layers = list(adapted_layers(model))
    of_layers: set[str] = set()
    for name, layer in layers:
        mine = {key for key in expected if key.startswith(f"{name}.")}
        weight = layer.get_param() if hasattr(layer, "get_param") else _weight(layer)
        # PEFT puts another parameter in the place of one that it loads
        plain = own.get(id(weight), f"{module_place(name)}.weight")
        if type(layer).__name__ == "TrainableTokensLayer":
            delta = expected.get(f"{name}.trainable_tokens_delta.{ADAPTER_NAME}")
            if delta is not None:
                rows = torch.tensor(layer.token_indices[ADAPTER_NAME])
                found.add(Replaced(name=plain, value=delta[1], rows=rows))
                of_layers |= mine
            continue
        made = _of_layer(name, layer, plain, expected, base)
        if made is None:
            return False
        for target in made:
            found.add(target)
        of_layers |= {key for key in mine if _whole(key) is None}
    for key, (_, tensor) in expected.items():
        if key not in of_layers:
            plain_name = _whole(key)
            if plain_name is None:
                return False
            found.add(Replaced(name=plain_name, value=tensor))
    return bool(found.targets) or not expected


def _weight(layer: Any) -> Any:
    inner = layer.get_base_layer()
    return getattr(inner, "in_proj_weight" if hasattr(inner, "in_proj_weight") else "weight", None)


def _of_layer(name: str, layer: Any, plain: str, expected: Expected, base: Mapping[str, Stored]) -> list[Target] | None:
    """Return the targets of one layer; None where it has no form."""
    stored = base.get(plain)
    in_file = {part.removeprefix(f"{name}."): tensor for part, (_, tensor) in expected.items()}
    # in the dtypes of the file, whatever those of the layer are
    files = {part: tensor.to(in_file[part].dtype) for part, tensor in files_of(expected, name, layer).items()}
    if not files:
        return []  # the file has nothing for this layer, which PEFT leaves as it was made: without effect
    is_low_rank = low_rank_of(torch.device("cpu"), name, layer, expected) is not None
    make = maker_of(layer)
    if stored is None:
        return _of_new_head(plain, layer, files) if is_low_rank else None
    if not is_low_rank and make is None:
        return None
    source = Source(layer=layer, weight=torch.empty(stored.shape, dtype=stored.dtype, device="meta"), files=files)
    lora, bias = _lora(plain, source), _bias_name(plain)
    is_convolution = make == LoraConvolution.of
    if lora is not None and (is_low_rank or is_convolution or lora.flat):
        added = files.get(f"lora_B.{ADAPTER_NAME}.bias")
        return [lora] if added is None else [lora, _bias(lora, bias, added)]
    assert make is not None
    found: list[Target] = [ByForm(name=plain, layer=layer, files=files, make=make, plain=lora)]
    if hasattr(layer, "ia3_l") and not layer.is_feedforward and bias in base:
        found.append(ByForm(name=bias, layer=layer, files=files, make=Bias.of))
    return found


def _of_new_head(name: str, layer: Any, files: Mapping[str, torch.Tensor]) -> list[Target] | None:
    """Return the LoRA of a head that no file of the base has: what it is added to was drawn when training began."""
    weight = _weight(layer)
    if HEAD.search(name) is None or weight is None:
        return None
    lora = _lora(name, Source(layer=layer, weight=weight, files=files))
    return None if lora is None else [lora]


def _lora(name: str, source: Source) -> LowRankTarget | None:
    """Return the two factors of a layer: its LoRA, of DoRA that alone, or those of all its experts."""
    layer, flat = source.layer, tuple[torch.Tensor, ...]()
    transposed = bool(getattr(layer, "fan_in_fan_out", False))
    a, b = source.tensor("lora_A"), source.tensor("lora_B")
    if a is None or b is None:
        a, b, transposed = source.tensor("lora_embedding_A"), source.tensor("lora_embedding_B"), True
    if a is None or b is None:
        return None
    shape = tuple(source.weight.shape)
    if _are_of_convolution(a, b, shape):
        a, b, shape = a.flatten(1), b.flatten(1), (shape[0], math.prod(shape[1:]))
    if a.dim() != 2:
        return None
    left, right = (one[None] for one in ((a.T, b.T) if transposed else (b, a)))
    if type(layer).__name__ == "ParamWrapper" and (factors := factors_of_experts(source)) is not None:
        (left, right), flat = factors, (a, b)
    elif shape != (left.shape[1], right.shape[2]):
        return None
    return LowRankTarget(
        name=name,
        left=left,
        right=right,
        scaling=source.lora_scaling(),
        flat=flat,
        alpha=float(layer.lora_alpha[ADAPTER_NAME]),
        rank=int(layer.r[ADAPTER_NAME]),
    )


def _bias_name(weight: str) -> str:
    return f"{weight.rpartition('.')[0]}.bias"


def _whole(name: str) -> str | None:
    """Return the base's name of a parameter that the adapter has whole; None for a part of its method."""
    plain = name.removeprefix(_PREFIX).replace(f".modules_to_save.{ADAPTER_NAME}.", ".")
    return None if f".{ADAPTER_NAME}" in plain else plain.replace(".base_layer.", ".")


def _modules(keys: Iterable[str]) -> list[str]:
    found = (_KEY.match(key.removeprefix(_PREFIX)) for key in keys)
    return list(dict.fromkeys(match["module"] for match in found if match is not None))


def _note_unmatched(found: Adapter, keys: Iterable[str], names: Iterable[str]) -> None:
    """Note the modules of the file that the model does not have, and the renaming that would help."""
    known = {name.rpartition(".")[0] for name in names}
    missed = [one for one in _modules(keys) if one not in known]
    found.unmatched = tuple(missed)
    if missed and (prefix := common_prefix(missed, known)) is not None:
        found.renaming = f"with {prefix[1] or 'nothing'} instead of {prefix[0] or 'nothing'} they would"
