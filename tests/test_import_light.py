"""What must not import torch does not, and the check that says so can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import consistency
from consistency.capture.json_codec import encode_json
from consistency.report import json
from consistency.report.formats import View
from tests.extras.operations.status.made_statuses import status as made_status
from tests.made_weights import f32, put
from tests.report.made_comparisons import faulty

pytestmark = pytest.mark.process

HEAVY = ("torch", "transformers", "peft", "numpy", "safetensors.torch", "accelerate")


def loaded_by(code: str, cwd: Path) -> set[str]:
    """Run code in a fresh interpreter; return which heavy modules it has loaded."""
    program = f"{code}\nimport sys\nprint('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, cwd=cwd)
    line = next(line for line in done.stdout.splitlines() if line.startswith("LOADED"))
    return set(line.split()[1:])


LIGHT = {
    "package": "import consistency; assert consistency.__version__",
    "public names": "from consistency import Case, Comparison, ConsistencyError, Options, Report, compare, run",
    "plugin": "import consistency.pytest_plugin.plugin",
    "reading and comparing": (
        "import consistency.comparison.compare, consistency.comparison.findings.collect, consistency.report.json"
    ),
    "looking at the machine": (
        "import consistency.workflows.pipeline, consistency.devices.host\n"
        "assert consistency.devices.host.read_host([]).kernel"
    ),
    "command line": (
        "from consistency.cli.main import main\ntry:\n    main(['run', '--help'])\nexcept SystemExit as error:\n"
        "    assert not error.code"
    ),
    "devices": "from consistency.cli.main import main\nassert main(['devices']) == 0",
    "explaining": "from consistency.cli.main import main\nassert main(['explain']) == main(['explain', 'zeros']) == 0",
    "preflight": (
        "from consistency import Options\n"
        "from consistency.pytest_plugin.item_names import places\n"
        "from consistency.workflows import pipeline\n"
        "assert len(places(pipeline.prepare(Options(base='builtin:llama')).case)) > 100"
    ),
    "pytest without the plugin's options": (
        "import pytest\nassert pytest.main(['-q', '--co', '-p', 'no:cacheprovider']) == 5"
    ),
    "collecting items": (
        "import pytest\n"
        "assert pytest.main(['-q', '--co', '-p', 'no:cacheprovider', '--consistency-base', 'builtin:gpt2']) == 0"
    ),
}


@pytest.mark.parametrize("code", LIGHT.values(), ids=LIGHT)
def test_stays_light(code: str, tmp_path: Path) -> None:
    assert loaded_by(code, tmp_path) - {"numpy"} == set()


PLUGIN_NEEDS = [
    "consistency",
    "consistency.case",  # the table of options: 5 ms of a pytest start of 400 ms, and no library
    "consistency.case.load_path",
    "consistency.case.options",
    "consistency.case.stages",
    "consistency.errors",
    "consistency.numerics",  # the rules of the stages: plain Python
    "consistency.numerics.real",
    "consistency.numerics.rules",
    "consistency.optional",
    "consistency.pytest_plugin",
    "consistency.pytest_plugin.plugin",
    "consistency.text",
]


@pytest.mark.slow
def test_plugin_loads_the_table_of_options_and_no_library(tmp_path: Path) -> None:
    """Every pytest session of the environment pays for what the plugin imports."""
    code = (
        "import pytest, sys\npytest.main(['-q', '--co', '-p', 'no:cacheprovider'])\n"
        "own = sorted(m for m in sys.modules if m.startswith('consistency'))\n"
        f"assert own == {PLUGIN_NEEDS!r}, own\nassert 'msgspec' not in sys.modules"
    )
    assert loaded_by(code, tmp_path) == set()


def test_importing_the_package_imports_nothing_else(tmp_path: Path) -> None:
    """So it takes a millisecond or two; `-S`, because `site` runs what the environment's .pth files import."""
    code = "import sys\nbefore = set(sys.modules)\nimport consistency\nprint(*sorted(set(sys.modules) - before))"
    where = {**os.environ, "PYTHONPATH": str(Path(consistency.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path, env=where
    )
    assert done.stdout.split() == ["__future__", "consistency"]


def test_compare_stays_a_function_after_its_package_was_imported(tmp_path: Path) -> None:
    """A package named `consistency.compare` would take the function's place as soon as a run imports it."""
    code = (
        "import consistency\nfrom consistency.workflows import pipeline\nimport consistency.comparison.compare, sys\n"
        "assert callable(consistency.compare) and callable(consistency.run)\n"
        "from consistency import compare\n"
        "assert compare is consistency.compare and compare.__module__ == 'consistency.workflows.api'\n"
        "taken = [n for n in consistency.__all__ if f'consistency.{n}' in sys.modules]\nassert not taken, taken"
    )
    assert loaded_by(code, tmp_path) <= {"numpy"}


STATUS_LEAVES_OUT = ("numpy", "rich", "jinja2", "fsspec", "consistency.case.options", "consistency.comparison.result")


def test_status_loads_next_to_nothing(tmp_path: Path) -> None:
    """Monitoring starts it every few seconds; the second half proves that the check can fail."""
    (tmp_path / "report.json").write_bytes(b"".join(json.render(faulty(), View())))
    small = tmp_path / "status.json"
    small.write_bytes(encode_json(made_status(faulty())))
    code = (
        "import sys\nfrom consistency.cli.main import main\n"
        "for form in ('text', 'nagios', 'prometheus', 'json'):\n"
        "    assert main(['status', '.', '--format', form]) in (1, 2)\n"
        f"loaded = [name for name in {STATUS_LEAVES_OUT!r} if name in sys.modules]\n"
    )
    assert loaded_by(f"{code}assert not loaded, loaded", tmp_path) == set()
    small.unlink()
    loaded_by(f"{code}assert 'consistency.comparison.result' in loaded, loaded", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["consistency.numerics.digest", "consistency.worker.session", "torch"])
def test_the_check_can_fail(module: str, tmp_path: Path) -> None:
    assert "torch" in loaded_by(f"import {module}", tmp_path)


@pytest.mark.slow
def test_equal_files_import_no_torch_and_others_do(tmp_path: Path) -> None:
    """The second half proves that the first can fail."""
    put(tmp_path / "a.safetensors", {"x.w": f32(1, 2)})
    for name, second, status, loaded in (("same", 2, 0, {"numpy"}), ("other", 3, 1, {"numpy", "torch"})):
        put(tmp_path / f"{name}.safetensors", {"x.w": f32(1, second)})
        diff = f"main(['diff', 'a.safetensors', '{name}.safetensors'])"
        code = f"from consistency.cli.main import main\nassert {diff} == {status}"
        assert loaded_by(code, tmp_path) == loaded
