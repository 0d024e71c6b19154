"""What the tests of every form do alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.stages.merged.forms.made_layers import DTYPES, Adapted, adapted

Each = Callable[[Any], list[Adapted]]


@pytest.fixture(params=DTYPES, ids=lambda pair: "-".join(str(dtype).removeprefix("torch.") for dtype in pair))
def each(request: pytest.FixtureRequest) -> Each:
    """Adapt the layers by a configuration, in every pair of dtypes of weight and adapter."""
    weight, adapter = request.param

    def layers(config: Any) -> list[Adapted]:
        return list(adapted(config, weight, adapter))

    return layers


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Compute on one thread: the layers are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
