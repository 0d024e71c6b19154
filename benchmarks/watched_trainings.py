"""Train healthy models in the ways in which people do, with a watch and without it, on several processes.

A watch has to find nothing, and to leave the loss curve its bits. Each kind runs on two processes by gloo on the CPU
(four for `hsdp`): once without the watch, once with it, from the same seeds.

    python -m benchmarks.watched_trainings                      # all kinds, 500 steps each
    python -m benchmarks.watched_trainings ddp fsdp2 --steps 100 --every 20
    python -m benchmarks.watched_trainings --given BASE ADAPTER # that adapter alone, by DistributedDataParallel
    python -m benchmarks.watched_trainings --list

It prints a line for each kind, and has status 1 where one has a finding or another curve. `--out FOLDER` keeps what the
watch has written.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.watched_models import VOCABULARY, causal_model, masked_model, with_lora

_BATCHES = 32
"""Batches that come again and again, so that there is something to learn."""

_LIMIT_S = 900.0
"""Seconds after which a training of a tiny model is ended: it hangs."""


@dataclass(slots=True, kw_only=True)
class Prepared:
    """A training that is ready to begin.

    Attributes
    ----------
    call : torch.nn.Module
        What the loop calls: the model, or its wrapper.
    accumulate : int
        Micro-batches in a step.
    conditions : callable
        Makes the context of a forward pass, such as autocast.
    shared_batch : bool
        All ranks get one batch, as with tensor parallel.
    has_own_loss : bool
        The loss is computed from the logits, outside of the model.
    clips : bool
        The norm of all gradients is clipped.
    tokens, vocabulary : int
        Tokens of a sequence, and how many different ones there are.
    """

    call: Any
    accumulate: int = 1
    conditions: Callable[[], AbstractContextManager[Any]] = nullcontext
    shared_batch: bool = False
    has_own_loss: bool = False
    clips: bool = True
    rate: float = 3e-3
    tokens: int = 12
    vocabulary: int = VOCABULARY
    optimizer: Any = None
    scaler: Any = None


@dataclass(slots=True, kw_only=True)
class Curve:
    """What a training left: its losses on this rank, and what the watch said."""

    losses: list[float] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


def batch_of(
    step: int, rank: int, *, tokens: int = 12, vocabulary: int = VOCABULARY, rows: int = 2
) -> dict[str, torch.Tensor]:
    """Return a batch, another one for each step and rank."""
    generator = torch.Generator().manual_seed(1000 * (step % _BATCHES) + rank)
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


# --- kinds of trainings with a loop of one's own ----------------------------------------------------------------------


def ddp(architecture: str = "llama", **options: Any) -> Callable[[], Prepared]:
    """Return what prepares a full fine-tuning by DistributedDataParallel."""
    return lambda: Prepared(call=DistributedDataParallel(causal_model(architecture, **options)))


def adapter(**options: Any) -> Callable[[], Prepared]:
    """Return what prepares the training of an adapter."""
    return lambda: Prepared(call=DistributedDataParallel(with_lora(causal_model(), **options)), rate=1e-2)


def masked() -> Prepared:
    return Prepared(call=DistributedDataParallel(masked_model()))


def accumulated() -> Prepared:
    return Prepared(call=DistributedDataParallel(causal_model()), accumulate=4)


def checkpointed(*, reentrant: bool, lora: bool = False) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        model = causal_model("gpt2") if not lora else with_lora(causal_model(), dropout=0.1)
        if lora:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return Prepared(call=DistributedDataParallel(model))

    return prepare


def autocast() -> Prepared:
    return Prepared(
        call=DistributedDataParallel(causal_model()), conditions=lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


def scaled_half() -> Prepared:
    """Autocast to float16 with a gradient scaler, whose first steps overflow and are left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    return Prepared(
        call=DistributedDataParallel(causal_model()),
        conditions=lambda: torch.autocast("cpu", dtype=torch.float16),
        scaler=scaler,
    )


def compiled_inside() -> Prepared:
    return Prepared(call=DistributedDataParallel(torch.compile(causal_model())))


def compiled_outside() -> Prepared:
    return Prepared(call=torch.compile(DistributedDataParallel(causal_model())))


def compiled_in_place() -> Prepared:
    model = causal_model()
    model.compile()
    return Prepared(call=DistributedDataParallel(model))


