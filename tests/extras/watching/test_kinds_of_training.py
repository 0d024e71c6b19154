"""Ways to train that people use have no finding, and their checks are made as far as they can be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import consistency
from benchmarks.watched_models import causal_model, with_lora
from consistency.extras.diagnosis.reproduce.folder import reproduce
from tests.extras.watching.trainings import (
    Training,
    batch,
    flip,
    is_of_the_device,
    losses,
    on_ranks,
    tiny_llama,
    trainer,
)

pytestmark = [pytest.mark.process, pytest.mark.slow]

JUDGED = ("this rank repeats", "the CPU says the same")


def statuses(folder: Path) -> dict[str, list[str]]:
    """Return what each check said, by its name."""
    by_check: dict[str, list[str]] = {}
    for line in (folder / "watch.jsonl").read_text().splitlines():
        entry = json.loads(line)
        by_check.setdefault(entry["check"], []).append(entry.get("not checked", entry["status"]))
    return by_check


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([tensor for tensor in model.parameters() if tensor.requires_grad], lr=1e-2)


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "qwen2-moe"])
def test_blocks_of_other_architectures_are_judged(tmp_path: Path, architecture: str) -> None:
    assert Training(model=causal_model(architecture), steps=2).run(tmp_path) == []
    said = statuses(tmp_path)
    assert all(said[check] == ["ok", "ok"] for check in JUDGED), said


def test_a_loss_from_another_output_than_the_loss_is_repeated(tmp_path: Path) -> None:
    model = causal_model()
    watch = consistency.watch.Watch(model, optimizer := optimizer_of(model), every=2, output=tmp_path)
    for step in range(4):
        outputs = model(**batch(step))
        outputs.logits.log_softmax(-1)[..., 1].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    assert watch.findings == []
    said = statuses(tmp_path)
    assert all(said[check] == ["ok"] * 3 for check in JUDGED), said


@pytest.mark.parametrize("is_whole", [True, False], ids=["the-model", "its-blocks"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, while it compiles
def test_a_model_that_compiles_its_own_call_trains_on(tmp_path: Path, is_whole: bool) -> None:
    model = causal_model()
    for module in [model] if is_whole else model.model.layers:
        module.compile(backend="eager")
    assert Training(model=model).run(tmp_path) == []
    said = statuses(tmp_path)
    assert said["this rank repeats"] == ["ok"] * 4
    assert said["the CPU says the same"] == ["the model is compiled, or has no list of blocks"] * 4


def test_a_trainer_that_compiles_keeps_its_bits(tmp_path: Path) -> None:
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    plain = trainer(tmp_path / "plain", tiny_llama(), [], **options)
    plain.train()
    callback = consistency.watch.Callback(every=2)
    watched = trainer(tmp_path / "watched", tiny_llama(), [callback], **options)
    watched.train()
    assert callback.findings == []
    assert losses(watched) == losses(plain)
    assert "compiles a wrapper" in statuses(tmp_path / "watched" / "watch")["this rank repeats"][-1]


def test_a_step_that_a_gradient_scaler_leaves_out_is_none(tmp_path: Path) -> None:
    found = on_ranks(2, scaled, str(tmp_path))
    assert found == [[], []]
    said = statuses(tmp_path)
    assert said["what is added up"] == ["ok", "ok"], said


def scaled(rank: int, world: int, folder: str) -> list[str]:
    """Put the gradients of the first pass away, as a scaler does where another tensor overflows."""
    model = DistributedDataParallel(causal_model())
    optimizer = optimizer_of(model)
    watch = consistency.watch.Watch(model, optimizer, every=2, output=folder, timeout_s=20)
    for number in range(3):
        model(**batch(number, rank)).loss.backward()
        if number:
            optimizer.step()
        optimizer.zero_grad()
    watch.close()
    return [found.message for found in watch.findings]


def compressed(rank: int, world: int, folder: str) -> list[str]:
    training = Training(rank=rank, world=world, model=causal_model(), steps=2, options={"timeout_s": 20})
    training.call = DistributedDataParallel(training.model)
    training.call.register_comm_hook(None, fp16_compress_hook)
    return [found.message for found in training.run(Path(folder))]


def test_sums_that_the_training_compresses_are_not_judged(tmp_path: Path) -> None:
    assert on_ranks(2, compressed, str(tmp_path)) == [[], []]
    said = statuses(tmp_path)["what is added up"]
    assert said == ["the training compresses its sums by torch's fp16_compress_hook"] * 2


class Sparse(torch.nn.Module):
    """A model of an embedding with sparse gradients, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 8, sparse=True)
        self.head = torch.nn.Linear(8, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        logits = self.head(self.embedding(input_ids))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def sparse(rank: int, world: int, folder: str) -> list[str]:
    model = Sparse()
    training = Training(rank=rank, world=world, model=model, steps=4, options={"timeout_s": 20})
    training.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return [found.message for found in training.run(Path(folder))]


@pytest.mark.slow
@pytest.mark.process
def test_running_statistics_are_a_ranks_own(tmp_path: Path) -> None:
    assert on_ranks(2, with_batch_norm, str(tmp_path)) == [[], []]
    assert statuses(tmp_path)["ranks agree"] == ["ok", "ok", "ok"]


def with_batch_norm(rank: int, world: int, folder: str) -> list[str]:
    """Train a batch norm whose statistics are not broadcast, as with FSDP2."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    parallel = DistributedDataParallel(model)
    parallel.broadcast_buffers = False  # the option of its constructor has another name in each version of torch
    optimizer = optimizer_of(parallel)
    watch = consistency.watch.Watch(parallel, optimizer, every=2, output=folder, timeout_s=20)
    for step in range(4):
        rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = parallel(rows).square().mean()
        loss.backward()
        watch.step(batch=rows, loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    watch.close()
    return [finding.message for finding in watch.findings]


def test_sparse_gradients_end_no_training(tmp_path: Path) -> None:
    assert on_ranks(2, sparse, str(tmp_path)) == [[], []]
    assert statuses(tmp_path)["what is added up"] == ["ok"] * 3


def test_a_reentrant_checkpoint_has_its_forward_pass_repeated(tmp_path: Path) -> None:
    model = with_lora(causal_model(), dropout=0.1)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    training = Training(model=model)
    assert training.run(tmp_path) == []
    assert set(statuses(tmp_path)["this rank repeats"]) == {
        "gradients: a reentrant checkpoint gives none to a pass that is made again"
    }


# --- models that are split over the ranks -----------------------------------------------------------------------------


def sharded(training: Training) -> Any:
    """Shard by FSDP2; with four processes there are two replicas."""
    shape, names = ((2, 2), ("replicate", "shard")) if training.world == 4 else ((2,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in training.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(training.model, mesh=mesh)


def flat(training: Training) -> Any:
    policy = ModuleWrapPolicy({type(training.model.model.layers[0])})
    return FullyShardedDataParallel(
        training.model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )


def buffer_of_rank(step: int, training: Training) -> None:
    if step == 3 and training.rank == 1:
        flip(training.model.model.rotary_emb.inv_freq)


def part_of_replica(step: int, training: Training) -> None:
    """Change the part of a weight that ranks 1 and 3 hold, on rank 3."""
    if step == 3 and training.rank == 3:
        flip(training.model.model.layers[1].mlp.up_proj.weight.to_local())


def attention_of_rank(step: int, training: Training) -> None:
    if step == 3 and training.rank == 1:
        # no pass tells which block it is: the next check in turn that judges this one is that of step 6
        training.model.model.layers[0].self_attn.register_forward_hook(_scaled)


def _scaled(module: Any, args: Any, output: Any) -> Any:
    return (output[0] * 1.02, *output[1:]) if is_of_the_device() else output


def rank_left_out(step: int, training: Training) -> None:
    """Leave what rank 1 computed out of the sums over ranks, from the third step on."""
    if step == 3 and training.rank == 1:
        # older versions of torch have the second alone
        names = ("reduce_scatter_single", "reduce_scatter_tensor")
        name = next(name for name in names if hasattr(torch.distributed, name))
        add_up = getattr(torch.distributed, name)

        def without_own(*args: Any, **kwargs: Any) -> Any:
            kwargs["input"].zero_()
            return add_up(*args, **kwargs)

        mock.patch.object(torch.distributed, name, without_own).start()


def split_training(rank: int, world: int, split: Callable[[Training], Any], fault: Any, same: bool, folder: str) -> Any:
    batches = (lambda step, _: batch(step)) if same else batch
    training = Training(rank=rank, world=world, model=causal_model(), batches=batches)
    training.call, training.is_wrapped = split(training), True
    training.options = {"timeout_s": 20.0}
    found = training.run(Path(folder), fault)
    return [[one.kind, list(one.ranks), one.message] for one in found]


@pytest.mark.parametrize(("world", "split"), [(2, sharded), (4, sharded), (2, flat)])
def test_a_healthy_split_model_has_no_finding(tmp_path: Path, world: int, split: Any) -> None:
    assert on_ranks(world, split_training, split, None, False, str(tmp_path)) == [[]] * world
    said = statuses(tmp_path)
    if split is flat:
        assert said["what is added up"] == ["the model is split: a rank keeps a part of each sum"] * 4
        return
    for check in ("ranks agree", "what is added up", "the CPU says the same"):
        assert said[check] == ["ok"] * 4


@pytest.mark.parametrize(("world", "split"), [(2, sharded), (4, sharded), (2, flat)])
def test_a_buffer_that_differs_beside_split_weights_is_found(tmp_path: Path, world: int, split: Any) -> None:
    (found,) = on_ranks(world, split_training, split, buffer_of_rank, False, str(tmp_path))[0]
    assert found[0] == "ranks-differ"
    assert "model.rotary_emb.inv_freq" in found[2]
    if world == 4:
        assert found[1] == [1]


def test_a_part_that_differs_between_two_replicas_is_found(tmp_path: Path) -> None:
    found = on_ranks(4, split_training, sharded, part_of_replica, False, str(tmp_path))[0]
    assert found[0][0] == "ranks-differ"
    assert "model.layers.1.mlp.up_proj.weight" in found[0][2]
    assert set(found[0][1]) <= {1, 3}, "the other two hold other parts"


@pytest.mark.parametrize("world", [2, 4])
def test_a_wrong_block_of_a_rank_that_shards_is_named(tmp_path: Path, world: int) -> None:
    found = on_ranks(world, split_training, sharded, attention_of_rank, False, str(tmp_path))[0]
    assert [one[:2] for one in found] == [["wrong-block", [1]]]
    assert "rank 1 computes model.layers.0 wrong" in found[0][2]
    if world == 2:
        reproduced = reproduce(tmp_path, 1, tmp_path / "repro")
        assert reproduced.happens_here, reproduced.output


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_is_left_out_of_sharded_sums_is_named(tmp_path: Path, world: int) -> None:
    found = on_ranks(world, split_training, sharded, rank_left_out, False, str(tmp_path))[0]
    assert found[0][:2] == ["wrong-sum", [1] if world > 2 else [0, 1]]
    assert ("without rank 1 it is right" if world > 2 else "rank 1 is left out") in found[0][2]


def test_the_same_batch_on_ranks_that_shard_is_found(tmp_path: Path) -> None:
    found = on_ranks(2, split_training, sharded, None, True, str(tmp_path))[0]
    assert [one[:2] for one in found] == [["same-batch", [0, 1]]]
