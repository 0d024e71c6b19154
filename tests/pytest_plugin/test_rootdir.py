"""Where pytest's root directory is when a model is elsewhere: ids, ini file and cache stay with the project."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


@pytest.fixture
def elsewhere(pytester: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory, llama_base: Path) -> Path:
    """Return a base outside of the project, which has an ini file and a test that fails."""
    pytester.makepyprojecttoml(
        '[tool.pytest.ini_options]\naddopts = "--strict-markers"\nmarkers = ["mine: of the ini"]'
    )
    pytester.makepyfile(test_own="import pytest\n@pytest.mark.mine\ndef test_own(): assert False")
    (pytester.path / "model").mkdir()
    return shutil.copytree(llama_base, tmp_path_factory.mktemp("elsewhere") / "llama")


@pytest.fixture(autouse=True)
def _no_other_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest -p no:anyio")


@pytest.mark.slow
def test_a_model_elsewhere_leaves_the_root_directory_alone(pytester: pytest.Pytester, elsewhere: Path) -> None:
    base = f"--consistency-base={elsewhere}"
    done = pytester.runpytest_subprocess(base, "--consistency-stages=base", "test_own.py", "-k", "test_own")
    assert done.parseoutcomes()["failed"] == 1
    done.stdout.fnmatch_lines(
        [f"rootdir: {pytester.path}", "configfile: pyproject.toml", "FAILED test_own.py::test_own*"]
    )
    assert (pytester.path / ".pytest_cache").is_dir()
    assert not (elsewhere / ".pytest_cache").exists()
    (pasted,) = [line.split()[1] for line in done.outlines if line.startswith("FAILED ")]
    pytester.runpytest_subprocess(pasted).assert_outcomes(failed=1)


def test_a_value_that_moves_the_root_directory_is_refused(pytester: pytest.Pytester, elsewhere: Path) -> None:
    """With the right form; pytest has read the wrong ini file by then, so it can go no further."""
    done = pytester.runpytest_subprocess("--consistency-base", str(elsewhere), "--consistency-load")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([
        f"*pytest takes {elsewhere} for a path to tests: its root directory would be *, not {pytester.path}",
        f"  write   --consistency-base={elsewhere}",
    ])  # fmt: skip
    assert not (elsewhere / ".pytest_cache").exists()


@pytest.mark.slow
def test_a_value_that_moves_nothing_is_taken(pytester: pytest.Pytester, elsewhere: Path) -> None:
    done = pytester.runpytest_subprocess(
        "--consistency-name", "model", "--consistency-out", str(pytester.path / "model"), "--co", "-q"
    )
    done.stdout.fnmatch_lines(["test_own.py::test_own"])
