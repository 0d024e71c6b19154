"""The variants of the kernel that this machine runs, and those of builds that it runs in a process of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from consistency.numerics.kernels.compiled import Kernel
from tests.numerics.kernels.builds import BUILDS, compile_build, running

_BUILDS = [pytest.param(name, marks=getattr(pytest.mark, build.mark)) for name, build in BUILDS.items()]


@pytest.fixture(scope="session")
def kernels_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Kernel]]]:
    """Return what compiles one of `BUILDS`, once, and returns its variants."""
    with ExitStack() as processes:

        @functools.cache
        def start(name: str) -> list[Kernel]:
            library = compile_build(BUILDS[name], tmp_path_factory.mktemp(name))
            return processes.enter_context(running(BUILDS[name], library))

        yield start


@pytest.fixture(scope="session", params=["native", *_BUILDS])
def variants(
    request: pytest.FixtureRequest, kernel_library: Path, kernels_of: Callable[[str], list[Kernel]]
) -> list[Kernel]:
    """Return every variant that this processor runs; of a build, after the plain one for this processor."""
    if request.param == "native":
        return [Kernel(kernel_library, variant=i) for i in range(Kernel(kernel_library).variants)]
    if (reason := BUILDS[request.param].missing) is not None:
        pytest.skip(reason)
    return [Kernel(kernel_library, variant=0), *kernels_of(request.param)]
