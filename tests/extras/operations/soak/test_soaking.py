"""Repeats of a case's stages in one process: all that is computed again, what changes, and memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from consistency.capture.records import TensorRecord
from consistency.case.stage import Level
from consistency.case.stages import LEVELS
from consistency.stages.adapter import again as of_adapter
from consistency.stages.base import again as of_base
from consistency.stages.forward import again as of_forward
from consistency.stages.forward.worker import by_blocks
from consistency.stages.gradient import worker as of_gradient
from consistency.worker.faults import plant
from consistency.worker.model.running import activations
from tests.extras.operations.soak.conftest import Left, SoakOf, of
from tests.worker.model.made_models import on_llama

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn while saving

WEIGHTS = ("base", "adapter", "merged", "gradient", "forward")


@pytest.fixture
def adapter(llama: Path) -> Path:
    return on_llama(llama, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def test_a_large_model_repeats_the_sequences_that_it_ran_without_its_adapter(
    llama: Path, adapter: Path, soak_of: SoakOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(LEVELS[Level.STANDARD], float64_merges=1 << 10)
    monkeypatch.setitem(LEVELS, Level.STANDARD, small)
    found = soak_of(llama, adapter, soak_s=40, stages=("forward",))
    assert found.repeats >= 3
    assert (found.changed, found.changes) == (None, ())


def _is_left_out(record: TensorRecord) -> bool:
    """Return whether it is no tensor on the device, of what is repeated what the optimizer makes, or what is given."""
    return record.layer == "adapter_settings" or record.tensor.endswith((".updated", ".given"))


def test_every_tensor_of_the_first_run_is_computed_again(
    llama: Path, adapter: Path, soak_of: SoakOf, left: Left
) -> None:
    """The stage `forward` has merged the adapter into the model: it has to be taken off to the bit."""
    found = soak_of(llama, adapter, soak_s=300, stages=WEIGHTS)
    assert found.complete
    assert found.repeats >= 3
    assert (found.changed, found.changes) == (None, ())
    recorded = Counter(r.stage for r in left.records if r.digest is not None and not _is_left_out(r))
    assert {stage: of(found, stage).tensors for stage in WEIGHTS} == dict(recorded)
    assert recorded["forward"] > 6
    assert all(of(found, stage).repeats >= found.repeats for stage in WEIGHTS)


def test_what_is_not_repeated_is_said(llama: Path, adapter: Path, soak_of: SoakOf) -> None:
    found = soak_of(llama, adapter, soak_s=10, stages=("adapter", "memory", "wrapping"))
    assert of(found, "adapter").reason is None
    assert of(found, "memory").reason == "it states facts, which are checked once"
    assert of(found, "memory").tensors == 0


def test_without_a_model_operators_and_copies_are_repeated(soak_of: SoakOf) -> None:
    found = soak_of("", None, soak_s=400, stages=("transfer", "operators"), level="quick")
    assert found.repeats >= 2
    assert found.changed is None
    assert of(found, "transfer").tensors >= 3
    assert of(found, "operators").tensors > 10


def test_one_repeat_is_completed_however_short_the_time(llama: Path, adapter: Path, soak_of: SoakOf) -> None:
    found = soak_of(llama, adapter, soak_s=0.1, stages=("base", "adapter"))
    assert (found.repeats, found.complete) == (1, True)


def test_a_repeat_of_an_activation_that_differs_is_found(
    llama: Path, adapter: Path, soak_of: SoakOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = by_blocks, itertools.count(1)

    def flips(*args: Any, **options: Any) -> Any:
        found, replay = real(*args, **options)
        if next(calls) == 7:  # the first mode of the third repeat
            found["model.layers.0::"].view(torch.int32)[0, 0, 0] ^= 1 << 3
        return found, replay

    monkeypatch.setattr(of_forward, "by_blocks", flips)
    found = soak_of(llama, adapter, soak_s=400, stages=("forward",))
    (change,) = found.changes
    assert (change.layer, change.tensor) == ("model.layers.0", "adapter_on")
    assert (change.occurrences.numbers, change.returned, change.word) == ((3,), True, "bit-flip")
    assert change.evidence["bits"] == [3]
    assert found.changed is not None
    assert found.changed.count == 1
    assert found.repeats > 3


def test_a_result_that_the_soak_changes_for_good_is_no_agreement(
    llama: Path, adapter: Path, soak_of: SoakOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All repeats agree with one another: the first run is what they are compared with."""

    def hot(*args: Any, **options: Any) -> Any:
        found = activations(*args, **options)
        found["logits"] += 1
        return found

    monkeypatch.setattr(of_forward, "activations", hot)
    found = soak_of(llama, adapter, soak_s=100, stages=("forward",))
    modes = ("adapter_on", "adapter_off", "adapter_merged")
    assert {change.tensor for change in found.changes} == {f"{mode}.end_to_end" for mode in modes}
    assert all(change.occurrences.numbers[:2] == (1, 2) and not change.returned for change in found.changes)


