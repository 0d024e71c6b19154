from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consistency.numerics import digest as digest_module
from consistency.numerics import kernels
from consistency.numerics.digest import digest
from consistency.numerics.kernels import triton_digest
from consistency.numerics.kernels.numpy_digest import BLOCK_BYTES, ROW_BYTES
from consistency.worker import determinism, environment
from consistency.worker.memory.per_stage import StageMemoryLog
from consistency.worker.memory.placement import Placement
from consistency.worker.protocol import WorkerState
from consistency.worker.session import Session
from tests.numerics.kernels.made_words import large

WORDS = ROW_BYTES // 8
BLOCK_WORDS = BLOCK_BYTES // 8
CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")

Launch = Callable[..., torch.Tensor]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: only CUDA builds of torch bring it"
)


@pytest.fixture(autouse=True)
def _nothing_tried_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_digest, "_states", {})
    monkeypatch.delenv(triton_digest.PLAIN_VARIABLE, raising=False)


@functools.cache
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    return digest_module._weights_on(CPU)


def right(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
    return triton_digest._plain(words, w, v)


def sums_by(launch: Launch, monkeypatch: pytest.MonkeyPatch, words: torch.Tensor) -> torch.Tensor | None:
    monkeypatch.setattr(triton_digest, "_launch", launch)
    return triton_digest.sums(words, *weights())


# --- whether it is trusted ------------------------------------------------------------------------------------------


def test_a_right_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    words = large()
    found = sums_by(right, monkeypatch, words)
    assert found is not None
    assert np.array_equal(found.numpy(), digest_module._rows_on_cpu(words.numpy().view(np.uint8)))
    assert triton_digest.state(CPU) == "fused"


def test_it_is_checked_once_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def count(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
        launches.append((len(words), words.data_ptr() % 16, turns))
        return right(words, w, v, turns=turns)

    first = large()
    sums_by(count, monkeypatch, first)
    assert len({(alignment, rows) for _, alignment, rows in launches[:-1]}) == 4  # each binary, one block and several
    assert launches[-1][0] == len(first)
    before = len(launches)
    sums_by(count, monkeypatch, first)
    assert len(launches) == before + 1


def logical_shift(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
    high = (words >> 32) & 0xFFFFFFFF
    blocks = zip(words.split(WORDS), high.split(WORDS), strict=True)
    return torch.stack([(x * w[: len(x)] + h * v[: len(h)]).sum() for x, h in blocks])


def without_the_last_word(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
    return right(words[:-1], w, v, turns=turns)


def wrong_in_several_rows(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
    found = right(words, w, v, turns=turns)
    found[1:] += turns > 1
    return found


WRONG: dict[str, Launch] = {
    "a logical shift": logical_shift,
    "without the last word": without_the_last_word,
    "without the last block": lambda words, w, v, *, turns: right(words, w, v, turns=turns)[:-1],
    "in other order": lambda words, w, v, *, turns: right(words, w, v, turns=turns).flip(0),
    "in double precision": lambda words, w, v, *, turns: right(words, w, v, turns=turns).clamp(-(2**53), 2**53),
    "wrong in several rows": wrong_in_several_rows,
    "wrong where misaligned": lambda words, w, v, *, turns: (
        right(words, w, v, turns=turns) + bool(words.data_ptr() % 16)
    ),
    "with the weights swapped": lambda words, w, v, *, turns: right(words, v, w, turns=turns),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_never_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sums_by(WRONG[name], monkeypatch, large()) is None
    assert triton_digest.state(CPU).startswith("plain: ")
    if name == "without the last word":
        assert triton_digest.state(CPU) == "plain: the kernel's sums are wrong in 1 of 5 test rows"

    def never(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a kernel that was found wrong ran again")

    assert sums_by(never, monkeypatch, large()) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "RuntimeError: Failed to find C compiler."),
        (PermissionError(13, "Permission denied", "cache"), "PermissionError: [Errno 13] Permission denied"),
        (subprocess.CalledProcessError(1, ["ptxas"]), "CalledProcessError: Command '['ptxas']' returned non-zero"),
        (ValueError("\nat 3:4:\n  x = \n"), "ValueError: at 3:4:"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_a_kernel_that_cannot_run_is_not_used(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise error

    assert sums_by(fail, monkeypatch, large()) is None
    assert triton_digest.state(CPU).startswith(f"plain: {reason}")


def test_without_triton_the_plain_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    # another test of this process may have imported it
    monkeypatch.delitem(sys.modules, "consistency.numerics.kernels.triton_digest_kernel", raising=False)
    monkeypatch.delattr(kernels, "triton_digest_kernel", raising=False)
    assert triton_digest.sums(large(), *weights()) is None
    assert "triton" in triton_digest.state(CPU)


def test_the_variable_keeps_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSISTENCY_PLAIN_DIGEST", "1")
    assert sums_by(right, monkeypatch, large()) is None
    assert triton_digest.state(CPU) == "plain: CONSISTENCY_PLAIN_DIGEST is set"


def test_small_tensors_do_not_even_start_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sums_by(right, monkeypatch, large(extra=-1)) is None
    assert triton_digest.state(CPU) == "plain: no tensor was large enough for the kernel"
    assert sums_by(right, monkeypatch, large(extra=0)) is not None


def test_the_check_leaves_generators_and_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with determinism.deterministic() as asked:
        before = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
        sums_by(right, monkeypatch, large())
        after = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # type: ignore[index]  # noqa: NPY002
        assert determinism.changed(asked) == {}
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]


# --- where it is used -----------------------------------------------------------------------------------------------


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


@pytest.mark.parametrize("launch", [right, without_the_last_word], ids=["right", "wrong"])
def test_the_digest_on_a_gpu_is_that_of_the_cpu(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []

    def note(words: torch.Tensor, w: torch.Tensor, v: torch.Tensor, *, turns: int) -> torch.Tensor:
        launches.append(len(words))
        return launch(words, w, v, turns=turns)

    monkeypatch.setattr(triton_digest, "_launch", note)
    monkeypatch.setattr(digest_module, "_weights_on", lambda _: weights())
    monkeypatch.setattr(triton_digest, "_check", functools.partial(checked, triton_digest._check))
    tensor = large(extra=WORDS + 7).view(torch.uint8)[:-3]
    found = digest(tensor.as_subclass(OnCuda))
    assert (len(tensor) // ROW_BYTES * WORDS in launches) == (launch is right)
    assert found == digest(tensor)


@pytest.mark.parametrize("offset", [0, 1, 3, 8, 16])
def test_the_kernel_gets_whole_words_alone(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that does not begin on one is copied first, and takes the plain path."""
    monkeypatch.setattr(triton_digest, "_launch", right)
    monkeypatch.setattr(digest_module, "_weights_on", lambda _: weights())
    monkeypatch.setattr(triton_digest, "_check", functools.partial(checked, triton_digest._check))
    tensor = large(extra=WORDS).view(torch.uint8)
    assert digest(tensor.as_subclass(OnCuda)[offset:]) == digest(tensor[offset:])
    assert (triton_digest.state(CUDA) == "fused") == (offset % 8 == 0)


def checked(check: Callable[..., str], w: torch.Tensor, v: torch.Tensor) -> str:
    """Check on plain tensors: only the digested one pretends."""
    return check(w.as_subclass(torch.Tensor), v.as_subclass(torch.Tensor))


def test_tensors_of_the_cpu_never_get_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the kernel is for CUDA alone")

    monkeypatch.setattr(triton_digest, "sums", never)
    digest(large())


# --- what is told of it ---------------------------------------------------------------------------------------------


def test_the_environment_of_a_cpu_worker_does_not_speak_of_it() -> None:
    assert "digest_kernel" not in environment.describe(CPU)


def test_a_worker_tells_what_became_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untried = {"torch": "2", "digest_kernel": triton_digest.state(CUDA)}
    session = Session.__new__(Session)
    session._job = SimpleNamespace(device="cuda:0", folder=str(tmp_path))  # type: ignore[assignment]
    session._asked = {}
    session._placement = Placement(torch.device("cpu"))
    session._memory = StageMemoryLog(torch.device("cpu"))
    session._state = WorkerState(environment=untried)
    triton_digest._states[CUDA] = triton_digest.FUSED
    monkeypatch.setattr(environment, "products", lambda _: {})  # of a GPU that is not here
    session._end("base")
    assert session._state.environment == {"torch": "2", "digest_kernel": "fused"}


# --- the kernel itself ----------------------------------------------------------------------------------------------


@pytest.mark.process
@needs_triton
def test_the_kernel_in_tritons_interpreter() -> None:
    file = Path(__file__).with_name("interpreted_digest.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore::UserWarning", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
