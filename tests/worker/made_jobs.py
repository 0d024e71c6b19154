"""Jobs of workers, made by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from consistency.capture.writer import CaptureWriter
from consistency.case.case import Case
from consistency.worker.protocol import Job


def job_of(case: Case, folder: Path | str = "", **changes: Any) -> Job:
    """Return the job of a CPU that computes the reference on one thread, with all its files in one folder."""
    place = str(folder)
    fields = {
        "case": case, "name": "cpu", "device": "cpu", "load_path": "isolated", "folder": place, "blobs": place,
        "scratch": place, "settings": {}, "makes_reference": True, "threads": 1, "parent_pid": os.getpid(),
    }  # fmt: skip
    return Job(**{**fields, **changes})


def job_in(writer: CaptureWriter, case: Case, scratch: Path, **changes: Any) -> Job:
    """Return a job whose records become those of a capture's only worker."""
    scratch.mkdir(parents=True, exist_ok=True)
    folder = writer.worker_folder("cpu.isolated")
    return job_of(case, folder, blobs=str(writer.blobs), scratch=str(scratch), **changes)
