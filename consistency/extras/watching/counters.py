"""Check 8: the counters of errors of this rank's card, since the last check."""

from __future__ import annotations

from typing import Any

import torch

from consistency.devices.host.condition import read_cpu, read_gpu
from consistency.extras.watching.kinds import CARD_COUNTER
from consistency.extras.watching.outcome import CheckOutcome, Discovery
from consistency.extras.watching.rank_talk import RankTalk, place_of_rank, rank_names

_DAMAGE = ("ecc uncorrected", "rows remapped", "memory errors, uncorrected")
_SIGNS = ("pcie replays", "ecc corrected, since boot", "memory errors, corrected")
"""Counters of what was repaired on the way: a healthy machine has some, so that they are noted and nothing is done."""


def counters_of(device: torch.device) -> tuple[dict[str, Any], str]:
    """Return what the device reports, and why it reports nothing."""
    if device.type == "cpu":
        readings, reason = read_cpu()
    elif device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        readings, reason = read_gpu(None if uuid is None else str(uuid))
    else:
        readings, reason = {}, f"the counters of {device.type} are not read"
    return readings, reason or ""


def check_counters(before: dict[str, Any], device: torch.device, talk: RankTalk, between: str) -> CheckOutcome:
    """Compare the counters with those of the last check, and put the new ones into `before`."""
    outcome = CheckOutcome(check="counters of the card")
    readings, reason = counters_of(device)
    counts = {name: int(value) for name, value in readings.items() if name.startswith(_DAMAGE + _SIGNS)}
    if not counts:
        outcome.not_checked = reason or "the device has no counters of errors"
    grown = {name: count - before[name] for name, count in counts.items() if count > before.get(name, count)}
    outcome.figures |= {name: readings[name] for name in ("temperature_c", "throttle_reasons") if name in readings}
    before.clear()
    before.update(counts)
    if grown:
        texts = ", ".join(f"{name} +{more}" for name, more in grown.items())
        is_damage = any(name.startswith(_DAMAGE) for name in grown)
        outcome.discoveries.append(
            Discovery(
                kind=CARD_COUNTER,
                severity="warning" if is_damage else "note",
                message=f"{rank_names([talk.rank])} ({place_of_rank(device)}): {texts}: {between}",
                ranks=(talk.rank,),
                next="uncorrected errors: take the card out; replays: look at its slot and cable (consistency doctor)",
            )
        )
    return outcome
