"""A reproducer from a real run with a planted fault, run as a stranger would: in isolation from this package."""

from __future__ import annotations

import dataclasses
import json
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from consistency.capture.folder import MANIFEST
from consistency.capture.records import TensorRecord
from consistency.capture.soak import ChangedTensor, Occurrences, Soak
from consistency.case import standard
from consistency.case.options import Options
from consistency.case.stage import Stage
from consistency.comparison.result import Finding
from consistency.errors import CaptureError, UsageError
from consistency.extras.diagnosis.drill.plantable import several_adapters
from consistency.extras.diagnosis.reproduce import folder as folder_module
from consistency.extras.diagnosis.reproduce.evidence import find_evidence
from consistency.extras.diagnosis.reproduce.folder import Reproduced, reproduce, try_script
from consistency.extras.peft_api.adapters.spec import ADAPTERS
from consistency.numerics import words
from consistency.numerics.digest import digest
from consistency.numerics.distance import measure
from consistency.report.json import as_bytes
from consistency.worker.recorder import Recorder
from consistency.workflows import pipeline
from tests.conftest import Cli, MakeCapture
from tests.launch.in_this_process import in_this_process
from tests.report.made_comparisons import comparison

pytestmark = pytest.mark.process

FAULTY = "cpu@baseline"
PLANTED = {standard.ADAPTER: "adapter-zeros", standard.MERGED: "merge-zeros", standard.FORWARD: "forward-off"}


def run_with_fault(stage: Stage, out: Path) -> Path:
    """Run one stage with a fault planted; of wrong bytes, what is computed with them would be no finding of its own."""
    options = Options(base="builtin:llama", devices=("cpu", FAULTY), stages=(stage,))
    plan = dataclasses.replace(pipeline.prepare(options), faults={FAULTY: PLANTED[stage]})
    with in_this_process():
        pipeline.run(plan, out, watch=lambda *_: None)
    return out


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_with_fault(standard.ADAPTER, tmp_path_factory.mktemp("run") / "out")


def number_of(report: Path, stage: str) -> int:
    findings = json.loads((report / "report.json").read_text())["findings"]
    return next(i for i, f in enumerate(findings, start=1) if f["message"].startswith(f"{stage} · "))


@pytest.fixture(scope="module")
def made(report: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reproduced]:
    folder, runs = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("runs")
    others = {stage: run_with_fault(stage, runs / stage) for stage in (standard.MERGED, standard.FORWARD)}
    reports = {standard.ADAPTER: report, **others}
    return {stage: reproduce(one, number_of(one, stage), folder / stage) for stage, one in reports.items()}


@pytest.mark.parametrize("stage", ["adapter", "merged", "forward"])
def test_folder_shows_the_finding_without_this_package(made: dict[str, Reproduced], stage: str) -> None:
    found = made[stage]
    assert found.shows
    assert not found.happens_here  # it was planted
    assert sum(file.stat().st_size for file in found.folder.iterdir()) < 10e6
    assert not found.needs_model
    assert found.output.count("$ python reproduce.py") == 2
    scripts = [file for file in found.folder.glob("*.py") if file.name != "load_with_peft.py"]
    imported = {
        line.split()[1].split(".")[0]
        for script in scripts for line in script.read_text().splitlines() if line.startswith(("import ", "from "))
    }  # fmt: skip
    own = {file.stem for file in scripts}
    assert imported - set(sys.stdlib_module_names) - own == {"torch", "safetensors"}
    readme = (found.folder / "README.md").read_text()
    assert "does not recompute" not in readme.splitlines()[0]
    assert "The report was made on " in readme
    assert f"    {shlex.join(json.loads((found.folder / 'finding.json').read_text())['command'])}\n" in readme
    assert PLANTED[Stage(stage)] in readme  # and says so
    assert (found.folder / "transcript.txt").read_text() == found.output
    assert json.loads((found.folder / "environment.json").read_text())["torch"] == torch.__version__


def test_script_shows_the_wrong_bytes_of_the_finding(made: dict[str, Reproduced]) -> None:
    tensors = load_file(made["adapter"].folder / "tensors.safetensors")
    assert not tensors["actual"].any()
    assert tensors["expected"].any()
    assert "differ, all of them zero" in made["adapter"].output
    assert "it does not happen here" in made["adapter"].output


