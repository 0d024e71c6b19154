"""Several accelerators in software, plugged into torch as any backend is: a test double, and never a real device.

torch calls `autoload` when it is imported, by way of the entry point in the group `torch.backends`.
"""

from __future__ import annotations

import os

NAME = "npu"
"""The devices are `npu:0`, `npu:1` and so on: safetensors knows that name, and would refuse one made up here."""


def autoload() -> None:
    """Be a backend of torch, with the devices that `CONSISTENCY_DOUBLE` and `ASCEND_RT_VISIBLE_DEVICES` ask for."""
    import torch
    from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

    from . import device_module, libraries, not_on_cpu
    from .settings import LATER, VARIABLE

    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, device_module)
    generate_methods_for_privateuse1_backend(for_storage=True)
    not_on_cpu.install()
    libraries.install()
    if os.environ.get(VARIABLE) != LATER:
        make_devices()


def make_devices() -> None:
    """Make the devices that the environment asks for, once in a process."""
    from . import _native, answers, as_cuda, copies, device_module, libraries, unordered
    from .settings import read_settings

    settings = read_settings()
    device_module.install(settings)
    copies.install(settings)
    if settings.failures or settings.waits:
        answers.install(settings)
    _native.set_fill(-1 if settings.fill is None else settings.fill)
    if settings.as_cuda:
        as_cuda.install()
    if settings.unordered_mean is not None:
        unordered.install(settings)
    libraries.know_devices(known=settings.known_to_libraries and bool(settings.visible))
