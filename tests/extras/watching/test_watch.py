"""The watch on one process changes nothing, finds, writes its report, and is a callback of transformers' Trainer."""

# ruff: noqa: ARG002, ARG005
from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import consistency
from consistency.capture.whole_file import WholeFile
from consistency.errors import CaptureError, UsageError
from consistency.extras.diagnosis.reproduce import cut
from consistency.extras.watching import report
from consistency.extras.watching.outcome import CheckOutcome
from consistency.extras.watching.watch import TrainingError
from consistency.worker.model import call_trace
from tests.conftest import Cli
from tests.extras.watching.trainings import (
    Training,
    batch,
    block,
    flip,
    is_of_the_device,
    losses,
    scaled_three_times,
    tiny_llama,
    trainer,
)

pytestmark = pytest.mark.process


def bits(model: Any) -> list[bytes]:
    return [tensor.detach().numpy().tobytes() for tensor in model.parameters()]


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"gradient_checkpointing": True}, {"bf16": True}]
)
def test_a_training_has_the_same_bits_with_the_watch(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = trainer(tmp_path / "plain", tiny_llama(dropout=0.1), [], **options)
    plain.train()
    callback = consistency.watch.Callback(every=2)
    watched = trainer(tmp_path / "watched", tiny_llama(dropout=0.1), [callback], **options)
    watched.train()
    assert callback.findings == []
    assert losses(watched) == losses(plain)
    assert bits(watched.model) == bits(plain.model)
    lines = [json.loads(line) for line in (tmp_path / "watched" / "watch" / "watch.jsonl").read_text().splitlines()]
    repeated = [line["status"] for line in lines if line["check"] == "this rank repeats"]
    assert repeated == ["ok"] * 3, lines
    judged = [line["status"] for line in lines if line["check"] == "the CPU says the same"]
    assert judged == ["ok"] * 3, lines


def test_a_full_disk_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is found is said all the same, and so is what cannot be written, once each."""

    def flip_base(step: int, training: Training) -> None:
        if step == 3:
            flip(block(training).mlp.up_proj.weight)

    (tmp_path / "watch.jsonl").symlink_to("/dev/full")
    full = CaptureError("cannot write", got=os.strerror(errno.ENOSPC))
    training = Training(steps=7)
    with patch.object(WholeFile, "write", side_effect=full):
        found = training.run(tmp_path, flip_base)
    assert len(training.losses) == 7
    assert [discovery.kind for discovery in found] == ["base-changed"]
    said = capsys.readouterr().err
    assert said.count("base weight") == 1
    assert said.count("report.json: cannot write (No space left on device)") == 1
    assert said.count(f"cannot write {tmp_path / 'watch.jsonl'}: OSError: [Errno 28]") == 1
    assert "consistency show" not in said


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    outcome = CheckOutcome(check="this rank repeats")
    report.write_line(tmp_path, 1, outcome, 0.5)
    before = (tmp_path / report.LINES).read_bytes()
    real = os.write

    def write(descriptor: int, content: Any) -> int:
        if len(content) < 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content[:8])

    with patch.object(os, "write", write), pytest.raises(OSError, match="No space left"):
        report.write_line(tmp_path, 2, outcome, 0.5)
    assert (tmp_path / report.LINES).read_bytes() == before


def test_a_finding_stops_the_trainer_which_saves_first(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Flip(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2:
                flip(model.get_base_model().model.layers[1].mlp.up_proj.weight)

    callback = consistency.watch.Callback(every=2, on_finding="stop")
    made = trainer(tmp_path, tiny_llama(), [callback, Flip()], max_steps=12)
    made.train()
    assert made.state.global_step == 4
    assert (tmp_path / "checkpoint-4").is_dir()
    assert [found.kind for found in callback.findings] == ["base-changed"]
    loaded = consistency.load_report(tmp_path / "watch")
    assert loaded.findings[0].tensors == ("watch::model.layers.1.mlp.up_proj.weight",)
    assert made.state.log_history[-2]["watch/findings"] == 1.0


@pytest.mark.parametrize("is_in_front", [True, False])
def test_figures_reach_the_loggers_of_a_trainer_where_the_watch_is_in_front(
    tmp_path: Path, *, is_in_front: bool
) -> None:
    """Loggers, such as TensorBoard's, are callbacks that a Trainer adds before those that it is given."""
    from transformers import TrainerCallback

    logged = list[dict[str, float]]()

    class Logger(TrainerCallback):  # type: ignore[misc]  # transformers' types are not followed
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            logged.append(dict(logs))

    callback = consistency.watch.Callback(every=2)
    made = trainer(tmp_path, tiny_llama(), [Logger()])
    if is_in_front:
        callback.add_to(made)
    else:
        made.add_callback(callback)
    made.train()
    assert ("watch/findings" in logged[1]) == is_in_front
    assert callback.findings == []


def test_an_adapter_that_was_not_loaded_again_is_named(tmp_path: Path) -> None:
    trainer(tmp_path, tiny_llama(), [consistency.watch.Callback(every=2)], save_strategy="steps", save_steps=2).train()
    healthy = consistency.watch.Callback(every=2)
    trainer(tmp_path, tiny_llama(), [healthy], max_steps=6).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert healthy.findings == []
    callback = consistency.watch.Callback(every=2)
    made = trainer(tmp_path, tiny_llama(), [callback], max_steps=6)
    made._load_from_checkpoint = lambda *_: None
    made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [found.kind for found in callback.findings] == ["not-reloaded"]
    assert callback.findings[0].message.startswith("18 of 18 tensors of the adapter")


def test_a_base_that_was_rounded_on_resuming_is_named(tmp_path: Path) -> None:
    Training(steps=2).run(tmp_path)
    assert Training(steps=2, options={"first_step": 2}).run(tmp_path) == []
    model = tiny_llama()
    with torch.no_grad():
        model.get_base_model().model.layers[0].mlp.up_proj.weight.copy_(
            model.get_base_model().model.layers[0].mlp.up_proj.weight.bfloat16()
        )
    (found,) = Training(steps=2, model=model, options={"first_step": 2}).run(tmp_path)
    assert found.kind == "base-changed"
    assert "layers.0.mlp.up_proj" in found.message


def uneven(step: int, rank: int) -> dict[str, torch.Tensor]:
    inputs = batch(step, rank)
    if step % 2:
        inputs["labels"][:, 4:] = -100
    return inputs


def test_micro_batches_that_weigh_the_same_are_named() -> None:
    found = Training(accumulate=2, batches=uneven).run(None)
    assert [one.kind for one in found] == ["unequal-weights"]
    assert "22, 6 label tokens" in found[0].message
    assert Training(accumulate=2).run(None) == []


def test_the_trainer_weighs_by_tokens(tmp_path: Path) -> None:
    callback = consistency.watch.Callback(every=2)
    made = trainer(tmp_path, tiny_llama(), [callback], gradient_accumulation_steps=2)
    for number, sample in enumerate(made.train_dataset):
        if number % 3:
            sample["labels"][4:] = -100
    made.train()
    assert callback.findings == []


def nan_from_mlp(step: int, training: Training) -> None:
    if step == 3:
        block(training).mlp.act_fn.register_forward_hook(lambda module, args, output: output / 0)


def test_the_module_that_made_the_first_nan_is_named() -> None:
    found = Training().run(None, nan_from_mlp)
    assert found[0].kind == "not-finite-from"
    assert "layers.1.mlp.act_fn of rank 0 makes NaN or infinity of finite inputs" in found[0].message


def wrong_once(step: int, training: Training) -> None:
    """Compute one pass of one layer wrongly, and never again."""
    if step == 4:
        passes = iter([1.001])
        block(training).mlp.register_forward_hook(lambda module, args, output: output * next(passes, 1.0))


def test_a_pass_that_was_wrong_once_is_named() -> None:
    found = Training().run(None, wrong_once)
    assert [(one.kind, one.tensors[0][0]) for one in found] == [("not-repeatable", "model.layers.1")]


def scaled(step: int, training: Training) -> None:
    def scale(module: Any, args: Any, output: Any) -> Any:
        return output * 1.02 if is_of_the_device() else output

    if step == 1:
        block(training).self_attn.o_proj.register_forward_hook(scale)


def test_a_card_that_is_always_wrong_is_named_by_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"rank 0 computes model\.layers\.1 wrong"):
        Training(on_finding="raise").run(tmp_path, scaled)
    report = consistency.load_report(tmp_path)
    assert report.verdict == "inconsistent"
    tensors = load_file(tmp_path / "block-of-step-2-rank-0.safetensors")
    file = str(tmp_path / "block-of-step-2-rank-0.safetensors")
    assert any(line.endswith(file) for line in report.findings[0].detail)
    assert torch.equal(computed_again(tensors, seed=1), computed_again(tensors, seed=2)), "all weights are in the file"