def compiled_blocks() -> Prepared:
    model = causal_model()
    for block in model.model.layers:
        block.compile()
    return Prepared(call=DistributedDataParallel(model))


def sharded(*, lora: bool = False, mesh: tuple[int, ...] = (), checkpoint: bool = False) -> Callable[[], Prepared]:
    """Return what prepares FSDP2, with replicas where the mesh has two dimensions."""

    def prepare() -> Prepared:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = causal_model()
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model = with_lora(model)
        names = ("replicate", "shard")[-len(mesh) :] if mesh else ("shard",)
        device_mesh = init_device_mesh("cpu", mesh or (dist.get_world_size(),), mesh_dim_names=names)
        for block in (model.get_base_model() if lora else model).model.layers:
            fully_shard(block, mesh=device_mesh)
        return Prepared(call=fully_shard(model, mesh=device_mesh), rate=1e-2 if lora else 3e-3)

    return prepare


def sharded_flat() -> Prepared:
    """Shard by the first version of FSDP, which accelerate takes by default."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = causal_model()
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return Prepared(
        call=FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
        ),
        clips=False,
    )


def loss_of_its_own() -> Prepared:
    """Give the model no labels, and take a loss from its logits."""
    return Prepared(call=DistributedDataParallel(causal_model()), has_own_loss=True)


def zero_redundancy() -> Prepared:
    """Split the optimizer's state over the ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(causal_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-3)
    return Prepared(call=model, optimizer=optimizer)


