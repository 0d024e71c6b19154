"""Judge a block on the CPU while the training goes on, by a process beside it.

At a check the device computes the block once more, which takes it a moment; float64 and noise on the CPU take as long
as many steps of a card. So the block, its inputs and the device's results go to a process of this rank's own, and the
answer is read at the next check. What is not within rounding is then judged in this process as every block is, from the
same file: so nothing is found beside a training that would not be found in it.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from consistency.capture.whole_file import write_fully
from consistency.devices.cores import available_cores
from consistency.errors import first_line
from consistency.extras.watching.beside_process import BlockJob, answer_of
from consistency.extras.watching.block_function import BlockFunction, without_dropout
from consistency.extras.watching.block_on_cpu import CHECK, judged_block
from consistency.extras.watching.micro_batch import MicroBatch, buffers_kept
from consistency.extras.watching.outcome import CheckOutcome
from consistency.extras.watching.rank_talk import RankTalk
from consistency.testing.calls import FunctionCall
from consistency.worker.precision import products_of

LEAST_THREADS = 2
"""Cores that have to be free for each rank."""

_ROOM_BYTES = 2**24
"""Bytes of a job besides its tensors."""

_PROGRAM = "consistency.extras.watching.beside_process"


def free_threads(places: Sequence[str], own: str, device: torch.device) -> int:
    """Return how many cores of this host are left for each of its ranks, beside those that the training computes with.

    Parameters
    ----------
    places : sequence of str
        Host and device of each rank, as `place_of_rank` has them.
    own : str
        Those of this rank.
    """
    host = own.partition(",")[0]
    ranks = sum(place.partition(",")[0] == host for place in places)
    used = torch.get_num_threads() if device.type == "cpu" else 1
    return available_cores() // ranks - used


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTurn:
    """Which block is judged, of which step.

    Attributes
    ----------
    name : str
        Name of the block.
    step : int
        The step whose micro-batch it computes.
    between : str
        The steps between which a fault came, in words.
    keep_in : Path or None
        File for the tensors of a block that is wrong.
    """

    name: str
    step: int
    between: str
    keep_in: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A block that the process beside has.

    Attributes
    ----------
    turn : BlockTurn
        Which block it is.
    file : Path
        File of the job.
    block : torch.nn.Module
        The block of the model.
    batch : MicroBatch
        The conditions of the micro-batch, without its tensors.
    """

    turn: BlockTurn
    file: Path
    block: torch.nn.Module
    batch: MicroBatch


