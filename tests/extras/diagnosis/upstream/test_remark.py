"""Findings that a known fault of another library explains say so; those that it does not explain never do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers

from benchmarks import upstream_faults
from consistency import plugins
from consistency.capture.folder import SCHEMA, Capture, CaptureManifest
from consistency.capture.names import ADAPTER_METHOD
from consistency.capture.records import WorkerInfo
from consistency.case.case import Case
from consistency.case.stages import SPECS
from consistency.comparison import kinds
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.remark import Remark, remarks_on_word, with_remarks
from consistency.comparison.records import Records
from consistency.comparison.result import Consequence, Finding
from consistency.comparison.workers import ComparedWorker
from consistency.extras.diagnosis.upstream.faults import FAULTS
from tests.conftest import Cli

DOCS = Path(__file__).parents[4] / "docs"
INSTALLED = {"peft": "0.21.2", "transformers": "5.23.0"}
HOTSWAP = Finding(
    kind="bytes-changed",
    severity="error",
    message="adapters · cpu · hotswap(b over a) changes 8 tensors of b",
    workers=("cpu",),
    tensors=("adapters::hotswap(b over a).bytes of b",),
    load_paths=("isolated",),
)
FROD = Finding(
    kind="recomputed",
    severity="error",
    message="adapter · cpu · values recomputed on the device",
    workers=("cpu",),
    tensors=("adapter::model.q_proj.frod_U", "forward::model.adapter_on"),
    consequences=(Consequence(stage="forward", message="outputs", tensors=("forward::model.adapter_on",)),),
)


def remarks(finding: Finding, *, planted: str | None = None, **environment: str) -> tuple[str, ...]:
    """Return the lines that are added to a finding about a CPU with this environment."""
    info = WorkerInfo(
        name="cpu", load_path="isolated", architecture="x86-64", model="EPYC", status="ok", planted=planted,
        environment={**INSTALLED, **environment},
    )  # fmt: skip
    manifest = CaptureManifest(
        schema=SCHEMA, tool="0", created="2026-01-01", host="a", workers=(), case=Case(name="a", base="b")
    )
    capture = Capture(folder=Path("/nowhere"), manifest=manifest, workers=())
    worker = ComparedWorker(label="cpu", capture=capture, info=info, records=Records({}))
    return with_remarks(finding, ComparisonEvidence(workers=(worker,))).detail


def changed(finding: Finding, **fields: Any) -> Finding:
    """Return a finding with other fields."""
    values = {name: getattr(finding, name) for name in finding.__struct_fields__}
    return Finding(**{**values, **fields})


def test_a_known_fault_is_said_with_its_versions_its_page_and_what_helps() -> None:
    (line,) = remarks(HOTSWAP)
    assert line.startswith("known fault of peft 0.18.0 to 0.21.2: Hotswap clears other adapters")
    assert "docs/upstream-peft.md#hotswap-clears-other-adapters" in line
    assert "Name the adapters" in line


@pytest.mark.parametrize("version", ["0.17.1", "0.21.3", "0.22.0", "1.0", ""])
def test_a_version_that_the_fault_was_not_seen_in_does_not_match(version: str) -> None:
    assert remarks(HOTSWAP, peft=version) == ()


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "bitflip"},
        {"tensors": ("adapters::delete_adapter.bytes of b",)},
        {"tensors": (*HOTSWAP.tensors, "adapter::model.q_proj.lora_A")},
    ],
    ids=["another kind", "another step", "one more tensor"],
)
def test_a_finding_that_is_not_all_of_the_fault_is_not_explained_by_it(other: dict[str, Any]) -> None:
    assert remarks(changed(HOTSWAP, **other)) == ()


def test_a_planted_fault_is_not_blamed_on_a_library() -> None:
    assert remarks(HOTSWAP, planted="wrong copy") == ()


def test_the_method_of_the_adapter_and_the_class_of_the_model_count() -> None:
    cached = changed(HOTSWAP, kind="cache-changes-the-model", tensors=("generation::logits.cache",))
    assert "Lily" in remarks(cached, **{ADAPTER_METHOD: "LILY"})[0]
    assert "RWKV" in remarks(cached, model_class="RwkvForCausalLM")[0]
    assert remarks(cached, model_class="LlamaForCausalLM", **{ADAPTER_METHOD: "LORA"}) == ()


def test_consequences_of_a_fault_are_a_part_of_it() -> None:
    (line,) = remarks(FROD, **{ADAPTER_METHOD: "FROD"})
    assert "FRoD forgets" in line
    assert remarks(changed(FROD, consequences=()), **{ADAPTER_METHOD: "FROD"}) == ()


def test_a_word_is_explained_by_the_faults_that_show_as_it() -> None:
    (line,) = remarks_on_word("bytes-changed")
    assert "Hotswap clears other adapters" in line
    assert remarks_on_word("bitflip") == ()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.anchor)
def test_every_fault_has_its_heading_with_a_script_and_signs_that_can_be(fault: Any) -> None:
    page = (DOCS / f"{fault.page}.md").read_text(encoding="utf-8")
    part = page.partition(f"\n## {fault.title}\n")[2].partition("\n## ")[0]
    scripts = re.findall(r"\(upstream/(\w+\.py)\)", part)
    assert scripts, "no such heading, or no script below it"
    assert all((DOCS / "upstream" / script).exists() for script in scripts)
    if fault.sign is not None:
        assert set(fault.sign.kinds) <= kinds.known()
        assert fault.sign.stage in SPECS


def test_the_page_has_the_table_of_today() -> None:
    assert upstream_faults.parts()["faults"] in upstream_faults.PAGE.read_text(encoding="utf-8")


def test_a_remark_of_another_distribution_costs_its_own_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> tuple[str, ...]:
        raise RuntimeError("theirs")

    own = list(plugins.offered("remarks"))
    theirs = [("theirs.module:REMARK", Remark(on_finding=fails, on_word=fails)), ("theirs.module:NONE", None)]
    noted: list[str] = []
    monkeypatch.setattr(plugins, "offered", lambda _: iter([*theirs, *own]))
    monkeypatch.setattr(plugins, "note_failure", lambda what, error: noted.append(f"{what}: {error}"))
    assert len(remarks(HOTSWAP)) == 1
    assert noted[0] == "the remark theirs.module:REMARK: theirs"
    assert "NoneType" in noted[1]


@pytest.mark.slow
def test_a_real_run_names_the_fault_and_the_word_of_it(cli_here: Cli, llama_base: Path, tmp_path: Path) -> None:
    """Prompt tuning on the built-in Llama, whose padded batch has other results."""
    model = transformers.AutoModelForCausalLM.from_pretrained(llama_base)
    adapter = tmp_path / "prompt"
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(model, config).save_pretrained(adapter)
    out = tmp_path / "out"
    command = [
        "run",
        "--base",
        llama_base,
        "--adapter",
        adapter,
        "--devices",
        "cpu",
        "--stages",
        "generation",
        "--out",
        out,
    ]
    assert cli_here(*command).returncode == 1
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    (padded,) = [finding for finding in report["findings"] if finding["kind"] == "padding-changes-the-model"]
    assert any("A prompt stands before the padding (peft#1093" in line for line in padded["detail"])
    others = [finding for finding in report["findings"] if finding is not padded]
    assert not any("known fault" in line for finding in others for line in finding["detail"])
