"""Real trainings of a tiny Llama with LoRA, alone and by several processes, for the tests of the watch."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode

from consistency.worker.model.call_trace import CallTrace

VOCABULARY = 64


def tiny_llama(
    *, layers: int = 3, seed: int = 0, dropout: float = 0.0, begins_at_zero: bool = False, **config: Any
) -> Any:
    """Return a Llama with a LoRA, float32, with the same weights for the same seed."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            **config,
        )
    )
    lora = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=dropout, init_lora_weights=begins_at_zero
    )
    return get_peft_model(made, lora)


def batch(step: int, rank: int = 0, *, tokens: int = 12, rows: int = 2) -> dict[str, torch.Tensor]:
    """Return a batch, another one for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


@dataclass(slots=True)
class Training:
    """A loop of one's own on one rank, into which a fault can be planted at a step."""

    rank: int = 0
    world: int = 1
    steps: int = 6
    every: int = 2
    accumulate: int = 1
    on_finding: Any = "warn"
    model: Any = None
    optimizer: Any = None
    call: Any = None
    is_wrapped: bool = False
    """Whether the model itself was split, so that nothing more is put around it."""
    options: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)
    """What a planted fault keeps from one step to another."""
    watch: Any = None
    batches: Callable[[int, int], dict[str, torch.Tensor]] = batch
    losses: list[float] = field(default_factory=list)

    def run(self, folder: Path | None, at_step: Callable[[int, Training], None] | None = None) -> list[Any]:
        """Train; return what the watch has found."""
        import consistency

        self.model = self.model if self.model is not None else tiny_llama()
        self.call = self.call or self.model
        if self.world > 1 and self.call is self.model and not self.is_wrapped:
            self.call = DistributedDataParallel(self.model)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = self.optimizer or torch.optim.AdamW(trained, lr=1e-2)
        self.watch = consistency.watch.Watch(
            self.call, self.optimizer, every=self.every, on_finding=self.on_finding, output=folder, **self.options
        )
        for step in range(1, self.steps + 1):
            if at_step is not None:
                at_step(step, self)
            for part in range(self.accumulate):
                inputs = self.batches(step * self.accumulate + part, self.rank)
                is_last = part == self.accumulate - 1
                context = nullcontext() if is_last or self.world == 1 else self.call.no_sync()
                with context:
                    loss = self.call(**inputs).loss
                    (loss / self.accumulate).backward()
                self.losses.append(float(loss.detach()))
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.watch.step(batch=inputs, loss=loss):
                break
        self.watch.close()
        return list(self.watch.findings)


def flip(tensor: torch.Tensor) -> None:
    """Flip a low bit of one element."""
    with torch.no_grad():
        tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


def is_of_the_device() -> bool:
    """Report whether a pass is one of the device, and not of the float64 or the noise that judges it."""
    mode = _get_current_dispatch_mode()
    return mode is None or isinstance(mode, CallTrace)


def block(training: Training) -> Any:
    return training.model.get_base_model().model.layers[1]


def scaled_three_times(step: int, training: Training) -> None:
    """Compute one block wrongly until it has been computed by itself, and never again."""
    passes = iter([1.02] * 3)  # the training's, the pass once more, and the block's by itself

    def scale(module: Any, args: Any, output: Any) -> Any:
        return output * next(passes, 1.0) if is_of_the_device() else output

    if step == 1:
        block(training).self_attn.o_proj.register_forward_hook(scale)


def trainer(folder: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    samples = [{name: values[0] for name, values in batch(number, rows=1).items()} for number in range(24)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **{"max_steps": 5, "save_strategy": "no", **options},
    )
    return Trainer(model=model, args=arguments, train_dataset=samples, callbacks=callbacks)


def losses(made: Any) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def on_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function of a module on so many ranks of a gloo group; return what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]  # torch says neither
            _rank, (world, folder, work, args), nprocs=world, start_method="fork"
        )
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def _rank(rank: int, world: int, folder: str, work: Callable[..., Any], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=20))
    try:
        value = work(rank, world, *args)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        raise
    (Path(folder) / f"{rank}.json").write_text(json.dumps(value))
    dist.destroy_process_group()
