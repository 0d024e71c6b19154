"""Both paths of the numerics, NumPy's and the compiled kernel's, for tests that have to hold on either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from consistency.numerics.kernels import compiled as kernel
from consistency.numerics.kernels import trust
from consistency.numerics.kernels.build import compile_kernel


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Compute on one thread: the tensors are small, and threads beyond the cores spin while they wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kernel_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the installed kernel, or one compiled for the tests."""
    if kernel.LIBRARY.exists():
        return kernel.LIBRARY
    target = tmp_path_factory.mktemp("kernel") / "_kernel.so"
    reason = compile_kernel(kernel.SOURCE, target)
    if reason is not None:
        pytest.skip(f"the kernel cannot be compiled here: {reason}")
    return target


@pytest.fixture(scope="module", params=["numpy", "compiled"])
def numerics_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Take one path for a whole module."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setenv(kernel.PLAIN_VARIABLE, "1")
        else:
            patch.delenv(kernel.PLAIN_VARIABLE, raising=False)
            patch.setattr(kernel, "LIBRARY", request.getfixturevalue("kernel_library"))
        trust.forget()
        assert trust.state().startswith(f"{request.param}: "), trust.state()
        yield request.param
    trust.forget()