def test_a_gradient_that_differs_is_found_in_its_pass(
    llama: Path, adapter: Path, soak_of: SoakOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)

    def computed_gradient(name: str, gradient: torch.Tensor) -> torch.Tensor:
        if "q_proj.lora_B" in name and next(calls) == 1 + 3:  # one of the first run, and of each repeat
            gradient.view(torch.int32)[0, 0] ^= -(2**31)
        return gradient

    monkeypatch.setattr(of_gradient, "computed", computed_gradient)
    found = soak_of(llama, adapter, soak_s=100, stages=("gradient",))
    (change,) = found.changes
    assert (change.layer, change.tensor) == ("model.layers.0.self_attn.q_proj", "lora_B.gradient")
    assert (change.occurrences.numbers, change.returned, change.values) == ((3,), True, 1)
    assert (change.word, change.evidence["bits"]) == ("bit-flip", [31])
    assert change.shape == (32, 2)


def test_a_weight_that_changes_in_memory_stays_changed(
    llama: Path, adapter: Path, soak_of: SoakOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = of_base.base, itertools.count(1)

    def base(context: Any, compare: Any) -> Any:
        again = real(context, compare)

        def repeat() -> Any:
            if next(calls) == 2:
                with torch.no_grad():
                    context.base.tensors["model.norm.weight"].data.view(torch.int32)[4] ^= 1 << 30
            yield from again()

        return repeat

    monkeypatch.setattr(of_base, "base", base)
    found = soak_of(llama, adapter, soak_s=300, stages=("base", "adapter"))
    (change,) = found.changes
    assert (change.stage, change.layer, change.returned) == ("base", "model.norm", False)
    assert change.occurrences.numbers[:2] == (2, 3)
    assert change.evidence["bits"] == [30]  # by the file, for it was never right again


def test_a_fault_in_every_20th_repeat_needs_a_soak(llama: Path, adapter: Path, soak_of: SoakOf) -> None:
    with plant("merge-bit-flip-now-and-then"):
        short = soak_of(llama, adapter, soak_s=0.1, stages=("merged",))
        assert (short.repeats, short.changed) == (1, None)
    with plant("merge-bit-flip-now-and-then"):
        found = soak_of(llama, adapter, soak_s=600, stages=("merged",))
    assert found.changed is not None
    assert found.changed.numbers[0] == 19  # the first run has merged that layer once
    assert found.changed.count == (found.repeats + 1) // 20
    (change,) = found.changes
    assert (change.tensor, change.word, change.values) == ("weight", "bit-flip", 1)


def test_what_a_worker_leaves_that_dies_in_its_soak(
    llama: Path, adapter: Path, soak_of: SoakOf, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = of_adapter.adapter, itertools.count(1)

    def adapter_again(context: Any, compare: Any) -> Any:
        again = real(context, compare)

        def repeat() -> Any:
            if next(calls) == 20:
                raise RuntimeError("the device fell off the bus")
            yield from again()

        return repeat

    monkeypatch.setattr(of_adapter, "adapter", adapter_again)
    with pytest.raises(RuntimeError, match="fell off"):
        soak_of(llama, adapter, soak_s=3000, stages=("adapter",))
    found = left.soak
    assert found is not None
    assert not found.complete
    assert 10 < found.repeats < 20


@pytest.mark.slow
def test_memory_stays_flat_over_repeats(llama: Path, adapter: Path, soak_of: SoakOf) -> None:
    found = soak_of(llama, adapter, soak_s=4500, stages=WEIGHTS)
    assert found.repeats >= 50
    first, _, middle, _, last = found.memory_bytes[-5:]
    # in a process of many tests an arena may be taken at any time, once; a leak grows in both halves
    assert min(last - middle, middle - first) < 2**21  # pieces of the C library; 25 repeats' activations alone are more


@pytest.mark.slow
def test_a_leak_shows(llama: Path, adapter: Path, soak_of: SoakOf, monkeypatch: pytest.MonkeyPatch) -> None:
    real, kept = activations, []

    def leaks(*args: Any, **options: Any) -> Any:
        kept.append(torch.ones(2**20))  # 4 MiB in each of three modes
        return real(*args, **options)

    monkeypatch.setattr(of_forward, "activations", leaks)
    found = soak_of(llama, adapter, soak_s=1000, stages=("forward",))
    assert len(found.memory_bytes) == 5
    grown = [b - a for a, b in itertools.pairwise(found.memory_bytes)]
    assert min(grown) > 0
    assert sum(grown) > 2**22 * len(kept) / 2  # the first ones may have taken memory that was free
