"""Small models on disk, and a session of a worker that runs in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from consistency.capture.records import TensorRecord
from consistency.capture.writer import CaptureWriter
from consistency.worker import determinism
from consistency.worker.protocol import Event, EventLog
from consistency.worker.session import Session
from tests.capture.whole import read_records
from tests.worker.made_jobs import job_in
from tests.worker.model.made_models import SIZES, a_llama, case_of, saved

Look = Callable[..., list[TensorRecord]]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same weights and adapters whichever tests ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(a_llama(), tmp_path / "llama")


@pytest.fixture
def masked_bert(tmp_path: Path) -> Path:
    return saved(transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), tmp_path / "bert")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Return a list that gets the events of the worker's sessions: their file goes with the capture."""
    events: list[Event] = []
    write = EventLog._write

    def write_and_keep(log: EventLog, event: Event) -> None:
        events.append(event)
        write(log, event)

    monkeypatch.setattr(EventLog, "_write", write_and_keep)
    return events


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Run a worker's session in this process, and return its records."""
    count = itertools.count()

    def run(
        base: Path, adapter: Path | None, *, settings: Mapping[str, Any] | None = None, **changes: Any
    ) -> list[TensorRecord]:
        home = tmp_path / f"run-{next(count)}"
        with CaptureWriter(home / "capture") as writer:
            job = job_in(writer, case_of(base, adapter, **changes), home / "scratch")
            folder = Path(job.folder)
            with (
                determinism.deterministic(threads=1, **settings or {}) as asked,
                EventLog(folder / "events.jsonl") as events,
            ):
                Session(job, events, asked).run()
            return list(read_records(folder / "records.jsonl"))

    return run
