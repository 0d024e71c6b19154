"""Write the file that asks another inference engine for its outputs: the fixed inputs, and the outputs wanted."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save

from consistency.capture.whole_file import write_whole
from consistency.case.case import Case
from consistency.errors import InputError
from consistency.extras.serving.inference.identity import CaseKey, adapter_digest, base_digest
from consistency.extras.serving.inference.request import METADATA, MODES, OUTPUT, REQUEST_SCHEMA, Request, batches_of
from consistency.worker.model.inputs import digest_of, fixed_inputs
from consistency.worker.model.loading import LoadedBase, load_base


def write_request(case: Case, path: Path) -> Request:
    """Write the fixed inputs of a case, on the CPU and in the dtypes that the model takes them in.

    Raises
    ------
    InputError
        No inputs can be made from the model's config.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # the base alone: inputs follow from its config, and an engine loads the adapter by itself
    base = load_base(case, "cpu")
    inputs, reason = fixed_inputs(case, base.model)
    if inputs is None or reason:
        raise InputError("there are no inputs to write", where=case.base, got=reason)
    rows = min(tensor.shape[0] for tensor in inputs.values())
    request = Request(
        schema=REQUEST_SCHEMA,
        case=key_of(case, base, inputs),
        base=case.base,
        adapter=case.adapter,
        output=OUTPUT,
        modes=MODES if case.adapter is not None else ("adapter_off",),
        batches=batches_of(rows),
    )
    text = msgspec.json.encode(request).decode()
    try:
        raw = save({name: tensor.contiguous().clone() for name, tensor in inputs.items()}, metadata={METADATA: text})
    except SafetensorError as error:
        raise InputError("these inputs cannot be written", where=path, got=error) from error
    write_whole(path, [raw])
    return request


def key_of(case: Case, base: LoadedBase, inputs: dict[str, torch.Tensor]) -> CaseKey:
    """Return what identifies a case and its inputs."""
    return CaseKey(
        name=case.name,
        inputs=digest_of(inputs),
        base=base_digest(case),
        adapter=adapter_digest(case),
        dtype=base.dtype,
    )
