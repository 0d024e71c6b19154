"""Outputs of engines on built-in cases, healthy and with a mistake planted, and what a run says of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.case.reading import make_options
from consistency.comparison.result import Comparison
from consistency.extras.serving.engines.answer import answer, case_of, computed, read_request, write_outputs
from consistency.extras.serving.engines.engine import make_engine
from consistency.extras.serving.inference.engine_request import write_request
from consistency.workflows import pipeline
from tests.extras.serving.engines.planted import MISTAKES

HEALTHY = "healthy"


def request_of(name: str, dtype: str, folder: Path) -> Path:
    """Write the inputs of a built-in case."""
    path = folder / f"{name}.{dtype}.inputs.safetensors"
    options: Any = {"base": f"builtin:{name}", "dtype": dtype}
    write_request(prepare_case(Options(**options)), path)
    return path


def outputs_of(engine_name: str, inputs: Path, mistakes: Iterable[str] = ()) -> dict[str, Path]:
    """Compute every output that is asked for, and with each mistake that of the adapter alone; by names of engines."""
    engine = make_engine(engine_name, "cpu")
    found = {HEALTHY: inputs.with_name(f"{engine_name}.{inputs.name}")}
    answer(inputs, found[HEALTHY], engine)
    request, given = read_request(inputs)
    short = msgspec.structs.replace(request, modes=("adapter_on",), batches=())
    for mistake in mistakes:
        name = mistake.replace(" ", "-")
        found[name] = inputs.with_name(f"{name}.{engine_name}.{inputs.name}")
        model = MISTAKES[mistake](case_of(request))
        write_outputs(found[name], short, engine, dict(computed(engine, model, short, given)))
    return found


def judged(name: str, dtype: str, files: dict[str, Path]) -> Comparison:
    """Compare outputs with the CPU, each under the name of its engine."""
    options = {
        "base": f"builtin:{name}", "dtype": dtype, "devices": ("cpu",), "stages": ("forward",),
        "engine_outputs": {engine: str(path) for engine, path in files.items()},
    }  # fmt: skip
    plan = pipeline.prepare(make_options(options))
    return pipeline.run(plan, None, watch=lambda *_: None).comparison
