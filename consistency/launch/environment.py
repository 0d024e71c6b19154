"""The environment that a worker's process starts with: threads, visible devices, kernel variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from consistency.case.load_path import LoadPath
from consistency.devices.backends import BACKENDS, kernel_variables, worker_variables
from consistency.devices.cores import available_cores, is_host_busy, threads_per_worker
from consistency.devices.interpreter import python_path
from consistency.devices.spec import DeviceInfo
from consistency.devices.visibility import Visibility, visibility_of
from consistency.launch.plan import WorkerPlan

_KEPT_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
"""Let glibc keep what is freed. By default each buffer above 32 MiB is mapped anew, and every page of it zeroed by the
kernel on first touch: a third of the time of a merge in float64, whose products are that large and freed at once.
"""

_QUIET_SPINS, _BUSY_SPINS = "10000", "1000"
"""How often a thread that waits for the others looks for them before it sleeps, where this process has the cores, and
where other processes compute on them: the thread that it waits for may not be running, and looking takes the core from
it. With the smaller number the built-in case took half of the processor time beside two processes that compute."""


def torch_device(info: DeviceInfo, load_path: LoadPath) -> str:
    """Return the device as torch numbers it inside the worker."""
    if info.spec.index is None:
        return info.spec.type
    if _mask(info, load_path) is not None:  # the worker sees no other device
        return f"{info.spec.type}:0"
    return f"{info.spec.type}:{_visible_index(info)}"


def worker_environment(
    info: DeviceInfo,
    load_path: LoadPath,
    *,
    threads: int | None,
    pinned: bool = True,
    change: Mapping[str, str | None] | None = None,
) -> dict[str, str]:
    """Return the whole environment of a worker.

    Parameters
    ----------
    threads : int or None
        Threads of each library; None leaves the user's variables.
    pinned : bool
        False passes the user's variables on that choose kernels, or lower their precision.
    change : mapping, optional
        Applied last; None in it removes a variable.
    """
    dropped = kernel_variables() if pinned else frozenset()
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment.update(python_path())
    environment.update(worker_variables(pinned=pinned))
    environment.update(
        HF_HUB_OFFLINE="1",  # models are folders by now, and nothing may use the network without being asked to
        PYTHONHASHSEED="0",
        TOKENIZERS_PARALLELISM="false",
        OPENBLAS_NUM_THREADS="1",  # NumPy's: it measures on threads of its own (`consistency.numerics.chunks`)
    )
    if pinned:
        # a thread that waits for the others spins shortly, less than a millisecond with libgomp, and sleeps: spinning
        # as long as by default takes the cores from other workers, and on small models most of a worker's time;
        # sleeping at once costs a tenth of a large one's
        # the user's own values of these variables come last, and win
        if "OMP_WAIT_POLICY" not in environment:
            spins = _BUSY_SPINS if is_host_busy() else _QUIET_SPINS
            environment = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": spins, **environment}
        if info.spec.is_cpu:
            environment = {**_KEPT_PAGES, **environment}
    if threads is not None:
        environment.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    changes = dict(_visibility_variables(info, load_path))
    variant = info.spec.numerical_variant()
    if variant is not None:
        changes |= variant.environment
    changes |= change or {}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return environment


def _visible_index(info: DeviceInfo) -> int | None:
    """Return the number of a device among all that are visible."""
    if info.visible_id in info.visible_ids:
        return info.visible_ids.index(info.visible_id)
    return info.spec.index


def _mask(info: DeviceInfo, load_path: LoadPath) -> Visibility | None:
    """Return what confines a worker to its device, None where it is not to be or cannot be confined."""
    return visibility_of(info.spec.type) if load_path is LoadPath.ISOLATED else None


def _visibility_variables(info: DeviceInfo, load_path: LoadPath) -> dict[str, str | None]:
    """Return the variables that confine a worker to its device, or hide every accelerator from one of the CPU."""
    mask = _mask(info, load_path)
    if mask is not None:
        return mask.applied(info.visible_id or mask.alone(info.spec.index or 0))
    # by identity too: CUDA may skip a GPU that NVML counts, and every later one would have the number of another
    everything = visibility_of(info.spec.type)
    if info.visible_ids and everything is not None:
        return everything.applied(",".join(info.visible_ids))
    changes: dict[str, str | None] = {}
    if info.spec.is_cpu:  # PEFT asks for the accelerator by itself and would send the adapter through it
        for kind in BACKENDS:
            hidden = visibility_of(kind)
            if hidden is not None and hidden.hides_all is not None:
                changes |= hidden.applied(hidden.hides_all)
    return changes


MOST_BESIDE_REFERENCE = 4
"""Most threads of an accelerator's worker while it waits for the CPU's, which computes the float64 passes. It copies,
digests and compares with them: everything else runs on its device."""


def shared_out(wave: Sequence[WorkerPlan], *, waits: bool) -> list[int]:
    """Return the threads per worker of a wave, in its order: equal parts of the cores, or most for the reference.

    Parameters
    ----------
    waits : bool
        Whether the workers wait for what one of them computes.
    """
    share = threads_per_worker(len(wave))
    maker = next((plan for plan in wave if plan.makes_reference and plan.info.spec.is_cpu), None)
    # nobody waits for the CPU, or all compute on it
    if maker is None or not waits or all(plan.info.spec.is_cpu for plan in wave):
        return [share] * len(wave)
    beside = min(share, MOST_BESIDE_REFERENCE)
    threads = []
    for plan in wave:
        own_threads = share if plan.info.spec.is_cpu else beside
        threads.append(own_threads)
    remaining_cores = available_cores() - sum(threads)
    threads[wave.index(maker)] += max(0, remaining_cores)
    return threads


def worker_threads(asked: int | None, share: int, *, pinned: bool = True) -> int | None:
    """Return the threads of a worker: as asked for, else its share of the cores, at most `OMP_NUM_THREADS`.

    As deployed (`pinned` False), the user's `OMP_NUM_THREADS` comes before the share: None leaves it.
    """
    of_user = os.environ.get("OMP_NUM_THREADS", "")
    if asked:
        return asked
    if asked is None and not pinned and of_user:
        return None
    first_level = of_user.partition(",")[0].strip()  # OpenMP takes a list, one number per level of nesting
    most = int(first_level) if first_level.isdecimal() else 0
    return min(share, most) if most else share
