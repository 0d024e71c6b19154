"""Stage `transfer`: copies into this worker's device from every other visible one, and to and from the host.

The model is not used. Destinations are poisoned before each copy and read back twice (`delivery.py`). The workers of a
shared wave together make the matrix of all pairs; a worker that sees only its own device checks copies to and from the
host, and the CPU's worker copies within the host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from consistency.capture.names import (
    CASTING,
    CHAIN,
    DIRECT,
    HOST,
    HOST_STAGED,
    OVERLAPPED,
    PINNED,
    STRIDED,
    large_copy,
    pair_name,
)
from consistency.capture.records import RecordStatus, TensorRecord
from consistency.case import standard
from consistency.case.load_path import LoadPath
from consistency.case.stage import Level
from consistency.errors import first_line
from consistency.numerics import words
from consistency.numerics.diagnosis import Diagnosis
from consistency.numerics.diagnosis_moved import OtherContents, diagnose_moved
from consistency.numerics.digest import as_bytes, combine
from consistency.numerics.distance import measure
from consistency.numerics.dtype import name_of
from consistency.numerics.measure import Measure
from consistency.numerics.rules import Rule
from consistency.stages.transfer.delivery import BOTH_AGREE, Delivery, NotTriedError, Place, Sender
from consistency.stages.transfer.payload import Payload, casting, contiguous, strided
from consistency.worker.context import Machine
from consistency.worker.device_error import computes, device_error, ends_the_worker, is_out_of_memory
from consistency.worker.memory.host_memory import free_bytes
from consistency.worker.protocol import Job
from consistency.worker.recorder import Recorder

KIB, MIB = 2**10, 2**20

# 3 bytes fill no word and 4097 no page; drivers switch copy methods somewhere between 64 KiB and 1 MiB
_SMALL = (3, 4097, 64 * KIB, MIB)

_MORE = (*_SMALL, 16 * MIB)
SIZES: dict[Level, tuple[int, ...]] = {Level.QUICK: _SMALL, Level.STANDARD: _MORE, Level.THOROUGH: _MORE}
"""Bytes of the direct copies of each pair. They follow from the level alone, so that captures can be compared."""

LARGE: tuple[int, ...] = (256 * MIB, 1024 * MIB)
"""Further sizes of the level `thorough`, each a separate tensor: not every machine has room for them."""

_SHARE = 8
"""A large copy may take one part in so many of the free memory: source, destination, expected and received bytes
coexist, and as much again is left free."""

_LAYOUT_BYTES = (64 * KIB, MIB)
_AT_ONCE, _AT_ONCE_BYTES = 4, MIB  # copies that are made at once, and the bytes of each
_CASTS = (
    (torch.float32, torch.bfloat16),  # `autocast_adapter_dtype=False` under a bfloat16 base does this one
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
)
_KEEP_BYTES = MIB  # of each wrong copy: N×N of them may be wrong, and the range of bytes is recorded anyway
_REMEMBERED = 32  # payloads of up to 1 MiB that a wrong copy is compared with, to identify its bytes


def run(context: Machine) -> None:
    """Check every pair that this worker answers for, and record what each kind of copy delivered."""
    job, record = context.job, context.record
    copies = Copies(job, record)
    pairs = copies.pairs()
    for number, (source, destination) in enumerate(pairs, start=1):
        layer = pair_name(source.name, destination.name)
        context.events.step(layer, number, len(pairs))
        if record.wants(standard.TRANSFER, layer):
            copies.pair(source, destination)
    copies.end()


def places(job: Job) -> tuple[Place, ...]:
    """Return the ends of this worker's copies: its own device first, then the host, then other visible devices."""
    own = torch.device(job.device)
    host = Place(name=HOST, device=torch.device("cpu"))
    if own.type == "cpu":
        return (host,)
    ends = [Place(name=job.name.partition("@")[0], device=own), host]
    if job.load_path == LoadPath.SHARED:
        for index in range(torch.get_device_module(own.type).device_count()):
            if index != own.index:
                ends.append(Place(name=f"{own.type}:{index}", device=torch.device(own.type, index)))
    return tuple(ends)


