"""Check a saved adapter by its file and its config, and by the names and shapes of a base. No torch at import.

Loading is asked too where it computes something: an adapter that draws at random when it is loaded is another one each
time, which takes base and PEFT to see.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from consistency.capture.adapter_remarks import AdapterFlaw, AdapterRemark
from consistency.capture.wording import counted, layers_text, size, some
from consistency.case import recognition
from consistency.case.adapter_fit import check_files, read_adapter
from consistency.case.case import Case
from consistency.case.checkpoint import read_model_weights
from consistency.case.other_trainers import adapter_of_another_trainer
from consistency.errors import InputError
from consistency.extras.merging.check_adapter.against import Relation, relation
from consistency.extras.merging.diff.mapped import StoredTensor, open_weights
from consistency.worker.memory.host_memory import available_bytes
from consistency.worker.model.saved_adapter import config_fit
from consistency.worker.model.saved_adapter.contents import RawTensor, TensorContents, by_layer, read_contents
from consistency.worker.model.saved_adapter.remarks import remarks_on_config, remarks_on_values
from consistency.worker.model.saved_adapter.untrained import inert_part, is_known_method

_COMPUTED_ON_LOADING = re.compile(r"pissa|olora|corda|eva|loftq|lora_ga|orthogonal", re.IGNORECASE)
"""`init_lora_weights` by which PEFT computes factors from the base when it loads an adapter that was not converted."""

_MOST_NAMED = 4


@dataclass(kw_only=True)
class SavedAdapter:
    """What a check has found of a saved adapter.

    Attributes
    ----------
    contents : list of TensorContents
        Of its floating-point tensors.
    untrained : dict of str to str
        Layers that add nothing, each with the tensor that shows it.
    not_finite : list of TensorContents
        Tensors that hold NaN or infinity.
    remarks : list of AdapterRemark
        What is wrong with it.
    scalings : dict of float to list of str
        Layers by the scaling that PEFT gives them.
    computes : str
        What PEFT computes when it loads this adapter; empty where it only reads the file.
    relation : Relation or None
        How it stands to another checkpoint.
    """

    config: Mapping[str, Any]
    contents: list[TensorContents]
    untrained: dict[str, str]
    not_finite: list[TensorContents]
    remarks: list[AdapterRemark] = field(default_factory=list)
    scalings: dict[float, list[str]] = field(default_factory=dict)
    computes: str = ""
    is_base_read: bool = False
    relation: Relation | None = None

    @functools.cached_property
    def layers(self) -> Mapping[str, None]:
        """Return the adapted layers in order; all in the file, where the method's tensors are not known here."""
        by_name = by_layer(tensor for tensor in self.contents if tensor.part not in ("weight", "bias", "tensor"))
        known = [layer for layer, parts in by_name.items() if is_known_method(parts)]
        return dict.fromkeys(known or by_name)

    @functools.cached_property
    def is_method_known(self) -> bool:
        """Report whether the file's layers can be told from their tensors."""
        return any(is_known_method(parts) for parts in by_layer(self.contents).values())


def check(case: Case, against: Path | None) -> SavedAdapter:
    """Check the adapter of a case, with its base where the case has one.

    Parameters
    ----------
    against : Path or None
        Another adapter, such as the checkpoint that a training was resumed from.

    Raises
    ------
    InputError
        File or config cannot be read, or no adapter of PEFT is in the folder.
    """
    assert case.adapter is not None
    folder = Path(case.adapter)
    other = adapter_of_another_trainer(folder)
    if other is not None:
        what, todo = other
        raise InputError(what, where=folder, wanted="a folder that PEFT's save_pretrained() wrote", hint=todo)
    recognition.refuse_adapter_without_config(folder)
    config, _ = read_adapter(folder, allow_pickle=case.allow_pickle)
    with open_weights(folder, allow_pickle=case.allow_pickle) as tensors:
        contents = read_contents(map(_raw, tensors.values()))
        keys = list(tensors)
        found = SavedAdapter(
            config=config,
            contents=contents,
            untrained=_untrained(contents),
            not_finite=[tensor for tensor in contents if tensor.not_finite],
            scalings=config_fit.scalings(config, by_layer(contents)),
        )
        if against is not None:
            with open_weights(against, allow_pickle=case.allow_pickle) as others:
                found.relation = relation(tensors, others)
    found.remarks += remarks_on_values(contents, says_all=True)
    found.remarks += remarks_on_config(config, contents, keys)
    found.computes = _computed_on_loading(config)
    if case.base:
        found.is_base_read = True
        _hold_against_base(found, case)
    if found.computes:
        _ask_two_loads(found, case)
    return found


