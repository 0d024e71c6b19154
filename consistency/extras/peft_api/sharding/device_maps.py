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
    """One way to lay the model out over devices."""

    name: str
    """Name of the layout, which stands for a layer in the report."""
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
    suggested: list[Layout] = []
    if case.device_map:
        suggested.append(Layout(name="given", device_map=_read_device_map(case.device_map), own=True))
    if device.type == "cpu":
        # one device: layers that are read from the disk when they are computed are shards too
        suggested.append(Layout(name="cpu and disk", device_map=spread(model, [HOST, DISK])))
        return suggested
    visible = _visible(device)
    if len(visible) > 1 and (device.index or 0) == 0:  # one worker is enough for layouts over all devices
        in_turn = spread(model, visible)
        suggested += [Layout(name=name, device_map=name) for name in MADE_BY_TRANSFORMERS]
        suggested.append(Layout(name="layers in turn", device_map=in_turn))
        suggested.append(Layout(name="layers in turn, by way of the host", device_map=in_turn, by_host=True))
    suggested.append(Layout(name=f"{device.type} and cpu", device_map=spread(model, [str(device), HOST])))
    return suggested


def spread(model: torch.nn.Module, places: Sequence[int | str]) -> DeviceMap:
    """Lay a model's blocks out over places in the order of the model, about as many on each.

    Tied weights, and so the head with the embeddings, go where the first of them is.
    """
    # the tensors of each block or other module, by where they begin in memory and how many bytes they have
    tensors_of: dict[str, list[tuple[Start, int]]] = {}
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        block = _BLOCK.match(name)
        unit = block["block"] if block else name.rpartition(".")[0]
        tensors_of.setdefault(unit, []).append((start_of(tensor), tensor.nbytes))
    units = sorted(tensors_of, key=_position(model))
    units_per_place = max(1, -(-len(units) // len(places)))
    device_map: DeviceMap = {}
    place_of_tensor: dict[tuple[Start, int], int | str] = {}
    for number, unit in enumerate(units):
        place = places[min(number // units_per_place, len(places) - 1)]
        for key in tensors_of[unit]:
            nbytes = key[1]
            if key in place_of_tensor and nbytes:  # a tensor without bytes is tied to nothing
                place = place_of_tensor[key]
                break
        device_map[unit] = place
        place_of_tensor.update(dict.fromkeys(tensors_of[unit], place))
    return device_map


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
    base_name = next(name for name, module in model.named_modules() if module is base.model)
    laid_out = {_join(base_name, name): place for name, place in layout.device_map.items()}
    laid_out |= _places_beside_base(model, laid_out)
    folder.mkdir(exist_ok=True)
    dispatched = dispatch_model(model, laid_out, offload_dir=str(folder))
    assert isinstance(dispatched, torch.nn.Module)
    return dispatched.eval()


def _join(prefix: str, name: str) -> str:
    return ".".join(part for part in (prefix, name) if part)


def _places_beside_base(model: torch.nn.Module, laid_out: DeviceMap) -> DeviceMap:
    """Return places of the modules that PEFT keeps beside the base, such as virtual tokens.

    A module that the base has too goes where that is; others go to the first place, where the base begins and takes
    their results.
    """
    if "" in laid_out:
        return {}
    place_of: dict[int, int | str] = {}
    beside: list[tuple[str, torch.nn.Module]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        places = [place for unit, place in laid_out.items() if f"{name}.".startswith(f"{unit}.")]
        if places:
            place_of[id(module)] = places[0]
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            beside.append((name, module))
    first = next(iter(laid_out.values()))
    return {name: place_of.get(id(module), first) for name, module in beside}


def _position(model: torch.nn.Module) -> Any:
    """Return a key that sorts modules as the model names them: the norm and the head come after the blocks."""
    position = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return lambda name: position.get(name, len(position))


def _visible(device: torch.device) -> list[str]:
    """Return the names of all devices of a worker's backend; of another backend than torch's own, its device alone."""
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return [str(device)]
    return [f"{device.type}:{i}" for i in range(torch.accelerator.device_count())]


def same_model(device: torch.device, places: Mapping[str, Any]) -> bool:
    """Report whether all computation is on devices of one model: the same kernels on the same values."""
    # the host and the disk compute nothing: what is kept there is moved to the device first
    names = {_device_name(device, place) for place in places.values() if place not in (HOST, DISK)}
    return len(names | {_device_name(device, str(device))}) == 1


def _device_name(device: torch.device, place: Any) -> str:
    """Return the model of the device at a place: its index, or its name in torch's spelling."""
    placed = torch.device(device.type, place) if isinstance(place, int) else torch.device(str(place))
    if placed.type == "cpu":
        return "cpu"
    module = torch.get_device_module(placed.type)
    if not hasattr(module, "get_device_properties"):
        return placed.type
    return str(getattr(module.get_device_properties(placed.index or 0), "name", placed.type))


def _read_device_map(option: str) -> str | DeviceMap:
    """Return the user's device map: a name that transformers knows, or the content of a JSON file."""
    if option in MADE_BY_TRANSFORMERS:
        return option
    return dict(json.loads(Path(option).read_text(encoding="utf-8")))
