"""An engine's outputs are checked from their header: every kind of rubbish gets one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from consistency.errors import InputError
from consistency.extras.serving.inference.outputs import batch_name, read_outputs

KEY = {"name": "a", "inputs": "i", "base": "b", "adapter": "c", "dtype": "float32"}
ABOUT: dict[str, Any] = {
    "schema": "consistency.outputs/1", "case": KEY, "engine": "e", "version": "1", "device": "d", "dtype": "float32",
}  # fmt: skip
ON = np.zeros((2, 3, 5), np.float32)
IDS = np.zeros((2, 3, 5), np.int64)


def written(path: Path, tensors: dict[str, Any], metadata: dict[str, str] | None = None, **about: Any) -> Path:
    text = {"consistency": json.dumps({**ABOUT, **about})}
    save_file(tensors, path, metadata=text if metadata is None else metadata)
    return path


def test_a_complete_file(tmp_path: Path) -> None:
    tensors = {
        "adapter_on": ON, "adapter_on.ids": IDS, "adapter_merged": ON, "adapter_merged.ids": IDS,
        "tokens": np.ones((2, 3), bool), "batch.8.last": ON[0], "batch.8.last.ids": IDS[0],
        "batch.1": ON[0], "batch.1.ids": IDS[0],
    }  # fmt: skip
    found = read_outputs(written(tmp_path / "o.safetensors", tensors, top_k=4, batch_invariant=True))
    assert found.modes == ("adapter_on", "adapter_merged")
    assert found.batches == ("batch.1", batch_name(8, "last"))
    assert found.about.top_k == 4
    assert found.about.batch_invariant


RUBBISH: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no outputs": ({"tokens": np.ones((2, 3), bool)}, {}, "hold no outputs"),
    "another tensor": ({"adapter_on": ON, "adapter_of": ON}, {}, "did you mean adapter_off"),
    "whole numbers": ({"adapter_on": IDS}, {}, "another dtype"),
    "different rows": ({"adapter_on": ON, "adapter_off": ON[:1]}, {}, "different rows or tokens"),
    "tokens of another shape": ({"adapter_on": ON, "tokens": np.ones((2, 2), bool)}, {}, "different rows or tokens"),
    "no vocabulary": ({"adapter_on": ON[0, 0]}, {}, "without a vocabulary"),
    "top-k without ids": ({"adapter_on": ON}, {"top_k": 2}, "without their ids"),
    "ids without top-k": ({"adapter_on": ON, "adapter_on.ids": IDS}, {}, "ids without top_k"),
    "fewer than k": ({"adapter_on": ON, "adapter_on.ids": IDS}, {"top_k": 6}, "fewer values than top_k"),
    "ids of another shape": ({"adapter_on": ON, "adapter_on.ids": IDS[:1]}, {"top_k": 2}, "ids of another shape"),
    "another dtype": ({"adapter_on": ON}, {"dtype": "int8"}, "Invalid enum value 'int8' - at `$.dtype`"),
    "another schema": ({"adapter_on": ON}, {"schema": "consistency.outputs/9"}, "at `$.schema`"),
    "a misspelled field": ({"adapter_on": ON}, {"topk": 2}, "unknown field `topk`"),
    "no engine": ({"adapter_on": ON}, {"engine": ""}, "at `$.engine`"),
    "a batch of very many rows": ({"adapter_on": ON, f"batch.{'9' * 5000}.first": ON[0]}, {}, "batch."),
    "a case of another dtype": ({"adapter_on": ON}, {"case": {**KEY, "dtype": "float64x"}}, "at `$.case.dtype`"),
    "another case's form": ({"adapter_on": ON}, {"case": {"name": "a"}}, "missing required field"),
}


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_gets_one_sentence(name: str, tmp_path: Path) -> None:
    tensors, about, sentence = RUBBISH[name]
    with pytest.raises(InputError) as error:
        read_outputs(written(tmp_path / "o.safetensors", tensors, **about))
    assert sentence in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_file_without_a_description(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not say what they are"):
        read_outputs(written(tmp_path / "o.safetensors", {"adapter_on": ON}, {"format": "pt"}))
    with pytest.raises(InputError, match="not JSON"):
        read_outputs(written(tmp_path / "o.safetensors", {"adapter_on": ON}, {"consistency": "{"}))


def test_a_truncated_file(tmp_path: Path) -> None:
    path = written(tmp_path / "o.safetensors", {"adapter_on": ON})
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match="cut short"):
        read_outputs(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_outputs(tmp_path / "o.safetensors")