def scaled_then_another(step: int, training: Training) -> None:
    """Have a second block go wrong at a later step."""
    scaled(step, training)
    if step == 3:
        training.model.get_base_model().model.layers[2].mlp.register_forward_hook(
            lambda module, args, output: output * 1.02 if is_of_the_device() else output
        )


def test_a_wrong_block_is_shown_without_this_tool(cli_here: Cli, tmp_path: Path) -> None:
    """By a script that computes what torch was called for, on another machine too."""
    watched = tmp_path / "watch"
    found = Training(steps=6, every=1).run(watched, scaled_then_another)
    assert [one.tensors[0][0] for one in found] == ["model.layers.1", "model.layers.2"]
    shown = cli_here("show", watched).stdout
    for number in (1, 2):
        assert f"consistency reproduce {watched} --finding {number} --out" in " ".join(shown.split()), shown
    redacted = tmp_path / "public.zip"
    made = cli_here("reproduce", watched, "--finding", 2, "--redact", "--out", redacted)
    assert "reproduced: it happens on this machine" in made.stdout, made.stdout + made.stderr
    with zipfile.ZipFile(redacted) as archive:
        archive.extractall(tmp_path)
    folder = tmp_path / "public"
    again = subprocess.run(
        [sys.executable, "-I", "reproduce.py"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert again.returncode == 1, again.stdout + again.stderr
    assert "model.layers.2" in again.stdout
    assert "bitwise as recorded" in again.stdout
    texts = [file.read_text() for file in folder.iterdir() if file.suffix in (".json", ".md", ".txt")]
    assert not any(socket.gethostname() in text or str(tmp_path) in text for text in texts)


def test_a_large_block_is_shown_with_all_its_weights(
    tmp_path: Path, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No product of matrices is wrong by itself, and the calls take more than a public folder may have."""
    monkeypatch.setattr(call_trace, "MOST_BYTES", 1 << 10)
    monkeypatch.setattr(cut, "MOST_BYTES", 1 << 10)
    Training(steps=1, every=1).run(tmp_path / "watch", scaled)
    made = cli_here("reproduce", tmp_path / "watch", "--out", tmp_path / "repro")
    assert "reproduced: it happens on this machine" in made.stdout, made.stdout + made.stderr
    assert made.stdout.rstrip().endswith("repro (with the weights of a block: more than 10 MB)")
    assert "made by its module: whole" in made.stdout


def test_a_reproducer_that_cannot_be_written_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = CaptureError("cannot store a tensor", got=os.strerror(errno.ENOSPC))
    with patch("consistency.extras.watching.evidence_folder.store_tensor", side_effect=full):
        training = Training(steps=3, every=1)
        found = training.run(tmp_path, scaled)
    assert [one.kind for one in found] == ["wrong-block"]
    assert len(training.losses) == 3
    assert "cannot write" in capsys.readouterr().err
    assert not (tmp_path / "captures").exists()
    assert consistency.load_report(tmp_path).verdict == "inconsistent"


def test_a_block_that_was_wrong_once_has_no_reproducer(cli_here: Cli, tmp_path: Path) -> None:
    """What is right when it is computed once more is not said to be wrong by a script."""

    found = Training(steps=1, every=1).run(tmp_path, scaled_three_times)
    assert [one.kind for one in found] == ["wrong-block"]
    assert not (tmp_path / "captures").exists()
    shown = cli_here("show", tmp_path).stdout
    assert "consistency reproduce" not in shown
    assert "next: test that card" in shown


def test_a_gradient_that_has_just_come_is_no_parameter_that_stays() -> None:
    # in the first step one matrix of each LoRA is zero, and so is the gradient of the other
    model = tiny_llama(begins_at_zero=True)
    trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0)
    assert Training(model=model, optimizer=optimizer).run(None) == []


def computed_again(tensors: dict[str, torch.Tensor], *, seed: int) -> torch.Tensor:
    """Compute the block of a file in a model that begins with other weights."""
    layer = tiny_llama(seed=seed).get_base_model().model.layers[1]
    weights = {name.removeprefix("weight "): tensor for name, tensor in tensors.items() if name.startswith("weight ")}
    layer.load_state_dict(weights, strict=False)
    hidden = tensors["input [0][0]"]
    tables = (tensors["input [1]['position_embeddings'][0]"], tensors["input [1]['position_embeddings'][1]"])
    output: torch.Tensor = layer(hidden, position_embeddings=tables)
    assert output.shape == tensors["gradient of the output"].shape
    return output


def frozen_in_optimizer(training: Training) -> None:
    training.model = tiny_llama()
    trained = [tensor for tensor in training.model.parameters() if tensor.requires_grad]
    training.optimizer = torch.optim.AdamW(trained[2:], lr=1e-2)


def test_parameters_that_the_optimizer_has_not_are_named() -> None:
    training = Training()
    frozen_in_optimizer(training)
    found = training.run(None)
    assert [one.kind for one in found] == ["not-trained"]
    assert "2 parameters to be trained" in found[0].message


def test_options_that_cannot_be_used_are_refused() -> None:
    model = tiny_llama(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="every so many"):
        consistency.watch.Watch(model, optimizer, every=0)
    with pytest.raises(UsageError, match="unknown way"):
        consistency.watch.Watch(model, optimizer, on_finding="ask")  # type: ignore[arg-type]
