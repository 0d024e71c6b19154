"""Words for the digest kernels to add up."""

from __future__ import annotations

import numpy as np
import torch

from consistency.numerics.kernels import triton_digest


def large(extra: int = 5, seed: int = 0) -> torch.Tensor:
    """Make words enough for the kernel to be worth it."""
    return random_words(triton_digest._WORTH_BYTES // 8 + extra, seed)


def random_words(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, size=count, dtype=np.int64))
