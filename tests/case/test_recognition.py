"""What was given for a base or an adapter is recognised for what it is: one sentence, and what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from consistency.case.adapter_fit import check_files
from consistency.case.recognition import in_place_of_weights, other_file, peft_methods, refuse_adapter_without_config
from consistency.errors import InputError

BASE, ADAPTER = "config.json", "adapter_config.json"
CONTENT: Mapping[str, bytes] = {
    BASE: b'{"model_type": "llama"}',
    ADAPTER: b'{"peft_type": "LORA", "r": 2, "target_modules": ["q"], "base_model_name_or_path": "org/llama"}',
}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4567\n"


def weights(path: Path, *names: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: np.zeros((2, 2), np.float32) for name in names or ("a",)}, path, metadata={"format": "pt"})


def put(folder: Path, names: Iterable[str]) -> Path:
    """Make a folder with files of these names; real headers for safetensors, `{}` for other JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            weights(path)
        elif not name.endswith("/"):
            path.write_bytes(CONTENT.get(path.name, b"{}"))
    return folder


def refused(base: Path | None, adapter: Path | None) -> InputError:
    with pytest.raises(InputError) as caught:
        check_files(base, adapter, allow_pickle=False)
    return caught.value


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

FOLDERS: Mapping[str, tuple[str, tuple[str, ...], str, str]] = {
    "empty base": ("base", (), "an empty folder was given for the base model", "stopped?"),
    "empty adapter": ("adapter", (), "an empty folder was given for the adapter", "stopped?"),
    "adapter as base": (
        "base", (ADAPTER, "adapter_model.safetensors"), "this is an adapter, not a base model", "--base: org/llama",
    ),
    "merged model as adapter": (
        "adapter", (BASE, "model.safetensors"), "this is a whole model, not an adapter", "`consistency check-merged`",
    ),
    "full training checkpoint as adapter": (
        "adapter", (BASE, "model.safetensors", "optimizer.pt", "trainer_state.json"),
        "this is a training checkpoint of a whole model, not an adapter", "merged into a model",
    ),
    "GGUF": ("base", ("llama-q4.gguf",), "GGUF weights of llama.cpp (llama-q4.gguf), not a base model", "converted"),
    "GGUF adapter": ("adapter", ("lora.gguf",), "GGUF weights of llama.cpp (lora.gguf), not an adapter", "converted"),
    "ONNX": ("base", ("model.onnx",), "an ONNX model (model.onnx), not a base model of transformers", "converted from"),
    "TensorFlow": ("base", ("tf_model.h5",), "TensorFlow weights", "converted from"),
    "FSDP": ("base", ("__0_0.distcp", ".metadata"), "a distributed checkpoint of PyTorch", "merge-weights"),
    "DeepSpeed": ("base", ("global_step5/x", "zero_to_fp32.py"), "a checkpoint of DeepSpeed", "zero_to_fp32.py"),
    "Meta": ("base", ("consolidated.00.pth", "params.json"), "their maker's own layout", "_weights_to_hf"),
    "diffusers": (
        "base", ("model_index.json", "unet/config.json", "vae/config.json"), "diffusers", "python:package.module",
    ),
    "diffusers LoRA": ("adapter", ("pytorch_lora_weights.safetensors",), "LoRA of diffusers", ""),
    "tokenizer as base": ("base", TOKENIZER, "this folder holds a tokenizer, not a base model", "own folder"),
    "tokenizer as adapter": ("adapter", (*TOKENIZER, "README.md"), "a tokenizer, not an adapter", "own folder"),
    "weights without config": (
        "base", ("model.safetensors",), "weights without config.json", "copy config.json into the folder",
    ),
    "adapter without config": ("adapter", ("adapter_model.safetensors",), "weights without adapter_config", "copy"),
    "checkpoints inside": (
        "adapter", (f"checkpoint-500/{ADAPTER}", f"checkpoint-1000/{ADAPTER}"),
        "the adapter is not in this folder, but in one inside it", "checkpoint-1000",
    ),
    "adapter inside a base": (
        "adapter", (BASE, "model.safetensors", f"lora/{ADAPTER}"), "but in one inside it", "lora",
    ),
    "cache of the hub": (
        "base", (f"snapshots/0a1b/{BASE}", "refs/main", "blobs/x"), "but in one inside it", "snapshots/0a1b",
    ),
    "state of a training": ("adapter", ("optimizer.pt", "trainer_state.json"), "a training checkpoint without", ""),
    "weights under another name": (
        "base", (BASE, "weights.safetensors"),
        "no weights: neither model.safetensors nor an index of shards, but weights under another name",
        "rename weights.safetensors to model.safetensors",
    ),
    "adapter's weights under another name": (
        "adapter", (ADAPTER, "lora.safetensors"), "weights under another name", "to adapter_model.safetensors",
    ),
    "shards without an index": (
        "base", (BASE, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
        "2 other safetensors files and no index", "model.safetensors.index.json",
    ),
    "GGUF beside a config": ("base", (BASE, "q4.gguf"), "but GGUF weights of llama.cpp (q4.gguf)", "converted from"),
    "config alone": ("adapter", (ADAPTER,), "but a config alone", "download the weights"),
    "config and tokenizer": ("base", (BASE, *TOKENIZER), "but a config and a tokenizer alone", "download"),
    "checkpoint without weights": ("adapter", (ADAPTER, "optimizer.pt"), "but the state of a training", "saved"),
    "another pickle": ("base", (BASE, "weights.pth"), "but pickled weights (weights.pth)", "save_pretrained()"),
}  # fmt: skip


@pytest.mark.parametrize(("role", "names", "what", "hint"), FOLDERS.values(), ids=FOLDERS)
def test_a_folder_is_recognised(role: str, names: tuple[str, ...], what: str, hint: str, tmp_path: Path) -> None:
    folder = put(tmp_path / "given", names)
    error = refused(folder, None) if role == "base" else refused(None, folder)
    assert what in error.what
    assert hint in (error.hint or "")
    assert str(folder) in (error.where or "")
    assert error.exit_status == 2


@pytest.mark.parametrize(
    ("names", "found"),
    [(TOKENIZER, "a tokenizer alone"), ((BASE, "README.md"), "a config alone"), (("README.md",), ""), (("x.txt",), "")],
)
def test_what_is_there_in_place_of_weights(names: tuple[str, ...], found: str, tmp_path: Path) -> None:
    """A comparison of files asks for weights without a config."""
    assert in_place_of_weights(put(tmp_path / "given", names), "model.safetensors")[0] == found


def test_base_and_adapter_that_are_swapped_are_told_with_the_command(tmp_path: Path) -> None:
    base, adapter = put(tmp_path / "m", (BASE, "model.safetensors")), put(tmp_path / "a", (ADAPTER,))
    error = refused(adapter, base)
    assert (error.what, error.hint) == ("base and adapter are swapped", f"--base {base} --adapter {adapter}")


def test_a_checkpoint_of_a_training_with_its_weights_is_no_error(tmp_path: Path) -> None:
    beside = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "training_args.bin", "rng_state.pth", "README.md")
    base = put(tmp_path / "checkpoint-500", (BASE, "model.safetensors", *beside))
    adapter = put(tmp_path / "lora" / "checkpoint-500", (*beside, *TOKENIZER))
    (adapter / ADAPTER).write_text('{"peft_type": "IA3"}')
    weights(adapter / "adapter_model.safetensors", "base_model.model.a.ia3_l")
    check_files(base, adapter, allow_pickle=False)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"GGUF\x03\0\0\0" + bytes(90), "GGUF weights"),
        (b"PK\x03\x04\x14\0\x08\x08" + bytes(90), "a pickle of torch.save"),
        (b"\x80\x02}q\x01X\x03\0" + bytes(90), "a pickle"),
        (b"<!DOCTYPE html><title>Sign in</title>", "a web page"),
        (b'{"error": "Repository not found"}', "a JSON text"),
        (bytes(500), "zeros"),
    ],
)
def test_a_file_that_is_no_safetensors_is_told_as_what_it_is(raw: bytes, what: str, tmp_path: Path) -> None:
    folder = put(tmp_path, (BASE,))
    (folder / "model.safetensors").write_bytes(raw)
    error = refused(folder, None)
    assert f"this is no safetensors file but {what}" in error.what
    assert error.where == str(folder / "model.safetensors")
    assert error.hint


