"""`consistency check-merged` as a user has it: what it prints, its files and statuses, and the Python function."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file, save_file

import consistency
from consistency.cli.main import main
from consistency.errors import InputError, UsageError
from consistency.extras.merging.check_merged.causes import MergeCause
from tests.extras.merging.check_merged.made_merges import Case, change_adapter, llama, write


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return llama(tmp_path)


def merged(case: Case, *, right: bool) -> Path:
    tensors = case.right()
    if not right:
        for name in list(case.deltas)[:2]:
            tensors[name] = case.tensors[name]
    return write(case.base.parent / "merged", tensors, json.loads((case.base / "config.json").read_text()))


def command(case: Case, folder: Path, *more: str) -> list[str]:
    return ["check-merged", "--base", str(case.base), "--adapter", str(case.adapter), str(folder), *more]


def test_a_right_one(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(case, merged(case, right=True))) == 0
    shown = capsys.readouterr().out
    assert "MERGED   14 of 14 adapted tensors hold base + adapter; the 7 others are the base's" in shown


def test_a_wrong_one_with_its_files(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = merged(case, right=False)
    out, junit = tmp_path / "report", tmp_path / "junit.xml"
    assert main(command(case, folder, "--out", str(out), "--junit", str(junit))) == 1
    shown = capsys.readouterr().out
    assert "NOT MERGED WHOLE   12 of 14 adapted tensors hold base + adapter; 2 hold the base alone" in shown
    assert f"report: {out}" in shown
    saved = json.loads((out / "report.json").read_text())
    assert saved["verdict"] == "inconsistent"
    (finding,) = (one for one in saved["findings"] if one["severity"] == "error")
    assert (finding["kind"], len(finding["tensors"])) == ("not-merged", 2)
    assert all((out / f"report.{kind}").exists() for kind in ("html", "md"))
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("failures"), suite.get("errors")) == ("1", "0")
    assert main(["show", str(out), "--redact", "--json"]) == 0
    redacted = capsys.readouterr().out
    assert str(tmp_path) not in redacted
    assert "layers.0.self_attn.q_proj" in redacted


def test_an_element_that_nothing_explains_is_not_the_base_alone(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    folder = merged(case, right=True)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(iter(case.deltas))
    tensors[name][0, 0] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(command(case, folder)) == 1
    shown = capsys.readouterr().out
    assert "WRONGLY MERGED   13 of 14 adapted tensors hold base + adapter; 1 is something else" in shown


def test_json(case: Case, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(command(case, merged(case, right=False), "--json")) == 1
    found = json.loads(capsysbinary.readouterr().out)
    wrong = [row for row in found["outcomes"] if row["status"] == "outside"]
    assert {row["evidence"]["role"] for row in wrong} == {"adapted"}
    assert {tuple(row["evidence"]["causes"]) for row in wrong} == {("not-merged",)}


def test_without_an_adapter(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-merged", "--base", str(case.base), str(merged(case, right=True))]) == 0
    shown = capsys.readouterr().out
    assert "COMPARED   14 of 21 tensors differ from the base" in shown
    assert "14 tensors by rank 4" in shown


def test_bad_input(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(case, tmp_path / "nowhere")) == 2
    assert main(command(case, case.base, "--out", str(case.base / "report"))) == 2
    assert "inside a folder of weights" in capsys.readouterr().err


def test_the_function(case: Case, tmp_path: Path) -> None:
    right = consistency.check_merged(merged(case, right=True), base=case.base, adapter=case.adapter)
    consistency.assert_consistent(right)
    wrong = consistency.check_merged(
        merged(case, right=False), base=case.base, adapter=case.adapter, out=tmp_path / "r"
    )
    assert wrong.findings[0].kind == MergeCause.NOT_MERGED
    with pytest.raises(AssertionError, match="12 of 14 adapted tensors hold base"):
        consistency.assert_consistent(wrong)
    with pytest.raises(UsageError):
        consistency.check_merged(case.base, base=case.base, out=case.base / "report")


def test_diff_names_the_command(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    folder = merged(case, right=True)
    assert main(["diff", str(case.base), str(folder)]) == 1
    assert f"next: consistency check-merged --base {case.base} {folder}" in capsys.readouterr().out


def test_layers_without_a_delta_are_counted_apart(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    def untrain(tensors: dict[str, torch.Tensor]) -> None:
        for key in tensors:
            if "lora_B" in key and "layers.1." in key:
                tensors[key] = torch.zeros_like(tensors[key])

    change_adapter(case, untrain)
    for name in case.deltas:
        if "layers.1." in name:
            case.deltas[name][1].zero_()
    assert main(command(case, merged(case, right=True))) == 0
    shown = capsys.readouterr().out
    assert "MERGED   7 of 14 adapted tensors hold base + adapter; 7 hold the base, to which the adapter adds" in shown
    assert "warning: the adapter: 7 of 14 adapted layers add nothing, since lora_B is zero there" in shown
    assert "in layer 1" in shown


def test_one_share_of_an_adapter_is_a_warning(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for key in tensors:
            if "lora_B" in key:
                tensors[key][len(tensors[key]) // 4 :] = 0

    change_adapter(case, cut)
    for name in case.deltas:
        factor = case.deltas[name][1]
        factor[len(factor) // 4 :] = 0
    assert main(command(case, merged(case, right=True))) == 0
    shown = capsys.readouterr().out
    assert "MERGED   14 of 14" in shown
    assert "in 14 of 14 adapted layers all but the first of 4 equal parts of the rows of lora_B is zero" in shown


def test_an_adapter_that_is_not_finite_is_no_fault_of_the_folder(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = merged(case, right=True)
    change_adapter(case, lambda tensors: next(iter(tensors.values())).fill_(torch.nan))
    assert main(command(case, folder)) == 1
    shown = capsys.readouterr().out
    assert "BROKEN ADAPTER   13 of 14 adapted tensors hold base + adapter; 1 cannot be judged" in shown


def test_a_base_by_its_hub_id_in_the_cache(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README says that `--base` is a folder or a hub id; nothing is downloaded for it."""
    from huggingface_hub import constants

    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot = repository / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(case.base, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    found = consistency.check_merged(merged(case, right=True), base="org/tiny", adapter=case.adapter)
    assert found.verdict == "consistent"
    with pytest.raises(InputError, match="the hub's cache does not hold it"):
        consistency.check_merged(merged(case, right=True), base="org/absent", adapter=case.adapter)


def test_a_part_of_a_pipeline_without_weights_is_refused(case: Case, tmp_path: Path) -> None:
    unet = tmp_path / "unet"
    unet.mkdir()
    (unet / "config.json").write_text('{"_class_name": "UNet2DConditionModel", "_diffusers_version": "0.30"}')
    with pytest.raises(InputError, match="no weights"):
        consistency.check_merged(merged(case, right=True), base=unet, adapter=case.adapter)
