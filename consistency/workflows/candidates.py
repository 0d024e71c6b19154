"""The plan of a bisection: which settings could explain a difference, and in which order they are switched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from consistency.case.load_path import LoadPath
from consistency.case.stages import SPECS, Stage
from consistency.comparison.workers import ComparedWorker
from consistency.devices.backends import Variant, backend_of
from consistency.devices.spec import parse_device
from consistency.launch.change import Change

_SDPA = {
    "SDPA flash": {"sdpa_math": False, "sdpa_flash": True},
    "SDPA memory-efficient": {"sdpa_math": False, "sdpa_mem_efficient": True},
}


def smallest(changes: Sequence[Change], gone: Callable[[Sequence[Sequence[Change]]], list[bool]]) -> tuple[Change, ...]:
    """Return the smallest set of changes that removes a difference, as far as few trials can find it.

    Each change is tried alone, then all together. If the difference is then gone, each change is left out again as long
    as the others suffice, so that no change in the result can be spared.
    """
    for change, is_gone in zip(changes, gone([(change,) for change in changes]), strict=True):
        if is_gone:
            return (change,)
    kept: list[Change] = []
    for change in changes:  # of two that set the same thing, the first
        if not any(change.touches & other.touches for other in kept):
            kept.append(change)
    if len(kept) < 2 or not gone([kept])[0]:
        return ()
    for change in tuple(kept):
        rest = [other for other in kept if other is not change]
        if rest and gone([rest])[0]:
            kept = rest
    return tuple(kept)


def candidates(subject: ComparedWorker, reference: ComparedWorker, stage: str) -> tuple[Change, ...]:
    """Return what could explain a difference of a worker, each to be switched alone."""
    return tuple(_candidates(subject, reference, stage))


def _candidates(subject: ComparedWorker, reference: ComparedWorker, stage: str) -> Iterator[Change]:
    spec = parse_device(subject.info.name)
    backend = backend_of(spec.type)
    variant = spec.numerical_variant() or Variant(name="native")
    if SPECS[Stage(stage)].together:
        for name, told in backend.of_collectives.items():
            yield Change(name=f"{name}={told}", environment={name: told})
    yield from (Change(name=f"{name} unset", environment={name: None}) for name in variant.environment)
    for name, value in reference.info.asked.items():
        if name in variant.settings and variant.settings[name] != value:
            yield Change(name=f"{name} = {value}", settings={name: value})
    threads, expected = (p.info.environment.get("threads") for p in (subject, reference))
    if isinstance(threads, int) and isinstance(expected, int):
        other = expected if expected != threads else threads + 1 if threads == 1 else 1
        yield Change(name=f"{other} threads" if other != 1 else "1 thread", threads=other)
    if subject.info.environment.get("dtype") in ("bfloat16", "float16") and subject.case.adapter is not None:
        yield Change(name="autocast_adapter_dtype=False", autocast_adapter_dtype=False)
    computes = stage != Stage.COLLECTIVES  # which has no product, and no attention
    for name, (value, text) in backend.alternatives.items():
        if computes and name in subject.info.asked and name not in variant.settings:
            yield Change(name=text, settings={name: value})
    if computes and not spec.is_cpu:
        yield from (Change(name=name, settings=settings) for name, settings in _SDPA.items())
    load_path = LoadPath(subject.load_path)
    if load_path.main is LoadPath.SHARED:
        yield Change(name="the other devices hidden", load_path=load_path.beside(LoadPath.ISOLATED))
    if stage == Stage.ADAPTER:
        yield from _load_paths(load_path, is_cpu=spec.is_cpu)


def _load_paths(load_path: LoadPath, *, is_cpu: bool) -> Iterator[Change]:
    """Yield the load paths that the adapter's bytes could have taken instead."""
    main = load_path.main
    others = {"the default load path": main, "torch_device='cpu'": LoadPath(f"{main}+cpu")}
    if not is_cpu:
        others["torch_device=target"] = LoadPath(f"{main}+target")
    if load_path.low_memory:
        others["low_cpu_mem_usage=False"] = load_path.without_low_memory
    else:
        others["low_cpu_mem_usage=True"] = LoadPath(f"{load_path}+low-memory")
    others["transformers' loader"] = LoadPath(f"{main}+transformers")
    yield from (Change(name=name, load_path=other) for name, other in others.items() if other is not load_path)
