from __future__ import annotations

import pytest
import torch

from consistency.numerics.reduced_products import GROUPED, grouped_product

OFFS = torch.tensor([2, 2, 7], dtype=torch.int32)
SHAPES = {
    "rows of a": ((7, 4), (3, 4, 8)),
    "columns of b": ((3, 5, 4), (4, 7)),
    "what is summed": ((5, 7), (7, 4)),
    "none": ((3, 5, 4), (3, 4, 8)),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_it_is_what_torch_computes(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES[kind])
    offs = None if kind == "none" else OFFS
    found = grouped_product(a, b, offs)
    expected = []
    ends = OFFS.tolist()
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        part = slice(start, end)
        match kind:
            case "rows of a":
                expected.append(a[part] @ b[group])
            case "columns of b":
                expected.append(a[group] @ b[:, part])
            case "what is summed":
                expected.append(a[:, part] @ b[part])
            case _:
                expected.append(a[group] @ b[group])
    match kind:
        case "rows of a":
            joined = torch.cat(expected)
        case "columns of b":
            joined = torch.cat(expected, 1)
        case _:
            joined = torch.stack(expected)
    assert torch.allclose(found, joined, rtol=1e-14)


def _has_kernel() -> bool:
    try:
        GROUPED(torch.ones(8, 16), torch.ones(1, 16, 16), torch.tensor([8], dtype=torch.int32))
    except NotImplementedError:
        return False
    return True


@pytest.mark.skipif(not _has_kernel(), reason="torch 2.8 has no grouped product on a CPU")
def test_it_is_what_the_grouped_kernel_computes() -> None:
    a, b = torch.linspace(-1, 1, 7 * 16).reshape(7, 16), torch.linspace(-1, 2, 3 * 16 * 16).reshape(3, 16, 16)
    assert torch.allclose(GROUPED(a, b, OFFS), grouped_product(a, b, OFFS), rtol=1e-5, atol=1e-5)
