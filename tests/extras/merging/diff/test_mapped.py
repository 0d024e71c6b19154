"""Weight files and folders of every kind are read, and what is none is refused in words."""

from __future__ import annotations

import collections
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from consistency.case.checkpoint import read_header
from consistency.errors import InputError
from consistency.extras.merging.diff import mapped
from consistency.extras.merging.diff.mapped import open_weights
from consistency.extras.merging.diff.weights import diff_weights
from tests.made_weights import Given, f32, put

ALL: dict[str, Given] = {f"layers.{i}.weight": f32(*range(i, i + 5)) for i in range(6)}


def refused(path: Path, match: str, *, allow_pickle: bool = False) -> InputError:
    with pytest.raises(InputError, match=match) as caught, open_weights(path, allow_pickle=allow_pickle):
        pass
    assert str(path.name) in str(caught.value.where)
    return caught.value


def sharded(folder: Path, tensors: dict[str, Given], *, ending: str = "safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    parts = [dict(list(tensors.items())[i::2]) for i in range(2)]
    names = {}
    stem = "model" if ending == "safetensors" else "pytorch_model"
    for number, part in enumerate(parts, start=1):
        file = folder / f"{stem}-{number:05}-of-00002.{ending}"
        put(file, part) if ending == "safetensors" else pickled(file, part)
        names.update(dict.fromkeys(part, file.name))
    index = folder / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def pickled(path: Path, tensors: dict[str, Given], *, legacy: bool = False) -> Path:
    import torch

    state = collections.OrderedDict(
        (name, torch.frombuffer(bytearray(raw), dtype=torch.float32).reshape(tuple(shape)))
        for name, (_, shape, raw) in tensors.items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    return path


def same(a: Path, b: Path, *, count: int = len(ALL)) -> None:
    found = diff_weights(a, b, allow_pickle=True)
    assert found.verdict == "consistent"
    assert len(found.tensors) == count


# what can be read


def test_what_a_file_says_of_its_tensors(tmp_path: Path) -> None:
    tensors: dict[str, Given] = {"b": ("BF16", (1, 2), b"\1\2\3\4"), "a": ("F6_E2M3", (4,), b"abc"), "c": f32(1)}
    with open_weights(put(tmp_path / "x.safetensors", tensors)) as found:
        assert list(found) == ["b", "a", "c"], "in the order of the file"
        assert {n: (t.dtype, t.shape, t.raw.tobytes()) for n, t in found.items()} == {
            "b": ("bfloat16", (1, 2), b"\1\2\3\4"), "a": ("F6_E2M3", (4,), b"abc"), "c": ("float32", (1,), f32(1)[2]),
        }  # fmt: skip
        assert not found["c"].raw.flags.writeable


def test_a_folder_of_shards_is_its_single_file(tmp_path: Path) -> None:
    index = sharded(tmp_path / "shards", ALL)
    single = put(tmp_path / "whole" / "model.safetensors", ALL)
    same(index.parent, single)
    same(index, single.parent)
    wrong = put(tmp_path / "wrong.safetensors", {**ALL, "layers.3.weight": f32(0, 0, 0, 0, 1)})
    assert diff_weights(index, wrong).verdict == "inconsistent"


def test_an_index_that_is_named_is_what_is_read(tmp_path: Path) -> None:
    """Beside an index may lie a whole file, of which a folder's reader takes that one."""
    index = sharded(tmp_path, ALL)
    put(tmp_path / "model.safetensors", {"other": f32(1)})
    with open_weights(index) as found:
        assert found.keys() == ALL.keys()
    with open_weights(tmp_path) as found:
        assert list(found) == ["other"]
    other = index.rename(tmp_path / "diffusion.safetensors.index.fp16.json")
    with open_weights(other) as found:
        assert found.keys() == ALL.keys()


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_is_read_where_that_is_allowed(tmp_path: Path, legacy: bool) -> None:
    path = pickled(tmp_path / "model" / "pytorch_model.bin", ALL, legacy=legacy)
    assert "--allow-pickle" in str(refused(path, "pickle"))
    same(path, put(tmp_path / "a.safetensors", ALL))
    same(path.parent, put(tmp_path / "a.safetensors", ALL))


def test_shards_of_pickles(tmp_path: Path) -> None:
    index = sharded(tmp_path / "shards", ALL, ending="bin")
    with pytest.raises(InputError, match="pickle"), open_weights(index):
        pass
    same(index, put(tmp_path / "a.safetensors", ALL))
    same(index.parent, put(tmp_path / "a.safetensors", ALL))


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_an_adapters_folder_is_told_from_a_models(tmp_path: Path, ending: str) -> None:
    adapter = tmp_path / "adapter"
    path = adapter / f"adapter_model.{ending}"
    put(path, ALL) if ending == "safetensors" else pickled(path, ALL)
    (adapter / "adapter_config.json").write_text("{}")
    put(adapter / "model.safetensors", {"other": f32(1)})  # what some trainers leave beside it
    same(adapter, put(tmp_path / "a.safetensors", ALL))


def test_a_pickles_tensors_are_all_found(tmp_path: Path) -> None:
    """A checkpoint that holds its weights one level down must not look as if it held none of them."""
    import torch

    weight = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    torch.save({"epoch": 3, "state_dict": {"w": weight.T}, "ema": [weight[:, 1]]}, tmp_path / "a.ckpt")
    with open_weights(tmp_path / "a.ckpt", allow_pickle=True) as found:
        assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
            "state_dict.w": ("bfloat16", (3, 2)), "ema.0": ("bfloat16", (2,)),
        }  # fmt: skip
        assert (
            found["state_dict.w"].raw.view("<u2").tolist() == weight.T.contiguous().view(torch.int16).flatten().tolist()
        )


def test_two_tensors_of_one_name_in_a_pickle_are_refused(tmp_path: Path) -> None:
    import torch

    torch.save({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "two tensors of one name", allow_pickle=True)


# what cannot


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.mark}",))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    path, mark = tmp_path / "model.bin", tmp_path / "owned"
    path.write_bytes(pickle.dumps({"w": Evil(mark)}, protocol))
    error = refused(path, "cannot read the pickle", allow_pickle=True)
    assert not mark.exists()
    assert "set to `False`" not in str(error), "that is no advice to give"
    pickle.loads(path.read_bytes())  # the test can fail
    assert mark.exists()


def test_spoilt_pickles_are_refused_in_words(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for legacy in (False, True):
        raw = pickled(tmp_path / "good.bin", ALL, legacy=legacy).read_bytes()
        for n in range(60):
            spoilt = bytearray(raw[: rng.integers(1, len(raw))] if n % 3 == 0 else raw)
            for at in rng.integers(0, min(len(spoilt), 700), 3):
                spoilt[at] = rng.integers(256)
            path = tmp_path / "bad.bin"
            path.write_bytes(bytes(spoilt))
            with suppress(InputError), open_weights(path, allow_pickle=True):
                pass


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch 2.14 says so of each that it reads
@pytest.mark.parametrize("kind", ["list", "sparse", "cycle"])
def test_what_is_no_state_dict(tmp_path: Path, kind: str) -> None:
    import torch

    path, cycle = tmp_path / "a.pt", dict[str, object]()
    cycle["self"] = cycle
    value: object = {
        "list": [torch.zeros(2)],
        "sparse": {"w": torch.eye(3).to_sparse()},
        "cycle": cycle,
    }[kind]
    torch.save(value, path)
    refused(path, "no state dict|not a plain tensor|contains itself", allow_pickle=True)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such file or folder")
    refused(put(tmp_path / "a.safetensors", ALL) / "below", "no such file or folder")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    refused(tmp_path, "no weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter_model.safetensors" in str(refused(tmp_path, "no weights"))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 100, -1, -20])
def test_a_file_that_was_cut(tmp_path: Path, keep: int) -> None:
    path = put(tmp_path / "a.safetensors", ALL)
    os.truncate(path, keep if keep >= 0 else path.stat().st_size + keep)
    refused(path, "cut short or corrupt")


@pytest.mark.parametrize("now", [{"other": f32(1)}, {n: f32(1) for n in ALL}, {}])
def test_a_file_that_is_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: dict[str, Given]
) -> None:
    """Shapes of the one and bytes of the other would be nonsense, and bytes behind the end a dead process."""
    path = put(tmp_path / "a.safetensors", ALL)

    def then_replaced(file: Path) -> object:
        found = read_header(file)
        put(file, now)
        return found

    monkeypatch.setattr(mapped, "read_header", then_replaced)
    refused(path, "replaced while it was opened")


def test_a_file_that_is_cut_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "a.safetensors", ALL)

    def then_cut(file: Path) -> object:
        found = read_header(file)
        os.truncate(file, file.stat().st_size - 20)
        return found

    monkeypatch.setattr(mapped, "read_header", then_cut)
    refused(path, "replaced while it was opened")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    refused(tmp_path / "pipe.safetensors", "neither a file nor a folder")
    refused(Path("/dev/zero"), "neither a file nor a folder")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Root may read everything: be somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    path = put(tmp_path / "closed" / "a.safetensors", ALL)
    path.parent.chmod(0)
    with as_nobody():
        refused(path, "cannot read the weights")
    path.parent.chmod(0o755)
    path.chmod(0)
    with as_nobody():
        refused(path, "cannot read the weights")
