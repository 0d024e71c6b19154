"""The loss of a training: of the next tokens where a model has them, else of all outputs."""

from __future__ import annotations

import pytest
import torch

from consistency.extras.training.trajectory.passes import TokenLoss
from consistency.worker.training.backward import loss_weights

IDS = torch.tensor([[1, 2, 0], [3, 3, 1]])


def logits(tokens: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, tokens, 5, generator=generator).requires_grad_()


def test_a_language_model_has_the_cross_entropy_of_each_next_token() -> None:
    given = logits()
    loss = TokenLoss({"input_ids": IDS})
    ((term, weight),) = loss({"logits": given})
    log = torch.log_softmax(given.detach(), -1)
    wanted = -sum(log[row, place, IDS[row, place + 1]] for row in range(2) for place in range(2)) / 4
    assert loss.value == pytest.approx(float(wanted))
    assert float(term.detach()) == loss.value
    assert float(weight) == 1


def test_the_tokens_of_a_prompt_predict_nothing() -> None:
    given = logits(tokens=5)
    with_prompt, without = TokenLoss({"input_ids": IDS}), TokenLoss({"input_ids": IDS})
    with_prompt({"logits": given})
    without({"logits": given.detach()[:, 2:].requires_grad_()})
    assert with_prompt.value == without.value


def test_a_decoder_is_trained_by_its_own_tokens() -> None:
    of_decoder, plain = TokenLoss({"input_ids": IDS[:, :2], "decoder_input_ids": IDS}), TokenLoss({"input_ids": IDS})
    of_decoder({"logits": logits()})
    plain({"logits": logits()})
    assert of_decoder.value == plain.value


@pytest.mark.parametrize(
    ("inputs", "ends"),
    [
        ({"pixel_values": torch.ones(2, 3)}, {"logits": logits()}),
        ({"input_ids": IDS}, {"output": logits()}),
        ({"input_ids": IDS}, {"logits": torch.ones(2, 5).requires_grad_()}),
        ({"input_ids": IDS + 4}, {"logits": logits()}),
    ],
    ids=["no ids", "no logits", "one answer for a text", "ids that no logit is for"],
)
def test_another_model_has_the_weighted_sum_of_its_outputs(
    inputs: dict[str, torch.Tensor], ends: dict[str, torch.Tensor]
) -> None:
    loss = TokenLoss(inputs)
    ((term, weights),) = loss(ends)
    (end,) = ends.values()
    assert term is end
    assert torch.equal(weights, loss_weights(end))
    assert loss.value == pytest.approx(float((end.detach() * weights).sum()), rel=1e-5)
