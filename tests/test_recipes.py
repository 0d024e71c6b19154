"""The recipes of `docs/extending*.md` work as they stand: applied to a copy of the package, each thing is there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.comparison.made_records import moved
from tests.conftest import MakeCapture

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1]
PAGES = sorted((HERE / "docs").glob("extending*.md"))

_BLOCK = re.compile(r"^```(python|markdown)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"(?:#|<!--) (?P<file>[\w/]+\.\w+)(?:, (?:after `(?P<after>.+)`|(?P<end>at the end)))?(?: -->)?\n")


def recipes() -> dict[str, str]:
    """Return the text of each recipe of all pages, by its heading; one in a block is a part of what is written."""
    found: dict[str, str] = {}
    for page in PAGES:
        heading, is_in_block = "", False
        for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
            is_in_block ^= line.startswith("```")
            if line.startswith("## ") and not is_in_block:
                heading = line.removeprefix("## ").rstrip()
            elif heading:
                found[heading] = found.get(heading, "") + line
    return found


def blocks() -> list[tuple[re.Match[str], str]]:
    """Return the blocks that say where they go, each with the text to put there."""
    found = [block for text in recipes().values() for kind, block in _BLOCK.findall(text) if kind]
    return [(place, block[place.end() :]) for block in found if (place := _PLACE.match(block))]


def commands(recipe: str) -> list[list[str]]:
    """Return the words of each command of a recipe."""
    found = [block for kind, block in _BLOCK.findall(recipes()[recipe]) if not kind]
    return [line.removeprefix("$ consistency ").split() for block in found for line in block.splitlines()]


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the package to which all recipes were applied."""
    home = tmp_path_factory.mktemp("extended")
    shutil.copytree(HERE / "consistency", home / "consistency", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "fixtures").symlink_to(HERE / "fixtures")
    (home / "docs").mkdir()
    shutil.copy(HERE / "docs" / "glossary.md", home / "docs")
    for place, text in blocks():
        path = home / ("" if place["file"].startswith("docs/") else "consistency") / place["file"]
        if place["after"] is None and place["end"] is None:
            assert not path.exists(), f"{place['file']} exists: say where in it"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        if place["end"]:
            lines.append("\n\n" + text)
        else:
            (number,) = (number for number, line in enumerate(lines) if place["after"] in line)
            lines.insert(number + 1, text if path.suffix == ".py" else f"\n{text}")
        path.write_text("".join(lines), encoding="utf-8")
    return home


def run(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=home, timeout=600)


def test_every_recipe_is_here() -> None:
    names = [
        "extending-engines.md",
        "extending-methods.md",
        "extending-plugins.md",
        "extending-stages.md",
        "extending.md",
    ]
    assert [page.name for page in PAGES] == names
    files = [place["file"] for place, _ in blocks()]
    assert len(files) == 29
    run = {recipe: [words[0] for words in commands(recipe)] for recipe in recipes()}
    assert {recipe: words for recipe, words in run.items() if words} == {
        "A stage": ["run", "drill"],
        "A finding": ["compare"],
        "A device backend": ["run"],
        "An inference engine": ["inputs", "engine"],
        "A report format": ["run"],
        "A planted fault": ["drill"],
        "An extra": ["count"],
    }


def test_an_extra_adds_its_command(extended: Path) -> None:
    done = run(extended, "-m", "consistency", *commands("An extra")[0])
    assert "count the elements of a file of weights" in done.stdout.lower(), done.stderr
    file = HERE / "fixtures" / "llama" / "adapter" / "adapter_model.safetensors"
    counted = run(extended, "-m", "consistency", "count", str(file))
    assert re.fullmatch(r"\d+ tensors, \d+ elements\n", counted.stdout), counted.stderr
    assert "count the elements" in run(extended, "-m", "consistency", "--help").stdout


