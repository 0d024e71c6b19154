"""Hold the prediction of `generation`, after how many tokens two healthy devices part, against real partings.

    python -m benchmarks.partings [--dtype bfloat16] [--prompts 256] [--tokens 64] [--base DIR --adapter DIR]

Each prompt is continued alone; beside others of the same length, which is another shape; and alone by other kernels, in
a process of its own: three healthy ways. Printed are the partings from the first text, and what its exact logits
predict.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consistency.case.budget.costs import LEAST_PASSES
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.devices.backends import BACKENDS, CPU
from consistency.devices.products import Products
from consistency.extras.serving.generation.text import _gaps, _two_largest, chance_to_part, share_unlike
from consistency.numerics.error_spread import Spread
from consistency.numerics.exact import Float64Mode
from consistency.worker.cpu_error import with_noise
from consistency.worker.model.inputs import SEED
from consistency.worker.model.loading import load_model
from consistency.worker.model.running import activations
from consistency.worker.model.ways import LOGITS, generated

_LENGTH, _BATCH = 8, 8


def whole_inputs(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def texts_of(model: Any, prompts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a model writes after each prompt by itself, and its logits, `(prompts, tokens, words)`."""
    steps: list[torch.Tensor] = []

    def see(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        steps.append(scores)
        return scores

    texts = torch.cat([generated(model, whole_inputs(one[None]), tokens, choosing=see) for one in prompts])
    return texts, torch.cat(steps).reshape(*texts.shape, -1)


def prompts_for(model: Any, prompts: int) -> torch.Tensor:
    """Return random prompts, `(prompts, length)`."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    return torch.from_numpy(generator.integers(4, model.config.vocab_size, (prompts, _LENGTH)))


def by_other_kernels() -> torch.Tensor:
    """Return what another process of this command writes with the CPU's baseline kernels."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "texts.npy"
        command = [sys.executable, "-m", "benchmarks.partings", *sys.argv[1:], "--write", str(file)]
        baseline = BACKENDS[CPU].variant("baseline")
        assert baseline is not None
        subprocess.run(command, check=True, env={**os.environ, **baseline.environment})
        return torch.from_numpy(np.load(file))


def chances_of(model: Any, prompts: torch.Tensor, texts: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Return the predicted chance of a parting at each token, `(prompts, tokens)`."""
    found, unlike = [], []
    for some, alone, by_steps in zip(prompts.split(_BATCH), texts.split(_BATCH), steps.split(_BATCH), strict=True):
        inputs = whole_inputs(torch.cat([some, alone[:, :-1]], 1))

        def logits(inputs: dict[str, torch.Tensor] = inputs) -> torch.Tensor:
            return activations(model, inputs)[LOGITS][:, _LENGTH - 1 :]

        with torch.no_grad(), Float64Mode():
            exact = logits().to(torch.float64)
        pairs, drawn = _two_largest(exact), []
        for seed in range(LEAST_PASSES):
            with with_noise(Products(), seed):
                drawn.append(_gaps(logits(), pairs).to(torch.float32))
        gap = _gaps(exact, pairs)
        spread = Spread.of(drawn, gap)
        deviation = (spread.rows * spread.columns).sqrt().reshape(-1)
        found.append(chance_to_part(gap.reshape(-1), deviation).reshape(alone.shape))
        unlike.append(share_unlike(logits(), by_steps, pairs))
    return torch.cat(found) * sum(unlike) / len(unlike)


def line(name: str, texts: torch.Tensor, other: torch.Tensor, chances: torch.Tensor) -> str:
    """Return how many texts part, and the share of tokens at which they do: seen, and predicted up to there."""
    differs = texts != other
    until = torch.where(differs.any(1), differs.int().argmax(1) + 1, texts.shape[1])
    parted = int(differs.any(1).sum())
    seen = parted / int(until.sum())
    predicted = float(torch.cat([row[:end] for row, end in zip(chances, until, strict=True)]).mean())
    times = f"{predicted / seen:.2f} times that" if parted else "none was seen"
    return f"{name}: {parted} of {len(texts)} texts part, {seen:.2%} a token; predicted {predicted:.2%}, {times}"


def main() -> None:
    """Print the figures of each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--base", type=Path, default=builtin_folder("llama") / "base")
    parser.add_argument("--adapter", type=Path, default=builtin_folder("llama") / "adapter")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    case = Case(name="partings", base=str(given.base), adapter=str(given.adapter), dtype=given.dtype)
    model = load_model(case, "cpu")
    prompts = prompts_for(model, given.prompts)
    texts, steps = texts_of(model, prompts, given.tokens)
    if given.write is not None:
        np.save(given.write, texts.numpy())
        return
    chances = chances_of(model, prompts, texts, steps)
    beside = torch.cat([generated(model, whole_inputs(some), given.tokens) for some in prompts.split(_BATCH)])
    print(line("beside others", texts, beside, chances))
    print(line("other kernels", texts, by_other_kernels(), chances))


if __name__ == "__main__":
    main()
