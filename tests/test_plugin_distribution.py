"""`fixtures/plugin`, a distribution of its own, is installed: all that it adds is there, and works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import transformers

import consistency
from tests.worker.model.made_models import a_llama, adapter_on, saved

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.filterwarnings("ignore")]

HERE = Path(__file__).parents[1]
ADAPTER = HERE / "fixtures" / "llama" / "adapter" / "adapter_model.safetensors"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which the distribution was installed; skip where pip cannot build it."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, str(HERE / "fixtures" / "plugin")], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot build it here: {done.stderr.strip().splitlines()[-1]}")
    return folder


def python(site: Path, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python where the distribution is installed."""
    paths = [str(site), str(Path(consistency.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-P", *map(str, words)], capture_output=True, text=True, check=False, env=environment,
        cwd=cwd, timeout=600,
    )  # fmt: skip


def command(site: Path, *words: object) -> subprocess.CompletedProcess[str]:
    done = python(site, "-m", "consistency", *words)
    assert "cannot be used" not in done.stderr, done.stderr
    return done


def test_its_command_and_its_function(site: Path) -> None:
    counted = command(site, "count", ADAPTER)
    assert counted.returncode == 0, counted.stderr
    assert "count the elements of a file of weights" in " ".join(command(site, "--help").stdout.split())
    code = f"import consistency, pathlib; print(consistency.count_elements(pathlib.Path({str(ADAPTER)!r})))"
    assert counted.stdout == f"{python(site, '-c', code).stdout.strip()} elements\n"


def test_its_finding_and_its_format_are_part_of_a_report(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command(site, "run", "--devices", "cpu", "--level", "quick", "--out", out)
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    (finding,) = (finding for finding in report["findings"] if finding["kind"] == "many-rows")
    assert finding["severity"] == "note"
    assert finding["message"] in " ".join(done.stdout.split())
    assert (out / "names.txt").read_text() == "0 wrong\n"


def test_its_fault_is_found_by_the_drill(site: Path, tmp_path: Path) -> None:
    done = command(site, "drill", "--only", "example-other-sign", "--json", "--out", tmp_path / "drill")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["fault"], row["found"]) == ("example-other-sign", True)


def test_its_device_backend_confines_a_worker(site: Path) -> None:
    code = "from consistency.devices.backends import backend_of; print(backend_of('privateuseone').visibility)"
    assert python(site, "-c", code).stdout == "EXAMPLE_VISIBLE_DEVICES\n"


def test_its_adapter_method_is_judged_by_a_bound(site: Path, tmp_path: Path) -> None:
    """Without the closed form it is held against PEFT's own merge."""
    base = saved(a_llama(), tmp_path / "base")
    config = peft.MissConfig(r=4, target_modules=["q_proj"], init_weights=False)
    adapter = adapter_on(transformers.LlamaForCausalLM.from_pretrained(base), config, tmp_path / "adapter")
    rules = {}
    for name, folder in (("with", site), ("without", tmp_path)):
        out = tmp_path / name
        words = ("run", "--base", base, "--adapter", adapter, "--devices", "cpu", "--stages", "merged", "--out", out)
        done = command(folder, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        rows = json.loads((out / "report.json").read_text())["outcomes"]
        rules[name] = {row["rule"] for row in rows if row["tensor"] == "weight"}
    assert rules == {"with": {"bound"}, "without": {"relative"}}