def test_a_file_that_is_cut_short_is_told_by_how_much(tmp_path: Path) -> None:
    folder = put(tmp_path, (BASE, "model.safetensors"))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-3])
    assert (refused(folder, None).got or "").startswith(f"{len(whole) - 3} of {len(whole)} bytes")


def test_the_start_of_every_sound_header_is_left_alone() -> None:
    """The lowest byte of a header's length may be the first one of any other format."""
    for first in range(256):
        assert other_file(bytes((first, 2, 0, 0, 0, 0, 0, 0)) + b'{"__meta') is None
        assert other_file(bytes((first or 1, 2, 0, 0, 0))) is None


def test_a_pointer_of_git_lfs_in_place_of_a_config_is_told(tmp_path: Path) -> None:
    folder = put(tmp_path, (BASE, "model.safetensors"))
    (folder / BASE).write_bytes(LFS)
    error = refused(folder, None)
    assert (error.what, error.wanted) == (
        "this is a Git LFS pointer, not the file", "the 4567 bytes that it stands for",
    )  # fmt: skip


# --- methods, and tensors that the config asks for --------------------------------------------------------------------


def adapter_of(folder: Path, *names: str, **config: object) -> Path:
    folder.mkdir(parents=True)
    (folder / ADAPTER).write_text(json.dumps({"peft_type": "IA3", **config}))
    weights(folder / "adapter_model.safetensors", *names)
    return folder


