"""The environment of this host for an issue, in the words of a report, without a run.

Versions come from the process itself, devices from `consistency.devices.discovery`: no device is opened here. Of the
variables of the environment only those are read that a capture records. Paths, ids, and the names of host and user are
taken out, as `consistency show --redact` does.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from typing import Any

import msgspec

from consistency.capture.version import __version__
from consistency.comparison.result import WorkerSummary
from consistency.devices.backends import recorded_variables
from consistency.devices.discovery import auto_choice, discover, why_unusable
from consistency.devices.spec import DeviceInfo
from consistency.devices.vendors import PLATFORMS
from consistency.errors import first_line
from consistency.report.documents import environment_texts
from consistency.report.markdown import folded
from consistency.report.redaction import redaction_of

_LIBRARIES = ("torch", "transformers", "peft", "safetensors", "accelerate", "numpy")


class HostDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as `consistency devices` finds it, without what identifies it; `unusable` says why it cannot be used."""

    name: str
    model: str
    architecture: str
    driver: str | None
    capability: str | None
    memory_bytes: int | None
    simulated: bool
    unusable: str


class HostEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a host that an issue has to state."""

    consistency: str  # version of this tool
    environment: dict[str, Any]  # as a worker on the CPU records it: versions, threads, kernels in force, variables
    devices: tuple[HostDevice, ...]  # in the order of `consistency devices`
    no_devices: str = ""  # where torch is built for accelerators and finds none: the reason


def read_host_environment() -> HostEnvironment:
    """Read the environment of this host; where torch cannot be imported, the installed versions and the reason."""
    devices, choice = discover(), auto_choice()
    no_devices = ""
    if choice.build:
        no_devices = f"torch is built for {PLATFORMS[choice.build].name} and finds no device: {choice.reason}"
    stated = HostEnvironment(
        consistency=__version__,
        environment=_environment(),
        devices=tuple(_device(info) for info in devices),
        no_devices=no_devices,
    )
    redacted = redaction_of({}).value(msgspec.to_builtins(stated))
    return msgspec.convert(redacted, HostEnvironment)


def as_markdown(stated: HostEnvironment) -> str:
    """Return a block for an issue, folded; its lines are those of the environment in report.md, and further ones."""
    lines = folded("Environment", list(_lines(stated)), "")
    return "".join(f"{line}\n" for line in lines).lstrip("\n")


def _environment() -> dict[str, Any]:
    """Return the environment as a worker on the CPU records it; versions alone where torch cannot be imported."""
    try:
        from consistency.worker.environment import describe_host

        return describe_host()
    except Exception as error:  # a broken installation of torch is what an issue may be about
        return {
            "python": platform.python_version(),
            "platform": platform.platform(),
            **{name: _version(name) for name in _LIBRARIES},
            "variables": {name: os.environ[name] for name in sorted(recorded_variables() & os.environ.keys())},
            "torch_error": first_line(error),
        }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device(info: DeviceInfo) -> HostDevice:
    names = [name for name in HostDevice.__struct_fields__ if name not in ("name", "unusable")]
    fields = {name: getattr(info, name) for name in names}
    return HostDevice(name=info.spec.name, unusable=why_unusable(info), **fields)


def _lines(stated: HostEnvironment) -> Iterator[str]:
    """Yield the facts of a host, one per line."""
    yield f"consistency version: {stated.consistency}"
    workers = [
        WorkerSummary(
            name=device.name,
            architecture=device.architecture,
            model=device.model,
            driver=device.driver,
            simulated=device.simulated,
            load_path="",
            status="ok",
            environment=stated.environment,
        )
        for device in stated.devices
    ]
    yield from environment_texts(workers)
    for device in stated.devices:
        if device.unusable:
            yield f"{device.name} cannot be used: {device.unusable}"
    if stated.no_devices:
        yield stated.no_devices
    facts = stated.environment
    if "torch_error" in facts:
        yield f"torch cannot be imported: {facts['torch_error']}"
    else:
        yield f"Compiled kernel: {facts.get('compiled_kernel')}"
        yield f"Threads: {facts.get('threads')}"
    yield from (f"{name}={value}" for name, value in facts.get("variables", {}).items())
