"""The worker's process: load on one device, run the stages, write records; `python -m consistency.worker JOB`.

Every failure is caught here and written as an event, so that the parent can report it; nothing is printed. This package
imports nothing of the parent's side but the protocol that both share.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
from pathlib import Path

from consistency.capture.json_codec import decode_json
from consistency.errors import ConsistencyError
from consistency.worker import lifeline
from consistency.worker.out_of_memory import is_out_of_memory
from consistency.worker.protocol import CANNOT_WRITE, EventLog, Job


def main(path: Path) -> int:
    """Do one job; return 0 when done, 2 for invalid input, 3 for any other failure, 4 when that cannot be written."""
    job = decode_json(path.read_bytes(), Job)
    lifeline.hold(job.parent_pid)
    folder = Path(job.folder)
    try:
        stack = (folder / "stack.txt").open("w", encoding="utf-8")
        events = EventLog(folder / "events.jsonl")
    except OSError:
        return CANNOT_WRITE
    faulthandler.enable(file=stack, all_threads=True)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal; the parent decides what ends
    try:
        events.stage("import")
        from consistency.worker.session import run

        run(job, events)
        events.done()
    except BaseException as error:  # nothing may pass here: the parent reports the error
        try:
            events.failed({**_described(error), "trace": traceback.format_exc(limit=40)})
        except OSError:
            return CANNOT_WRITE
        return 2 if isinstance(error, ConsistencyError) else 3
    return 0


def _described(error: BaseException) -> dict[str, str | None]:
    if isinstance(error, ConsistencyError):
        return {"kind": type(error).__name__, **error.parts}
    if is_out_of_memory(error):
        return {"kind": "OutOfMemory", "what": "out of memory"}
    return {"kind": type(error).__name__, "what": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
