from __future__ import annotations

import contextlib
import json
import pickle
import shlex
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from consistency.case.checkpoint import LFS_MARK, Checkpoint, TensorHeader, read_checkpoint, read_header, read_json
from consistency.errors import InputError

LFS_POINTER = LFS_MARK + b"v1\noid sha256:" + b"ab" * 32 + b"\nsize 123456789\n"


def read(folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
    return read_checkpoint(folder, stem="model", pickle_stem="pytorch_model", allow_pickle=allow_pickle)


def save(path: Path, **shapes: tuple[int, ...]) -> Path:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def save_shards(folder: Path, weight_map: object = None) -> None:
    save(folder / "model-1.safetensors", a=(2, 3))
    save(folder / "model-2.safetensors", b=(4,), c=())
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    index = {"metadata": {}, "weight_map": names if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def raw_safetensors(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


# --- whole files ----------------------------------------------------------------------------------------------------


def test_names_shapes_and_dtypes_come_from_the_header(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"w": np.zeros((2, 3), np.float16), "s": np.zeros((), np.int64), "e": np.zeros((0, 4), np.bool_)}, file)
    found = read(tmp_path)
    assert found == Checkpoint(
        folder=tmp_path,
        files=(file,),
        tensors={
            "e": TensorHeader(name="e", shape=(0, 4), dtype="BOOL", file=file),
            "s": TensorHeader(name="s", shape=(), dtype="I64", file=file),
            "w": TensorHeader(name="w", shape=(2, 3), dtype="F16", file=file),
        },
    )


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F64", "U8"])
def test_dtypes_that_numpy_does_not_know_are_read_too(dtype: str, tmp_path: Path) -> None:
    size = {"BF16": 2, "F64": 8}.get(dtype, 1) * 6
    header = {"w": {"dtype": dtype, "shape": [2, 3], "data_offsets": [0, size]}}
    (tmp_path / "x.safetensors").write_bytes(raw_safetensors(header, bytes(size)))
    assert read_header(tmp_path / "x.safetensors")["w"].dtype == dtype


def test_a_file_comes_before_shards_and_a_pickle(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    save(tmp_path / "model.safetensors", whole=(1,))
    assert list(read(tmp_path).tensors) == ["whole"]
    (tmp_path / "model.safetensors").unlink()
    assert sorted(read(tmp_path).tensors) == ["a", "b", "c"]


def test_no_weights_says_what_is_there_instead(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(InputError, match=r"no weights: neither model\.safetensors nor an index of shards") as caught:
        read(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert caught.value.got == "config.json, weights.gguf"


def test_an_empty_folder_and_none_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    assert caught.value.got == "an empty folder"
    with pytest.raises(InputError) as caught:
        read(tmp_path / "none")
    assert caught.value.got == "no such folder"


# --- Git LFS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_told_with_the_size_and_the_command(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(LFS_POINTER)
    with pytest.raises(InputError, match="Git LFS pointer, not the weights") as caught:
        read(tmp_path, allow_pickle=True)
    assert caught.value.where == str(tmp_path / name)
    assert caught.value.got == f"{len(LFS_POINTER)} bytes of text"
    assert caught.value.wanted == "the 123456789 bytes that it stands for"
    assert "git lfs pull" in (caught.value.hint or "")


def test_a_git_lfs_pointer_without_a_size_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(LFS_MARK + b"v1\n")
    with pytest.raises(InputError, match="Git LFS pointer"):
        read(tmp_path)


def test_a_shard_that_is_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(LFS_POINTER)
    with pytest.raises(InputError, match="Git LFS pointer") as caught:
        read(tmp_path)
    assert caught.value.where == str(tmp_path / "model-2.safetensors")


# --- pickle ---------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("allow", [False, True])
def test_a_pickle_is_never_opened_here(allow: bool, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    if allow:
        found = read(tmp_path, allow_pickle=True)
        assert (found.pickled, dict(found.tensors)) == (True, {})
        assert found.files == (tmp_path / "pytorch_model.bin",)
    else:
        with pytest.raises(InputError):
            read(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_the_refusal_of_a_pickle_says_why_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    error = caught.value
    assert error.what == "the weights are a pickle (pytorch_model.bin), which can run code when it is read"
    assert (error.where, error.wanted) == (str(tmp_path / "pytorch_model.bin"), "model.safetensors")
    hint = error.hint or ""
    assert "weights_only=True" in hint
    assert "--allow-pickle" in hint
    words = shlex.split(hint.partition("convert it: ")[2].partition("; or allow")[0])
    assert words[:2] == ["python", "-c"]
    compile(words[2], "hint", "exec")  # what is to be pasted is Python
    assert words[3:] == ["pytorch_model.bin", "model.safetensors"]


def test_a_name_in_a_command_to_paste_stays_a_name(tmp_path: Path) -> None:
    name = '$(touch PWNED)"; x.bin'
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(InputError) as caught:
        read(tmp_path)
    hint = caught.value.hint or ""
    words = shlex.split(hint.partition("convert it: ")[2].partition("; or allow")[0])
    assert "touch" not in words[2]
    assert words[3:] in ([name, "model.safetensors"], [index.name, "model.safetensors"])


def test_a_sharded_pickle_is_refused_by_its_index(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}')
    with pytest.raises(InputError, match="the weights are a pickle"):
        read(tmp_path)
    with pytest.raises(InputError, match=r"a shard is missing: pytorch_model-1\.bin"):
        read(tmp_path, allow_pickle=True)
    shards = [tmp_path / f"pytorch_model-{i}.bin" for i in (1, 2)]
    for shard in shards:
        shard.write_bytes(b"")
    found = read(tmp_path, allow_pickle=True)
    assert found.pickled
    assert found.files == tuple(shards)


# --- damage ---------------------------------------------------------------------------------------------------------


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "model.safetensors", a=(3, 4), b=(5,))
    whole = file.read_bytes()
    for length in {0, 1, 7, 8, 9, 40, len(whole) - 4 * 17 - 1, len(whole) - 4 * 17, len(whole) - 20, len(whole) - 1}:
        file.write_bytes(whole[:length])
        with pytest.raises(InputError, match="cut short or corrupt") as caught:
            read(tmp_path)
        assert caught.value.where == str(file)
        assert (caught.value.got or "").startswith(f"{length} ")
        assert "checksum" in (caught.value.hint or "")
    file.write_bytes(whole)
    assert len(read(tmp_path).tensors) == 2


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 64,
        struct.pack("<Q", 2**40) + b"{}",
        raw_safetensors("text"),
        raw_safetensors({"w": entry([2], 0, 4)}, bytes(4)),
        raw_safetensors({"w": entry([1], 4, 8)}, bytes(8)),
        raw_safetensors({"w": entry([1], 0, 4)}, bytes(5)),
        raw_safetensors({"w": entry([1], 4, 0)}, bytes(4)),
        raw_safetensors({"w": entry([1], -4, 0)}, bytes(4)),
        raw_safetensors({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, bytes(12)),
        raw_safetensors({"w": entry([1], 0, 4, "X99")}, bytes(4)),
        raw_safetensors({"w": entry([2**62, 8], 0, 4)}, bytes(4)),
        struct.pack("<Q", 8) + b"\xff\xfe{}    ",
    ],
    ids=["ones", "huge-header", "text", "short", "hole", "trailing", "backwards", "negative", "overlapping", "dtype",
         "overflow", "utf8"],
)  # fmt: skip
def test_a_corrupt_header_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(InputError, match="cut short or corrupt"):
        read(tmp_path)


@given(data=st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_in_a_header_it_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    file = save(tmp_path / "model.safetensors", a=(3, 4), b=(5,))
    raw = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(raw)
    with contextlib.suppress(InputError):
        assert all(header.file == file for header in read_header(file).values())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the weights"):
        read_header(tmp_path / "none.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(InputError, match="cannot read the weights"):
        read(tmp_path)


# --- shards ---------------------------------------------------------------------------------------------------------


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    save_shards(tmp_path)
    found = read(tmp_path)
    assert found.files == (tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors")
    assert {name: (header.shape, header.file.name) for name, header in found.tensors.items()} == {
        "a": ((2, 3), "model-1.safetensors"),
        "b": ((4,), "model-2.safetensors"),
        "c": ((), "model-2.safetensors"),
    }


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(InputError, match=r"a shard is missing: model-2\.safetensors") as caught:
        read(tmp_path)
    assert caught.value.got == "model-1.safetensors, model.safetensors.index.json"


def test_a_tensor_that_no_shard_holds_is_named(tmp_path: Path) -> None:
    save_shards(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors", "lost": "model-1.safetensors"})
    with pytest.raises(InputError, match="1 tensors of the index are in no shard") as caught:
        read(tmp_path)
    assert (caught.value.got, caught.value.wanted) == ("lost", "model-1.safetensors")


@pytest.mark.parametrize("name", ["../model-1.safetensors", "/etc/passwd", "sub/model-1.safetensors", "..", "", "."])
def test_a_shard_outside_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    save(tmp_path / "model-1.safetensors", a=(2, 3))
    save_shards(home, {"a": name})
    with pytest.raises(InputError):
        read(home)


@pytest.mark.parametrize("weight_map", [["a"], {"a": 1}, {"a": None}, "model-1.safetensors", 7])
def test_an_index_of_another_form_is_refused(weight_map: object, tmp_path: Path) -> None:
    save_shards(tmp_path, weight_map)
    with pytest.raises(InputError, match="weight_map must map tensor names to files of the same folder"):
        read(tmp_path)


@pytest.mark.parametrize("weight_map", [{}, []])
def test_an_index_without_tensors_is_refused(weight_map: object, tmp_path: Path) -> None:
    save_shards(tmp_path, weight_map)
    with pytest.raises(InputError, match="lacks the field 'weight_map'"):
        read(tmp_path)


# --- JSON -----------------------------------------------------------------------------------------------------------


def test_an_object_is_read_with_the_fields_that_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"r": 0, "model_type": "llama", "other": null}')
    assert read_json(path, needed=("model_type", "r")) == {"r": 0, "model_type": "llama", "other": None}


@pytest.mark.parametrize("text", ['{"x": 1}', '{"r": null, "x": 1}', '{"r": "", "x": 1}', '{"r": [], "x": 1}'])
def test_a_field_that_is_missing_or_empty_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"adapter_config\.json lacks the field 'r'") as caught:
        read_json(path, needed=("x", "r"))
    assert "x" in (caught.value.got or "")


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"r": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b"null", "is not a JSON object"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(InputError, match=what) as caught:
        read_json(tmp_path / "config.json")
    assert caught.value.where == str(tmp_path / "config.json")


def test_a_missing_file_says_what_the_folder_holds(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").touch()
    with pytest.raises(InputError, match=r"no config\.json in the folder") as caught:
        read_json(tmp_path / "config.json")
    assert caught.value.got == ", ".join(f"{i}.txt" for i in range(8)) + " …"
