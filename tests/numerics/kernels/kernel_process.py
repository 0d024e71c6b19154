"""The kernel in a process of its own (`kernel_process.c`), behind the functions that ctypes gives of a library.

What tests know of a `Kernel` holds of one that runs elsewhere: `kernel_of` loads it as any other, and a call sends what
the function reads and brings back what it wrote.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from consistency.numerics.kernels.compiled import KINDS, Computed, Errors, Kernel, _Range
from consistency.numerics.kernels.numpy_digest import ROW_BYTES

_WIDTHS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_ALIGNMENT = 16
_SHARED, _OWN, _ANSWER = range(3)


class ProcessError(AssertionError):
    """The process ended: what it wrote to standard error, which is a sanitizer's report if there is one."""


def kernel_of(process: KernelProcess, library: Path, *, variant: int | None = None) -> Kernel:
    """Return a kernel whose functions run in a process that has loaded the library."""
    with mock.patch("ctypes.CDLL", return_value=process.library()):
        return Kernel(library, variant=variant)


class KernelProcess:
    """A process that runs `kernel_process.c`; one call at a time."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._lock = threading.Lock()

    def library(self) -> Any:
        """Return what stands for the loaded library: callables with the names of its functions."""
        return SimpleNamespace(**{f"consistency_{name}": _Function(self, name) for name in _DESCRIBED})

    def call(self, name: str, call: _Call) -> int:
        """Make a call, write into memory what it wrote, and return what it returned."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(call.packed(f"consistency_{name}"))
                self._process.stdin.flush()
            except BrokenPipeError:
                raise ProcessError(self._last_words()) from None
            answer = self._process.stdout.read(8 + sum(block.size for block in call.answered))
        if len(answer) < 8 + sum(block.size for block in call.answered):
            raise ProcessError(self._last_words())
        place = 8
        for block in call.answered:
            ctypes.memmove(block.address, answer[place : place + block.size], block.size)
            place += block.size
        return int.from_bytes(answer[:8], "little", signed=True)

    def close(self) -> None:
        """End the process; an error if that is not how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._errors:
            self._process.stdin.close()
            self._process.stdout.close()
            if self._process.wait(60):
                raise ProcessError(self._last_words())

    def kill(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()  # type: ignore[union-attr]  # both are pipes

    def _last_words(self) -> str:
        status = self._process.wait(60)
        self._errors.seek(0)
        return f"exit status {status}: {self._errors.read().decode(errors='replace').strip()}"


class _Function:
    """A function of the library, as ctypes has it: Kernel sets the types, which are known here."""

    def __init__(self, process: KernelProcess, name: str) -> None:
        self._process = process
        self._name = name
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None

    def __call__(self, *arguments: int) -> int:
        call = _Call()
        _DESCRIBED[self._name](call, *arguments)
        return self._process.call(self._name, call)


@dataclass(frozen=True, slots=True)
class _Block:
    address: int
    size: int
    use: int

    def packed(self) -> bytes:
        offset = self.address % _ALIGNMENT
        return struct.pack("<3q", self.size, offset, self.use) + ctypes.string_at(self.address, self.size)


@dataclass(slots=True)
class _Call:
    """A call as it is sent: blocks of memory, pointers from one to another, arguments."""

    blocks: list[_Block] = field(default_factory=list)
    pointers: list[tuple[int, int, int]] = field(default_factory=list)
    arguments: list[tuple[int, int]] = field(default_factory=list)

    @property
    def answered(self) -> list[_Block]:
        return [block for block in self.blocks if block.use == _ANSWER]

    def numbers(self, *values: int) -> None:
        self.arguments += [(0, value) for value in values]

    def memory(self, address: int, size: int, use: int = _SHARED) -> None:
        self.arguments.append((1, self.block(address, size, use)))

    def block(self, address: int, size: int, use: int = _SHARED) -> int:
        self.blocks.append(_Block(address, size, use))
        return len(self.blocks) - 1

    def point(self, block: int, at: int, address: int | None, size: int, use: int = _SHARED) -> None:
        """Send what a pointer in a block points to, if anything."""
        if address:
            self.pointers.append((block, at, self.block(address, size, use)))

    def packed(self, name: str) -> bytes:
        counts = len(self.blocks), len(self.pointers), len(self.arguments)
        head = struct.pack("<32s3q", name.encode(), *counts)
        blocks = [block.packed() for block in self.blocks]
        pointers = [struct.pack("<3q", *pointer) for pointer in self.pointers]
        arguments = [struct.pack("<2q", *argument) for argument in self.arguments]
        return b"".join([head, *blocks, *pointers, *arguments])


def _measure(
    call: _Call, variant: int, kind: int, parts: int, a: int, e: int, n: int, chunk: int, sums: int, squares: int,
    out: int,
) -> None:  # fmt: skip
    chunks = -(-n // chunk)
    call.numbers(variant, kind, parts)
    call.memory(a, n * _WIDTHS[KINDS[kind]])
    call.memory(e, n * _WIDTHS[KINDS[kind]])
    call.numbers(n, chunk)
    call.memory(sums, 8 * chunks, _ANSWER)
    call.memory(squares, 8 * chunks, _ANSWER)
    call.memory(out, ctypes.sizeof(_Range), _ANSWER)


def _errors(
    call: _Call, variant: int, kind: int, of: int, start: int, n: int, chunk: int, sums: int, squares: int,
    left_out: int, seen: int,
) -> None:  # fmt: skip
    chunks, computed = -(-n // chunk), Computed.from_address(of)
    width = _WIDTHS[KINDS[kind]]
    call.numbers(variant, kind)
    call.memory(of, ctypes.sizeof(Computed), _OWN)
    call.numbers(start, n, chunk)
    call.memory(sums, 8 * chunks, _ANSWER)
    call.memory(squares, 8 * chunks, _ANSWER)
    call.memory(left_out, chunks, _ANSWER)
    call.memory(seen, ctypes.sizeof(Errors), _ANSWER)
    for name, size in (("actual", width), ("value", 8), ("size", 8), ("base", width)):
        call.point(0, getattr(Computed, name).offset, getattr(computed, name), size * n)


def _digest(call: _Call, variant: int, data: int, rows: int, w: int, v: int, out: int) -> None:
    call.numbers(variant)
    call.memory(data, rows * ROW_BYTES)
    call.numbers(rows)
    call.memory(w, ROW_BYTES)
    call.memory(v, ROW_BYTES)
    call.memory(out, 8 * rows, _ANSWER)


def _nothing(_: _Call) -> None:
    pass


_DESCRIBED: dict[str, Callable[..., None]] = {
    "source": _nothing,
    "variants": _nothing,
    "measure": _measure,
    "errors": _errors,
    "digest": _digest,
}
"""What each function of `kernel.c` reads and writes, by its arguments."""