def test_a_method_that_the_installed_peft_does_not_know(tmp_path: Path) -> None:
    error = refused(None, adapter_of(tmp_path / "a", "x", peft_type="FINEGATES", peft_version="9.9.0"))
    assert "does not know the adapter's method FINEGATES" in error.what
    assert error.got == "peft_type FINEGATES, saved by PEFT 9.9.0"
    assert "LORA" in (error.wanted or "")
    assert "pip install -U peft" in (error.hint or "")
    assert refused(None, adapter_of(tmp_path / "b", "x", peft_type="lora")).hint == "did you mean LORA?"


def test_methods_are_those_of_peft_itself() -> None:
    from peft import PeftType

    assert set(peft_methods()) == {one.value for one in PeftType}


def test_without_a_source_of_peft_its_methods_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert peft_methods() == ()
    check_files(None, adapter_of(tmp_path / "a", "x", peft_type="NEW"), allow_pickle=False)


HEAD = ("classifier.dense.weight", "classifier.dense.bias", "classifier.out_proj.weight")
SAVED = tuple(f"base_model.model.{name}" for name in HEAD)


def base_of(folder: Path, *names: str, architectures: object = ("RobertaForSequenceClassification",)) -> Path:
    put(folder, (BASE,))
    (folder / BASE).write_text(json.dumps({"model_type": "roberta", "architectures": architectures}))
    weights(folder / "model.safetensors", *names)
    return folder


def test_a_file_without_a_tensor_that_its_config_asks_for(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "roberta.x.weight", *HEAD)
    whole = adapter_of(tmp_path / "whole", *SAVED, modules_to_save=["classifier", "score"])
    check_files(base, whole, allow_pickle=False)
    modules = ["classifier", "score"]
    error = refused(base, adapter_of(tmp_path / "part", *SAVED[1:], modules_to_save=modules, task_type="SEQ_CLS"))
    assert error.what == "the adapter's file lacks a tensor that its config asks for: classifier.dense.weight"
    assert "modules_to_save" in (error.wanted or "")
    nothing = adapter_of(tmp_path / "nothing", "base_model.model.roberta.x.ia3_l", modules_to_save=modules)
    assert "its config asks for: classifier." in refused(base, nothing).what


