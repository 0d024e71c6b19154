"""Check 1: what is replicated has the same bits on all ranks: parameters, buffers, gradients, optimizer state.

Each rank sends one digest of 16 bytes over all of it; only where these differ, or where tensors are split, it sends the
digest of each tensor. Of three and more ranks the majority tells the odd one. A base weight that nothing trains tells
it even of two: its bits are those of the start on the rank that is right.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.tensor import DTensor

from consistency.capture.names import split_name
from consistency.capture.wording import counted, layers_text
from consistency.extras.watching.kinds import BASE_CHANGED, RANKS_DIFFER
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, rank_names
from consistency.numerics.digest import digest
from consistency.worker.quantized.held import is_composite

Digests = dict[str, str]
"""Digest by the name of a tensor: `parameter model.norm.weight`, with the coordinates of a part of a split tensor."""

PARAMETER, BUFFER, GRADIENT, STATE = "parameter", "buffer", "gradient", "optimizer state"


def digests_of(kind: str, tensors: Mapping[str, torch.Tensor]) -> Digests:
    """Return the digest of each tensor, or of this rank's part of it, under a name that has the kind before it."""
    digests: Digests = {}
    for name, tensor in tensors.items():
        local, coordinates = local_part_of(tensor)
        if has_digest(local):
            digests[f"{kind} {name}{coordinates}"] = digest(local).value
    return digests


def has_digest(tensor: torch.Tensor) -> bool:
    """Report whether a tensor has bytes of its own: none has one on `meta`, a sparse one, or one made of others."""
    return not tensor.is_meta and tensor.layout is torch.strided and not is_composite(tensor)


def local_part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return this rank's part of a tensor, and which part that is: empty for a tensor that each rank holds whole."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), ""
    # ranks along a mesh dimension that replicates hold the same part
    coordinate = tensor.device_mesh.get_coordinate() or ()
    parts = [
        f"{number}:{index}"
        for number, (placement, index) in enumerate(zip(tensor.placements, coordinate, strict=True))
        if not placement.is_replicate()
    ]
    return tensor.to_local().detach(), f"[{','.join(parts)}]" if parts else ""


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state, by parameter and key.

    Parameters
    ----------
    names : mapping of int to str
        Name of each parameter, by its identity.
    """
    tensors: dict[str, torch.Tensor] = {}
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}.{key}"] = value
    return tensors


def check_agreement(talk: RankTalk, own: Digests, *, start: Digests, between: str) -> CheckOutcome:
    """Compare the digests of all ranks.

    Parameters
    ----------
    own : dict
        This rank's digests.
    start : dict
        Its digests of the frozen parameters when the watch began.
    between : str
        The two steps between which a difference came, in words.
    """
    outcome = CheckOutcome(check="ranks agree", figures={"tensors": len(own)})
    if talk.world == 1:
        outcome.not_checked = "one rank"
        return outcome
    summary = hashlib.blake2b(repr(sorted(own.items())).encode(), digest_size=16).digest()
    if len(set(talk.gather(summary))) == 1:
        return outcome
    by_rank: list[Digests] = talk.gather(own)
    starts: list[Digests] = talk.gather(start)
    compared, differing = _differing(by_rank)
    outcome.figures["compared"] = compared
    if compared < len(own):
        outcome.figures["split"] = len(own) - compared
    outcome.discoveries = _discoveries(differing, by_rank, starts, between)
    return outcome


def _differing(by_rank: Sequence[Digests]) -> tuple[int, dict[str, list[str]]]:
    """Return how many tensors several ranks hold, and the digests by rank of those that differ; empty where not held.

    A name that one rank alone has is a part of a split tensor, or is reported as a whole where nothing is split.
    """
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for digests in by_rank:
        for name in digests:
            holders[name].append(digests[name])
    differing = {}
    compared = 0
    for name, values in holders.items():
        is_part = name.endswith("]")
        if len(values) < 2 and is_part:
            continue
        compared += 1
        if len(set(values)) > 1 or (len(values) < len(by_rank) and not is_part):
            differing[name] = [digests.get(name, "") for digests in by_rank]
    return compared, differing


def _discoveries(
    differing: Mapping[str, Sequence[str]], by_rank: Sequence[Digests], starts: Sequence[Digests], between: str
) -> list[Discovery]:
    """Return one discovery for each set of ranks that are odd in the same way."""
    by_odd: defaultdict[tuple[str, tuple[int, ...], tuple[int, ...], bool], list[str]] = defaultdict(list)
    everyone = tuple(range(len(by_rank)))
    for name, values in differing.items():
        kind = next(kind for kind in (PARAMETER, BUFFER, GRADIENT, STATE) if name.startswith(kind))
        changed = _changed_ranks(name, values, starts)
        odd = changed or odd_ranks(values)
        # of a part that two replicas hold, the ranks with other parts know nothing
        holders = tuple(rank for rank, value in enumerate(values) if value) if name.endswith("]") else everyone
        by_odd[kind, odd, holders, bool(changed)].append(name.removeprefix(f"{kind} "))
    discoveries = []
    for (kind, odd, holders, is_base), names in by_odd.items():
        discoveries.append(_discovery(kind, odd, names, between, holders=holders, is_base=is_base))
    return discoveries


def _changed_ranks(name: str, values: Sequence[str], starts: Sequence[Digests]) -> tuple[int, ...]:
    """Return the ranks whose frozen tensor is not that of the start; none where all ranks began with other bits."""
    if any(name not in start for start in starts) or len({start[name] for start in starts}) > 1:
        return ()
    return tuple(rank for rank, value in enumerate(values) if value and value != starts[rank][name])


def odd_ranks(values: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks that most others differ from; none where no majority agrees."""
    held = [value for value in values if value]
    (common, count), *_ = Counter(held).most_common(1)
    if 2 * count <= len(held):
        return ()
    return tuple(rank for rank, value in enumerate(values) if value and value != common)


