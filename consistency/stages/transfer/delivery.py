"""Send copies and check what arrived, after checking that each device can be filled and read at all.

A delivery is read twice: as a digest that the device computes, and as a copy on the host. Both cross the lane to the
host, so a device first has to return values that it made itself; then a broken lane to the host is reported as such,
and not as N broken copies into the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from consistency.capture.names import FILLING, HOST, READING, pair_name
from consistency.errors import first_line
from consistency.numerics.digest import TensorDigest, as_bytes, digest
from consistency.stages.transfer import copying as copies
from consistency.stages.transfer.background_load import all_at_once, under_load, wait
from consistency.stages.transfer.payload import Payload
from consistency.worker.device_error import is_of_the_device
from consistency.worker.model.poison import poisoned

BOTH_AGREE = "agree"
HOST_DIFFERS = "the device's own digest is right, the copy on the host is not"
DIGEST_DIFFERS = "the copy on the host is right, the device's own digest is not"
COPY_ALONE = "the copy on the host alone: of what the device made itself, its own digest is wrong"

_NUMBERS = 65536
"""How many values a device makes itself, to be read back."""

_ODD = 30011
"""Factor of these values: all products differ, and the largest is below 2³¹."""


class NotTriedError(Exception):
    """The source cannot be filled or the destination not read back, so the copy cannot be checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An end of a copy: its name as the user knows it, and the device as torch numbers it in this worker."""

    name: str
    device: torch.device

    @property
    def is_host(self) -> bool:
        return self.device.type == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A copy as it arrived at the destination."""

    payload: Payload
    seen: TensorDigest
    """Digest of the whole buffer at the destination, computed by the device."""
    wanted: TensorDigest
    """Digest of the whole buffer as it is expected."""
    wrong: bool
    """Whether the copy did not arrive as it should."""
    host: torch.Tensor | None = None
    """The buffer read back, where it is wrong."""
    read_back: str = BOTH_AGREE
    """Whether the two readings agree."""
    took_s: float = 0.0
    """Seconds from the start of the first hop to the end of the last one; 0 for concurrent copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """Which of the two readings of a device are reliable."""

    digest: bool = True
    """Whether the digest is, which the device computes with weights that the host has sent it."""
    copy: bool = True
    """Whether a copy on the host is."""


@dataclass(slots=True, kw_only=True)
class Sender:
    """Send copies along paths of places."""

    tell: Callable[[str, str, Delivery], None]
    """Called with a pair, `FILLING` or `READING`, and the delivery where a device cannot be filled or read."""
    broken: set[str]
    """Pairs whose copies are known to be wrong, by name."""
    witnesses: dict[str, Witness] = field(default_factory=dict)
    """Devices that have been tried, by the names of their places."""
    unfilled: set[str] = field(default_factory=set)
    """Pairs of the host and a device that could not be filled: each is reported once."""

    def one_by_one(self, path: Sequence[Place], payloads: Sequence[Payload]) -> Iterator[Delivery]:
        """Send each payload along the path, from place to place, and yield the outcome.

        Raises
        ------
        NotTriedError
            The source cannot be filled, or the destination not read.
        """
        devices = [place.device for place in path]
        for payload in payloads:
            start = payload.take(self._filled(path[0], payload))
            # stops on the way are poisoned as the landing is, so that a hop that is dropped shows
            stops = [poisoned(tuple(start.shape), start.dtype, place.device) for place in path[1:-1]]
            landing = payload.landing(path[-1].device)
            wait(devices)  # earlier work would count as time of this copy
            began = time.perf_counter()
            source = start
            for stop in (*stops, payload.put(landing)):
                copies.copy(source, stop)
                source = stop
            wait(devices)
            yield self._read(payload, path[-1], landing, took_s=time.perf_counter() - began)

    def together(
        self, path: Sequence[Place], payloads: Sequence[Payload], *, pinned: bool = False
    ) -> Iterator[Delivery]:
        """Send all payloads at once, under load, and yield each outcome.

        Parameters
        ----------
        pinned : bool
            Send from or to pinned memory of the host.

        Raises
        ------
        NotTriedError
            The source cannot be filled, the destination not read, or the host's memory not pinned.
        """
        devices = [place.device for place in path]
        starts = [self._filled(path[0], payload) for payload in payloads]
        landings = [payload.landing(path[-1].device) for payload in payloads]
        if pinned:
            starts = [_pinned(buffer) for buffer in starts]
            landings = [_pinned(buffer) for buffer in landings]
        wait(devices)
        with under_load(devices):
            pairs = zip(starts, landings, strict=True)
            all_at_once([functools.partial(copies.copy, start, landing) for start, landing in pairs], devices)
            wait(devices)
        for payload, landing in zip(payloads, landings, strict=True):
            yield self._read(payload, path[-1], landing, took_s=0.0)

    def witness(self, place: Place) -> Witness:
        """Check how reliably a device can be read, by values that it makes itself, without a copy to it."""
        if place.is_host:
            return Witness()
        if place.name not in self.witnesses:
            on_device = torch.arange(_NUMBERS, dtype=torch.int32, device=place.device) * _ODD
            expected, read_back = _made_on_host(), on_device.to("cpu")
            if torch.equal(read_back, expected):
                witness = Witness(digest=digest(on_device).value == digest(expected).value)
            else:
                witness = Witness(digest=False, copy=False)  # the digest crosses the same lane
                self._tell_unread(place, read_back, BOTH_AGREE)
            self.witnesses[place.name] = witness
        return self.witnesses[place.name]

    def tell_of_digest(self, place: Place) -> None:
        """Report a device's own digest that is wrong where no copy to the device explains it."""
        witness = self.witness(place)
        if witness.copy and not witness.digest and pair_name(HOST, place.name) not in self.broken:
            self._tell_unread(place, _made_on_host(), DIGEST_DIFFERS)

    def _tell_unread(self, place: Place, host: torch.Tensor, read_back: str) -> None:
        """Report that a device cannot be read; `host` has the values that it made itself, as they were read."""
        expected = _made_on_host()
        delivery = Delivery(
            payload=Payload(name=f"the reading of {place.name}", sent=expected, expected=expected),
            seen=digest(host),
            wanted=digest(expected),
            wrong=True,
            host=host,
            read_back=read_back,
        )
        self.tell(pair_name(place.name, HOST), READING, delivery)

    def _filled(self, source: Place, payload: Payload) -> torch.Tensor:
        """Return the payload on the device that sends it; not copied through the seam, which is under test.

        Raises
        ------
        NotTriedError
            The device does not hold the payload, which is reported.
        """
        if source.is_host:
            return payload.sent
        buffer = payload.sent.to(source.device)
        witness = self.witness(source)
        if not witness.copy:  # it cannot be read here, but its further copies can
            return buffer
        readable = buffer if witness.digest else buffer.to("cpu")
        seen, wanted = digest(readable), digest(payload.sent)
        if seen.value == wanted.value:
            return buffer
        lane = pair_name(HOST, source.name)
        if lane not in self.unfilled:  # the worker of that device may not see it, or may not take part
            self.unfilled.add(lane)
            filling = Payload(name=f"the filling of {payload.name}", sent=payload.sent, expected=payload.sent)
            delivery = Delivery(payload=filling, seen=seen, wanted=wanted, wrong=True, host=buffer.to("cpu"))
            self.tell(lane, FILLING, delivery)
        raise NotTriedError(f"its source could not be filled: a copy {lane} did not arrive")

    def _read(self, payload: Payload, destination: Place, landing: torch.Tensor, *, took_s: float) -> Delivery:
        """Read a delivery back twice, and compare both readings with the expected bytes.

        Raises
        ------
        NotTriedError
            The destination cannot be read.
        """
        witness, lane = self.witness(destination), pair_name(destination.name, HOST)
        if not witness.copy:
            raise NotTriedError(f"what arrives cannot be read back: copies {lane} fail")
        wanted, seen, host = digest(payload.expected), digest(landing), landing.to("cpu")
        by_digest, by_copy = seen.value == wanted.value, torch.equal(as_bytes(host), as_bytes(payload.expected))
        if not witness.digest:
            by_digest, seen = by_copy, digest(host)
        # a lane to the host that is known to be wrong is reported as that pair, and proves nothing about another
        readings = [by_digest] if lane in self.broken else [by_digest, by_copy]
        is_wrong = not all(readings)
        return Delivery(
            payload=payload,
            seen=seen,
            wanted=wanted,
            wrong=is_wrong,
            host=host if is_wrong else None,
            read_back=_agreement(witness, by_digest=by_digest, by_copy=by_copy),
            took_s=took_s,
        )


def _agreement(witness: Witness, *, by_digest: bool, by_copy: bool) -> str:
    """Return whether the two readings of a delivery agree; `by_digest`, `by_copy`: whether each is as expected."""
    if not witness.digest:
        return COPY_ALONE
    if by_digest == by_copy:
        return BOTH_AGREE
    return HOST_DIFFERS if by_digest else DIGEST_DIFFERS


def _pinned(buffer: torch.Tensor) -> torch.Tensor:
    """Return a buffer of the host in pinned memory; one of another device as it is."""
    if buffer.device.type != "cpu":
        return buffer
    try:
        return buffer.pin_memory()
    except RuntimeError as error:
        if is_of_the_device(error):
            raise
        raise NotTriedError(f"no memory of the host is pinned for this device: {first_line(error)}") from error


def _made_on_host() -> torch.Tensor:
    """Return the values that a device makes itself, made by NumPy."""
    return torch.from_numpy(np.arange(_NUMBERS, dtype=np.int32) * np.int32(_ODD))
