from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from consistency.case.case import Case
from consistency.case.fit import Fit
from consistency.worker.model.inputs import fixed_inputs


class Words(torch.nn.Module):
    """A model that has the config of a language model."""

    config = SimpleNamespace(vocab_size=50, max_position_embeddings=100)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids


@pytest.mark.parametrize(("fit", "shape"), [(Fit(), (8, 16)), (Fit(sequences=2), (2, 16)), (Fit(tokens=4), (8, 4))])
def test_a_case_that_is_cut_has_smaller_inputs(fit: Fit, shape: tuple[int, int]) -> None:
    inputs, reason = fixed_inputs(Case(name="x", base="b", fit=fit), Words())
    assert inputs is not None, reason
    assert inputs["input_ids"].shape == shape
