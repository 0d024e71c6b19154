"""A training of the kind that the documentation of accelerate shows, with a watch in two lines.

    accelerate launch --multi_gpu --num_processes 2 -m benchmarks.accelerated_training --steps 500 --watch FOLDER

`--multi_gpu` is how it starts several processes, on the CPU too. Rank r writes its losses to `--losses FOLDER`/r.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.watched_models import VOCABULARY, causal_model


def samples(count: int, tokens: int = 12) -> list[dict[str, torch.Tensor]]:
    """Return texts of random tokens."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(0, VOCABULARY, (count, tokens), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row.clone()} for row in rows]


def train(*, steps: int, every: int, accumulate: int, folder: str | None) -> tuple[list[float], Any]:
    """Train for so many steps of the optimizer; return the losses, and the watch where a folder is given for it."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import get_linear_schedule_with_warmup

    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = causal_model("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader: Any = DataLoader(samples(64), batch_size=2, shuffle=True)  # type: ignore[arg-type]  # a list is a dataset
    scheduler = get_linear_schedule_with_warmup(optimizer, 10, 2 * steps)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    watch = None
    if folder is not None:
        import consistency

        watch = consistency.watch.Watch(model, optimizer, every=every, output=folder)

    losses: list[float] = []
    done = 0
    while done < steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            done += accelerator.sync_gradients
            if done == steps:
                break
            if watch is not None and accelerator.sync_gradients:
                watch.step(batch=batch, loss=loss)
    if watch is not None:
        watch.close()
    return losses, watch


def main() -> int:
    """Train without the watch, and with it; leave losses and findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--watch", default=None)
    parser.add_argument("--losses", type=Path, required=True)
    given = parser.parse_args()
    losses, watch = train(
        steps=given.steps,
        every=given.every,
        accumulate=given.accumulate,
        folder=given.watch,
    )
    rank = torch.distributed.get_rank()
    findings = [] if watch is None else [found.message for found in watch.findings]
    (given.losses / f"{rank}.json").write_text(json.dumps({"losses": losses, "findings": findings}))
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
