from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.numpy import save_file

from consistency.case import standard
from consistency.case.adapter_fit import check_files, read_adapter
from consistency.case.inputs_file import paragraphs
from consistency.case.load_path import LoadPath
from consistency.case.options import Edge, Options, Source
from consistency.case.preflight import prepare_case
from consistency.case.stage import Level
from consistency.case.stages import LEVELS
from consistency.errors import InputError, UsageError

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
PREFIX = "base_model.model."

Shapes = Mapping[str, tuple[int, ...]]


def save(path: Path, shapes: Shapes) -> None:
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, path, metadata={"format": "pt"})


def make_base(
    folder: Path,
    shapes: Shapes | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Write a base with two projections of 8 inputs and 12 outputs."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    plain: Shapes = {f"{m}.weight": (12, 8) for m in MODULES}
    save(folder / "model.safetensors", shapes or plain)
    return folder


def make_adapter(
    folder: Path,
    *,
    rank: int = 2,
    features: tuple[int, int] = (12, 8),
    modules: tuple[str, ...] = MODULES,
    shapes: Shapes | None = None,
    **config: Any,
) -> Path:
    folder.mkdir(parents=True)
    table = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in table.items() if v is not ...}))
    if shapes is None:
        a = {f"{PREFIX}{m}.lora_A.weight": (rank, features[1]) for m in modules}
        shapes = a | {f"{PREFIX}{m}.lora_B.weight": (features[0], rank) for m in modules}
    save(folder / "adapter_model.safetensors", shapes)
    return folder


def check(base: Path | None, adapter: Path | None) -> None:
    check_files(base, adapter, allow_pickle=False)


# --- what fits ------------------------------------------------------------------------------------------------------


def test_a_base_and_its_adapter_make_a_case(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "llama"), make_adapter(tmp_path / "mine")
    stages = (standard.ADAPTER, standard.MERGED)
    options = Options(base=str(base), adapter=str(adapter), stages=stages, load_paths=tuple(LoadPath), dtype="float16")
    case = prepare_case(options)
    assert (case.base, case.adapter, case.name) == (str(base), str(adapter), "llama + mine")
    assert case.stages == (standard.ADAPTER, standard.MERGED)
    assert case.load_paths == tuple(LoadPath)
    assert case.dtype == "float16"
    assert case.inputs is None


def test_the_level_chooses_what_the_options_leave_open(tmp_path: Path) -> None:
    base = str(make_base(tmp_path / "llama"))
    quick = prepare_case(Options(base=base, level=Level.QUICK))
    assert (quick.stages, quick.repeat, quick.load_paths, quick.adapter) == (
        LEVELS[Level.QUICK].stages,
        1,
        None,
        None,
    )
    assert prepare_case(Options(base=base, level=Level.THOROUGH)).repeat == 2
    assert prepare_case(Options(base=base, level=Level.THOROUGH, repeat=5)).repeat == 5


