"""Merged folders in formats of quantized weights, and what is lost or wrong in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from consistency.comparison.result import Comparison
from consistency.extras.merging.check_merged.causes import MergeCause
from consistency.extras.merging.check_merged.result import check_merged
from tests.extras.merging.check_merged.made_merges import Case, Tensors, kinds, message, random, save

FLOAT8 = torch.float8_e4m3fn


def wide(folder: Path, *, size: float = 1.0) -> Case:
    """Return a model of two weights of 128 rows and columns."""
    tensors = random({f"layers.{n}.fc.weight": (128, 128) for n in range(2)})
    tensors |= random({"norm.weight": (128,)})
    case = save(folder, tensors, {"model_type": "wide"}, [name for name in tensors if "fc" in name])
    deltas = {name: (s, b, a) for name, (s, b, a) in case.deltas.items()}
    assert size == 1.0
    return Case(base=case.base, adapter=case.adapter, tensors=case.tensors, deltas=deltas)


def check(
    case: Case, folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, base: Path | None = None
) -> Comparison:
    merged = folder / "merged"
    merged.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, merged / "model.safetensors", {"format": "pt"})
    (merged / "config.json").write_text(json.dumps(config or {}))
    return check_merged(merged, base=base or case.base, adapter=case.adapter)


def float8(values: torch.Tensor, name: str, *, block: int = 0) -> Tensors:
    """Return a weight in 8-bit floats with a scale for all, or for each block of so many rows and columns."""
    if not block:
        scale = values.abs().max() / 448
        return {name: (values / scale).float().to(FLOAT8), f"{name}_scale": scale.float()}
    parts = values.reshape(values.shape[0] // block, block, -1, block)
    scale = parts.abs().amax(dim=(1, 3)) / 448
    codes = (parts / scale[:, None, :, None]).reshape(values.shape).float().to(FLOAT8)
    return {name: codes, f"{name}_scale_inv": scale.float()}


@pytest.mark.parametrize("block", [0, 64])
def test_eight_bit_floats(tmp_path: Path, block: int) -> None:
    case = wide(tmp_path)
    right, base = ({"norm.weight": case.tensors["norm.weight"]} for _ in range(2))
    for name in case.deltas:
        right |= float8(case.with_delta(name), name, block=block)
        base |= float8(case.tensors[name], name, block=block)
    assert kinds(check(case, tmp_path, right)) == []
    assert kinds(check(case, tmp_path, base)) == [MergeCause.NOT_MERGED]


def test_a_scale_that_was_never_applied(tmp_path: Path) -> None:
    case = wide(tmp_path)
    tensors = {"norm.weight": case.tensors["norm.weight"]}
    for name in case.deltas:
        scale = float8(case.tensors[name], name)[f"{name}_scale"]
        tensors |= {name: case.with_delta(name).to(FLOAT8), f"{name}_scale": scale}
    assert kinds(check(case, tmp_path, tensors)) == [MergeCause.CODES]


@pytest.mark.parametrize("left", ["codes", "scale"])
def test_codes_and_scales_that_do_not_belong_together(tmp_path: Path, left: str) -> None:
    case = wide(tmp_path)
    tensors = case.right(torch.bfloat16)
    name = "layers.1.fc.weight"
    codes = float8(case.with_delta(name), name)
    if left == "codes":
        tensors[name] = codes[name]
    else:
        tensors[f"{name}_scale"] = codes[f"{name}_scale"]
    assert MergeCause.CODES in kinds(check(case, tmp_path, tensors))


def mlx(values: torch.Tensor, layer: str, *, bits: int = 4, group: int = 64) -> Tensors:
    """Return a weight as mlx quantizes it: codes of a group, the first one lowest, its scale and its lowest value."""
    groups = values.float().reshape(values.shape[0], -1, group)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = (high - low) / (2**bits - 1)
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 2**bits - 1).to(torch.int64)
    digits = (codes.reshape(values.shape[0], -1, 1) >> torch.arange(bits)) & 1
    whole = np.packbits(digits.numpy().astype(np.uint8).reshape(len(values), -1), axis=1, bitorder="little")
    packed = torch.from_numpy(whole.view(np.uint32))
    return {f"{layer}.weight": packed, f"{layer}.scales": scale.bfloat16(), f"{layer}.biases": low.bfloat16()}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx(tmp_path: Path, bits: int) -> None:
    case = wide(tmp_path)
    right, base = ({"norm.weight": case.tensors["norm.weight"]} for _ in range(2))
    for name in case.deltas:
        layer = name.removesuffix(".weight")
        right |= mlx(case.with_delta(name), layer, bits=bits)
        base |= mlx(case.tensors[name], layer, bits=bits)
    config = {"quantization": {"bits": bits, "group_size": 64}}
    assert kinds(check(case, tmp_path, right, config)) == []
    assert kinds(check(case, tmp_path, base, config)) == [MergeCause.NOT_MERGED]


def dequantized_by_mlx(parts: Tensors, layer: str, *, rounds_between: bool) -> torch.Tensor:
    """Return what MLX makes of a weight of 8 bits: product and sum in bfloat16, or the sum alone rounded to it."""
    codes = parts[f"{layer}.weight"].view(torch.uint8)
    scale, offset = (parts[f"{layer}.{part}"].repeat_interleave(64, dim=1) for part in ("scales", "biases"))
    if rounds_between:
        return codes.bfloat16() * scale + offset
    return (codes.float() * scale.float() + offset.float()).bfloat16()


@pytest.mark.parametrize("rounds_between", [True, False])
def test_a_merge_into_what_mlx_dequantized(tmp_path: Path, rounds_between: bool) -> None:
    """`mlx_lm fuse --dequantize`, whose rounding on the way is none that torch's own formula makes."""
    case = wide(tmp_path)
    quantized, right = ({"norm.weight": case.tensors["norm.weight"]} for _ in range(2))
    for name in case.deltas:
        layer = name.removesuffix(".weight")
        parts = mlx(case.tensors[name], layer, bits=8)
        quantized |= parts
        weight = dequantized_by_mlx(parts, layer, rounds_between=rounds_between)
        right[name] = weight + case.delta(name).bfloat16()
    base = tmp_path / "quantized"
    base.mkdir()
    save_file(quantized, base / "model.safetensors", {"format": "pt"})
    (base / "config.json").write_text(json.dumps({"model_type": "wide", "quantization": {"bits": 8, "group_size": 64}}))
    assert kinds(check(case, tmp_path, right, {"model_type": "wide"}, base)) == []
    wrong = {name: tensor.clone() for name, tensor in right.items()}
    wrong["layers.1.fc.weight"].view(torch.int16)[3, 5] += 1
    found = check(case, tmp_path, wrong, {"model_type": "wide"}, base)
    assert [row.layer for row in found.tensors if row.is_wrong] == ["layers.1.fc"]