def tensor_parallel() -> Prepared:
    """Load a model as transformers splits it by its plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders, src=0)  # the first rank alone writes
        causal_model().save_pretrained(folders[0])
        dist.barrier()
        config = DistributedConfig(tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folders[0], distributed_config=config, dtype=torch.float32)
        dist.barrier()
    # torch does not take one norm of tensors that are split and of others
    return Prepared(call=model.train(), shared_batch=True, clips=False)


def given(base: str, adapter_folder: str) -> Callable[[], Prepared]:
    """Return what prepares the training of an adapter that is in a folder, with its base."""

    def prepare() -> Prepared:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        trained = PeftModel.from_pretrained(model, adapter_folder, is_trainable=True)
        return Prepared(call=DistributedDataParallel(trained), rate=1e-4, tokens=48, vocabulary=model.config.vocab_size)

    return prepare


def own_loss(call: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss with label smoothing, which the model's own has not."""
    logits = call(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    labels = inputs["input_ids"][:, 1:]
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def loop_of(prepare: Callable[[], Prepared]) -> Callable[[Plan], Curve]:
    """Return a training by a loop of one's own."""

    def train(plan: Plan) -> Curve:
        torch.manual_seed(0)
        torch._dynamo.reset()
        prepared = prepare()
        call, accumulate = prepared.call, prepared.accumulate
        torch.manual_seed(100 + plan.rank)
        trained = [parameter for parameter in call.parameters() if parameter.requires_grad]
        optimizer = prepared.optimizer or torch.optim.AdamW(trained, lr=prepared.rate)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
        watch = plan.watch(call, optimizer)
        curve = Curve()
        for step in range(plan.steps):
            for part in range(accumulate):
                inputs = batch_of(
                    step * accumulate + part,
                    0 if prepared.shared_batch else plan.rank,
                    tokens=prepared.tokens,
                    vocabulary=prepared.vocabulary,
                )
                is_last = part == accumulate - 1
                with nullcontext() if is_last else call.no_sync():
                    with prepared.conditions():
                        loss = own_loss(call, inputs) if prepared.has_own_loss else call(**inputs).loss
                    scaled = loss / accumulate
                    (prepared.scaler.scale(scaled) if prepared.scaler else scaled).backward()
                curve.losses.append(float(loss.detach()))
            if prepared.scaler:
                prepared.scaler.unscale_(optimizer)
            if prepared.clips:
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if prepared.scaler:
                prepared.scaler.step(optimizer)
                prepared.scaler.update()
            else:
                optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.step(batch=inputs, loss=loss)
        if watch is not None:
            watch.close()
            curve.findings = [f"{found.kind}: {found.message}" for found in watch.findings]
        return curve

    return train


# --- kinds with a trainer ---------------------------------------------------------------------------------------------


def _samples(count: int) -> list[dict[str, torch.Tensor]]:
    return [{name: values[0] for name, values in batch_of(number, 0, rows=1).items()} for number in range(count)]


def trainer(make: Callable[[], Any], **options: Any) -> Callable[[Plan], Curve]:
    """Return a training by transformers' Trainer."""

    def train(plan: Plan) -> Curve:
        from transformers import Trainer, TrainingArguments

        torch.manual_seed(0)
        torch._dynamo.reset()
        arguments = TrainingArguments(**plan.arguments(), **options)
        callbacks = plan.callbacks()
        made = Trainer(model=make(), args=arguments, train_dataset=_samples(256), callbacks=callbacks)
        return _trained_by(made, callbacks)

    return train


def sft(*, lora: bool) -> Callable[[Plan], Curve]:
    """Return a training by TRL's SFTTrainer, of texts of unlike lengths."""

    def train(plan: Plan) -> Curve:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(5)
        texts = []
        for _ in range(256):
            length = int(torch.randint(4, 20, (1,), generator=generator))
            words = torch.randint(4, VOCABULARY, (length,), generator=generator).tolist()
            texts.append({"text": " ".join(f"w{word}" for word in words)})
        callbacks = plan.callbacks()
        made = SFTTrainer(
            model=causal_model(),
            args=SFTConfig(**plan.arguments(), gradient_accumulation_steps=2, max_length=32),
            train_dataset=Dataset.from_list(texts),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
            callbacks=callbacks,
        )
        return _trained_by(made, callbacks)

    return train


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _trained_by(made: Any, callbacks: list[Any]) -> Curve:
    from transformers.trainer_callback import PrinterCallback

    made.remove_callback(PrinterCallback)
    made.train()
    curve = Curve(losses=[entry["loss"] for entry in made.state.log_history if "loss" in entry])
    # of a rank that does not log, the weights tell whether it trained alike
    curve.losses += [float(parameter.detach().double().sum()) for parameter in made.model.parameters()]
    for callback in callbacks:
        curve.findings += [f"{found.kind}: {found.message}" for found in getattr(callback, "findings", [])]
    return curve


KINDS: dict[str, Callable[[Plan], Curve]] = {
    "ddp": loop_of(ddp()),
    "gpt2": loop_of(ddp("gpt2")),
    "qwen2": loop_of(ddp("qwen2")),
    "qwen3": loop_of(ddp("qwen3")),
    "gemma2": loop_of(ddp("gemma2")),
    "mixtral": loop_of(ddp("mixtral")),
    "qwen2-moe": loop_of(ddp("qwen2-moe")),
    "bert": loop_of(masked),
    "accumulation": loop_of(accumulated),
    "checkpointing": loop_of(checkpointed(reentrant=False)),
    "checkpointing-lora": loop_of(checkpointed(reentrant=False, lora=True)),
    "checkpointing-reentrant": loop_of(checkpointed(reentrant=True, lora=True)),
    "lora": loop_of(adapter()),
    "lora-dropout": loop_of(adapter(dropout=0.1)),
    "dora": loop_of(adapter(dora=True)),
    "dropout": loop_of(ddp(attention_dropout=0.1)),
    "eager-attention": loop_of(ddp(_attn_implementation="eager", attention_dropout=0.1)),
    "zero-redundancy": loop_of(zero_redundancy),
    "autocast": loop_of(autocast),
    "scaler": loop_of(scaled_half),
    "compile": loop_of(compiled_inside),
    "compile-outside": loop_of(compiled_outside),
    "compile-in-place": loop_of(compiled_in_place),
    "compile-blocks": loop_of(compiled_blocks),
    "own-loss": loop_of(loss_of_its_own),
    "fsdp1": loop_of(sharded_flat),
    "fsdp2": loop_of(sharded()),
    "fsdp2-lora": loop_of(sharded(lora=True)),
    "fsdp2-checkpointing": loop_of(sharded(checkpoint=True)),
    "hsdp": loop_of(sharded(mesh=(2, 2))),
    "tensor-parallel": loop_of(tensor_parallel),
    "trainer": trainer(causal_model, gradient_accumulation_steps=2),
    "trainer-lora": trainer(lambda: with_lora(causal_model(), dropout=0.1)),
    "trainer-bert": trainer(masked_model, warmup_steps=20),
    "trainer-compile": trainer(causal_model, torch_compile=True),
    "sft": sft(lora=False),
    "sft-lora": sft(lora=True),
}
_SCRIPT = "accelerate"
"""The kind that `accelerate launch` starts."""

_GIVEN = "given"
"""The kind that trains a model of the user's."""

_WORLDS = {"hsdp": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One training of a kind, on this rank."""

    rank: int
    steps: int
    every: int
    folder: Path | None
    """Folder of the watch; None without it."""
    beside: bool = False
    """Whether the CPU's part of a check runs beside the training."""
    also: tuple[Any, ...] = ()
    """Callbacks of a Trainer after the watch's, such as one that plants a fault."""

    def watch(self, call: Any, optimizer: Any) -> Any:
        import consistency

        if self.folder is None:
            return None
        return consistency.watch.Watch(call, optimizer, output=self.folder, **self.options())

    def callbacks(self) -> list[Any]:
        import consistency

        if self.folder is None:
            return list(self.also)
        return [consistency.watch.Callback(output=self.folder, **self.options()), *self.also]

    def options(self) -> dict[str, Any]:
        """Return the options of the watch, but its folder."""
        return {"every": self.every, "timeout_s": 120.0, "beside": self.beside}

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a Trainer."""
        return {
            "output_dir": tempfile.gettempdir(),
            "per_device_train_batch_size": 2,
            "learning_rate": 3e-3,
            "max_steps": self.steps,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How each kind is trained and watched, as of `Plan`."""

    steps: int
    every: int
    beside: bool


def run_rank(rank: int, world: int, port: int, kind: str, how: Schedule, folder: Path) -> None:
    """Train without the watch and with it, as one rank, and write down both curves."""
    with (folder / "output.txt").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    if not kind.startswith(("trainer", "sft")):  # those make the group themselves
        dist.init_process_group("gloo")
    curves = {}
    for name, watch_folder in (("plain", None), ("watched", folder / "watch")):
        began_s = time.monotonic()
        plan = Plan(rank=rank, steps=how.steps, every=how.every, beside=how.beside, folder=watch_folder)
        curve = KINDS[kind](plan)
        curves[name] = {
            "losses": curve.losses,
            "findings": curve.findings,
            "seconds": time.monotonic() - began_s,
        }
    (folder / f"{rank}.json").write_text(json.dumps(curves))
    dist.destroy_process_group()


def run_kind(kind: str, how: Schedule, folder: Path) -> dict[str, Any]:
    """Run a kind on its processes; return what is printed of it."""
    world = _WORLDS.get(kind, 2)
    folder.mkdir(parents=True, exist_ok=True)
    if kind == _SCRIPT:
        failure = _run_script(how, folder)
        curves = [] if failure else _script_curves(folder, world)
    else:
        failure = _run_ranks(kind, world, how, folder)
        curves = [] if failure else _curves(folder, world)
    if failure:
        lines = [line for line in (folder / "output.txt").read_text().splitlines() if "Error" in line]
        return {"kind": kind, "failure": f"{failure}: {lines[0] if lines else ''}"}
    return _row(kind, world, how.steps, curves, folder / "watch")


def _run_ranks(kind: str, world: int, how: Schedule, folder: Path) -> str:
    """Fork the processes, which have imported everything; return why they failed."""
    port = _free_port()
    context = multiprocessing.get_context("fork")
    arguments = [(rank, world, port, kind, how, folder) for rank in range(world)]
    ranks = [context.Process(target=run_rank, args=given) for given in arguments]
    for process in ranks:
        process.start()
    end_s = time.monotonic() + (math.inf if kind == _GIVEN else _LIMIT_S)
    for process in ranks:
        left_s = max(0.0, end_s - time.monotonic())
        process.join(None if left_s == math.inf else left_s)
    statuses = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    return "" if not any(statuses) and None not in statuses else f"status {statuses}"


def _run_script(how: Schedule, folder: Path) -> str:
    """Have accelerate launch the script without the watch, and with it; return why it failed."""
    for is_watched in (False, True):
        with (folder / "output.txt").open("a") as output:
            command = _accelerated(how, folder, is_watched)
            try:
                ended = subprocess.run(command, stdout=output, stderr=output, timeout=_LIMIT_S, check=False)
            except subprocess.TimeoutExpired:
                return "no end"
        if ended.returncode:
            return f"status {ended.returncode}"
    return ""


def _accelerated(how: Schedule, folder: Path, is_watched: bool) -> list[str]:
    """Return the command that has accelerate launch the script."""
    losses = folder / ("watched" if is_watched else "plain")
    losses.mkdir(exist_ok=True)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launcher += ["--main_process_port", str(_free_port())]
    own = ["-m", "benchmarks.accelerated_training", "--steps", str(how.steps), "--every", str(how.every)]
    own += ["--losses", str(losses)]
    return [*launcher, *own, *(["--watch", str(folder / "watch")] if is_watched else [])]


def _free_port() -> int:
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        return int(connection.getsockname()[1])


def _curves(folder: Path, world: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _script_curves(folder: Path, world: int) -> list[dict[str, Any]]:
    names = ("plain", "watched")
    return [{name: json.loads((folder / name / f"{rank}.json").read_text()) for name in names} for rank in range(world)]


def _row(kind: str, world: int, steps: int, curves: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return what is said of a kind: findings, whether the curves are equal, and what was checked."""
    lines = [json.loads(line) for line in (folder / "watch.jsonl").read_text().splitlines()]
    checked = Counter(line["check"] for line in lines if line["status"] != "not checked")
    unchecked = Counter((line["check"], line["not checked"]) for line in lines if "not checked" in line)
    return {
        "kind": kind,
        "world": world,
        "steps": steps,
        "findings": curves[0]["watched"]["findings"],
        "equal": all(curve["plain"]["losses"] == curve["watched"]["losses"] for curve in curves),
        "losses": [curves[0]["plain"]["losses"][0], curves[0]["plain"]["losses"][steps - 1]],
        "checks": dict(checked),
        "not checked": [f"{check} ({count}): {reason}" for (check, reason), count in unchecked.items()],
        "seconds": [round(curves[0][name].get("seconds", 0.0), 1) for name in ("plain", "watched")],
    }


def printed(row: dict[str, Any]) -> str:
    """Return a row as a line, with what was found and not checked under it."""
    if "failure" in row:
        return f"{row['kind']:24} FAILED {row['failure']}"
    first, last = row["losses"]
    text = (
        f"{row['kind']:24} {row['world']} processes  {row['steps']} steps  {len(row['findings'])} findings  "
        f"{'same curve' if row['equal'] else 'OTHER CURVE'}  {sum(row['checks'].values())} checks  "
        f"loss {first:.3f} to {last:.3f}  {row['seconds'][0]} s, with the watch {row['seconds'][1]} s"
    )
    extra = [*(f"    found: {message}" for message in row["findings"])]
    extra += [f"    not checked: {line}" for line in row["not checked"]]
    return "\n".join([text, *extra])


def main() -> int:
    """Run the kinds that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--beside", action="store_true", help="judge blocks beside the training (not by accelerate)")
    parser.add_argument("--list", action="store_true", help="print the kinds")
    parser.add_argument("--given", nargs=2, metavar=("BASE", "ADAPTER"), help="train this adapter alone")
    options = parser.parse_args()
    known = [*KINDS, _SCRIPT]
    if options.given:
        KINDS[_GIVEN], options.kinds = loop_of(given(*options.given)), [_GIVEN]
        known.append(_GIVEN)
    if options.list:
        print("\n".join(known))
        return 0
    if unknown := set(options.kinds) - set(known):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; --list prints all")
    import peft  # noqa: F401 - once, and not in each process
    import transformers  # noqa: F401

    import consistency.extras.watching.watch  # noqa: F401

    how = Schedule(steps=options.steps, every=options.every, beside=options.beside)
    is_healthy = True
    with tempfile.TemporaryDirectory() as temporary:
        for kind in options.kinds or known:
            row = run_kind(kind, how, (options.out or Path(temporary)) / kind)
            is_healthy = is_healthy and not row.get("findings", ["failed"]) and row["equal"]
            print(printed(row), flush=True)
    return 0 if is_healthy else 1


if __name__ == "__main__":
    raise SystemExit(main())
