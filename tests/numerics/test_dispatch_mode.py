"""Modes do without torch's compiler, and are not compiled by it where it is in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import consistency
from consistency.numerics.dispatch_mode import DispatchMode


class _Counted(DispatchMode):
    """Count the operations that run while the mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.slow  # starts a process
def test_a_mode_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
from consistency.numerics.exact import Float64Mode
from consistency.numerics.rounding_noise import RoundingNoise
for mode in (Float64Mode(), RoundingNoise(0)):
    with mode:
        torch.ones(4, 4) @ torch.ones(4, 4)
print("torch._dynamo" in sys.modules)
"""
    assert _run(code) == "False"


@pytest.mark.slow  # starts a process
def test_the_compiler_may_be_imported_while_a_mode_is_active() -> None:
    # torch makes constants while it imports its compiler, which are dispatched to the mode
    code = """
import sys, torch
from consistency.numerics.rounding_noise import RoundingNoise
with RoundingNoise(0):
    torch.ones(2) + 1
    import torch._dynamo
    torch.ones(2) + 1
print("torch._dynamo" in sys.modules)
"""
    assert _run(code) == "True"


def test_a_mode_in_a_compiled_function_sees_each_operation_and_is_not_compiled() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return graph

    def product(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu()

    x = torch.ones(2, 2)
    with _Counted() as mode:
        result = torch.compile(product, backend=backend)(x)
    assert torch.equal(result, product(x))
    assert mode.names == ["aten.mm.default", "aten.relu.default"]
    assert not graphs


def test_a_mode_keeps_its_own_name_and_docstring() -> None:
    assert _Counted.__torch_dispatch__.__name__ == "__torch_dispatch__"


def test_a_mode_that_inherits_its_dispatch_is_one() -> None:
    class Inherits(_Counted):
        pass

    with Inherits() as mode:
        torch.ones(2) + 1
    assert mode.names == ["aten.ones.default", "aten.add.Tensor"]


def test_each_mode_is_of_this_class() -> None:
    package = Path(consistency.__file__).parent
    derived = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "(TorchDispatchMode)" in path.read_text("utf-8")
    ]
    assert derived == ["numerics/dispatch_mode.py"]
