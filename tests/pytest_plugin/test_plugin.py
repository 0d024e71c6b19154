"""The pytest plugin, from outside: selection, reruns, reports, lost workers, and the fixtures."""

from __future__ import annotations

import json
import os
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from consistency.cli.main import main
from consistency.devices.discovery import select

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_pytest")]

BASE = ("--consistency-base", "builtin:llama", "--consistency-devices", "cpu")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "llama"
LAYER = "model.layers.1.self_attn.v_proj"

# A fault for the device's worker, planted from a conftest: the option for it exists in no command line.
PLANT = """
import dataclasses
from consistency.workflows import pipeline

real = pipeline.prepare


def prepare(*arguments):
    return dataclasses.replace(real(*arguments), faults={faults!r})


pipeline.prepare = prepare
"""


@pytest.fixture(autouse=True)
def _no_other_plugins(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # importing the plugins of hypothesis and anyio takes longer than all that is tested here
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")


def collected(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    done = pytester.runpytest_subprocess("--co", "-q", *arguments)
    return [line for line in done.outlines if line.startswith("consistency::")]


@pytest.mark.slow
def test_items_are_made_from_headers(pytester: pytest.Pytester) -> None:
    found = collected(pytester, *BASE)
    assert f"consistency::llama::adapter::{LAYER}.lora_B[cpu]" in found
    assert f"consistency::llama::merged::{LAYER}.delta[cpu]" in found
    assert f"consistency::llama::merged::{LAYER}.weight_safe_merge[cpu]" in found
    assert f"consistency::llama::base::{LAYER}.weight[cpu]" in found
    assert "consistency::llama::forward::logits.adapter_merged[cpu]" in found
    assert "consistency::llama::forward::model.layers.3.mlp.adapter_off[cpu]" in found
    assert "consistency::llama::base::everything_else[cpu]" in found
    assert found[-1] == "consistency::llama::run::agreement"
    assert len(found) == len(set(found)) > 200


@pytest.mark.slow
def test_a_stage_that_needs_an_adapter_is_a_usage_error_without_one(pytester: pytest.Pytester) -> None:
    builtin = pytester.runpytest_subprocess("--consistency-base", "builtin:llama", "--co", "-q")
    assert builtin.ret == 0
    done = pytester.runpytest_subprocess(f"--consistency-base={FIXTURES / 'base'}", "--consistency-stages", "adapter")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*adapter without an adapter", "*--consistency-stages"])


def test_several_devices_have_items_each(pytester: pytest.Pytester) -> None:
    found = collected(
        pytester, *BASE[:2], "--consistency-devices", "cpu,cpu@baseline", "--consistency-stages", "adapter"
    )
    assert [f for f in found if f"{LAYER}.lora_A" in f] == [
        f"consistency::llama::adapter::{LAYER}.lora_A[cpu]",
        f"consistency::llama::adapter::{LAYER}.lora_A[cpu@baseline]",
    ]
    assert not any("::merged::" in f for f in found)


def test_selection(pytester: pytest.Pytester) -> None:
    found = collected(pytester, *BASE, "-k", "v_proj and merged and delta")
    assert [f.rpartition("::")[2] for f in found] == [f"model.layers.{i}.self_attn.v_proj.delta[cpu]" for i in range(4)]
    one = f"consistency::llama::merged::{LAYER}.delta[cpu]"
    assert collected(pytester, *BASE, one) == [one]
    assert len(collected(pytester, *BASE, "consistency::llama::adapter")) == 59


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        (f"consistency::llama::adapter::{LAYER}.lora_C", f"did you mean consistency::llama::adapter::{LAYER}.lora_"),
        ("consistency::lama", "did you mean consistency::llama?"),
    ],
)
def test_an_item_that_does_not_exist_is_named(pytester: pytest.Pytester, argument: str, hint: str) -> None:
    done = pytester.runpytest_subprocess("--co", "-q", *BASE, argument)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"ERROR: not found: {argument}; {hint}*"])