def _discovery(
    kind: str, odd: tuple[int, ...], names: Sequence[str], between: str, *, holders: tuple[int, ...], is_base: bool
) -> Discovery:
    places = [split_name(name.partition("[")[0]) for name in names]
    layers = layers_text([layer for layer, _ in places])
    tensors = f"{counted(len(names), kind)}: {names[0]}" if len(names) == 1 else f"{len(names)} {kind}s ({layers})"
    if is_base:
        sentence = f"{rank_names(odd)} changed {tensors}, which nothing trains"
    elif odd:
        rest = [rank for rank in holders if rank not in odd]
        sentence = f"{rank_names(odd)} differs from {rank_names(rest)} in {tensors}"
    else:
        sentence = (
            f"{rank_names(holders)} differ in {tensors}; of {len(holders)} none is in the majority, so which is wrong "
            "is not known"
        )
    return Discovery(
        kind=BASE_CHANGED if is_base else RANKS_DIFFER,
        message=f"{sentence}: {between}",
        ranks=odd or holders,
        tensors=tuple(places),
        next=_NEXT[kind],
    )


_NEXT = {
    PARAMETER: "go back to the checkpoint before it; test the card and the memory of that rank (consistency doctor)",
    BUFFER: "broadcast buffers (DistributedDataParallel does unless broadcast_buffers=False), or make them alike",
    GRADIENT: "wrap the model in DistributedDataParallel, and call its forward pass; else test the links between cards "
    "(consistency run --stages collectives)",
    STATE: "load the same optimizer state on all ranks; go back to the checkpoint before it",
}


def changed_base(own: Digests, start: Digests) -> list[str]:
    """Return the names of the frozen parameters whose bits are not those of the start."""
    return [name.partition(" ")[2] for name, value in start.items() if own.get(name, value) != value]