@pytest.mark.parametrize(
    ("of_base", "modules", "more"),
    [
        (("roberta.x.weight",), ["classifier"], {}),  # a head that the base does not have
        (("lm_head.weight",), ["lm_head"], {"ensure_weight_tying": True}),  # saved once
        (("my_classifier.weight",), ["classifier"], {}),  # another module
        (("mlp.experts.0.up.weight",), ["mlp"], {}),  # transformers may fuse these on loading
        (HEAD, None, {}),
        (HEAD, "all", {}),
        (HEAD, ["classifier"], {"task_type": "TOKEN_CLS"}),  # loaded as another class
        (HEAD, ["classifier"], {"auto_mapping": {"base_model_class": "RobertaForMaskedLM"}}),
    ],
)
def test_what_the_headers_cannot_tell_is_left_to_the_worker(
    of_base: tuple[str, ...], modules: object, more: dict[str, object], tmp_path: Path
) -> None:
    adapter = adapter_of(tmp_path / "a", "base_model.model.x.ia3_l", modules_to_save=modules, **more)
    check_files(base_of(tmp_path / "base", *of_base), adapter, allow_pickle=False)


def test_a_head_of_another_form_is_left_to_the_worker(tmp_path: Path) -> None:
    adapter = adapter_of(tmp_path / "a", "base_model.model.classifier.weight", modules_to_save=["classifier"])
    check_files(base_of(tmp_path / "base", *HEAD), adapter, allow_pickle=False)
    adapter = adapter_of(tmp_path / "b", "base_model.model.x.ia3_l", modules_to_save=["classifier"])
    for number, classes in enumerate((None, [], ["A", "B"], "A")):
        check_files(base_of(tmp_path / str(number), *HEAD, architectures=classes), adapter, allow_pickle=False)


@pytest.mark.process
def test_recognition_needs_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom consistency.case.recognition import check_method\nfrom consistency.errors import InputError\n"
        "try:\n    check_method('FINEGATES', None, {})\nexcept InputError:\n    sys.exit('torch' in sys.modules)\n"
        "sys.exit(2)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], check=False, timeout=60, env=dict(os.environ))
    assert done.returncode == 0


def test_a_part_of_a_pipeline_is_told_as_the_pipeline_is(tmp_path: Path) -> None:
    """Its config has no model_type, and that it lacks one told nobody what it is."""
    folder = put(tmp_path / "unet", (BASE, "diffusion_pytorch_model.safetensors"))
    (folder / BASE).write_text('{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30.0"}')
    assert "UNet2DConditionModel of diffusers" in refused(folder, None).what


@pytest.mark.parametrize(
    ("file", "key", "config", "message"),
    [
        ("lora.safetensors", "lora_unet_mid_block.lora_down.weight", None, "a LoRA of kohya's scripts"),
        ("adapters.safetensors", "model.layers.0.self_attn.q_proj.lora_a", '{"rank": 8}', "a LoRA of MLX"),
        ("pytorch_lora_weights.safetensors", "unet.mid_block.lora.down.weight", None, "a LoRA of diffusers"),
        ("adapter_model.safetensors", "base_model.model.q.lora_A.weight", CONTENT[ADAPTER].decode(), None),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_an_adapter_of_another_trainer_is_named_with_its_conversion(
    tmp_path: Path, file: str, key: str, config: str | None, message: str | None, *, is_file: bool
) -> None:
    folder = tmp_path / "adapter"
    weights(folder / file, key)
    if config is not None:
        (folder / ADAPTER).write_text(config)
    if message is None:
        if not is_file:
            refuse_adapter_without_config(folder)
        return
    with pytest.raises(InputError, match=message) as raised:
        refuse_adapter_without_config(folder / file if is_file else folder)
    assert raised.value.hint is not None
    assert "convert" in raised.value.hint or "load_lora_weights" in raised.value.hint
