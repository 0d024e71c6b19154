"""How other tools compare two state dicts of which one lacks a tensor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

import numpy as np
import torch

from tests.numerics.references import numbers

State = Mapping[str, torch.Tensor]


def _arrays(state: State) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in state.items()}


def _deepdiff(a: State, e: State) -> bool:
    from deepdiff import DeepDiff

    return bool(DeepDiff(_arrays(e), _arrays(a)))


def _polygraphy(a: State, e: State) -> bool:
    from polygraphy.comparator import Comparator, IterationResult, RunResults

    runs = RunResults()
    for name, state in (("actual", a), ("expected", e)):
        runs.append((name, [IterationResult(_arrays(state), runner_name=name)]))
    return not Comparator.compare_accuracy(runs)


def _raised(check: Callable[[], object]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


def ways() -> dict[str, Callable[[State, State], bool]]:
    """Return each call in Markdown, and a function that reports whether it detects the difference."""
    found: dict[str, Callable[[State, State], bool]] = {
        "`all(torch.equal(a[k], e[k]) for k in a)`": lambda a, e: not all(torch.equal(a[k], e[k]) for k in a),
        "`all(torch.equal(a[k], e[k]) for k in e)`": lambda a, e: not all(torch.equal(a[k], e[k]) for k in e),
        "`all(torch.equal(x, y) for x, y in zip(a.values(), e.values()))`": lambda a, e: (
            not all(
                torch.equal(x, y)
                for x, y in zip(a.values(), e.values())  # noqa: B905 - as it is written
            )
        ),
        "`torch.testing.assert_close(a, e)`": lambda a, e: _raised(lambda: torch.testing.assert_close(a, e)),
        "`numpy.testing.assert_equal(a, e)`, of arrays": lambda a, e: _raised(
            lambda: np.testing.assert_equal(_arrays(a), _arrays(e))
        ),
    }
    if importlib.util.find_spec("deepdiff"):
        found["`DeepDiff(e, a)`, of arrays"] = _deepdiff
    if importlib.util.find_spec("polygraphy"):
        found["Polygraphy's `Comparator.compare_accuracy`, of arrays"] = _polygraphy
    return found


def answers() -> list[tuple[str, str, str]]:
    """Return the answer of each call to a missing tensor and to an additional one."""
    whole = {name: numbers(torch.float32, shape=(8, 4), seed=i) for i, name in enumerate(("q", "k", "v"))}
    part = {name: tensor for name, tensor in whole.items() if name != "v"}

    def said(differs: Callable[[State, State], bool], a: State, e: State) -> str:
        try:
            return "sees" if differs(a, e) else "**misses**"
        except KeyError as error:
            return type(error).__name__

    return [(call, said(differs, part, whole), said(differs, whole, part)) for call, differs in ways().items()]
