"""Weights of a quantized base from its headers, in files as bitsandbytes and torchao write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from consistency.case.checkpoint import TensorHeader, read_header
from consistency.case.quantized import states_settings, weights_of

STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [96, 64]}
NAME = "model.layers.0.q_proj"


def headers(folder: Path, tensors: dict[str, Any], **metadata: str) -> dict[str, TensorHeader]:
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata=metadata)
    return read_header(file)


def record(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def four_bit(state: str = json.dumps(STATE)) -> dict[str, Any]:
    return {
        f"{NAME}.weight": np.zeros((3072, 1), np.uint8),
        f"{NAME}.weight.absmax": np.zeros(96, np.uint8),
        f"{NAME}.weight.quant_map": np.zeros(16, np.float32),
        f"{NAME}.weight.nested_absmax": np.zeros(1, np.float32),
        f"{NAME}.weight.nested_quant_map": np.zeros(256, np.float32),
        f"{NAME}.weight.quant_state.bitsandbytes__nf4": record(state),
        "norm.weight": np.zeros(64, np.float32),
    }


def shapes(found: dict[str, TensorHeader]) -> dict[str, tuple[int, ...]]:
    return {name: header.shape for name, header in found.items()}


def test_a_plain_base_is_as_it_is(tmp_path: Path) -> None:
    found = headers(tmp_path, {"a.weight": np.zeros((2, 3), np.float32), "a.SCB": np.zeros(2, np.float32)})
    assert weights_of(found) == found


def test_four_bits_have_the_shape_that_their_record_states(tmp_path: Path) -> None:
    assert shapes(weights_of(headers(tmp_path, four_bit()))) == {f"{NAME}.weight": (96, 64), "norm.weight": (64,)}


@pytest.mark.parametrize("state", ["{", "[]", "{}", '{"shape": 3}', '{"shape": [-1, 2]}', "[" * 3000, "x" * 5000])
def test_a_damaged_record_states_no_shape(tmp_path: Path, state: str) -> None:
    assert shapes(weights_of(headers(tmp_path, four_bit(state))))[f"{NAME}.weight"] == ()


def test_eight_bits_lose_their_scales(tmp_path: Path) -> None:
    tensors = {
        f"{NAME}.weight": np.zeros((96, 64), np.int8),
        f"{NAME}.SCB": np.zeros(96, np.float32),
        f"{NAME}.weight_format": np.zeros(1, np.uint8),
    }
    assert shapes(weights_of(headers(tmp_path, tensors))) == {f"{NAME}.weight": (96, 64)}


@pytest.mark.parametrize(
    ("kind", "shape"), [("Int8Tensor", (96, 64)), ("IntxUnpackedToInt8Tensor", (96, 64)), ("Int4Tensor", ()), ("", ())]
)
def test_torchao_states_the_kind_of_its_codes(tmp_path: Path, kind: str, shape: tuple[int, ...]) -> None:
    tensors = {
        f"{NAME}._weight_qdata": np.zeros((96, 64), np.int8),
        f"{NAME}._weight_scale": np.zeros((96, 1), np.float32),
        f"{NAME}._weight_zero_point": np.zeros((96, 1), np.int8),
        "embed._weight_only": np.zeros(3, np.float32),
    }
    found = weights_of(headers(tmp_path, tensors, **{f"{NAME}.weight": json.dumps({"_type": kind})}))
    assert shapes(found) == {f"{NAME}.weight": shape, "embed._weight_only": (3,)}


def test_records_of_settings_are_told_from_tensors() -> None:
    assert states_settings(f"{NAME}.weight.quant_state.bitsandbytes__fp4")
    assert states_settings(f"{NAME}.weight_format")
    assert not states_settings(f"{NAME}.weight.absmax")