def test_a_stage_runs(extended: Path) -> None:
    done = run(extended, "-m", "consistency", *commands("A stage")[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^ +finite$", done.stdout, re.MULTILINE)
    assert "CONSISTENT" in done.stdout
    order = run(extended, "-c", "from consistency.case.stages import SPECS; print(*SPECS)")
    assert order.stdout.split()[-2:] == ["wrapping", "finite"], "by the place that it declares"


def test_the_fault_of_a_stage_is_found(extended: Path) -> None:
    done = run(extended, "-m", "consistency", *commands("A stage")[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "base-with-infinity" in done.stdout


def test_a_word_is_recognized(extended: Path) -> None:
    code = (
        "import torch; from consistency.numerics.diagnosis_moved import diagnose_moved; "
        "from consistency.numerics.distance import measure; x = torch.arange(1.0, 9.0); "
        "y = x.flip(0); print(diagnose_moved(y, x, measure(y, x)).word)"
    )
    done = run(extended, "-c", code)
    assert done.stdout.strip() == "reversed", done.stderr


def test_a_stage_and_a_word_are_explained(extended: Path) -> None:
    done = run(extended, "-m", "consistency", "explain", "finite", "infinite", "reversed")
    assert done.returncode == 0, done.stderr
    assert "the parameters of the model are numbers" in done.stdout
    assert "the right elements in reverse order" in done.stdout


def test_a_finding_is_in_the_report(extended: Path, make_capture: MakeCapture) -> None:
    capture = make_capture("capture-1", {"cpu": [moved()], "cpu@baseline": [moved()]})
    words = commands("A finding")[0]
    done = run(extended, "-m", "consistency", *(str(capture) if word == capture.name else word for word in words))
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [finding["kind"] for finding in json.loads(done.stdout)["findings"]]
    assert "one-architecture" in kinds
    done = run(extended, "-m", "consistency", "explain", "one-architecture")
    assert "all devices are of one architecture" in done.stdout, done.stderr


def test_an_adapter_method_is_judged_by_its_form(extended: Path) -> None:
    code = (
        "import peft; from tests.stages.merged.forms.made_layers import DTYPES, adapted, largest, moved\n"
        "config = peft.MissConfig(r=12, target_modules=['linear'])\n"
        "for one in (one for pair in DTYPES[:5] for one in adapted(config, *pair)):\n"
        "    tested = one.tensors()['plain']\n"
        "    off = moved(tested, largest(tested), 2)\n"
        "    print(type(one.form).__name__, one.worst(tested)[0] <= 1, one.worst(off)[0] > 1)"
    )
    done = run(extended, "-c", f"import sys; sys.path.append({str(HERE)!r})\n{code}")
    assert done.stdout.splitlines() == ["Miss True True"] * 5, done.stderr


def test_a_backend_is_known(extended: Path) -> None:
    done = run(extended, "-m", "consistency", *commands("A device backend")[0])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "hpu" in done.stderr
    done = run(extended, "-c", "from consistency.devices.backends import mask_variables as f; print(sorted(f()))")
    assert "HABANA_VISIBLE_MODULES" in done.stdout, done.stderr


def test_an_engine_runs_a_case(extended: Path) -> None:
    code = (
        "import dataclasses; from pathlib import Path; from consistency.case.reading import make_options; "
        "from consistency.workflows import pipeline; "
        "plan = pipeline.prepare(make_options({'devices': 'cpu', 'stages': 'base'})); "
        "plan = dataclasses.replace(plan, engine='noting'); "
        "print(pipeline.run(plan, Path('run-2'), watch=lambda *_: None).comparison.verdict)"
    )
    done = run(extended, "-c", code)
    assert done.stdout.strip() == "consistent", done.stderr
    assert "noted: llama" in done.stderr


def test_an_inference_engine_is_judged(extended: Path) -> None:
    for words in commands("An inference engine"):
        done = run(extended, "-m", "consistency", *words)
        assert done.returncode == 0, done.stdout + done.stderr
    words = ["run", "--base", "builtin:llama", "--devices", "cpu", "--stages", "forward"]
    done = run(extended, "-m", "consistency", *words, "--engine-outputs", "eager=outputs.safetensors")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "eager" in done.stdout


def test_a_format_is_written(extended: Path) -> None:
    done = run(extended, "-m", "consistency", *commands("A report format")[0])
    assert done.returncode == 0, done.stderr
    assert (extended / "run-1" / "names.txt").read_text() == ""
    again = run(extended, "-m", "consistency", *commands("A report format")[0])
    assert again.returncode == 2, "the file is in the way, as those of the other formats"


def test_a_fault_is_found(extended: Path) -> None:
    done = run(extended, "-m", "consistency", *commands("A planted fault")[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "base-reversed" in done.stdout