@pytest.mark.slow
def test_several_adapters_of_one_model(tmp_path: Path) -> None:
    """A file that hotswap leaves a tensor of, and a weight that all adapters are merged into."""
    with several_adapters() as adapters:
        options = Options(base="builtin:llama", adapters=adapters, devices=("cpu", FAULTY), stages=(ADAPTERS,))
        faults = {"cpu": "hotswap-leaves-one", FAULTY: "merge-bit-flip"}
        plan = dataclasses.replace(pipeline.prepare(options), faults=faults)
        with in_this_process():
            pipeline.run(plan, tmp_path / "out", watch=lambda *_: None)
    findings = json.loads((tmp_path / "out" / "report.json").read_text())["findings"]
    for kind, name, script in (
        ("stale", "reproduce.py", "to a device unchanged"),
        ("bit-flip", "check_recorded.py", "computes nothing again"),
    ):
        number = next(i for i, f in enumerate(findings, start=1) if f["kind"] == kind)
        found = reproduce(tmp_path / "out", number, tmp_path / kind)
        assert found.shows, found.output
        assert not found.happens_here
        assert script in (found.folder / name).read_text()
        assert json.loads((found.folder / "finding.json").read_text())["tensor"].startswith("adapters::")
        recorded = [] if found.needs_model else ["--as-recorded"]
        assert run_script(found.folder, *recorded, name=name).returncode == 1


def run_script(folder: Path, *arguments: str, name: str = "reproduce.py") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", name, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_merge_is_computed_anew_and_judged(made: dict[str, Reproduced], tmp_path: Path) -> None:
    """What the device had follows from its zeros; from the right factors this machine merges inside the bound."""
    assert "times tolerance" in made["merged"].output
    # and a merge that is off here is met: the factors' product no longer is what the bound is made for
    for file in made["merged"].folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    facts = json.loads((tmp_path / "finding.json").read_text())
    facts["allowance"] = {"product": 0.0, "weight": 0.0, "floor": 0.0}
    (tmp_path / "finding.json").write_text(json.dumps(facts))
    done = run_script(tmp_path)
    assert done.returncode == 1
    assert "it happens here" in done.stdout


@pytest.mark.slow
def test_damaged_tensors_are_refused(made: dict[str, Reproduced], tmp_path: Path) -> None:
    for file in made["adapter"].folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "tensors.safetensors")
    save_file({**tensors, "expected": tensors["expected"] + 1}, tmp_path / "tensors.safetensors")
    done = run_script(tmp_path)
    assert done.returncode == 2  # neither of the two answers
    assert "damaged" in done.stderr


@pytest.mark.slow
def test_command_says_what_came_of_it(report: Path, tmp_path: Path, cli_here: Cli) -> None:
    done = cli_here(
        "reproduce", report / "report.json", "--finding", number_of(report, "adapter"), "--out", tmp_path / "r"
    )
    assert done.returncode == 0, done.stderr
    assert "not reproduced: it does not happen on this machine now; the recorded bytes show it" in done.stdout
    assert "if it was found on this machine: plain copies are right, so what loads," in done.stdout
    assert (tmp_path / "r" / "load_with_peft.py").exists()


@pytest.mark.slow
def test_a_zip_holds_the_folder(report: Path, made: dict[str, Reproduced], tmp_path: Path) -> None:
    number = number_of(report, "adapter")
    found = reproduce(report, number, tmp_path / "case-1.zip")
    assert (found.folder, found.shows) == (tmp_path / "case-1.zip", True)
    assert [file.name for file in tmp_path.iterdir()] == ["case-1.zip"], "nothing beside it"
    with zipfile.ZipFile(tmp_path / "case-1.zip") as archive:
        assert sorted(archive.namelist()) == sorted(f"case-1/{file.name}" for file in made["adapter"].folder.iterdir())
        archive.extractall(tmp_path)
    assert run_script(tmp_path / "case-1", "--as-recorded").returncode == 1
    with pytest.raises(UsageError, match="exists"):
        reproduce(report, number, tmp_path / "case-1.zip")
    reproduce(report, number, tmp_path / "case-1.zip", replace=True)