def _raw(tensor: StoredTensor) -> RawTensor:
    return RawTensor(key=tensor.name, shape=tensor.shape, dtype=tensor.dtype, raw=tensor.raw)


def _untrained(contents: Sequence[TensorContents]) -> dict[str, str]:
    layers = by_layer(contents)
    return {layer: part for layer, parts in layers.items() if is_known_method(parts) and (part := inert_part(parts))}


def _computed_on_loading(config: Mapping[str, Any]) -> str:
    """Return what PEFT computes from the base on loading; empty where it only reads the file."""
    way = config.get("init_lora_weights")
    if isinstance(way, str) and _COMPUTED_ON_LOADING.search(way):
        return (
            f"init_lora_weights is {way!r}: PEFT computes factors from the base when it loads this adapter, and takes "
            "them out of the base's weights"
        )
    return ""


def _hold_against_base(found: SavedAdapter, case: Case) -> None:
    """Add what the headers of the base show: shapes that do not fit, and layers without factors."""
    base = Path(case.base)
    check_files(base, Path(case.adapter or ""), allow_pickle=case.allow_pickle, weights_alone=True)
    weights = read_model_weights(base, allow_pickle=case.allow_pickle)
    matrices = [
        name.removesuffix(".weight")
        for name, header in weights.tensors.items()
        if name.endswith(".weight") and len(header.shape) == 2
    ]
    adapted = set(found.layers)
    lacking = config_fit.without_factors(found.config, adapted, matrices)
    if lacking and found.is_method_known:
        found.remarks.append(
            AdapterRemark(
                flaw=AdapterFlaw.CONFIG_MISMATCH,
                text=f"target_modules names {counted(len(lacking), 'layer')} of the base for which the file has no "
                f"factors: {layers_text(lacking)}",
                todo="save it again from all processes: a pipeline stage, or a rank, has the layers of its own alone",
                is_error=True,
            )
        )
    if found.config.get("bias") in ("all", "lora_only"):
        _look_for_biases(found, set(weights.tensors))


def _ask_two_loads(found: SavedAdapter, case: Case) -> None:
    """Add whether loading draws at random, by two loads on the CPU, or why they were not made."""
    if not case.base:
        found.computes += "; with --base it is seen whether that draws at random"
        return
    size_of_base = sum(file.stat().st_size for file in _weight_files(case))
    free = available_bytes()
    if free is not None and 2 * size_of_base > free:
        found.computes += f"; two loads of a base of {size(size_of_base)} did not fit into {size(free)}"
        return
    from consistency.worker.model.drawn_on_loading import remark_on_draws

    try:
        drawn = remark_on_draws(case)
    except InputError as error:
        found.computes += f"; whether that draws at random is not known, as they do not load: {error.what}"
        return
    if drawn is None:
        found.computes += "; two loads under two seeds were the same"
    else:
        found.remarks.append(drawn)


def _weight_files(case: Case) -> Sequence[Path]:
    return read_model_weights(Path(case.base), allow_pickle=case.allow_pickle).files


def _look_for_biases(found: SavedAdapter, names: set[str]) -> None:
    """Add that the file lacks biases which the config has as trained, and the base has in adapted layers."""
    if any(tensor.part == "bias" for tensor in found.contents):
        return
    endings = {name.removesuffix(".bias") for name in names if name.endswith(".bias")}
    biased = [layer for layer in found.layers if any(layer.endswith(end) or end.endswith(layer) for end in endings)]
    if biased:
        found.remarks.append(
            AdapterRemark(
                flaw=AdapterFlaw.CONFIG_MISMATCH,
                text=f"bias is {found.config['bias']!r}, and the file has no bias of {some(biased, _MOST_NAMED)}",
                todo="save it again by PEFT's save_pretrained(): the trained biases are not in this file",
                is_error=True,
            )
        )
