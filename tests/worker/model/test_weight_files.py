from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from consistency.errors import InputError
from consistency.worker.model.weight_files import WeightFiles, file_names
from tests.worker.memory.resident_pages import resident

Shapes = dict[str, tuple[int, ...]]


def tensors(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(i)) for i, (name, shape) in enumerate(shapes.items())}


def match(model: Shapes, files: Shapes, folder: Path) -> dict[str, str]:
    save_file(tensors(files), folder / "model.safetensors")
    return file_names(tensors(model), WeightFiles.of_base(str(folder), allow_pickle=False))


# --- names ----------------------------------------------------------------------------------------------------------


Q, LARGE = (4, 4), (6, 6)
MATCHES: dict[str, tuple[Shapes, Shapes, dict[str, str]]] = {
    "a checkpoint of the bare model lacks the first component": (
        {"transformer.h.0.q.weight": Q, "transformer.h.1.q.weight": Q, "transformer.wte.weight": (9, 4)},
        {"h.0.q.weight": Q, "h.1.q.weight": Q, "wte.weight": (9, 4)},
        {
            "transformer.h.0.q.weight": "h.0.q.weight", "transformer.h.1.q.weight": "h.1.q.weight",
            "transformer.wte.weight": "wte.weight",
        },
    ),
    "a checkpoint of a larger model has further components": (
        {"layers.0.q.weight": Q},
        {"outer.model.layers.0.q.weight": Q, "head.weight": (9, 4)},
        {"layers.0.q.weight": "outer.model.layers.0.q.weight"},
    ),
    "another shape is another tensor": ({"model.norm.weight": (4,)}, {"model.norm.weight": (5,)}, {}),
    "another shape is another tensor, of another name": ({"model.norm.weight": (4,)}, {"norm.weight": (5,)}, {}),
    "where two tensors of the file have the ending neither is taken": (
        {"layers.0.q.weight": Q}, {"text.layers.0.q.weight": Q, "image.layers.0.q.weight": Q}, {},
    ),
    "where two tensors of the model have the ending neither gets it": (
        {"text.layers.0.q.weight": Q, "image.layers.0.q.weight": Q}, {"layers.0.q.weight": Q}, {},
    ),
    "whichever of them comes first": (
        {"image.layers.0.q.weight": Q, "text.layers.0.q.weight": Q}, {"layers.0.q.weight": Q}, {},
    ),
    "of two tensors of the model the one of that shape gets it": (
        {"text.layers.0.q.weight": Q, "image.layers.0.q.weight": LARGE},
        {"layers.0.q.weight": LARGE},
        {"image.layers.0.q.weight": "layers.0.q.weight"},
    ),
    "a tensor with its own name in the file does not give way": (
        {"outer.layers.0.q.weight": Q, "layers.0.q.weight": Q},
        {"layers.0.q.weight": Q},
        {"layers.0.q.weight": "layers.0.q.weight"},
    ),
    "the last component alone is no ending": ({"norm.weight": (4,)}, {"other.weight": (4,)}, {}),
    "the last component alone is no ending of another": ({"norm.weight": (4,)}, {"weight": (4,)}, {}),
    "layers of other numbers are kept apart": (
        {"model.layers.1.q.weight": Q}, {"layers.0.q.weight": Q, "layers.11.q.weight": Q}, {},
    ),
    "what no file holds stays unmatched, and equal names belong together": (
        {"model.layers.0.qkv.weight": (12, 4), "model.norm.weight": (4,), "scale": ()},
        {"model.layers.0.q.weight": Q, "model.norm.weight": (4,), "unused.weight": (3,), "scale": ()},
        {"model.norm.weight": "model.norm.weight", "scale": "scale"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MATCHES)
def test_tensors_of_the_model_are_matched_with_those_of_the_files(what: str, tmp_path: Path) -> None:
    model, files, matched = MATCHES[what]
    assert match(model, files, tmp_path) == matched


# --- contents -------------------------------------------------------------------------------------------------------


def test_tensors_are_read_in_the_dtype_and_the_bits_of_the_file(tmp_path: Path) -> None:
    saved = {
        "a": torch.tensor([1.0, -0.0, float("nan")], dtype=torch.bfloat16),
        "b": torch.arange(6).reshape(2, 3),
        "c": torch.tensor(1.5).to(torch.float8_e4m3fn),
    }
    save_file(saved, tmp_path / "adapter_model.safetensors")
    files = WeightFiles.of_adapter(str(tmp_path), allow_pickle=False)
    assert sorted(files.names()) == ["a", "b", "c"]
    for name, tensor in files.read_all().items():
        assert tensor.dtype == saved[name].dtype
        assert tensor.device.type == "cpu"
        assert files.shape(name) == tuple(tensor.shape) == tuple(saved[name].shape)
        assert tensor.view(-1).view(torch.uint8).tolist() == saved[name].view(-1).view(torch.uint8).tolist()
    header = files.header("a")
    assert header is not None
    assert (header.dtype, header.shape) == ("BF16", (3,))
    assert files.header("none") is None


def test_tensors_of_all_shards_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    index = '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    files = WeightFiles.of_base(str(tmp_path), allow_pickle=False)
    assert {name: tensor.tolist() for name, tensor in files.read_all().items()} == {"a": [1, 1], "b": [0, 0, 0]}


def test_a_pickle_is_read_only_where_that_was_allowed(tmp_path: Path) -> None:
    torch.save({"h.0.w": torch.ones(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="the weights are a pickle"):
        WeightFiles.of_base(str(tmp_path), allow_pickle=False)
    files = WeightFiles.of_base(str(tmp_path), allow_pickle=True)
    assert files.read("h.0.w").tolist() == [[1, 1], [1, 1]]
    assert (files.shape("h.0.w"), files.header("h.0.w")) == ((2, 2), None)
    assert file_names({"transformer.h.0.w": torch.zeros(2, 2)}, files) == {"transformer.h.0.w": "h.0.w"}


class Touch:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def test_a_pickle_that_was_allowed_still_runs_no_code(tmp_path: Path) -> None:
    torch.save({"w": Touch(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        WeightFiles.of_base(str(tmp_path), allow_pickle=True)
    assert not (tmp_path / "ran").exists()


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is resident of a file")
def test_what_was_read_and_let_go_does_not_stay_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consistency.worker.model.weight_files.WINDOW_BYTES", 4 * 2**20)
    path = tmp_path / "model.safetensors"
    given = {f"layers.{i}.weight": torch.full((2**18,), float(i)) for i in range(32)}  # of 1 MiB each
    save_file(given, path)
    files = WeightFiles.of_base(str(tmp_path), allow_pickle=False)
    held = files.read("layers.0.weight")
    most = 0
    for number, (name, tensor) in enumerate(given.items()):
        assert torch.equal(files.read(name), tensor)
        if number % 8 == 7:  # to ask takes longer than to read
            most = max(most, resident(path))
    assert 2**20 <= most <= 16 * 2**20  # the mapping that is read, the one of `held`, and what the kernel reads ahead
    assert torch.equal(held, given["layers.0.weight"]), "a tensor in use keeps its bytes"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux tells what is resident of a file")
def test_files_that_are_let_go_are_mapped_anew(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2**20), "b": torch.ones(2**20)}, path)
    files = WeightFiles.of_base(str(tmp_path), allow_pickle=False)
    assert float(files.read("a").sum()) == 2**20
    assert resident(path) >= 4 * 2**20
    files.let_go()
    assert resident(path) == 0
    assert float(files.read("b").sum()) == 2**20
