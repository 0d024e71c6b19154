"""The worker's process: load on one device, run the stages, write records; `python -m consistency.worker JOB`.

Everything that may fail is caught here and told as an event, so that the parent can name it; nothing is printed for a
user. This package imports nothing of the parent's side but the words that both share.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
from pathlib import Path

from consistency.errors import ConsistencyError
from consistency.numbers import decode_json
from consistency.worker import lifeline
from consistency.worker.job import EventLog, Job


def main(path: Path) -> int:
    """Do one job; the exit status is 0 when it was done."""
    job = decode_json(path.read_bytes(), Job)
    lifeline.hold(job.parent_pid)
    folder = Path(job.folder)
    stack = (folder / "stack.txt").open("w", encoding="utf-8")
    faulthandler.enable(file=stack, all_threads=True)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides what ends
    events = EventLog(folder / "events.jsonl")
    try:
        events.stage("import")
        from consistency.worker.session import run

        run(job, events)
    except ConsistencyError as error:
        events.failed(
            {
                "kind": type(error).__name__, "what": error.what, "where": error.where, "got": error.got,
                "wanted": error.wanted, "hint": error.hint, "trace": traceback.format_exc(limit=20),
            }
        )  # fmt: skip
        return 2
    except BaseException as error:  # the one place that must let nothing through: what it was is told to the parent
        memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        events.failed(
            {
                "kind": "OutOfMemory" if memory else type(error).__name__,
                "what": "out of memory" if memory else f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(limit=40),
            }
        )
        return 3
    events.done()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
