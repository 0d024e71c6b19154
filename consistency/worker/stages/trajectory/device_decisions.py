"""What a device decides in the steps of its training, one track for each step (`decisions.track`)."""

from __future__ import annotations

from pathlib import Path

import torch

from consistency.numerics.decisions import Watch
from consistency.worker.decisions.track import Track

PASS = "step"
"""Name of the only pass of such a track."""


class DeviceDecisions:
    """Records the decisions of each step, and gives the track that passes on the CPU are held to.

    Parameters
    ----------
    stem : Path
        Of the scratch files, one for each step that decides.
    title : str
        Name of the device's products.
    """

    def __init__(self, stem: Path, model: torch.nn.Module, title: str) -> None:
        self._stem = stem
        self._model = model
        self._title = title
        self._tracks: dict[int, Track] = {}

    def watch(self, step: int) -> Watch | None:
        """Return what records a step from its start; None after steps in which the model decided nothing."""
        earlier = [track for number, track in self._tracks.items() if number != step]
        if earlier and not any(track.decides for track in earlier):
            return None
        if step not in self._tracks:
            path = self._stem.with_name(f"{self._stem.name}.decided-{step}")
            self._tracks[step] = Track(path, self._model, self._title)
        return self._tracks[step].own(PASS, is_judged=True)

    def of(self, step: int) -> Track | None:
        """Return the track of a step; None where the device decided nothing."""
        track = self._tracks.get(step)
        return track if track is not None and track.decides else None

    def remove(self) -> None:
        for track in self._tracks.values():
            track.remove()
