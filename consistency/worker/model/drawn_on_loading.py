"""Find out whether loading an adapter draws at random, so that the same file is another adapter on every load.

Some methods compute a part of themselves when they are loaded, from the base: PiSSA and OLoRA the factors that they
take out of it, others subspaces and projections. Where such a computation draws random numbers, every load has others.
A run seeds all generators before it loads, on every device alike, so that none of its comparisons can show it: here
base and adapter are loaded twice more, on the CPU, with two seeds for the adapter alone.

Random values of parameters that the file then overwrites have no effect, and are not looked at.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping

import torch

from consistency.capture.adapter_remarks import AdapterFlaw, AdapterRemark
from consistency.capture.names import module_place
from consistency.capture.wording import counted, some
from consistency.case.case import Case
from consistency.numerics.digest import digest
from consistency.worker import determinism
from consistency.worker.model.loading import load_adapter, load_base

_SEEDS = (determinism.SEED, determinism.SEED + 1)
"""Seeds of the two loads of the adapter."""


def remark_on_draws(case: Case, names: Collection[str] | None = None) -> AdapterRemark | None:
    """Load base and adapter twice, and return a remark where the seed makes a difference; None where it makes none.

    Parameters
    ----------
    case : Case
        Base and adapter.
    names : collection of str, optional
        Names in the adapted model of the tensors to look at; without, all of them.

    Raises
    ------
    InputError
        They cannot be loaded on the CPU.
    """
    first, second = (_digests(case, seed, names) for seed in _SEEDS)
    differing = [
        module_place(name).replace(".base_layer.", ".") for name, value in first.items() if second.get(name) != value
    ]
    if not differing:
        return None
    verb = "differs" if len(differing) == 1 else "differ"
    text = (
        f"another adapter on every load, since loading it draws at random: {counted(len(differing), 'tensor')} that it "
        f"computes {verb} between two loads of the same files under two seeds: {some(differing, 4)}"
    )
    return AdapterRemark(flaw=AdapterFlaw.DRAWN_ON_LOADING, text=text)


def _digests(case: Case, seed: int, names: Collection[str] | None) -> Mapping[str, str]:
    """Load base and adapter on the CPU, the adapter under a seed, and return the digests of these tensors by name."""
    with determinism.seeded(determinism.SEED):  # a head that is new is drawn as well, and is not the adapter's
        base = load_base(case, "cpu")
    with determinism.seeded(seed):
        model = load_adapter(base, case).model
    digests = {
        name: digest(tensor.detach()).value
        for name, tensor in _tensors(model).items()
        if names is None or name in names
    }
    # the second load must not find the first in memory; PEFT's models hold themselves
    del model, base
    gc.collect()
    return digests


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
