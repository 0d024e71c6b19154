"""Outputs of engines are given by name, and relative to the file that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistency.case.engine_file import EngineFile, as_engine_files
from consistency.case.options import Edge
from consistency.case.reading import gather_options, make_options
from consistency.errors import UsageError

TWO = (EngineFile(name="vllm", path="a.safetensors"), EngineFile(name="ort", path="b=c.safetensors"))


@pytest.mark.parametrize(
    "given", [["vllm=a.safetensors", "ort=b=c.safetensors"], {"vllm": "a.safetensors", "ort": "b=c.safetensors"}, TWO]
)
def test_every_form_means_the_same(given: object) -> None:
    assert make_options({"engine_outputs": given}).engine_outputs == TWO


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["a.safetensors"], "without a name"),
        (["cpu=a"], "the name of a device"),
        (["cuda=a"], "the name of a device"),
        (["a:b=c"], "not the outputs of an engine with a name"),
        (["x="], "not the outputs of an engine with a name"),
        (["x=a", "x=b"], "two engines have the name x"),
        (3, "not the outputs of an engine"),
    ],
)
def test_a_name_that_cannot_be_used(given: object, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        as_engine_files(given, where="--engine-outputs")


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "o.safetensors").touch()
    (tmp_path / "case.toml").write_text('engine_outputs = {vllm = "o.safetensors", far = "far.safetensors"}')
    found = gather_options(tmp_path / "case.toml", {}, Edge.COMMAND_LINE).engine_outputs
    assert found is not None
    assert [one.path for one in found] == [str(tmp_path / "o.safetensors"), "far.safetensors"]