@pytest.mark.slow
def test_own_tests_are_left_out_unless_a_path_is_given(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own(): pass")
    done = pytester.runpytest_subprocess("--co", "-q", *BASE)
    assert sum(line.startswith("consistency::") for line in done.outlines) > 200
    assert not any("test_own" in line for line in done.outlines)
    done = pytester.runpytest_subprocess("--co", "-q", *BASE, "test_own.py")
    assert any("test_own.py::test_own" in line for line in done.outlines)
    assert any(line.startswith("consistency::llama::") for line in done.outlines)


@pytest.mark.slow
def test_only_what_is_selected_is_captured(pytester: pytest.Pytester) -> None:
    done = pytester.runpytest_subprocess(*BASE, "--consistency-out", "out", "-k", "adapter and v_proj and layers.1")
    done.stdout.fnmatch_lines(["collected * items / * deselected / 2 selected"])
    done.assert_outcomes(passed=2, deselected=done.parseoutcomes()["deselected"])
    records = pytester.path / "out" / "captures" / "workers" / "cpu.isolated" / "records.jsonl"
    places = [(r["layer"], r["tensor"]) for r in map(json.loads, records.read_text().splitlines())]
    assert {layer for layer, _ in places} == {"model.layers.1.self_attn.v_proj"}
    assert {tensor for _, tensor in places} == {"lora_A", "lora_B"}


def test_a_session_without_options_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_own(): pass")
    done = pytester.runpytest_subprocess("-q")
    done.assert_outcomes(passed=1)
    assert "consistency" not in "".join(done.outlines[1:])


@pytest.mark.slow
def test_bad_input_is_a_usage_error(pytester: pytest.Pytester) -> None:
    done = pytester.runpytest_subprocess("--consistency-base", "./nowhere")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*no such folder for the base*"])
    done = pytester.runpytest_subprocess(*BASE, "--consistency-stages", "merge")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*unknown stage: merge*"])


def test_mismatch_is_a_failure_until_the_baseline_accepts_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is an expected failure; drift from the history is one that it has not accepted."""
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeconftest(PLANT.format(faults={"cpu": "adapter-bit-flip"}))
    options = (*BASE, "--consistency-stages", "adapter", "--consistency-history", "history")
    done = pytester.runpytest_subprocess(*options, "--junitxml", "out.xml", "--consistency-out", "out")
    outcomes = done.parseoutcomes()
    assert outcomes["failed"] == 1
    assert outcomes["passed"] == 58
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    place = "model.layers.0.mlp.gate_proj.lora_B"
    done.stdout.fnmatch_lines(
        [
            f"adapter: {place}[[]0, 5[]] is outside on cpu (bit-flip)",
            "got *bit 20 (mantissa)*1 of 2048 elements*",
            "compared with file; rule: bitwise",
            "*- consistency: worst layer by architecture and stage -*",
            f"*  adapter: ✗ 0.00049 / 0 *  adapter::{place}",
            "*inconsistent: adapter · cpu · single-bit flips in lora_B of model.layers.0.mlp.gate_proj*",
            f"FAILED consistency::llama::adapter::{place}[[]cpu[]] - bit-flip: [[]0, 5[]] · got 0.00441076 *",
        ]
    )
    suite = ElementTree.parse(pytester.path / "out.xml").getroot()
    (failed,) = [case for case in suite.iter("testcase") if case.find("failure") is not None]
    assert failed.get("classname") == "consistency.llama.adapter"
    assert failed.get("name") == f"{place}[cpu]"
    properties = {p.get("name"): p.get("value") for p in failed.iter("property")}
    assert properties["status"] == "outside"

    report = pytester.path / "out" / "report.json"
    accept = ["baseline", "accept", str(report), "--baseline", "accepted.json", "--reason", "on purpose"]
    monkeypatch.chdir(pytester.path)
    assert main(accept) == 0
    accepted = ("--consistency-baseline", "accepted.json")
    again = pytester.runpytest_subprocess(*options, *accepted, "--lf", "-rx")
    assert again.parseoutcomes()["xfailed"] == 1
    assert not {"failed", "passed"} & set(again.parseoutcomes()), "--lf selects what failed"
    again.stdout.fnmatch_lines(["XFAIL *gate_proj.lora_B[[]cpu[]] - *accepted on * (on purpose): adapter · cpu *"])

    for path in (pytester.path / "history" / "tables").iterdir():
        path.unlink()  # the runs have the digests of every stage, and without a table any tensor may differ
    for path in (pytester.path / "history" / "runs").iterdir():
        run = json.loads(path.read_text())
        (seen,) = run["workers"]["seen"]
        seen["bits"] = dict.fromkeys(seen["bits"], "other")
        path.write_text(json.dumps(run))
    drifted = pytester.runpytest_subprocess(*options, *accepted, "consistency::llama::run")
    assert drifted.parseoutcomes() == {"failed": 1}
    drifted.stdout.fnmatch_lines(["drift · cpu · 58 of 58 adapter tensors differ bitwise from the run of *"])


@pytest.mark.slow
def test_items_of_an_architecture(pytester: pytest.Pytester) -> None:
    """The run is narrowed to its devices and the reference; what concerns the whole run stays."""
    first, second = select(("cpu", "cpu@baseline"))
    assert first.architecture != second.architecture
    devices = "--consistency-devices=cpu,cpu@baseline"
    options = ("--consistency-base=builtin:llama", devices, "--consistency-stages=adapter")
    one, *others = collected(pytester, *options, f"--consistency-arch={second.architecture[-5:].upper()}")
    assert one.endswith("[cpu@baseline]")
    assert [found for found in others if not found.endswith("[cpu@baseline]")] == ["consistency::llama::run::agreement"]
    by_keyword = collected(pytester, *options, "-k", f"{first.architecture.split()[-1]} and lora_A")
    assert by_keyword
    assert all(found.endswith("[cpu]") for found in by_keyword)
    done = pytester.runpytest_subprocess(*options, "--consistency-arch=sm_90")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([f"*no device has such an architecture: sm_90; there are {first.architecture}, *"])


@pytest.mark.slow
def test_a_tensor_that_is_missing_fails_whoever_selects_its_layer(pytester: pytest.Pytester, tmp_path: Path) -> None:
    """One layer lacks a factor, and one both: no other item of that has a name from the adapter's file."""
    adapter = shutil.copytree(FIXTURES / "adapter", tmp_path / "holed")
    tensors = load_file(adapter / "adapter_model.safetensors")
    place = f"base_model.model.{LAYER}"
    other = place.replace("layers.1", "layers.2")
    kept = {k: v for k, v in tensors.items() if k != f"{place}.lora_B.weight" and not k.startswith(other)}
    save_file(kept, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    options = (f"--consistency-base={FIXTURES / 'base'}", f"--consistency-adapter={adapter}", "-k", "v_proj and lora_")
    done = pytester.runpytest_subprocess(*options, "--consistency-devices=cpu", "--consistency-level=quick", "-v")
    missing = {f"{LAYER}.lora_B", *(f"{LAYER.replace('1', '2')}.lora_{side}" for side in "AB")}
    failed = {line.split("::")[3].split("[")[0] for line in done.outlines if "[cpu] FAILED" in line}
    assert failed == missing
    done.assert_outcomes(failed=3, passed=5, deselected=done.parseoutcomes()["deselected"])


@pytest.mark.slow
def test_tolerances_of_file_and_options(pytester: pytest.Pytester) -> None:
    """The options' come after the file's, and the last one that matches wins."""
    pytester.makefile(".toml", mine='base = "builtin:llama"\ndevices = "cpu"\n[[tolerance]]\natol = 0\nrtol = 0\n')
    options = ("--consistency-config", "mine.toml", "--consistency-stages", "merged", "--consistency-level", "quick")
    given = "layer=model.layers.1.*,atol=1e-3,rtol=1e-2"
    done = pytester.runpytest_subprocess(*options, "--consistency-tolerance", given, "-k", "v_proj and weight")
    done.assert_outcomes(passed=1, failed=3, deselected=done.parseoutcomes()["deselected"])
    done.stdout.fnmatch_lines(
        [
            "collected * items / * deselected / 4 selected",
            "*inf× the user tolerance*",
            "*compared with float64; rule: user*",
            "*inconsistent: merged · cpu · errors that exceed tolerance*",
            "note: tolerance layer=model.layers.1.[*],atol=0.001,rtol=0.01: 2 tensors judged by it *",
        ]
    )
    assert not any(f"{LAYER}.weight" in line for line in done.outlines if line.startswith("FAILED"))


def test_bad_tolerance_is_a_usage_error(pytester: pytest.Pytester) -> None:
    done = pytester.runpytest_subprocess(*BASE, "--consistency-tolerance", "stage=base,atol=1,rtol=1")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*the stage base only moves bytes, and no byte may differ*"])


def test_lost_worker_is_an_error_with_signal_and_last_event(pytester: pytest.Pytester) -> None:
    """Under xdist, where one process runs the devices, and the others wait for it and say the same."""
    pytester.makeconftest(PLANT.format(faults={"cpu": "killed"}))
    done = pytester.runpytest_subprocess(*BASE, "--consistency-stages", "adapter,merged", "-k", LAYER, "-n", "2")
    outcomes = done.parseoutcomes()
    assert outcomes["passed"] == 2, "what it captured before it was lost is still compared"
    assert outcomes["errors"] == 3
    assert "failed" not in outcomes
    done.stdout.fnmatch_lines(["*cpu was lost: killed by SIGKILL; last event: merged*"])


@pytest.mark.slow
def test_a_stack_is_shown_once(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factory that fails on one device was hundreds of lines, the same traceback for each tensor."""
    pytester.makepyfile(own="def load():\n    raise RuntimeError('my own code')")
    monkeypatch.setenv("PYTHONPATH", str(pytester.path), prepend=os.pathsep)
    options = ("--consistency-base=python:own:load", f"--consistency-adapter={FIXTURES / 'adapter'}")
    done = pytester.runpytest_subprocess(*options, *BASE[2:], "--consistency-stages", "merged", "-k", LAYER)
    assert done.parseoutcomes()["errors"] > 1
    done.stdout.fnmatch_lines(["*cpu failed: RuntimeError: my own code*"])
    assert sum('own.py", line 2' in line for line in done.outlines) == 1


@pytest.mark.slow
def test_stack_of_a_worker_that_hangs(pytester: pytest.Pytester) -> None:
    """Without xdist."""
    pytester.makeconftest(PLANT.format(faults={"cpu": "hung"}))
    options = (*BASE, "--consistency-stages", "merged", "--consistency-stall", "15")
    done = pytester.runpytest_subprocess(*options, "-k", f"{LAYER}.delta")
    assert done.parseoutcomes()["errors"] == 1
    done.stdout.fnmatch_lines(["*no sign of life for 15 s*", "*process.py*in hang*"])


@pytest.mark.slow
def test_process_that_held_the_lock_and_died_is_told(pytester: pytest.Pytester, tmp_path: Path) -> None:
    pytester.makeconftest(
        """
        import os
        from consistency.workflows import pipeline


        def run(*arguments, **options):
            os._exit(9)


        pipeline.run = run
        """
    )
    options = (*BASE, "--consistency-stages", "adapter", "-n", "2", "--maxfail", "3")
    done = pytester.runpytest_subprocess(*options)
    done.stdout.fnmatch_lines(["*the pytest process that ran the devices died before it was done*"])
    assert done.ret != 0


STOPPED = """
import signal

import pytest
from consistency.workflows import pipeline


def too_long(_number, _frame):
    pytest.fail("Timeout (>3.0s) from pytest-timeout.")


def run(*arguments, **options):
    with open("runs.txt", "a") as file:
        file.write("run\\n")
    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.pause()


pipeline.run = run
"""


@pytest.mark.slow
def test_a_run_that_is_stopped_is_not_started_again(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pytest-timeout stops an item: by a failure raised from an alarm. The first item carries the whole run."""
    monkeypatch.setenv("COLUMNS", "200")
    pytester.makeconftest(STOPPED)
    case = '@pytest.mark.consistency(base="builtin:llama", devices="cpu", level="quick")'
    tests = "".join(f"{case}\ndef test_{i}(consistency_report): pass\n" for i in range(2))
    pytester.makepyfile(test_own=f"import pytest\n{tests}")
    done = pytester.runpytest_subprocess(*BASE, "--consistency-stages=adapter", "test_own.py")
    done.assert_outcomes(errors=60 + 2)
    assert (pytester.path / "runs.txt").read_text() == "run\n" * 2, "one of the items, one of the tests of one's own"
    done.stdout.fnmatch_lines([
        "ERROR test_own.py::test_0 - Failed: Timeout (>3.0s) from pytest-timeout.",
        "ERROR test_own.py::test_1 - Failed: the run was stopped, and is not started again for other items",
        "ERROR consistency::llama::adapter::* - Failed: Timeout (>3.0s) from pytest-timeout.",
        "ERROR consistency::llama::adapter::* - Failed: the run was stopped, and is not started again for other items",
    ])  # fmt: skip
    assert sum("got:    Failed: Timeout (>3.0s)" in line for line in done.outlines) == 60
    assert not any("During handling" in line for line in done.outlines)


@pytest.mark.slow
def test_auto_starts_as_many_as_there_are_devices(pytester: pytest.Pytester) -> None:
    devices = ("--consistency-devices", "cpu,cpu@baseline", "--consistency-stages", "adapter")
    done = pytester.runpytest_subprocess(*BASE[:2], *devices, "-n", "auto", "-k", "nothing")
    assert done.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    done.stdout.fnmatch_lines(["2 workers *"])


@pytest.mark.slow
def test_fixtures(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_own="""
        import torch
        from consistency.worker.determinism import SEED

        def test_deterministic(deterministic):
            assert deterministic["cudnn_allow_tf32"] is False
            assert torch.get_deterministic_debug_mode() == 1
            first = torch.rand(3)
            torch.manual_seed(SEED)
            assert torch.equal(first, torch.rand(3))

        def test_settings_are_put_back():
            assert torch.get_deterministic_debug_mode() == 0

        def test_devices(consistency_devices):
            assert consistency_devices == ("cpu",)

        def test_report(consistency_report):
            assert consistency_report.verdict == "consistent"
            assert {t.stage for t in consistency_report.tensors} == {"adapter"}

        def test_run(consistency_run):
            report = consistency_run(base="builtin:gpt2", devices="cpu", stages=("adapter",))
            assert report.verdict == "consistent"
        """
    )
    done = pytester.runpytest_subprocess(*BASE, "--consistency-stages", "adapter", "test_own.py")
    done.assert_outcomes(passed=5 + 59, skipped=1)
