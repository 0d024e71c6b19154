"""Penalties of a sampler: the logits of tokens that were there before are made smaller before a token is chosen.

The three that engines have are computed as vLLM, SGLang and transformers do: the repetition penalty looks at prompt and
text, the presence and frequency penalties at the text alone. In a batch of unequal prompts transformers'
`generate` before 5.23 penalizes the padding too, most often the token that ends a text. llama.cpp has all
three look back over its last tokens, of prompt and text alike (`repeat_last_n`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from consistency.extras.serving.check_text.sampling import Sampling

USUAL_PENALTIES = (
    *(Sampling(repetition_penalty=value) for value in (1.1, 1.05, 1.2, 1.15, 1.3, 1.02, 1.03, 1.08, 1.25, 1.5, 2.0)),
    *(Sampling(repetition_penalty=value, penalty_last_n=64) for value in (1.1, 1.05, 1.2, 1.15, 1.3)),
    *(Sampling(repetition_penalty=value, penalized_padding=True) for value in (1.1, 1.05, 1.2, 1.15, 1.3, 1.5)),
    *(Sampling(presence_penalty=value) for value in (0.5, 1.0, 1.5, 2.0, 0.1, 0.2, 0.3, 0.6)),
    *(Sampling(frequency_penalty=value) for value in (0.5, 1.0, 1.5, 2.0, 0.1, 0.2, 0.3, 0.6)),
)
"""Penalties that are tried on a text, the most usual ones first of each kind.

64 is how far llama.cpp and Ollama look back by default.
"""


def penalized(
    logits: torch.Tensor,
    prompt: list[int],
    ids: list[int],
    places: list[int],
    penalties: Sampling,
    ends: Sequence[int] = (),
) -> torch.Tensor:
    """Return the logits that a token was chosen by, `(tokens, vocabulary)`; the same tensor without a penalty.

    Parameters
    ----------
    logits : torch.Tensor
        `(tokens, vocabulary)`: the model's own.
    prompt, ids : list of int
        Prompt and text.
    places : list of int
        The place in the text of the token that each row has chosen, from 0 on.
    penalties : Sampling
    ends : sequence of int
        Tokens that end a text; the first one is what batches are filled up with.
    """
    if not penalties.penalizes:
        return logits
    changed = logits.clone()
    padding = [end for end in ends[:1] if end < logits.shape[-1]] if penalties.penalized_padding else []
    for row, place in zip(changed, places, strict=True):
        before, written = [*prompt, *ids[:place]], ids[:place]
        if penalties.penalty_last_n:
            before = written = before[-penalties.penalty_last_n :]
        _divide(row, [*padding, *before], penalties.repetition_penalty)
        tokens, counts = torch.tensor(written, dtype=torch.int64).unique(return_counts=True)
        row[tokens] -= penalties.presence_penalty + penalties.frequency_penalty * counts
    return changed


def _divide(row: torch.Tensor, tokens: list[int], penalty: float) -> None:
    """Divide the positive logits of tokens by the repetition penalty, and multiply the others by it, in place."""
    ids = torch.tensor(tokens, dtype=torch.int64).unique()
    values = row[ids]
    row[ids] = torch.where(values > 0, values / penalty, values * penalty)
