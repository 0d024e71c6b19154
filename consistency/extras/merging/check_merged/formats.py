"""Read formats of quantized weights: the values of their parts, and the largest distance from an exact value.

Each is read by its formula. Of a value that was quantized it is known that it is the nearest level by the scale that is
stored with it: half the distance to the next level, the rounding of that scale, and where the scale leaves the largest
values out of its range, how far these are cut.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from consistency.errors import InputError, extra_hint
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.folder import Folder, Problem, Stored, open_folder
from consistency.numerics.dtype import UNIT_ROUNDOFF, name_of, named
from consistency.numerics.quantized import EightBit, FourBit, QuantizedWeight
from consistency.worker.quantized.held import STATE, settings_in

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PACKED = (*_FLOAT8, torch.uint8, torch.int8, torch.int32, torch.uint32)
_UNREAD = "is not read here: give the weights as they were before they were quantized"
"""Dequantized ones are no help: they are levels of the format, and none of them is base + adapter to the rounding."""


def open_weights(path: Path, *, allow_pickle: bool, like: Folder | None = None) -> Folder:
    """Open a folder or file of weights in any format that is read here; `like` is the base of a merged one.

    Raises
    ------
    InputError
        There are no weights, or they cannot be read.
    """
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")) if path.is_dir() else []
    if files and like is not None and not list(path.glob("*.safetensors")):
        return _gguf(path, files, like)
    found = open_folder(path, allow_pickle=allow_pickle, strict=like is None)
    for read in (_bitsandbytes, _float8, _mlx):
        read(found)
    for name, stored in found.tensors.items():
        if stored.step is None and stored.dtype in _PACKED and len(stored.shape) > 1:
            found.unread.setdefault(name, f"a packed format ({name_of(stored.dtype)}) {_UNREAD}")
    return found


def _take(
    folder: Folder, name: str, parts: Mapping[str, str], make: Callable[[dict[str, torch.Tensor]], QuantizedWeight]
) -> None:
    """Put a weight in the place of the tensors that store its parts; `parts` are their names by part."""
    taken = {part: folder.tensors[key] for part, key in parts.items()}

    def load() -> QuantizedWeight:
        return make({part: stored.read() for part, stored in taken.items()})

    try:
        weight = load()
    except (KeyError, RuntimeError, ValueError, TypeError, IndexError) as error:
        folder.unread[name] = f"a variant of its format ({error}) {_UNREAD}"
        return
    for key in parts.values():
        del folder.tensors[key]
    folder.tensors[name] = Stored(
        name=name,
        keys=tuple(parts.values()),
        shape=weight.shape,
        dtype=weight.dtype,
        read=lambda: load().rounded(),
        step=lambda exact: load().requantized(exact, torch.zeros_like(exact)).allowed,
    )


def _bitsandbytes(folder: Folder) -> None:
    for key in [key for key in folder.tensors if STATE in key]:
        name = key.partition(STATE)[0]
        names = {"codes": name, "absmax": f"{name}.absmax", "table": f"{name}.quant_map", "state": key}
        nested = {"nested_absmax": f"{name}.nested_absmax", "nested_table": f"{name}.nested_quant_map"}
        names |= {part: one for part, one in nested.items() if one in folder.tensors}
        if all(one in folder.tensors for one in names.values()):
            _take(folder, name, names, _four_bit)
    for key in [key for key in folder.tensors if key.endswith(".SCB")]:
        name = f"{key.removesuffix('.SCB')}.weight"
        if name in folder.tensors:
            folder.tensors.pop(f"{key.removesuffix('.SCB')}.weight_format", None)
            _take(folder, name, {"codes": name, "absmax": key}, _eight_bit)


def _four_bit(parts: dict[str, torch.Tensor]) -> QuantizedWeight:
    stated = settings_in(parts.pop("state"))
    if "nested_offset" in stated:
        parts["offset"] = torch.tensor(float(stated["nested_offset"]))
    if stated.get("nested_blocksize", 256) != 256:
        raise ValueError("nested scales in blocks of another size than 256")
    dtype = named(str(stated["dtype"]))
    return FourBit(parts=parts, shape=tuple(stated["shape"]), dtype=dtype, block=int(stated["blocksize"]))


def _eight_bit(parts: dict[str, torch.Tensor]) -> QuantizedWeight:
    return EightBit(parts=parts, shape=tuple(parts["codes"].shape), dtype=torch.float32)


class _Levels(QuantizedWeight):
    """A weight of stored levels times scales, plus offsets: a value is the nearest of them."""

    __slots__ = ()

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        found = self.parts["codes"].to(dtype) * self._spread("scale", dtype)
        return found + self._spread("offset", dtype) if "offset" in self.parts else found

    def in_turn(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values in a dtype, the product of level and scale rounded to it, and then the sum."""
        return (self.parts["codes"].to(dtype) * self._spread("scale", dtype)) + self._spread("offset", dtype)

    def _spread(self, part: str, dtype: torch.dtype) -> torch.Tensor:
        found = self.parts[part].to(dtype)
        if found.numel() == 1:
            return found.reshape(1, 1)
        for dim, size in enumerate(self.shape):
            if dim < found.dim() and found.shape[dim] not in (1, size):
                found = found.repeat_interleave(-(-size // found.shape[dim]), dim=dim).narrow(dim, 0, size)
        return found

    def _steps(self, exact: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 - no scale is computed from the values
        """Return twice the half step at each value, and what the scale's own rounding and a cut at its range add."""
        codes, scale = self.parts["codes"], self._spread("scale", torch.float64).abs()
        unit = max(UNIT_ROUNDOFF.get(self.parts["scale"].dtype, 0.0), 2**-24)
        if codes.is_floating_point():  # as far apart as the levels of the float are
            info = torch.finfo(codes.dtype)
            inside = (exact.abs() / scale.clamp(min=1e-300)).clamp(min=float(info.smallest_normal), max=float(info.max))
            return torch.exp2(torch.floor(torch.log2(inside))) * info.eps * scale, 4 * unit * exact.abs()
        lowest, highest = int(codes.min()), int(codes.max())
        edge = (codes == lowest) | (codes == highest)
        return scale.expand_as(exact), torch.where(edge, scale / 2, scale * 0) + 4 * unit * highest * scale


def _levels(parts: dict[str, torch.Tensor], shape: tuple[int, ...]) -> QuantizedWeight:
    return _Levels(parts=parts, shape=shape, dtype=torch.float32)


def _float8(folder: Folder) -> None:
    for name in [name for name, one in folder.tensors.items() if one.dtype in _FLOAT8]:
        stored = folder.tensors[name]
        scale = next((one for one in (f"{name}_scale_inv", f"{name}_scale") if one in folder.tensors), None)
        if scale is None:
            text = f"{name} is {name_of(stored.dtype)} without a scale"
            folder.problems.append(Problem(cause=MergeCause.CODES, text=text, tensors=(name,)))
            continue
        _take(folder, name, {"codes": name, "scale": scale}, functools.partial(_levels, shape=stored.shape))
        if name in folder.tensors and folder.tensors[name].step is not None:
            folder.tensors[name] = replace(folder.tensors[name], codes=stored.read)
    for name in [name for name in folder.tensors if re.search(r"\.weight_scale(_inv)?$", name)]:
        weight = re.sub(r"_scale(_inv)?$", "", name)
        if weight in folder.tensors and folder.tensors[weight].step is None:
            text = f"{weight} has a scale, {name}, and is {name_of(folder.tensors[weight].dtype)}"
            folder.problems.append(Problem(cause=MergeCause.CODES, text=text, tensors=(weight, name)))
            del folder.tensors[name]


def _mlx(folder: Folder) -> None:
    settings: Any = folder.config.get("quantization")
    bits = int(settings.get("bits", 0)) if isinstance(settings, dict) else 0
    for key in [key for key in folder.tensors if key.endswith(".scales")]:
        layer = key.removesuffix(".scales")
        name, offset = f"{layer}.weight", f"{layer}.biases"
        if name not in folder.tensors or folder.tensors[name].dtype != torch.uint32:
            continue
        folder.reader = "MLX"
        if not bits or offset not in folder.tensors:
            folder.unread[name] = f"MLX's format without {'offsets' if bits else 'a number of bits'} {_UNREAD}"
            for part in {key, offset} & folder.tensors.keys():
                del folder.tensors[part]
            continue
        stored = {part: folder.tensors[one] for part, one in (("codes", name), ("scale", key), ("offset", offset))}
        _take(folder, name, {"codes": name, "scale": key, "offset": offset}, functools.partial(_of_mlx, bits=bits))
        if folder.tensors[name].step is not None:
            in_turn = functools.partial(_in_turn, stored, bits)
            folder.tensors[name] = replace(folder.tensors[name], variants=(in_turn,))


def _in_turn(stored: Mapping[str, Stored], bits: int) -> torch.Tensor:
    """Return values as MLX dequantizes them: scale times code is rounded to the scale's dtype, and then the sum."""
    levels = _of_mlx({part: tensor.read() for part, tensor in stored.items()}, bits=bits)
    assert isinstance(levels, _Levels)
    return levels.in_turn(stored["scale"].dtype)


def _of_mlx(parts: dict[str, torch.Tensor], *, bits: int) -> QuantizedWeight:
    size = math.lcm(bits, 8) // 8  # bytes after which a code begins with a byte again
    parted = parts["codes"].view(torch.uint8).reshape(len(parts["codes"]), -1, size).to(torch.int64)
    words = (parted << torch.arange(0, 8 * size, 8)).sum(dim=2, keepdim=True)
    codes = ((words >> torch.arange(0, 8 * size, bits)) & (2**bits - 1)).flatten(1)
    return _levels({**parts, "codes": codes.to(torch.int16)}, tuple(codes.shape))


# --- GGUF ------------------------------------------------------------------------------------------------------------

_READ_OF_GGUF = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": torch.float32}
_HEADS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def _gguf(path: Path, files: list[Path], like: Folder) -> Folder:
    """Open a file of llama.cpp by a base's names: q and k of a Llama are permuted, Gemma's norms have 1 more."""
    try:
        import gguf
    except ImportError:
        raise InputError(
            "GGUF is read by a library that is not installed", where=path, hint=extra_hint("trained")
        ) from None
    if len(files) > 1:
        raise InputError(
            "several GGUF files",
            where=path,
            got=", ".join(file.name for file in files[:4]),
            hint="give one; of a split one: llama-gguf-split --merge FIRST OUT",
        )
    reader = gguf.GGUFReader(files[0])
    kind = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    arch = next((one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind), None)
    if arch is None:
        raise InputError("the library gguf does not know this architecture", where=files[0], got=kind)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    blocks = 1 + max((int(m[1]) for name in by_name if (m := re.match(r"blk\.(\d+)\.", name))), default=0)
    mapping = gguf.get_tensor_name_map(arch, blocks)
    found = Folder(path=path, tensors={}, config=like.config, reader="llama.cpp")
    for name, stored in like.tensors.items():
        tensor = by_name.pop(mapping.get_name(name, try_suffixes=(".weight", ".bias")) or "", None)
        if tensor is None:
            continue
        dtype = _READ_OF_GGUF.get(tensor.tensor_type.name)
        if dtype is None:
            found.unread[name] = f"{tensor.tensor_type.name} of GGUF {_UNREAD}"
            continue
        back = functools.partial(_as_in_base, name=tensor.name, shape=stored.shape, kind=kind, config=like.config)
        found.tensors[name] = Stored(
            name=name,
            keys=(tensor.name,),
            shape=stored.shape,
            dtype=dtype,
            read=functools.partial(_of_gguf, tensor, back),
            step=functools.partial(_step_of_q8, tensor, back) if tensor.tensor_type.name == "Q8_0" else None,
        )
    for name in by_name.keys() - {"rope_freqs.weight"}:
        found.tensors[name] = Stored(
            name=name,
            keys=(name,),
            shape=tuple(map(int, reversed(by_name[name].shape))),
            dtype=torch.float32,
            read=functools.partial(torch.from_numpy, by_name[name].data),
        )
    return found


def _as_in_base(
    values: torch.Tensor, *, name: str, shape: tuple[int, ...], kind: str, config: Mapping[str, Any]
) -> torch.Tensor:
    """Return a tensor in the layout of the base: with the rows of q and k, and the norms, as transformers has them."""
    values = values.reshape(shape)
    heads = next((config.get(one) for part, one in _HEADS.items() if f".{part}." in name), None)
    if kind == "llama" and isinstance(heads, int):
        return values.reshape(heads, -1, 2, *shape[1:]).transpose(1, 2).reshape(shape)
    return values - 1 if kind.startswith("gemma") and name.endswith("norm.weight") else values


def _of_gguf(tensor: Any, back: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    from gguf.quants import dequantize

    if tensor.tensor_type.name == "Q8_0":
        return back(torch.from_numpy(dequantize(tensor.data, tensor.tensor_type)))
    values = torch.from_numpy(tensor.data.copy())
    return back(values.view(torch.bfloat16) if tensor.tensor_type.name == "BF16" else values)


def _step_of_q8(tensor: Any, back: Callable[[torch.Tensor], torch.Tensor], _: torch.Tensor) -> torch.Tensor:
    """Return half a step of each value: its scale, in float16, is a 127th of the largest of 32."""
    scales = torch.from_numpy(tensor.data.reshape(-1, 34)[:, :2].copy()).view(torch.float16).double()
    # rounded to float16, a scale may leave the largest value, 127 of it, out of its range
    return back(scales.expand(-1, 32)) * (0.5 + 128 * UNIT_ROUNDOFF[torch.float16])
