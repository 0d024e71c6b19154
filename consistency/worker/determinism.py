"""The one module that changes torch's numerical settings: it sets, records and restores all of them.

The names, values and pinned values are those of `consistency.devices.settings`. A library that is imported later may
change a setting unnoticed, so the worker reads them again after each stage.
"""

from __future__ import annotations

import functools
import os
import random
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from consistency.devices.settings import AS_FOUND, DEFAULT_LIBRARY, SETTINGS, THREADS, UNREADABLE, with_implied
from consistency.errors import UsageError, first_line

SEED = zlib.crc32(b"consistency")
"""Seed of all generators: 2186408668, which nobody takes by habit.

Models, adapters and inputs are often drawn after ``manual_seed(0)``. A worker that drew from there too would draw the
very weights of a file that it failed to load, and a function's random numbers would be the function's inputs.
"""

_Access = tuple[Callable[[], Any], Callable[[Any], None]]
"""Functions that read and write a setting."""


class _Request(NamedTuple):
    """The settings that a call of `deterministic` was asked for, and whether it pins all of them."""

    asked: dict[str, Any]
    pins: bool


_requests: list[_Request] = []
"""Requests of the calls of `deterministic` that are entered, the innermost last."""


def settings_to_judge_by() -> tuple[dict[str, Any], Mapping[str, str]]:
    """Return the settings, and the environment variables, that results are to be judged by.

    A setting that was asked for has the value that was asked for, even where a library has changed it since: TF32 that
    nobody requested is a fault. A setting that nobody asked for has the value in force. Where all settings are pinned,
    no environment variable counts.
    """
    request = _requests[-1] if _requests else _Request(asked={}, pins=False)
    variables = {} if request.pins else os.environ
    return {**in_force(), **request.asked}, variables


def pinned() -> dict[str, Any]:
    """Return the values that the profile `pinned` sets, by setting."""
    return {name: spec.pinned for name, spec in SETTINGS.items() if spec.pinned != AS_FOUND}


def in_force() -> dict[str, Any]:
    """Return the current values, by setting; `unreadable: …` where this torch has none."""
    return {name: _read(name) for name in _ACCESS}


def changed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not as requested, with the value in force."""
    now = in_force()
    return {name: now[name] for name, value in asked.items() if name in now and now[name] != value}


@contextmanager
def deterministic(
    *, threads: int | None = None, seed: int = SEED, pins: bool = True, **overrides: Any
) -> Iterator[dict[str, Any]]:
    """Pin every setting, seed every generator, yield the requested values by setting, and restore all at the end.

    Parameters
    ----------
    threads : int, optional
        Threads per operation; None leaves the number as it is.
    pins : bool
        False leaves every setting as it is, except those in `overrides`.
    **overrides
        Settings by name that differ from the pinned ones; torch changes some others together with them.

    Raises
    ------
    UsageError
        This torch refuses one of the overrides.
    TypeError
        An override is no setting.
    """
    unknown = overrides.keys() - SETTINGS.keys()
    if unknown:
        raise TypeError(f"unknown settings: {', '.join(sorted(unknown))}")
    before = in_force()
    asked = _requested_settings(overrides, before, threads=threads, pins=pins)
    with _generators_kept():
        try:
            _apply(asked, chosen=overrides)
            # torch may report the library that it chose, which would look like a change of what was asked for
            asked |= {name: _read(name) for name, value in asked.items() if value == DEFAULT_LIBRARY}
            seed_all(seed)
            _requests.append(_Request(asked=asked, pins=pins))
            try:
                yield asked
            finally:
                _requests.pop()
        finally:
            _apply(before)


def _requested_settings(
    overrides: Mapping[str, Any], before: Mapping[str, Any], *, threads: int | None, pins: bool
) -> dict[str, Any]:
    """Return every setting that `deterministic` asks for: the overrides, and with `pins` all others too.

    Settings that are not pinned to a value are asked for as they are in force `before`, so that a change is noticed.
    """
    # a setting that this torch lacks is in force nowhere, and so not asked for
    asked = {name: value for name, value in with_implied(overrides).items() if name in overrides or _exists(name)}
    if not pins:
        return asked
    readable = {name: value for name, value in before.items() if not _is_unreadable(value)}
    asked = readable | {name: value for name, value in pinned().items() if _exists(name)} | asked
    if "mkldnn_matmul_fp32_precision" in overrides and "float32_matmul_precision" not in overrides:
        # torch reports it only while all backends have the same precision, which this override may end
        del asked["float32_matmul_precision"]
    if threads is not None:
        asked[THREADS] = threads
    return asked


@contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Seed every generator, and restore its state at the end."""
    with _generators_kept():
        seed_all(seed)
        yield


