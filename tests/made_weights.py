"""Weight files written byte by byte, so that tests can make what no library would write."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Given = tuple[str, Sequence[int], bytes]


def f32(*values: float, shape: Sequence[int] | None = None) -> Given:
    return ("F32", (len(values),) if shape is None else shape, np.array(values, "<f4").tobytes())


def put(path: Path, tensors: Mapping[str, Given], *, pad: int = 0) -> Path:
    """Write a safetensors file; the header is padded to 8 bytes, and by `pad` more."""
    header, at = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    return put_raw(path, header, b"".join(raw for *_, raw in tensors.values()), pad=pad)


def put_raw(path: Path, header: object, data: bytes, *, pad: int = 0) -> Path:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + pad)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path
