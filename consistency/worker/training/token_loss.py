"""The loss that a language model is trained by: the cross entropy of each next token of its input.

A model without such an answer has the weighted sum of `consistency.worker.training.backward`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from consistency.worker.training.backward import Tensors, of_outputs


class TokenLoss:
    """Computes the loss of one pass, and keeps its value.

    Logits are taken in float32 as trainers do; in a float64 pass that cast gives float64.
    """

    def __init__(self, inputs: Tensors) -> None:
        self._ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
        self.value = 0.0

    def __call__(self, ends: Tensors) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        loss = self._of_tokens(ends.get("logits"))
        if loss is not None:
            self.value = float(loss.detach())
            return [(loss, torch.ones_like(loss))]
        terms = of_outputs(ends)
        self.value = sum(float((tensor.detach() * weights).sum(dtype=torch.float64)) for tensor, weights in terms)
        return terms

    def _of_tokens(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        ids = self._ids
        if logits is None or ids is None or not logits.requires_grad or logits.dim() != 3 or ids.dim() != 2:
            return None
        virtual = logits.shape[1] - ids.shape[1]  # tokens that a prompt adds
        if ids.shape[0] != logits.shape[0] or virtual < 0 or ids.shape[1] < 2 or int(ids.max()) >= logits.shape[2]:
            return None
        predicted, wanted = logits[:, virtual:-1], ids[:, 1:].to(logits.device)
        return torch.nn.functional.cross_entropy(predicted.flatten(0, 1).float(), wanted.flatten())