class Copies:
    """The copies that one worker makes and records."""

    def __init__(self, job: Job, record: Recorder) -> None:
        self._level = job.case.level
        self._record = record
        self._places = places(job)
        self._broken: set[str] = set()
        self._sent: list[tuple[str, torch.Tensor]] = []
        self._sender = Sender(tell=self._record_unusable_device, broken=self._broken)

    def pairs(self) -> list[tuple[Place, Place]]:
        """Return source and destination of the pairs that this worker answers for, in their order."""
        own = self._places[0]
        if own.is_host:
            return [(own, own)]
        _, host, *other_devices = self._places
        # device to host comes first: reading back is evidence only if that lane works
        pairs = [(own, host), (host, own), (own, own)]
        return pairs + [(other, own) for other in other_devices]

    def pair(self, source: Place, destination: Place) -> None:
        """Check every kind of copy between a source and a destination."""
        name, path = pair_name(source.name, destination.name), (source, destination)

        def payloads(kind: str, sizes: Sequence[int]) -> list[Payload]:
            return [contiguous(f"{name} {kind}, {size} bytes", size) for size in sizes]

        self._check(DIRECT, path, payloads(DIRECT, SIZES[self._level]))
        self._check(STRIDED, path, [strided(f"{name} {STRIDED}, {size} bytes", size) for size in _LAYOUT_BYTES])
        casts = [casting(f"{name} {name_of(a)} to {name_of(b)}", _LAYOUT_BYTES[0], a, b) for a, b in _CASTS]
        self._check(CASTING, path, casts)
        is_between_devices = not source.is_host and not destination.is_host and source != destination
        if is_between_devices:
            host = self._places[1]
            self._check(HOST_STAGED, (source, host, destination), payloads(HOST_STAGED, _LAYOUT_BYTES))
        # by way of another device, where this worker sees a third one
        third = next((place for place in self._places if not place.is_host and place not in path), None)
        if third is not None:
            self._check(CHAIN, (source, third, destination), payloads(CHAIN, _LAYOUT_BYTES))
        self._check(OVERLAPPED, path, _payloads_at_once(name, OVERLAPPED))
        is_within_host = source.is_host and destination.is_host
        if self._level is Level.THOROUGH and not is_within_host:
            self._check_thoroughly(name, path)

    def _check_thoroughly(self, name: str, path: tuple[Place, Place]) -> None:
        """Check the kinds of copies of a pair that take most time and memory."""
        source, destination = path
        if source.is_host or destination.is_host:  # only memory of the host is pinned
            self._check(PINNED, path, _payloads_at_once(name, PINNED))
        for size in LARGE:
            self._check_large(name, path, size)

    def end(self) -> None:
        """Record what needs all pairs: a device's own digest that is wrong, with no wrong copy to explain it."""
        own = self._places[0]
        if not own.is_host and self._record.wants(standard.TRANSFER, pair_name(own.name, HOST)):
            self._sender.tell_of_digest(own)

    def _check_large(self, name: str, path: tuple[Place, ...], size: int) -> None:
        """Make a copy of `size` bytes that may be too large for this machine, after checking that it fits."""
        host = self._places[1]
        too_small = [place.name for place in (*path, host) if not _has_room(place, size)]
        if too_small:
            why = f"a copy of {size >> 20} MiB is more than one part in {_SHARE} of what is free on "
            self._record_absent(name, large_copy(size), "skipped", why + " and ".join(dict.fromkeys(too_small)), {})
        else:
            self._check(large_copy(size), path, [contiguous(f"{name}, {size} bytes", size)])

    def _check(self, kind: str, path: tuple[Place, ...], payloads: Sequence[Payload]) -> None:
        """Send payloads along a path of places and record what arrived."""
        name = pair_name(path[0].name, path[-1].name)
        evidence: dict[str, Any] = {"bytes": [payload.bytes for payload in payloads]}
        if len(path) > 2:
            evidence["via"] = path[1].name
        elif (peer := _peer_access(path[0].device, path[1].device)) is not None:
            evidence["peer_access"] = peer
        send: Callable[[Sequence[Place], Sequence[Payload]], Iterator[Delivery]] = self._sender.one_by_one
        if kind in (OVERLAPPED, PINNED):
            send = functools.partial(self._sender.together, pinned=kind == PINNED)
        try:
            deliveries = list(send(path, payloads))
        except NotTriedError as error:
            self._record_absent(name, kind, "skipped", str(error), evidence)
            return
        except (RuntimeError, MemoryError) as error:
            self._record_failure(name, kind, path, error, evidence)
            return
        last = deliveries[-1]
        is_timed = kind == DIRECT or kind in map(large_copy, LARGE)
        if is_timed and not last.wrong:  # a dropped copy would be the fastest
            evidence["gb_per_s"] = float(f"{last.payload.bytes / max(last.took_s, 1e-9) / 1e9:.3g}")
        self._record_deliveries(name, kind, deliveries, evidence)

    def _record_failure(
        self, name: str, kind: str, path: tuple[Place, ...], error: Exception, evidence: dict[str, Any]
    ) -> None:
        """Record a copy that raised an error.

        An error of this worker's device ends the worker, and is raised. Where another device is on the path, it may be
        that one which fails, as its own worker will know. Of a large copy alone memory may run out.
        """
        own = self._places[0]
        is_alone = all(place.is_host or place == own for place in path)
        # a device that does not compute any more ends the worker, whatever is on the path
        if ends_the_worker(error, own.device) is not None and not computes(own.device):
            raise error
        may_lack_memory = not is_alone or kind in map(large_copy, LARGE)
        if may_lack_memory and is_out_of_memory(error):
            self._record_absent(name, kind, "skipped", "no memory left for it", evidence)
            return
        if is_alone and ends_the_worker(error, own.device) is not None:
            raise error
        self._broken.add(name)  # readings by way of this lane prove nothing any more
        status: RecordStatus = "missing" if device_error(error) is None else "blocked"
        self._record_absent(name, kind, status, f"the copy fails: {first_line(error)}", evidence)

    def _record_unusable_device(self, name: str, kind: str, delivery: Delivery) -> None:
        """Record that a device cannot be filled or read, which is no fault of a copy between devices."""
        self._record_deliveries(name, kind, [delivery], {"bytes": [delivery.payload.bytes]})

    def _record_absent(self, name: str, kind: str, status: RecordStatus, reason: str, evidence: dict[str, Any]) -> None:
        """Record that copies of a kind were not made, or failed."""
        row = TensorRecord(
            standard.TRANSFER,
            name,
            kind,
            rule=Rule.BITWISE,
            status=status,
            reason=reason,
            dtype="uint8",
            shape=(sum(evidence.get("bytes", ())),),
            evidence=evidence,
        )
        self._record.write(row)

    def _record_deliveries(
        self, name: str, kind: str, deliveries: Sequence[Delivery], evidence: dict[str, Any]
    ) -> None:
        """Record the copies of one kind as one tensor, their bytes concatenated."""
        total = sum(evidence["bytes"])
        disagreements = (delivery.read_back for delivery in deliveries if delivery.read_back != BOTH_AGREE)
        evidence["read_back"] = next(disagreements, BOTH_AGREE)
        received = tuple(itertools.chain.from_iterable(delivery.seen.blocks for delivery in deliveries))
        expected = tuple(itertools.chain.from_iterable(delivery.wanted.blocks for delivery in deliveries))
        row = TensorRecord(
            standard.TRANSFER,
            name,
            kind,
            rule=Rule.BITWISE,
            status="equal",
            shape=(total,),
            dtype="uint8",
            digest=combine("uint8", (total,), received).value,
            reference="payload",
            reference_digest=combine("uint8", (total,), expected).value,
            evidence=evidence,
        )
        wrong = [delivery for delivery in deliveries if delivery.wrong]
        if wrong:
            self._broken.add(name)
            self._record_wrong(row, wrong, deliveries)
        else:
            self._record.write(row)
        self._remember(deliveries)

    def _record_wrong(self, row: TensorRecord, wrong: Sequence[Delivery], deliveries: Sequence[Delivery]) -> None:
        """Record copies that include wrong ones, with the difference of the first wrong copy."""
        payload = wrong[0].payload
        received, expected = _differing_bytes(wrong[0])
        difference = measure(received, expected)
        diagnosis = self._diagnose(
            payload, received, expected, difference, [delivery.payload for delivery in deliveries]
        )
        counts = {"copy": payload.name, "wrong_copies": len(wrong), "copies": len(deliveries)}
        keep = received.nbytes <= _KEEP_BYTES
        self._record.differs(row, received, expected, difference, diagnosis, evidence=counts, keep=keep)

    def _remember(self, deliveries: Sequence[Delivery]) -> None:
        """Keep the last small payloads, with which the bytes of a wrong copy are compared."""
        for delivery in deliveries:
            payload = delivery.payload
            if payload.bytes <= MIB:
                self._sent.append((payload.name, payload.put(payload.expected)))
        self._sent = self._sent[-_REMEMBERED:]

    def _diagnose(
        self,
        payload: Payload,
        received: torch.Tensor,
        expected: torch.Tensor,
        difference: Measure,
        together: Sequence[Payload],
    ) -> Diagnosis:
        """Name what arrived instead of a payload; `differs` where only the device's own digest is wrong.

        `together` are all payloads that were sent for the same row.
        """
        if difference.mismatched == 0:
            return Diagnosis(word=words.DIFFERS, evidence={"digest_only": True})
        others = [(other.name, other.put(other.expected)) for other in together if other is not payload]
        other_contents = OtherContents(
            poison=payload.poison,
            swapped=lambda tensor: _owner(tensor, others),
            stale=lambda tensor: _owner(tensor, self._sent),
        )
        return diagnose_moved(received, expected, difference, other_contents=other_contents)