def test_relative_folders_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_base(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    assert prepare_case(Options(base="llama")).base == str((tmp_path / "llama").resolve())


@pytest.mark.parametrize(
    ("base", "adapter", "name"),
    [
        ("a/base", "a/adapter", "a"),
        ("a/base", "b/adapter", "a + b"),
        ("a", None, "a"),
        ("x", "y", "x + y"),
        ("hub/models--org--my-base/snapshots/0e9e39f249a16976918f6564b8830bc894c89659", "y", "org/my-base + y"),
        ("x", "models--org--my-lora/snapshots/0e9e39f", "x + org/my-lora"),
        ("models--gpt2/snapshots/0", None, "gpt2"),
    ],
)
def test_a_case_is_named_after_its_folders(base: str, adapter: str | None, name: str, tmp_path: Path) -> None:
    make_base(tmp_path / base)
    other = None if adapter is None else str(make_adapter(tmp_path / adapter))
    assert prepare_case(Options(base=str(tmp_path / base), adapter=other)).name == name
    assert prepare_case(Options(base=str(tmp_path / base), adapter=other, name="given")).name == "given"


Q = f"{PREFIX}{MODULES[0]}"
GATES = {f"model.layers.{n}.block_sparse_moe.gate.weight": (8, 12) for n in range(2)}
OF_GATES: dict[str, Any] = {
    "modules": tuple(f"model.layers.{n}.mlp.gate" for n in range(2)),
    "target_modules": ["gate"],
}
EXPERTS = f"{PREFIX}model.layers.0.mlp.experts"

FITS: dict[str, tuple[Shapes | None, dict[str, Any]]] = {
    "the names of the base": (None, {}),
    "a base that was saved bare": ({f"{m.removeprefix('model.')}.weight": (12, 8) for m in MODULES}, {}),
    "a base that stores its weights as in × out": ({f"{m}.weight": (8, 12) for m in MODULES}, {}),
    "weights that transformers fuses": ({f"model.layers.{i}.self_attn.qkv.weight": (36, 8) for i in range(2)}, {}),
    "a name that fits several layers of the base": (
        None,
        {"shapes": {f"{PREFIX}model.layers.5.self_attn.q_proj.lora_A.weight": (2, 99),
                    f"{PREFIX}model.layers.5.self_attn.q_proj.lora_B.weight": (99, 2),
                    f"{Q}.lora_A.weight": (2, 8), f"{Q}.lora_B.weight": (12, 2)}},
    ),
    "another method, which has no rank": (None, {"peft_type": "IA3", "r": ..., "shapes": {f"{PREFIX}x.ia3_l": (8, 1)}}),
    "target parameters, whose rank is that times experts": (
        None,
        {"target_modules": ..., "target_parameters": ["experts.down"], "shapes": {f"{Q}.lora_A.weight": (64, 8)}},
    ),
    "experts that the base's file has apart": (
        {f"model.layers.0.block_sparse_moe.experts.{n}.w2.weight": (12, 8) for n in range(8)},
        {"target_modules": [], "target_parameters": ["experts.down_proj"],
         "shapes": {f"{EXPERTS}.lora_A.weight": (16, 8), f"{EXPERTS}.lora_B.weight": (12, 16)}},
    ),
    "a layer whose parent transformers renames": (GATES, {**OF_GATES, "features": (8, 12)}),
    "the same, with other features": (GATES, {**OF_GATES, "features": (8, 13)}),
}  # fmt: skip


@pytest.mark.parametrize(("base", "adapter"), FITS.values(), ids=FITS)
def test_what_fits_or_is_left_to_the_worker(base: Shapes | None, adapter: dict[str, Any], tmp_path: Path) -> None:
    check(make_base(tmp_path / "base", base), make_adapter(tmp_path / "adapter", **adapter))


def test_a_rank_of_its_own_is_looked_up_in_the_pattern(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    check(base, make_adapter(tmp_path / "fits", rank=4, rank_pattern={"q_proj": 4}))
    with pytest.raises(InputError) as caught:
        check(base, make_adapter(tmp_path / "other", rank=3, rank_pattern={"q_proj": 4}))
    assert (caught.value.wanted or "").startswith("r=2 or 4 in ")


@pytest.mark.parametrize(
    "fields",
    [
        {"use_bdlora": {"nblocks": 2}},
        {"a_field_of_a_later_version": True},
        {"target_modules": "all-linear"},
        {"target_modules": None},
        {"target_modules": ["k_proj"]},  # the file's other tensors are ignored
        {"layers_to_transform": [1]},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize(("rank", "features"), [(4, (12, 8)), (2, (12, 4)), (2, (3, 5))])
def test_shapes_that_peft_may_want_are_left_to_peft(
    tmp_path: Path, fields: dict[str, Any], rank: int, features: tuple[int, int]
) -> None:
    base = make_base(tmp_path / "base")
    check(base, make_adapter(tmp_path / "adapter", rank=rank, features=features, **fields))


def test_a_rank_that_the_config_leaves_out_is_that_of_peft(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    check(base, make_adapter(tmp_path / "a", rank=8, r=...))
    with pytest.raises(InputError, match="was it trained with r=2"):
        check(base, make_adapter(tmp_path / "b", rank=2, r=...))


# --- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [(12, 16), (16, 8), (8, 12 + 1)])
def test_an_adapter_for_another_base_is_named_by_layer_and_features(features: tuple[int, int], tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter", features=features)
    with pytest.raises(InputError, match="the adapter is for another base") as caught:
        check(base, adapter)
    error = caught.value
    assert MODULES[0] in error.what
    assert str(features) in error.what
    assert "(12, 8)" in error.what
    assert error.where == str(adapter / "adapter_model.safetensors")
    assert error.wanted == f"in and out features of {MODULES[0]}.weight in model.safetensors"


def test_an_adapter_none_of_whose_layers_is_in_the_base_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", {"h.0.attn.c_attn.weight": (8, 24), "wte.weight": (10, 8)})
    with pytest.raises(InputError, match="none of its 2 layers is in the base") as caught:
        check(base, make_adapter(tmp_path / "adapter"))
    assert caught.value.got == MODULES[0]


@pytest.mark.parametrize(("features", "fits"), [((10, 8), True), ((11, 8), False)])
def test_a_head_tied_to_the_embedding_is_in_no_file(tmp_path: Path, features: tuple[int, int], fits: bool) -> None:
    base = make_base(tmp_path / "base", {"model.embed_tokens.weight": (10, 8)})
    adapter = make_adapter(tmp_path / "adapter", features=features, modules=("lm_head",), target_modules=["lm_head"])
    if fits:
        check(base, adapter)
    else:
        with pytest.raises(InputError, match="none of its 1 layers is in the base"):
            check(base, adapter)


def test_one_layer_of_another_size_is_enough(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", {f"{MODULES[0]}.weight": (12, 8), f"{MODULES[1]}.weight": (12, 9)})
    with pytest.raises(InputError, match="the adapter is for another base") as caught:
        check(base, make_adapter(tmp_path / "adapter"))
    assert MODULES[1] in caught.value.what


def test_a_rank_that_the_config_does_not_have_is_told_with_shape_and_place(tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", rank=4)
    with pytest.raises(InputError) as caught:
        check(make_base(tmp_path / "base"), adapter)
    error = caught.value
    assert error.what == (
        f"adapter file has shape (4, 8), its config wants (2, 8) at {MODULES[0]}.lora_A: was it trained with r=4?"
    )
    assert error.got == "rank 4"
    assert error.wanted == f"r=2 in {adapter / 'adapter_config.json'}"


def test_a_rank_of_lora_b_alone_is_told_too(tmp_path: Path) -> None:
    key = f"{PREFIX}{MODULES[0]}"
    shapes = {f"{key}.lora_A.weight": (2, 8), f"{key}.lora_B.weight": (12, 4)}
    with pytest.raises(InputError, match=r"has shape \(12, 4\), its config wants \(12, 2\) at .*lora_B"):
        check(make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter", shapes=shapes))


def test_tensors_without_elements_are_a_broken_file(tmp_path: Path) -> None:
    """As a rank of DeepSpeed ZeRO-3 saves what other ranks hold; the question was whether it is for this base."""
    shapes = {f"{Q}.lora_A.weight": (2, 8), f"{Q}.lora_B.weight": (0,)}
    with pytest.raises(InputError, match="file is broken: it has tensors without elements") as caught:
        read_adapter(make_adapter(tmp_path / "adapter", shapes=shapes), allow_pickle=False)
    assert caught.value.got == f"1 of shape (0,), such as {Q}.lora_B.weight"


def test_an_adapter_without_a_tensor_is_loaded_by_peft(tmp_path: Path) -> None:
    _, tensors = read_adapter(make_adapter(tmp_path / "adapter", shapes={}), allow_pickle=False)
    assert not tensors


# --- what was asked for ---------------------------------------------------------------------------------------------


def test_an_adapter_without_a_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--base is required with an adapter"):
        prepare_case(Options(adapter=str(make_adapter(tmp_path / "adapter"))))


@pytest.mark.parametrize("base", ["python:", "python:module", "python:a b:c", "python:a:b:c", "python:1a:b"])
def test_what_is_no_factory_is_refused(base: str) -> None:
    with pytest.raises(UsageError, match="not a model factory") as caught:
        prepare_case(Options(base=base))
    assert (caught.value.got, caught.value.wanted) == (base, "python:package.module:function")


@pytest.mark.parametrize("text", ["./none", "/none/there", "~/none-there", "a/b/c"])
def test_a_folder_that_is_not_there_is_no_hub_id(text: str) -> None:
    with pytest.raises(InputError, match="no such folder for the base"):
        prepare_case(Options(base=text))


@pytest.mark.parametrize("text", ["a b", "-x", "org/", "org/name?x", "org\\name"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="neither a folder nor a hub id for the base"):
        prepare_case(Options(base=text))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    file = make_base(tmp_path / "base") / "model.safetensors"
    with pytest.raises(InputError, match="the base must be a folder"):
        prepare_case(Options(base=str(file)))


def test_an_unknown_built_in_case_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match="there is no built-in case 'none'") as caught:
        prepare_case(Options(base="builtin:none"))
    assert caught.value.wanted == "one of llama, gpt2, bert"


@pytest.mark.process
def test_a_hub_id_is_told_to_be_offline(tmp_path: Path) -> None:
    # the hub's library reads its variables once, when it is imported
    script = (
        "from consistency.case.options import Options; from consistency.case.preflight import prepare_case\n"
        "from consistency.errors import InputError\n"
        "try:\n    prepare_case(Options(base='org/no-such-model'))\n"
        "except InputError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert (
        "no folder 'org/no-such-model' for the base, and it cannot be downloaded from the hub (HF_HUB_OFFLINE is set)"
        in done.stdout
    )
    assert "hint:   give the path of a local folder" in done.stdout


def test_a_folder_with_a_similar_name_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_base(tmp_path / "llama")
    with pytest.raises(InputError) as caught:
        prepare_case(Options(base=str(tmp_path / "lama")))
    assert caught.value.hint == f"did you mean {tmp_path}/llama?"
    with pytest.raises(InputError) as caught:
        prepare_case(Options(base=str(tmp_path / "other")))
    assert caught.value.hint is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError) as caught:
        prepare_case(Options(base="lama"))
    assert (caught.value.got, caught.value.hint) == ("it is not in the hub's cache", "did you mean ./llama?")


@pytest.mark.parametrize(
    ("status", "kind", "got"),
    [
        (403, GatedRepoError, "the repository is gated"),
        (404, RepositoryNotFoundError, "no such repository"),
        (None, LocalEntryNotFoundError, "the hub cannot be reached, and its cache does not hold it"),
    ],
)
def test_what_the_hub_refuses_is_told_in_words(
    status: int | None, kind: type[Exception], got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind("Got: ConnectError") if status is None else kind.__new__(kind)

    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(InputError, match="cannot be downloaded from the hub") as caught:
        prepare_case(Options(base="org/model"))
    assert caught.value.got == got
    assert caught.value.hint


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_an_inputs_file_is_checked(tmp_path: Path) -> None:
    base = str(make_base(tmp_path / "base"))
    good, empty, other = tmp_path / "in.safetensors", tmp_path / "empty.safetensors", tmp_path / "in.npz"
    save(good, {"input_ids": (1, 4)})
    save(empty, {})
    other.touch()
    assert prepare_case(Options(base=base, inputs=str(good))).inputs == str(good)
    for path, what in (
        (empty, "the inputs file holds no tensor"),
        (other, "inputs are a safetensors file"),
        (tmp_path / "none.safetensors", "no such inputs file"),
        (tmp_path, "no such inputs file"),
    ):
        with pytest.raises(InputError, match=what) as caught:
            prepare_case(Options(base=base, inputs=str(path)))
        assert caught.value.where == str(path)


def test_a_text_as_inputs_needs_utf8_and_a_tokenizer(tmp_path: Path) -> None:
    base, file = make_base(tmp_path / "base"), tmp_path / "in.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    for without in (str(base), "python:module:function"):
        with pytest.raises(InputError, match="the base has no tokenizer for a text"):
            prepare_case(Options(base=without, inputs=str(file)))
    (base / "tokenizer.model").touch()
    case = prepare_case(Options(base=str(base), inputs=str(file)))
    assert case.inputs == str(file)
    assert case.makes_inputs
    for text, what in (("Grüße".encode("latin-1"), "the inputs file is not UTF-8"), (b" \n", "holds no text")):
        file.write_bytes(text)
        with pytest.raises(InputError, match=what):
            prepare_case(Options(base=str(base), inputs=str(file)))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\nmore\n\n \n\ntwo", ["one\nmore", "two"]),
        ("\ufeffone\r\n\r\ntwo", ["one", "two"]),
    ],
)
def test_a_text_has_a_sequence_for_each_paragraph_or_for_each_line(text: str, parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(text, encoding="utf-8")
    assert paragraphs(tmp_path / "in.txt") == parts


@pytest.mark.process
def test_preflight_needs_no_torch(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path / "base"), make_adapter(tmp_path / "adapter")
    script = (
        "import sys; from pathlib import Path; from consistency.case.adapter_fit import check_files\n"
        f"check_files(Path({str(base)!r}), Path({str(adapter)!r}), allow_pickle=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("options", "where"),
    [(Options(load=True), "--load"), (Options(soak=600.0, timeout=600.0), "--timeout")],
)
def test_a_soak_and_what_contradicts_it(options: Options, where: str) -> None:
    with pytest.raises(UsageError, match="--for") as raised:
        prepare_case(options)
    assert raised.value.where == where


@pytest.mark.parametrize(
    ("edge", "stages", "adapter"),
    [(Edge.COMMAND_LINE, "--stages", "--adapter"), (Edge.PYTEST, "--consistency-stages", "--consistency-adapter")],
)
def test_a_stage_that_needs_an_adapter_is_refused_without_one(
    tmp_path: Path, edge: Edge, stages: str, adapter: str
) -> None:
    base = str(make_base(tmp_path / "base"))
    for asked in ((standard.ADAPTER,), (standard.BASE, standard.MERGED)):
        with pytest.raises(UsageError, match="without an adapter") as error:
            prepare_case(Options(base=base, stages=asked, source=Source(edge=edge)))
        assert error.value.where == stages
        assert str(error.value.wanted).startswith(adapter)
    assert standard.ADAPTER in prepare_case(Options(base=base)).stages, "of a level it is skipped, and said to be"


def test_prefixes_that_select_nothing_are_refused(tmp_path: Path) -> None:
    base = str(make_base(tmp_path / "base"))
    for only in ("adapter::model.layers.0", "memory"):
        with pytest.raises(UsageError, match="nothing of this is checked"):
            prepare_case(Options(base=base, level=Level.QUICK, only=(only,)))
    assert prepare_case(Options(base=base, only=("base::model",))).only == ("base::model",)