@pytest.mark.slow
def test_a_redacted_one_names_no_host_and_no_folder(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path may be in what the script prints, too."""
    plain = try_script

    def with_paths(folder: Path, name: str, *, computes: bool) -> Reproduced:
        found = plain(folder, name, computes=computes)
        return dataclasses.replace(found, output=f'{found.output}File "{folder}/reproduce.py" in {Path.home()}\n')

    monkeypatch.setattr(folder_module, "try_script", with_paths)
    table = json.loads((report / "report.json").read_text())
    names = [table["base"], table["adapter"], str(tmp_path), str(Path.home()), platform.node()]
    texts = {}
    for redact in (False, True):
        found = reproduce(report, number_of(report, "adapter"), tmp_path / f"{redact}", redact=redact)
        files = [file for file in found.folder.iterdir() if file.suffix != ".safetensors"]
        texts[redact] = "".join(file.read_text() for file in files) + found.output
    assert [name for name in names if name in texts[False]] == names
    assert [name for name in names if name in texts[True]] == []
    facts = json.loads((tmp_path / "True" / "finding.json").read_text())
    assert (facts["base"], facts["adapter"]) == ("<base>", "<adapter>")
    assert run_script(tmp_path / "True", "--as-recorded").returncode == 1, "it still runs"


@pytest.mark.slow
def test_names_of_its_command_are_taken_out_of_a_redacted_one(report: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(report, copy)
    words = ["--base", "acme-llama", "--adapter", "wonder-lora", "--name", "alice's"]
    table = json.loads((copy / "report.json").read_text())
    (copy / "report.json").write_text(
        json.dumps(table | {"command": ["consistency", "run", *words], "case": "alice's"})
    )
    found = reproduce(copy, number_of(report, "adapter"), tmp_path / "r", redact=True)
    texts = [file.read_text() for file in found.folder.iterdir() if file.suffix in (".md", ".json", ".txt")]
    assert [name for name in words[1::2] if any(name in text for text in texts)] == []


def test_nothing_is_written_where_there_is_something(report: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        reproduce(report, 1, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_finding_that_is_not_there(report: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no finding 99"):
        reproduce(report, 99, tmp_path / "r")
    assert not (tmp_path / "r").exists()


def test_finding_about_no_tensor(report: Path, tmp_path: Path) -> None:
    table = json.loads((report / "report.json").read_text())
    table["findings"][0]["tensors"] = []
    (tmp_path / "report.json").write_text(json.dumps(table))
    with pytest.raises(UsageError, match="concerns no tensor"):
        reproduce(tmp_path, 1, tmp_path / "r")


def test_a_note_has_no_number(report: Path, tmp_path: Path) -> None:
    findings = json.loads((report / "report.json").read_text())["findings"]
    assert [f["severity"] for f in findings[:2]] == ["error", "note"]
    with pytest.raises(UsageError, match="the report has no finding 2") as caught:
        reproduce(report, 2, tmp_path / "r")
    assert caught.value.got == "1 finding"


def test_the_only_finding_needs_no_number(report: Path, tmp_path: Path) -> None:
    assert find_evidence(report, None, tmp_path).number == 1
    table = json.loads((report / "report.json").read_text())
    (tmp_path / "report.json").write_text(json.dumps({**table, "findings": table["findings"][:1] * 2}))
    with pytest.raises(UsageError, match=r"which finding\?") as caught:
        find_evidence(tmp_path, None, tmp_path)
    assert (caught.value.got, caught.value.wanted) == ("2 findings", "--finding N")


@pytest.mark.parametrize("text", ["", "[]", '{"schema": "other/1", "findings": []}', '{"findings": 3}'])
def test_rubbish_for_a_report(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(UsageError):
        reproduce(tmp_path, 1, tmp_path / "r")


def test_report_without_its_captures(report: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes((report / "report.json").read_bytes())
    with pytest.raises(CaptureError, match=r"no capture next to the report"):
        reproduce(tmp_path, 1, tmp_path / "r")


def test_kept_tensors_that_are_gone(report: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(report, copy)
    assert (copy / "captures" / MANIFEST).exists()
    shutil.rmtree(copy / "captures" / "blobs")
    with pytest.raises(CaptureError, match="no stored tensor shows"):
        reproduce(copy, number_of(report, "adapter"), tmp_path / "r")


def write_report(folder: Path, finding: Finding) -> None:
    (folder / "report.json").write_bytes(as_bytes(comparison([], findings=(finding,))))


@pytest.mark.slow
def test_copy_between_devices_is_tried_on_the_same_two(make_capture: MakeCapture, tmp_path: Path) -> None:
    """Where no payload was kept one is made up; the script is told both ends."""
    pair = TensorRecord(rule="bitwise",
        stage="transfer", layer="cuda:0->cuda:1", tensor="direct", digest="a" * 32, reference="file",
        reference_digest="b" * 32, shape=(4,), dtype="uint8", status="outside", word=words.ZEROS,
    )  # fmt: skip
    run = make_capture("run/captures", {"cuda:1": [pair]})
    finding = Finding(
        kind="zeros", severity="error", message="m", workers=("cuda:1",), tensors=("transfer::cuda:0->cuda:1.direct",)
    )
    write_report(run.parent, finding)
    found = reproduce(run.parent, 1, tmp_path / "r")
    facts = json.loads((tmp_path / "r" / "finding.json").read_text())
    assert (facts["via"], facts["device"]) == ("cuda:0", "cuda:1")
    assert not found.shows
    assert "this machine has no cuda:1" in found.output or torch.cuda.device_count() > 1


def test_fact_has_no_reproducer(make_capture: MakeCapture, tmp_path: Path) -> None:
    fact = TensorRecord(stage="memory", layer="cuda:0", tensor="allocated", rule="limit", status="outside")
    run = make_capture("run/captures", {"cuda:1": [fact]})
    finding = Finding(
        kind="touched",
        severity="error",
        message="m",
        workers=("cuda:1",),
        tensors=("memory::cuda:0.allocated",),
        next="give torch_device",
    )
    write_report(run.parent, finding)
    with pytest.raises(CaptureError, match="no stored tensor shows") as caught:
        reproduce(run.parent, 1, tmp_path / "r")
    assert caught.value.hint == "it concerns a fact, not a tensor: give torch_device"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rule"), [("adapter", "bitwise"), ("merged", "bound")])
def test_bits_that_changed_in_a_soak_are_shown_as_they_were_stored(
    make_capture: MakeCapture, tmp_path: Path, stage: str, rule: str
) -> None:
    right = torch.arange(1, 9, dtype=torch.float32)
    wrong = right.clone()
    wrong.view(torch.int32)[3] ^= 1 << 22
    tensor = TensorRecord(status="equal",
        stage=stage, layer="q", tensor="weight", rule=rule, digest=digest(right).value, shape=(8,), dtype="float32",
        reference="file", reference_digest=digest(right).value,
    )  # fmt: skip
    seen = measure(wrong, right)
    with Recorder(tmp_path, tmp_path) as record:
        blobs = [record.keep(wrong), record.keep(right)]
    change = ChangedTensor(
        stage=stage, layer="q", tensor="weight", shape=(8,), dtype="float32", measure=seen, word=words.BIT_FLIP,
        occurrences=Occurrences(count=1, numbers=(7,), first_at="", last_at=""), blob=blobs[0], reference_blob=blobs[1],
    )  # fmt: skip
    info = {"cpu": {"soak": Soak(asked_s=1.0, repeats=9, changes=(change,))}}
    run = make_capture("run/captures", {"cpu": [tensor]}, info=info)
    (run / "blobs").mkdir(exist_ok=True)
    for name in blobs:
        (tmp_path / f"{name}.safetensors").rename(run / "blobs" / f"{name}.safetensors")
    finding = Finding(
        kind="not-repeatable", severity="error", message="m", workers=("cpu",), tensors=(f"{stage}::q.weight",)
    )
    write_report(run.parent, finding)
    found = reproduce(run.parent, 1, tmp_path / "r")
    assert found.shows
    assert not found.happens_here
    tensors = load_file(found.folder / "tensors.safetensors")
    assert torch.equal(tensors["actual"], wrong)
    assert torch.equal(tensors["expected"], right)


def test_a_full_disk_leaves_nothing(report: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(CaptureError, match="cannot write the reproducer"):
            reproduce(report, number_of(report, standard.ADAPTER), tmp_path / "repro")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_the_earlier_one_stays_until_the_new_one_is_made(report: Path, tmp_path: Path) -> None:
    """Whoever is killed in between leaves the earlier one aside, which the next one puts back before its work."""
    for out in (tmp_path / "repro", tmp_path / "repro.zip"):
        reproduce(report, number_of(report, standard.ADAPTER), out)
        with pytest.raises(UsageError):
            reproduce(report, 99, out, replace=True)
        reproduce(report, number_of(report, standard.ADAPTER), out, replace=True)
    (tmp_path / ".repro.partial").mkdir()
    (tmp_path / ".repro.partial" / "left").touch()
    (tmp_path / "repro").rename(tmp_path / ".repro.earlier")
    reproduce(report, number_of(report, standard.ADAPTER), tmp_path / "repro", replace=True)
    assert {one.name for one in tmp_path.iterdir()} == {"repro", "repro.zip"}
