"""What moves between shards is held against itself; a move that changes something ends the pass with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import accelerate.hooks
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from consistency.extras.peft_api.sharding.moves import ChangedInTransferError, Moves, watched

IDS = torch.arange(6).reshape(1, 6)
GIVEN = {"input_ids": IDS, "labels": IDS + 10}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(6, 4), torch.nn.LayerNorm(4)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"hidden": self.norm(self.table(input_ids)), "labels": labels}


@pytest.fixture
def model() -> torch.nn.Module:
    """Hook every module, as accelerate does where a model is laid out."""
    found = Model()
    for part in (found, found.table, found.norm):
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu", io_same_device=part is found))
    return found


def run(model: torch.nn.Module, moves: Moves, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> Any:
    real = accelerate.hooks.send_to_device
    monkeypatch.setattr(accelerate.hooks, "send_to_device", lambda t, *a, **k: change(real(t, *a, **k)))
    with watched(model, moves):
        return model(**GIVEN)


def copied(value: Any) -> Any:
    """Return what a good copy to another device gives: other tensors, the same numbers."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(v) for key, v in value.items()}
    return tuple(map(copied, value)) if isinstance(value, tuple) else value


def test_good_moves_are_counted_and_nothing_is_said(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    moves = Moves(given=GIVEN)
    found = run(model, moves, monkeypatch, copied)
    assert torch.equal(found["labels"], GIVEN["labels"])
    assert moves.count == 6  # two inputs, ids into the table, hidden states into the norm, two outputs
    assert moves.devices == {"cpu"}
    before = moves.count
    model(**GIVEN)
    assert moves.count == before, "the watch is taken away"


def broken(name: str) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        value = copied(value)
        if isinstance(value, dict) and name in value:
            value[name].view(-1)[3] += 1
        if isinstance(value, tuple) and value and isinstance(value[0], torch.Tensor):
            kind = "hidden" if value[0].is_floating_point() else "ids"
            if kind == name:
                value[0].view(-1)[3] += 1
        return value

    return change


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        (
            "labels",
            "labels-changed",
            "labels changed during transfer to device cpu: labels[0, 3] was 13, is 14; 1 of 6",
        ),
        ("input_ids", "ids-changed", "ids changed during transfer to device cpu: input_ids[0, 3] was 3, is 4; 1 of 6"),
        ("ids", "ids-changed", "ids changed during transfer to device cpu, into table: ids[0, 3] was 3, is 4"),
        ("hidden", "changed-on-the-way", "hidden states changed during transfer to device cpu, into norm: "),
    ],
)
def test_a_changed_tensor_is_named(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, name: str, word: str, sentence: str
) -> None:
    with pytest.raises(ChangedInTransferError) as seen:
        run(model, Moves(given=GIVEN), monkeypatch, broken(name))
    assert seen.value.word == word
    assert seen.value.sentence.startswith(sentence)


def test_all_inputs_that_changed_are_named(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(value: Any) -> Any:
        return broken("labels")(broken("input_ids")(value))

    with pytest.raises(ChangedInTransferError, match="so have labels"):
        run(model, Moves(given=GIVEN), monkeypatch, change)


def test_a_zero_of_the_other_sign_is_a_change() -> None:
    with pytest.raises(ChangedInTransferError, match=r"hidden states changed during transfer to device cpu, into x$"):
        Moves(given={}).look("", torch.zeros(3), -torch.zeros(3), where="x")
    Moves(given={}).look("", torch.full((3,), torch.nan), torch.full((3,), torch.nan), where="x")


def test_by_way_of_the_host_every_move_is_two(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = accelerate.hooks.send_to_device

    def send(tensor: Any, device: Any, **_: Any) -> Any:
        seen.append(str(device))
        return real(tensor, device)

    monkeypatch.setattr(accelerate.hooks, "send_to_device", send)
    with watched(model, Moves(given=GIVEN, by_host=True)):
        model(**GIVEN)
    assert len(seen) == 14
    assert set(seen[::2]) == {"cpu"}


def hand_on(logits: Any, labels: Any) -> Any:
    return labels


class WithLoss(torch.nn.Module):
    @property
    def loss_function(self) -> Any:
        return vars(self).get("_loss_function") or hand_on

    @loss_function.setter
    def loss_function(self, value: Any) -> None:
        vars(self)["_loss_function"] = value


def test_the_loss_moves_its_labels_under_watch() -> None:
    model, moves = WithLoss(), Moves(given=GIVEN)
    logits = torch.empty(1, 6, 4, device="meta")
    with watched(model, moves):
        moved = model.loss_function(logits=SimpleNamespace(device="cpu"), labels=GIVEN["labels"])
        assert moved is GIVEN["labels"], "what is no tensor is handed on"
        with pytest.raises(NotImplementedError):  # a look at what has arrived on `meta` finds nothing there
            model.loss_function(logits=logits, labels=GIVEN["labels"])
    assert moves.devices == {"meta"}
    assert "_loss_function" not in vars(model)


def test_two_values_that_differ_are_told_apart() -> None:
    """It said "was -0.36464, is -0.36464"."""
    moves = Moves(given={})
    sent = torch.tensor([[-0.36464032530784607, 1.0]])
    arrived = torch.tensor([[-0.3646402955055237, 1.0]])
    with pytest.raises(ChangedInTransferError) as changed:
        moves.look("hidden_states", sent, arrived, where="layers.1")
    assert "was -0.36464032530784607, is -0.3646402955055237; 1 of 2 elements" in changed.value.sentence
    with pytest.raises(ChangedInTransferError) as far:
        moves.look("hidden_states", torch.tensor([1.0]), torch.tensor([2.0]), where="layers.1")
    assert "was 1, is 2" in far.value.sentence