def test_a_format_that_is_not_read_says_so(tmp_path: Path) -> None:
    case = wide(tmp_path)
    tensors = case.right()
    layer = "layers.0.fc"
    tensors |= mlx(case.with_delta(f"{layer}.weight"), layer)
    del tensors[f"{layer}.biases"]  # as those of 4-bit floats are
    found = check(case, tmp_path, tensors, {"quantization": {"bits": 4, "mode": "mxfp4"}})
    assert (found.verdict, found.exit_status) == ("incomplete", 3)
    assert any("MLX's format without offsets is not read here" in one.message for one in found.findings)


def bitsandbytes(values: torch.Tensor, name: str, kind: str) -> Tensors:
    functional = pytest.importorskip("bitsandbytes.functional")
    if kind == "int8":
        codes, scale, _ = functional.int8_vectorwise_quant(values.half())
        return {name: codes, f"{name.removesuffix('weight')}SCB": scale.float()}
    codes, state = functional.quantize_4bit(values.bfloat16(), quant_type="nf4", compress_statistics=kind == "nested")
    return {name: codes, **{f"{name}.{part}": one for part, one in state.as_dict(packed=True).items()}}


@pytest.mark.parametrize("kind", ["nf4", "nested", "int8"])
def test_bitsandbytes(tmp_path: Path, kind: str) -> None:
    case = wide(tmp_path)
    right, base = ({"norm.weight": case.tensors["norm.weight"]} for _ in range(2))
    for name in case.deltas:
        right |= bitsandbytes(case.with_delta(name), name, kind)
        base |= bitsandbytes(case.tensors[name], name, kind)
    assert kinds(check(case, tmp_path, right)) == []
    assert kinds(check(case, tmp_path, base)) == [MergeCause.NOT_MERGED]


def test_a_delta_that_quantizing_takes_away(tmp_path: Path) -> None:
    """A base of four bits, and a delta that is small against a step: the sums' nearest levels are those of the base."""
    case = wide(tmp_path)
    quantized, again = ({"norm.weight": case.tensors["norm.weight"]} for _ in range(2))
    for name in case.deltas:
        layer = name.removesuffix(".weight")
        quantized |= mlx(case.tensors[name], layer)
    folder = tmp_path / "base-4bit"
    folder.mkdir()
    config = {"model_type": "wide", "quantization": {"bits": 4, "group_size": 64}}
    save_file(quantized, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    again |= dict(quantized.items())
    settings = json.loads((case.adapter / "adapter_config.json").read_text())
    (case.adapter / "adapter_config.json").write_text(json.dumps({**settings, "lora_alpha": 0.2}))
    found = check(case, tmp_path, again, config, base=folder)
    assert MergeCause.QUANTIZED_AWAY in kinds(found)
    assert "has 0% of its delta" in message(found, MergeCause.QUANTIZED_AWAY)


def test_a_base_in_sixteen_bits_in_the_place_of_a_quantized_one(tmp_path: Path) -> None:
    case = wide(tmp_path)
    quantized = {"norm.weight": case.tensors["norm.weight"]}
    for name in case.deltas:
        quantized |= mlx(case.tensors[name], name.removesuffix(".weight"), bits=8)
    folder = tmp_path / "base-8bit"
    folder.mkdir()
    save_file(quantized, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization": {"bits": 8, "group_size": 64}}))
    assert kinds(check(case, tmp_path, case.right(), base=folder)) == [MergeCause.SIXTEEN_BIT_BASE]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_gguf(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    from tests.extras.merging.check_merged.made_merges import llama

    case = llama(tmp_path)
    mapping = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for right in (True, False):
        file = tmp_path / "merged.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        chosen = gguf.GGMLQuantizationType[kind]
        for name, tensor in (case.right() if right else case.tensors).items():
            heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
            if heads is not None:  # as convert_hf_to_gguf.py permutes them
                tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
            values, own = tensor.float().numpy(), chosen
            if tensor.dim() == 1 or tensor.shape[-1] % 32:
                own = gguf.GGMLQuantizationType.F32
            data = values if own.name == "F32" else gguf.quants.quantize(values, own)
            writer.add_tensor(mapping.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        found = check_merged(file, base=case.base, adapter=case.adapter)
        if kind == "Q4_0":
            assert found.exit_status in (1, 3)
            assert any("Q4_0 of GGUF is not read here" in one.message for one in found.findings)
        elif right:
            assert (found.verdict, kinds(found)) == ("consistent", [])
        else:
            assert kinds(found) == [MergeCause.NOT_MERGED]