@contextmanager
def switched(**overrides: Any) -> Iterator[None]:
    """Set some settings within a `with` block, and those that torch changes together with them."""
    if all(_read(name) == value for name, value in with_implied(overrides).items()):
        # inside another block of the same settings, as each noisy pass is, reading all settings of `before` would take
        # longer than the pass
        yield
        return
    before = in_force()
    try:
        _apply(with_implied(overrides))
        yield
    finally:
        _apply(before)


def restore(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Set back every setting that is not as requested; return the value that each of these had, by setting."""
    values = changed(asked)
    if values:
        _apply(asked)  # all of them: torch moves some together with others, and so does putting these back
    return values


@contextmanager
def repeated_warnings() -> Iterator[None]:
    """Let torch give each time the warnings that it gives once in the life of a process, in which several cases run."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def seed_all(seed: int = SEED) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - models draw from the global generator
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        # not without an accelerator: for each type of device that is not in use `torch.manual_seed` stores the stack of
        # the call, which takes longer than all else here
        torch.manual_seed(seed)


def _apply(values: Mapping[str, Any], *, chosen: Mapping[str, Any] | None = None) -> None:
    """Set each setting that differs from its value here.

    Raises
    ------
    UsageError
        This torch refuses one of the settings that the user has `chosen`; it may refuse others.
    """
    # one order for all: torch's matmul precision also moves the switches of its backends, so those come after it
    for name, (_, write) in _ACCESS.items():
        value = values.get(name, UNREADABLE)
        if _is_unreadable(value):
            continue  # nothing to restore: torch refused to report the value
        if _read(name) == value:
            continue
        try:
            write(value)
        except (RuntimeError, AttributeError, ValueError, AssertionError) as error:
            if name in (chosen or {}):
                raise UsageError(
                    f"this torch cannot set {name}",
                    where="--set, or a device's variant",
                    got=value,
                    hint=f"torch {torch.__version__}: {first_line(error)}",
                ) from error


def _read(name: str) -> Any:
    """Return the value of a setting, or a text that begins with `unreadable`."""
    try:
        return _ACCESS[name][0]()
    # torch refuses to answer after its old and new TF32 switches were both used, and an older torch has fewer switches
    except (RuntimeError, AttributeError) as error:
        return f"{UNREADABLE}: {first_line(error)}"


def _is_unreadable(value: object) -> bool:
    return str(value).startswith(UNREADABLE)


def _exists(name: str) -> bool:
    """Return whether this torch has a setting, even if it refuses to tell its value."""
    try:
        _ACCESS[name][0]()
    except AttributeError:
        return False
    except RuntimeError:
        return True
    return True


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the state of every generator at the end."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    module = _initialized_accelerator()
    states = []
    if module is not None:
        states = [module.get_rng_state(index) for index in range(module.device_count())]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        for index, state in enumerate(states):
            module.set_rng_state(state, index)


def _initialized_accelerator() -> Any:
    """Return the accelerator's module if it is in use, else None; reading its generators must not open it."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator.type)
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is None or not is_initialized() or not hasattr(module, "get_rng_state"):
        return None
    return module


def _attribute(owner: str, name: str) -> _Access:
    """Return access to an attribute of a part of torch, which an older torch may lack."""

    def part_of_torch() -> Any:
        return functools.reduce(getattr, owner.split("."), torch)

    def read() -> Any:
        return getattr(part_of_torch(), name)

    def write(value: Any) -> None:
        # Reading raises AttributeError where torch lacks the attribute: `setattr` alone would make a new one, for torch
        # 2.8 takes any attribute of torch.backends. RuntimeError only means that the value cannot be told.
        with suppress(RuntimeError):
            read()
        setattr(part_of_torch(), name, value)

    return read, write


def _sdpa(name: str) -> _Access:
    """Return access to the switch of one kernel of scaled dot product attention."""
    backends = torch.backends.cuda  # despite the name these switches choose the CPU's SDPA kernel too
    return (
        lambda: getattr(backends, f"{name}_sdp_enabled")(),
        lambda value: getattr(backends, f"enable_{name}_sdp")(value),
    )


def _library(name: str) -> _Access:
    """Return access to torch's choice between libraries that offer the same operations."""

    def write(value: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls them experimental
            getattr(torch.backends.cuda, name)(value)

    return (lambda: getattr(torch.backends.cuda, name)().name.lower()), write


def _environment(name: str) -> _Access:
    """Return access to a variable of the environment; None where it is not set."""

    def write(value: Any) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return (lambda: os.environ.get(name)), write


def _algorithms() -> _Access:
    """Return access to `torch.use_deterministic_algorithms`, as `off`, `warn` or `error`."""
    # "warn" rather than "error": a model with an operation that has no deterministic version runs nevertheless, and
    # `consistency.worker.nondeterministic` notes what the operation can reach
    names = {0: "off", 1: "warn", 2: "error"}

    def write(value: Any) -> None:
        torch.use_deterministic_algorithms(value != "off", warn_only=value == "warn")

    return (lambda: names[torch.get_deterministic_debug_mode()]), write


def _write_matmul_precision(value: Any) -> None:
    """Set the precision of float32 products, without torch's warning about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(value)


def _reduction(name: str) -> _Access:
    """Return access to a switch of products that newer torch reports as a tuple, the switch first."""

    def read() -> bool:
        value = getattr(torch.backends.cuda.matmul, name)
        return bool(value[0]) if isinstance(value, tuple) else bool(value)

    return read, (lambda value: setattr(torch.backends.cuda.matmul, name, value))


def _math_reduction() -> _Access:
    """Return access to the switch of half-precision sums in attention by its formula."""
    backends = torch.backends.cuda
    return (
        lambda: backends.fp16_bf16_reduction_math_sdp_allowed(),
        lambda value: backends.allow_fp16_bf16_reduction_math_sdp(value),
    )


_ACCESS: dict[str, _Access] = {
    "fp32_precision": _attribute("backends", "fp32_precision"),
    "cuda_fp32_precision": _attribute("backends.cudnn", "fp32_precision"),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, _write_matmul_precision),
    "matmul_allow_tf32": _attribute("backends.cuda.matmul", "allow_tf32"),
    "cudnn_allow_tf32": _attribute("backends.cudnn", "allow_tf32"),
    "cuda_matmul_fp32_precision": _attribute("backends.cuda.matmul", "fp32_precision"),
    "cudnn_conv_fp32_precision": _attribute("backends.cudnn.conv", "fp32_precision"),
    "cudnn_rnn_fp32_precision": _attribute("backends.cudnn.rnn", "fp32_precision"),
    "mkldnn_matmul_fp32_precision": _attribute("backends.mkldnn.matmul", "fp32_precision"),
    "mkldnn_conv_fp32_precision": _attribute("backends.mkldnn.conv", "fp32_precision"),
    "mkldnn_rnn_fp32_precision": _attribute("backends.mkldnn.rnn", "fp32_precision"),
    "nvidia_tf32_override": _environment("NVIDIA_TF32_OVERRIDE"),
    "fp16_reduced_precision_reduction": _reduction("allow_fp16_reduced_precision_reduction"),
    "bf16_reduced_precision_reduction": _reduction("allow_bf16_reduced_precision_reduction"),
    "fp16_accumulation": _reduction("allow_fp16_accumulation"),
    "fp16_bf16_reduction_math_sdp": _math_reduction(),
    "blas_library": _library("preferred_blas_library"),
    "linalg_library": _library("preferred_linalg_library"),
    "rocm_fa_library": _library("preferred_rocm_fa_library"),
    "cudnn_enabled": _attribute("backends.cudnn", "enabled"),
    "cudnn_deterministic": _attribute("backends.cudnn", "deterministic"),
    "cudnn_benchmark": _attribute("backends.cudnn", "benchmark"),
    "deterministic_algorithms": _algorithms(),
    "cublas_workspace_config": _environment("CUBLAS_WORKSPACE_CONFIG"),
    "sdpa_math": _sdpa("math"),
    "sdpa_flash": _sdpa("flash"),
    "sdpa_mem_efficient": _sdpa("mem_efficient"),
    "sdpa_cudnn": _sdpa("cudnn"),
    THREADS: (torch.get_num_threads, torch.set_num_threads),
}
"""Access to each setting, by name, in the order in which they are set."""
