"""Layouts of a model over devices, and loading in them, as a user would do it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from consistency.case.case import Case
from consistency.errors import InputError
from consistency.numerics.identity import Start, start_of
from consistency.worker.model.loading import load_adapter, load_base

DeviceMap = dict[str, int | str]

MADE_BY_TRANSFORMERS = ("auto", "balanced", "sequential")
HOST, DISK = "cpu", "disk"

# a block of a stack of layers, which is never split: `model.layers.3`, `transformer.h.11`, `encoder.block.0`
_BLOCK = re.compile(r"^(?P<block>(?:.*?\.)?[A-Za-z_]+\.\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to lay the model out."""

    name: str
    """Of the layer in the report."""
    device_map: str | DeviceMap
    by_host: bool = False
    """Whether moves between shards are staged through the CPU."""
    own: bool = False
    """Whether the user gave the map."""

    @property
    def offloads(self) -> bool:
        """Whether layers stay on the host or on the disk until they are computed."""
        return not isinstance(self.device_map, str) and bool({HOST, DISK} & set(self.device_map.values()))


def layouts(case: Case, device: torch.device, model: torch.nn.Module) -> list[Layout]:
    """Return the layouts that the visible devices suggest, and the user's own."""
    found = [Layout(name="given", device_map=_given(case.device_map), own=True)] if case.device_map else []
    if device.type == "cpu":
        # one device: layers that are read from the disk when they are computed are shards too
        return [*found, Layout(name="cpu and disk", device_map=spread(model, [HOST, DISK]))]
    visible = _visible(device)
    if len(visible) > 1 and (device.index or 0) == 0:  # one worker is enough for layouts over all devices
        over = spread(model, visible)
        found += [Layout(name=name, device_map=name) for name in MADE_BY_TRANSFORMERS]
        found.append(Layout(name="layers in turn", device_map=over))
        found.append(Layout(name="layers in turn, by way of the host", device_map=over, by_host=True))
    return [*found, Layout(name=f"{device.type} and cpu", device_map=spread(model, [str(device), HOST]))]


def spread(model: torch.nn.Module, places: Sequence[int | str]) -> DeviceMap:
    """Lay a model's blocks out over places in the order of the model, about as many on each.

    Tied weights, and so the head with the embeddings, go where the first of them is.
    """
    order: dict[str, list[tuple[Start, int]]] = {}
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        block = _BLOCK.match(name)
        unit = block["block"] if block else name.rpartition(".")[0]
        order.setdefault(unit, []).append((start_of(tensor), tensor.nbytes))
    units = sorted(order, key=_position(model))
    share = max(1, -(-len(units) // len(places)))
    found: DeviceMap = {}
    owner: dict[tuple[Start, int], int | str] = {}
    for number, unit in enumerate(units):
        tied = [owner[key] for key in order[unit] if key in owner and key[1]]
        found[unit] = tied[0] if tied else places[min(number // share, len(places) - 1)]
        owner.update(dict.fromkeys(order[unit], found[unit]))
    return found


def load(case: Case, layout: Layout, device: torch.device, folder: Path) -> torch.nn.Module:
    """Load base and adapter laid out over devices; layers on the disk go into `folder`.

    With layers on the disk, the model is laid out after loading: PEFT 0.21 writes a copy of the base below the working
    directory when it loads an adapter onto a base that transformers has laid out with a disk.

    Raises
    ------
    InputError, ValueError, RuntimeError, NotImplementedError, KeyError, AttributeError
        transformers, PEFT or accelerate cannot do it.
    """
    if not layout.offloads:
        base = load_base(case, str(device), device_map=layout.device_map)
        if DISK in dict(getattr(base.model, "hf_device_map", None) or {}).values():
            raise InputError("the devices do not hold the model, and transformers would put a part on the disk")
        return base.model if case.adapter is None else load_adapter(base, case).model
    from accelerate import dispatch_model

    assert not isinstance(layout.device_map, str)
    base = load_base(case, "cpu")
    model = base.model if case.adapter is None else load_adapter(base, case).model
    prefix = next(name for name, part in model.named_modules() if part is base.model)
    dotted = f"{prefix}." if prefix else ""
    laid_out = {f"{dotted}{name}" if name else prefix: place for name, place in layout.device_map.items()}
    laid_out |= _beside(model, laid_out)
    folder.mkdir(exist_ok=True)
    found = dispatch_model(model, laid_out, offload_dir=str(folder))
    assert isinstance(found, torch.nn.Module)
    return found.eval()


def _beside(model: torch.nn.Module, laid_out: DeviceMap) -> DeviceMap:
    """Return places of what PEFT keeps beside the base, as virtual tokens: that of a module it shares, else the first.

    The first is where the base begins, which takes what they give.
    """
    if "" in laid_out:
        return {}
    place_of: dict[int, int | str] = {}
    left: list[tuple[str, torch.nn.Module]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        place = next((p for part, p in laid_out.items() if f"{name}.".startswith(f"{part}.")), None)
        if place is not None:
            place_of[id(module)] = place
        elif next(iter([*module.parameters(recurse=False), *module.buffers(recurse=False)]), None) is not None:
            left.append((name, module))
    first = next(iter(laid_out.values()))
    return {name: place_of.get(id(module), first) for name, module in left}


def _position(model: torch.nn.Module) -> Any:
    """Return a key that sorts modules as the model names them: the norm and the head come after the blocks."""
    where = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return lambda name: where.get(name, len(where))


def _visible(device: torch.device) -> list[str]:
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return [str(device)]
    return [f"{device.type}:{i}" for i in range(torch.accelerator.device_count())]


def same_model(device: torch.device, places: Mapping[str, Any]) -> bool:
    """Report whether all computation is on devices of one model: the same kernels on the same values."""
    wanted = {_device_name(device, place) for place in places.values() if place not in (HOST, DISK)}
    return len(wanted | {_device_name(device, str(device))}) == 1


def _device_name(device: torch.device, place: Any) -> str:
    one = torch.device(device.type, place) if isinstance(place, int) else torch.device(str(place))
    if one.type == "cpu":
        return "cpu"
    module = torch.get_device_module(one.type)
    if not hasattr(module, "get_device_properties"):
        return one.type
    return str(getattr(module.get_device_properties(one.index or 0), "name", one.type))


def _given(text: str) -> str | DeviceMap:
    if text in MADE_BY_TRANSFORMERS:
        return text
    found = json.loads(Path(text).read_text(encoding="utf-8"))
    return dict(found)
