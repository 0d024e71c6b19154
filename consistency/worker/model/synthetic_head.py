"""Numbers for parameters that no file holds: a classification head that the base was saved without.

transformers draws them from torch's generator, whose numbers differ between devices and between kernel variants of the
same CPU. For every worker to compare the same model, they are made by NumPy, from a seed that the name gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import torch

from consistency.numerics.dtype import UNIT_ROUNDOFF

STANDARD_DEVIATION = 0.02
"""transformers' usual `initializer_range`."""


def is_made_up(tensor: torch.Tensor) -> bool:
    """Tell whether a parameter that no file holds gets numbers: vectors have constants already, integers are tables."""
    return tensor.dim() >= 2 and tensor.dtype in UNIT_ROUNDOFF


def made_up(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a parameter on the CPU, in its dtype: normal, the same on every machine."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    generator = np.random.Generator(np.random.PCG64(seed))
    numbers = generator.standard_normal(size=tuple(like.shape), dtype=np.float32) * np.float32(STANDARD_DEVIATION)
    return torch.from_numpy(numbers).to(like.dtype)


def overwrite(model: torch.nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Give the parameters that no file holds their numbers.

    Returns
    -------
    frozenset of str
        The names: of tied ones the first in the model's order, and none whose storage a file fills under another name.
    """
    named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wanted = set(names)
    done = {tensor.data_ptr() for name, tensor in named.items() if name not in wanted}
    anew = set()
    with torch.no_grad():
        for name, tensor in named.items():
            if name not in wanted or tensor.data_ptr() in done:
                continue
            done.add(tensor.data_ptr())
            anew.add(name)
            if is_made_up(tensor):
                tensor.copy_(made_up(name, tensor))
    return frozenset(anew)
