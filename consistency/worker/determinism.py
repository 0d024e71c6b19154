"""The one module that changes torch's numerical settings: it sets, records and restores all of them.

A library that is imported later may change a setting unnoticed, so the worker reads them again after each stage.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from consistency.devices.backends import CUBLAS_WORKSPACE_CONFIG

SEED = 0

_UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: how it is read, how it is set, and its pinned value."""

    name: str
    pinned: Any
    read: Callable[[], Any]
    write: Callable[[Any], None]


def pinned() -> dict[str, Any]:
    """Return the values that a deterministic run asks for, by setting."""
    return {s.name: s.pinned for s in _SETTINGS}


def in_force() -> dict[str, Any]:
    """Return the current values, by setting."""
    return {s.name: _read(s) for s in _SETTINGS}


def changed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not as requested, with the value in force."""
    now = in_force()
    return {name: now[name] for name, value in asked.items() if name in now and now[name] != value}


@contextmanager
def deterministic(*, threads: int | None = None, seed: int = SEED, **overrides: Any) -> Iterator[dict[str, Any]]:
    """Pin every setting, seed every generator, yield the requested values by setting, and restore all at the end.

    Parameters
    ----------
    threads : int, optional
        Threads per operation; None leaves the number as it is.
    **overrides
        Settings by name that differ from the pinned ones.
    """
    unknown = set(overrides) - {s.name for s in _SETTINGS}
    if unknown:
        raise TypeError(f"unknown settings: {', '.join(sorted(unknown))}")
    before = in_force()
    asked = pinned() | overrides
    asked["threads"] = before["threads"] if threads is None else threads
    with _generators_kept():
        try:
            _apply(asked)
            seed_all(seed)
            yield asked
        finally:
            _apply(before)


def restore(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Set back every setting that is not as requested; return what `changed` returned before."""
    found = changed(asked)
    _apply({name: asked[name] for name in found})
    return found


def seed_all(seed: int = SEED) -> None:
    """Seed Python, NumPy and torch on every device."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - models draw from the global generator
    torch.manual_seed(seed)


def _apply(values: Mapping[str, Any]) -> None:
    # one order for all: torch's matmul precision also moves the TF32 switch, so that switch comes after it
    for setting in _SETTINGS:
        value = values.get(setting.name, _UNREADABLE)
        if str(value).startswith(_UNREADABLE):
            continue  # nothing to restore: torch refused to report the value
        if _read(setting) != value:
            setting.write(value)


def _read(setting: Setting) -> Any:
    try:
        return setting.read()
    except RuntimeError as error:  # torch refuses to answer after its old and new TF32 switches were both used
        return f"{_UNREADABLE}: {str(error).splitlines()[0]}"


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the state of every generator at the end."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    module = _initialized_accelerator()
    states = [] if module is None else [module.get_rng_state(i) for i in range(module.device_count())]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        for index, state in enumerate(states):
            module.set_rng_state(state, index)


def _initialized_accelerator() -> Any:
    """Return the accelerator's module if it is in use; reading its generators must not open it."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator.type)
    initialized = getattr(module, "is_initialized", None)
    return module if initialized is not None and initialized() and hasattr(module, "get_rng_state") else None


_Access = tuple[Callable[[], Any], Callable[[Any], None]]


def _attribute(owner: Any, name: str) -> _Access:
    return (lambda: getattr(owner, name)), (lambda value: setattr(owner, name, value))


def _sdpa(name: str) -> _Access:
    backends = torch.backends.cuda  # despite the name these switches choose the CPU's SDPA kernel too
    return getattr(backends, f"{name}_sdp_enabled"), getattr(backends, f"enable_{name}_sdp")


def _environment(name: str) -> _Access:
    def write(value: Any) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return (lambda: os.environ.get(name)), write


def _algorithms() -> _Access:
    # "warn" rather than "error": an operation without a deterministic version is a note in the report, not a crash
    names = {0: "off", 1: "warn", 2: "error"}

    def write(value: Any) -> None:
        torch.use_deterministic_algorithms(value != "off", warn_only=value == "warn")

    return (lambda: names[torch.get_deterministic_debug_mode()]), write


def _precision_write(value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(value)


def _reduction(name: str) -> _Access:
    def read() -> bool:
        value = getattr(torch.backends.cuda.matmul, name)
        return bool(value[0]) if isinstance(value, tuple) else bool(value)

    return read, (lambda value: setattr(torch.backends.cuda.matmul, name, value))


_SETTINGS = tuple(
    Setting(name=name, pinned=value, read=read, write=write)
    for name, value, (read, write) in (
        ("float32_matmul_precision", "highest", (torch.get_float32_matmul_precision, _precision_write)),
        ("matmul_allow_tf32", False, _attribute(torch.backends.cuda.matmul, "allow_tf32")),
        ("cudnn_allow_tf32", False, _attribute(torch.backends.cudnn, "allow_tf32")),
        ("fp16_reduced_precision_reduction", False, _reduction("allow_fp16_reduced_precision_reduction")),
        ("bf16_reduced_precision_reduction", False, _reduction("allow_bf16_reduced_precision_reduction")),
        ("cudnn_enabled", True, _attribute(torch.backends.cudnn, "enabled")),
        ("cudnn_deterministic", True, _attribute(torch.backends.cudnn, "deterministic")),
        ("cudnn_benchmark", False, _attribute(torch.backends.cudnn, "benchmark")),
        ("deterministic_algorithms", "warn", _algorithms()),
        ("cublas_workspace_config", CUBLAS_WORKSPACE_CONFIG, _environment("CUBLAS_WORKSPACE_CONFIG")),
        ("sdpa_math", True, _sdpa("math")),
        ("sdpa_flash", False, _sdpa("flash")),
        ("sdpa_mem_efficient", False, _sdpa("mem_efficient")),
        ("sdpa_cudnn", False, _sdpa("cudnn")),
        ("threads", 1, (torch.get_num_threads, torch.set_num_threads)),
    )
)
