"""`fixtures/plugin`, a distribution of its own, is installed: all that it adds is there, and works."""

from __future__ import annotations

import json
import os
import re
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
    # built with what the extra `test` installs: a fresh environment to build in needs the network
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = HERE / "fixtures" / "plugin"
    done = subprocess.run([*pip, "--target", str(folder), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def python(site: Path, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python where the distribution is installed."""
    paths = [str(site), str(Path(consistency.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-P", *map(str, words)], capture_output=True, text=True, check=False, env=environment,
        cwd=cwd, timeout=600,
    )  # fmt: skip


def rows_of(out: Path) -> list[tuple[str, str, str]]:
    rows = json.loads((out / "report.json").read_text())["outcomes"]
    return [(row["stage"], row["layer"], row["status"]) for row in rows]


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
    page = (out / "report.html").read_text()
    assert '<h2 id="counts-title">Counts' in page
    assert re.search(r'<th scope="row">base</th><td class="number">\d+</td>', page)


def test_its_stage_is_run_and_each_weight_is_an_item(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command(site, "run", "--devices", "cpu", "--stages", "base,finite", "--out", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads((out / "report.json").read_text())["outcomes"]
    checked = {row["layer"] for row in rows if row["stage"] == "finite" and row["status"] == "equal"}
    assert "model.norm" in checked
    assert "finite" in command(site, "run", "--plan", "--stages", "finite").stdout
    words = ("-p", "no:cacheprovider", "--consistency-base=builtin:llama", "--consistency-stages=finite", "-v")
    tested = python(site, "-m", "pytest", *words, "--consistency-devices=cpu", cwd=tmp_path)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "finite::model.norm.weight" in tested.stdout


def test_a_case_with_its_stage_is_compared_where_it_is_not_installed(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command(site, "run", "--devices", "cpu", "--stages", "base,finite", "--out", out)
    assert done.returncode == 0, done.stderr
    again = command(tmp_path, "compare", out, "--out", tmp_path / "again")
    assert again.returncode == 0, again.stdout + again.stderr
    own, others = (
        [
            (row["stage"], row["layer"], row["status"])
            for row in json.loads((home / "report.json").read_text())["outcomes"]
        ]
        for home in (out, tmp_path / "again")
    )
    assert others == own


def test_a_stage_that_is_not_installed_is_named(tmp_path: Path) -> None:
    done = command(tmp_path, "run", "--devices", "cpu", "--stages", "finite")
    assert done.returncode == 2
    assert "unknown stage: finite" in done.stderr


@pytest.mark.parametrize("word", ["not-a-number", "many-rows", "finite"])
def test_its_words_are_explained(site: Path, tmp_path: Path, word: str) -> None:
    done = command(site, "explain", word)
    assert done.returncode == 0, done.stderr
    assert "what to do" in done.stdout
    assert command(tmp_path, "explain", word).returncode == 2


def test_its_fault_is_found_by_the_drill(site: Path, tmp_path: Path) -> None:
    names = ("example-other-sign", "example-not-a-number")
    done = command(site, "drill", *(f"--only={name}" for name in names), "--json", "--out", tmp_path / "drill")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)
    assert {row["fault"]: row["found"] for row in rows} == dict.fromkeys(names, True)


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