def _payloads_at_once(name: str, kind: str) -> list[Payload]:
    """Return the payloads of a pair that are copied at the same time; their kind makes their bytes different."""
    return [contiguous(f"{name} {kind} {number}", _AT_ONCE_BYTES) for number in range(_AT_ONCE)]


def _has_room(place: Place, size: int) -> bool:
    """Return whether a copy of `size` bytes leaves enough memory free; where that is not known, yes."""
    free = free_bytes(place.device)
    return free is None or size <= free // _SHARE


def _differing_bytes(wrong: Delivery) -> tuple[torch.Tensor, torch.Tensor]:
    """Return received and expected bytes of the copied part; of the whole buffers where only the gaps differ."""
    payload = wrong.payload
    assert wrong.host is not None
    received, expected = payload.put(wrong.host).contiguous(), payload.put(payload.expected).contiguous()
    if torch.equal(as_bytes(received), as_bytes(expected)):
        return wrong.host, payload.expected
    return received, expected


def _owner(tensor: torch.Tensor, payloads: Sequence[tuple[str, torch.Tensor]]) -> str | None:
    """Name the payload whose bytes a tensor has, None where there is none."""
    raw = as_bytes(tensor)
    for name, payload in payloads:
        if payload.numel() * payload.element_size() == raw.numel() and torch.equal(as_bytes(payload), raw):
            return f"what was sent as {name}"
    return None


def _peer_access(source: torch.device, destination: torch.device) -> bool | None:
    """Return whether one device can access the other's memory directly, None where that does not apply."""
    if "cpu" in (source.type, destination.type) or source == destination:
        return None
    module = torch.get_device_module(source.type)
    if not hasattr(module, "can_device_access_peer"):
        return None
    return bool(module.can_device_access_peer(source, destination))
