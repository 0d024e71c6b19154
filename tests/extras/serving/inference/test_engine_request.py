"""The file that asks an engine for its outputs is also a file of inputs for a run."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import safe_open

from consistency.capture.names import ADAPTER_MERGED, ADAPTER_OFF, ADAPTER_ON
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.extras.serving.inference.engine_request import write_request
from consistency.extras.serving.inference.request import METADATA, MODES, Request
from consistency.worker.model.inputs import digest_of, fixed_inputs
from consistency.worker.model.loading import load_base


def test_the_written_inputs_are_those_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "inputs.safetensors"
    written = write_request(prepare_case(Options(base="builtin:llama")), path)
    with safe_open(path, framework="numpy") as file:
        assert msgspec.json.decode(file.metadata()[METADATA], type=Request) == written
        assert file.get_tensor("input_ids").shape == (8, 16)
    for options in (Options(base="builtin:llama"), Options(base="builtin:llama", inputs=str(path))):
        case = prepare_case(options)
        inputs, _ = fixed_inputs(case, load_base(case, "cpu").model)
        assert inputs is not None
        assert digest_of(inputs) == written.case.inputs
    assert (written.case.dtype, written.modes, written.batches) == ("float32", MODES, (1, 2, 3, 5, 8))


def test_modes_have_the_names_of_the_stage() -> None:
    assert MODES == (ADAPTER_ON, ADAPTER_OFF, ADAPTER_MERGED)
