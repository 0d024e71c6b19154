"""Synthetic values for parameters that no file holds: a classification head that the base was saved without.

transformers draws them from torch's generator, which differs between devices and between kernel variants of the same
CPU. So that every worker compares the same model, NumPy makes them from a seed derived from the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from consistency.numerics.dtype import UNIT_ROUNDOFF
from consistency.numerics.identity import start_of

STANDARD_DEVIATION = 0.02
"""transformers' usual `initializer_range`."""


def is_synthetic(tensor: torch.Tensor) -> bool:
    """Report whether a parameter that no file holds gets values: vectors have constants, integers are tables."""
    return tensor.dim() >= 2 and tensor.dtype in UNIT_ROUNDOFF


def synthetic(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the values of a parameter on the CPU, in its dtype: normal, the same on every machine."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.PCG64(seed))
    values = generator.standard_normal(size=tuple(like.shape), dtype=np.float32) * np.float32(STANDARD_DEVIATION)
    return torch.from_numpy(values).to(like.dtype)


def overwrite(model: torch.nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Set the parameters that no file holds, and return their names.

    Of tied ones the first in the model's order, and none whose storage a file fills under another name.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wanted = set(names)
    done = {start_of(tensor) for name, tensor in named.items() if name not in wanted}
    anew = set()
    with torch.no_grad():
        for name, tensor in named.items():
            if name in wanted and start_of(tensor) not in done:
                done.add(start_of(tensor))
                anew.add(name)
                if is_synthetic(tensor):
                    tensor.copy_(synthetic(name, tensor))
    return frozenset(anew)
