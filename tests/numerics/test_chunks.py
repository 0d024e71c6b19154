"""Exact values of a LoRA, made in pieces or as one product per stretch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from consistency.numerics import chunks
from consistency.numerics.bound import delta_allowance
from consistency.numerics.chunks import LowRankProduct, LowRankTensor


@pytest.mark.parametrize("by_one_thread", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (33, 5), (300, 2049), (7, 0)])
def test_value_and_size_of_every_element(
    by_one_thread: bool, rows: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "_BY_ONE_THREAD", by_one_thread)
    generator = np.random.default_rng(0)
    left, right = (torch.from_numpy(generator.normal(size=shape)) for shape in ((rows, 4), (4, columns)))
    product = LowRankProduct(left=left, right=right, scaling=-2.0)
    allowance = delta_allowance(4, scaling=-2.0, adapter=torch.float32)
    tested = LowRankTensor(actual=torch.zeros(rows, columns), allowance=allowance, has_base=False)
    values, sizes = [np.zeros(0)], [np.zeros(0)]
    for (stretch,) in product.stretches([tested], range(rows)):
        assert stretch.size is not None
        values.append(stretch.value.copy())
        sizes.append(stretch.size.copy())
    wanted = -2.0 * (left @ right).numpy().ravel()
    # the same sums in another order: four products of normal numbers, in float64
    np.testing.assert_allclose(np.concatenate(values), wanted, rtol=0, atol=1e-13)
    np.testing.assert_allclose(np.concatenate(sizes), 2 * (left.abs() @ right.abs()).numpy().ravel(), rtol=1e-13)
