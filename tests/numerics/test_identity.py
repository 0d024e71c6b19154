from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import consistency
from consistency.numerics.identity import start_of, storage_of

PACKAGE = Path(consistency.__file__).parent
ON_THE_CPU = {
    "numerics/identity.py",
    "numerics/digest.py",  # alignment
    "numerics/distance.py",
    "numerics/kernels/trust.py",
    "numerics/kernels/compiled_error.py",
    "worker/memory/mapped_pages.py",
    "extras/diagnosis/reproduce/scripts/shared.py",
}
"""Modules that hand addresses to C, of tensors on the CPU."""


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("has_addresses", [True, False])
def test_tensors_are_told_apart_where_their_addresses_are_not(
    device: str, has_addresses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_addresses:
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 0)
    whole, other = torch.zeros(4, 3, device=device), torch.zeros(4, 3, device=device)
    tied = torch.nn.Parameter(whole)
    assert start_of(tied) == start_of(whole) == start_of(tied.data) == start_of(whole.detach()) == start_of(whole[:2])
    assert start_of(whole) != start_of(other)
    assert start_of(whole) != start_of(whole[1])
    assert storage_of(whole) == storage_of(whole[1]) != storage_of(other)


def test_a_sparse_tensor_is_itself() -> None:
    one = torch.eye(2).to_sparse()
    assert start_of(one) == start_of(one) != start_of(torch.eye(2).to_sparse())
    assert storage_of(one) == storage_of(one) != storage_of(torch.eye(2).to_sparse())


def test_no_other_module_takes_an_address_for_an_identity() -> None:
    uses = {path for path in PACKAGE.rglob("*.py") if re.search(r"\bdata_ptr\(", path.read_text())}
    assert {path.relative_to(PACKAGE).as_posix() for path in uses} == ON_THE_CPU
