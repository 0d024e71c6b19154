from __future__ import annotations

import pytest
import torch

from consistency.worker.out_of_memory import is_out_of_memory


def test_the_host_ran_out() -> None:
    with pytest.raises(RuntimeError) as ran_out:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(ran_out.value)
    assert is_out_of_memory(MemoryError())


def test_a_device_ran_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."))


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("not enough memory"), OSError()]
)
def test_other_errors_are_not_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)