class _LimitedFile(io.FileIO):
    """A file that takes so many bytes: a block may refer to its whole model, or be a part of one large tensor."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        super().__init__(path, "w")
        self._most_bytes = most_bytes
        self.refusal: Exception | None = None
        """Why bytes could not be written: torch raises an error of its own in its place."""

    def write(self, data: Any) -> int:
        """Write all bytes, unless they are too many."""
        try:
            if self.tell() + len(data) > self._most_bytes:
                raise ValueError("it holds more than its own weights")
            write_fully(self.fileno(), data)
        except (OSError, ValueError) as error:
            self.refusal = self.refusal or error
            raise
        return len(data)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def _without_hooks(block: torch.nn.Module) -> Iterator[None]:
    """Take a block's hooks away: transformers hangs local functions on blocks, which no other process can have.

    A hook that changes what a block computes makes the process beside call it wrong; then it is judged here with it.
    """
    taken = [(module, name, getattr(module, name)) for module in block.modules() for name in _HOOKS]
    for module, name, hooks in taken:
        setattr(module, name, type(hooks)())
    try:
        yield
    finally:
        for module, name, hooks in taken:
            setattr(module, name, hooks)


def _write(job: BlockJob, file: Path) -> None:
    """Write a job; raise an error where it is much larger than the block with its inputs."""
    leaves = _pytree.tree_leaves((job.function.inputs, job.computed))
    size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
    with _LimitedFile(file, 2 * size + _ROOM_BYTES) as limited, _without_hooks(job.function.block):
        try:
            torch.save(job, limited)
        except RuntimeError:
            if limited.refusal is not None:
                raise limited.refusal from None
            raise


class JudgeBeside:
    """The process beside a training, and the block that it has.

    Parameters
    ----------
    threads : int
        Threads that it computes with.
    """

    def __init__(self, threads: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="consistency-watch-")
        self._waiting: Waiting | None = None
        self._number = 0
        environment = {
            **os.environ,
            # what this process can import, and nothing else
            "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
            "OMP_NUM_THREADS": str(threads),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _PROGRAM, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    @property
    def waiting(self) -> Waiting | None:
        """Return the block that was begun and is not judged yet."""
        return self._waiting

    def begin(self, function: BlockFunction, batch: MicroBatch, turn: BlockTurn) -> str:
        """Give a block to the process; return why that cannot be done, empty where it was."""
        self._number += 1
        file = Path(self._folder.name) / f"{self._number}.pt"
        try:
            with batch.conditions(function.device), buffers_kept(function.block), without_dropout(function.block):
                call = FunctionCall(function.compute, None, function.inputs, gradients=False)
                computed = call.on(call.device)[0].computed
            job = BlockJob(
                function=function,
                computed=computed,
                device_type=function.device.type,
                products=products_of(function.device),
                any_dtype=function.device.type != "cpu" and batch.autocast is not None,
                autocast=batch.autocast,
            )
            _write(job, file)
            assert self._process.stdin is not None
            self._process.stdin.write(f"{file}\n")
            self._process.stdin.flush()
        except Exception as error:  # a block may hold what cannot be pickled, and a disk may be full
            file.unlink(missing_ok=True)
            return first_line(error)
        # without its tensors: a gradient of logits is as large as several blocks, and would stay until the next check
        conditions = replace(batch, args=(), kwargs={}, marks=None)
        self._waiting = Waiting(turn=turn, file=file, block=function.block, batch=conditions)
        return ""

    def outcome(self, talk: RankTalk, *, wait_s: float = 0.0) -> CheckOutcome | None:
        """Return what is known of the block that was begun; None where there is none, or it is still computed.

        Parameters
        ----------
        wait_s : float
            Seconds that an answer is waited for.
        """
        waiting = self._waiting
        if waiting is None:
            return None
        answer = self._answer(waiting, wait_s)
        if answer is None:
            return None
        self._waiting = None
        if answer["within"]:
            outcome = CheckOutcome(check=CHECK, figures={"block": waiting.turn.name, "ratio": answer["ratio"]})
        else:
            outcome = self._judged_here(waiting, talk)
            outcome.figures["judged once more"] = answer.get("error", "not within rounding")
        outcome.figures |= {"of step": waiting.turn.step, "seconds beside": answer.get("seconds", 0.0)}
        for file in (waiting.file, answer_of(waiting.file)):
            file.unlink(missing_ok=True)
        return outcome

    def _answer(self, waiting: Waiting, wait_s: float) -> dict[str, Any] | None:
        """Return the answer to a job; None where there is none yet."""
        file = answer_of(waiting.file)
        end_s = time.monotonic() + wait_s
        while not file.exists():
            if self._process.poll() is not None:
                return {"within": False, "error": f"the process ended with status {self._process.returncode}"}
            if time.monotonic() >= end_s:
                return None
            time.sleep(0.05)
        answer: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return answer

    def _judged_here(self, waiting: Waiting, talk: RankTalk) -> CheckOutcome:
        """Judge what the device computed as it is judged without a process beside, with the weights that there were.

        It does not compute once more: a fault that comes and goes would be gone.
        """
        try:
            job: BlockJob = torch.load(waiting.file, map_location="cpu", weights_only=False)
        except Exception as error:  # on a disk that is full, for example
            return CheckOutcome(check=CHECK, not_checked=f"its job cannot be read: {first_line(error)}")
        device = next(waiting.block.parameters()).device

        def on_device(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        inputs = _pytree.tree_map(on_device, job.function.inputs)
        function = BlockFunction(block=waiting.block, inputs=inputs)
        turn = waiting.turn
        return judged_block(function, waiting.batch, turn.name, talk, turn.between, turn.keep_in, job.computed)

    def close(self) -> None:
        """End the process, and remove what it was given."""
        with suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()
