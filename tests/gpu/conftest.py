"""Which accelerators there are, and why a test is skipped where they are not."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.accelerator.fixtures import Double, Warm

from .machines import Card, Machine, machine_with

ARCHITECTURES = ["A", "A", "B"]
"""Of the double: two that are equal, and one that is not."""


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest) -> Machine:
    """Return the machine's GPUs, or the software accelerator."""
    if request.param == "cuda":
        return machine_with("cuda", os.environ)
    double: Double = request.getfixturevalue("double")
    warm: Warm = request.getfixturevalue("warm_double")
    environment = double.environment(devices=len(ARCHITECTURES), architectures=ARCHITECTURES)
    return machine_with(request.param, environment, command=tuple(warm().command()[2:]))


@pytest.fixture
def one_gpu(machine: Machine) -> Card:
    """Return the first card."""
    return machine.cards[0]


@pytest.fixture
def two_gpus(machine: Machine) -> tuple[Card, Card]:
    """Return the first two cards."""
    if len(machine.cards) < 2:
        pytest.skip(f"needs two devices, and there is one: {machine.cards[0].model}")
    return machine.cards[0], machine.cards[1]


@pytest.fixture
def equal_gpus(machine: Machine) -> tuple[Card, ...]:
    """Return all cards of the model that there is most of."""
    model, count = Counter(card.model for card in machine.cards).most_common(1)[0]
    if count < 2:
        pytest.skip(f"needs two devices of one model: {', '.join(card.model for card in machine.cards)}")
    return tuple(card for card in machine.cards if card.model == model)


@pytest.fixture
def unlike_gpus(machine: Machine) -> tuple[Card, ...]:
    """Return the first card of each model."""
    first = {card.model: card for card in reversed(machine.cards)}
    if len(first) < 2:
        pytest.skip(f"needs devices of two models, and all are {machine.cards[0].model}")
    return tuple(card for card in machine.cards if card in first.values())
