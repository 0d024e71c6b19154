"""The files for a forge, a container and an editor parse, and name commands, extras and versions that exist."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from consistency.capture.version import __version__
from tests.documents import commands, refused

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted(path.name for path in (ROOT / ".github" / "workflows").iterdir())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def steps_of(workflow: str) -> list[dict[str, Any]]:
    return [step for job in read(f".github/workflows/{workflow}")["jobs"].values() for step in job["steps"]]


def tox_environments() -> set[str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    return {name.removeprefix("testenv:") for name in parser.sections() if name.startswith("testenv:")}


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_workflows_may_only_read_and_end(workflow: str) -> None:
    text = read(f".github/workflows/{workflow}")
    assert text["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job and "permissions" not in job for job in text["jobs"].values())


@pytest.mark.parametrize("where", [*WORKFLOWS, "action.yml"])
def test_actions_of_others_are_pinned_by_their_commit(where: str) -> None:
    steps = read(where)["runs"]["steps"] if where == "action.yml" else steps_of(where)
    used = [step["uses"] for step in steps if "uses" in step]
    assert used
    assert all(name == "./" or re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name) for name in used), used


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_commands_of_workflows_exist(workflow: str) -> None:
    lines = [line for step in steps_of(workflow) for line in step.get("run", "").splitlines()]
    assert lines
    for line in lines:
        words = shlex.split(line)
        if words[0] == "tox":
            assert words[1:3] == ["run", "-e"]
            assert set(words[3].split(",")) <= tox_environments()
        elif words[0] == ".ci/run":
            assert os.access(ROOT / ".ci" / "run", os.X_OK)
        else:
            assert words[0] in ("python", "sudo"), line


def test_the_workflows_run_lint_types_documents_and_tests() -> None:
    ran = " ".join(step.get("run", "") for step in steps_of("tests.yml"))
    assert re.search(r"-e lint,docs\b", ran)
    assert "-e tests -- -m" in ran
    (versions,) = (
        job["strategy"]["matrix"]["python"]
        for job in read(".github/workflows/tests.yml")["jobs"].values()
        if "strategy" in job
    )
    language = "Programming Language :: Python :: 3."
    declared = [name for name in PROJECT["project"]["classifiers"] if name.startswith(language)]
    assert [f"{language}{version.removeprefix('3.')}" for version in versions] == declared


def test_the_form_asks_for_what_the_tool_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert read(".github/ISSUE_TEMPLATE/config.yml")["blank_issues_enabled"] is True
    form = read(".github/ISSUE_TEMPLATE/bug.yml")
    fields = {field["id"]: field for field in form["body"] if field["type"] != "markdown"}
    assert set(fields) == {"expected", "command", "env", "report", "files", "repeats"}
    assert fields["report"]["attributes"]["label"] == "report.md"
    text = "\n".join(field["attributes"].get(key, "") for field in form["body"] for key in ("value", "description"))
    named = list(commands(" ".join(text.split())))
    assert {"show", "reproduce", "env"} <= {words[0] for words in named}
    problems = {shlex.join(words): why for words in named if (why := refused(words)) is not None}
    assert problems == {}


@pytest.mark.skipif(sys.platform == "win32", reason="a script for bash")
@pytest.mark.process
def test_the_action_passes_its_inputs_on_and_commands_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    action = read("action.yml")
    (step,) = (step for step in action["runs"]["steps"] if step.get("id") == "run")
    values = {
        "base": "./a base", "adapter": "$(touch wrong)", "options": "--name 'two words' --level quick", "report": "out",
    }  # fmt: skip
    inputs = {name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: values[m[1]], v) for name, v in step["env"].items()}
    tool = tmp_path / "consistency"
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > words.txt\nexit 3\n', encoding="utf-8")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "python").symlink_to(sys.executable)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env={**os.environ, **inputs, "PATH": f"{tmp_path}:{os.environ['PATH']}", "GITHUB_OUTPUT": "output.txt"},
        check=False,
    )
    assert done.returncode == 3
    assert (tmp_path / "output.txt").read_text() == "status=3\n"
    words = (tmp_path / "words.txt").read_text().splitlines()
    assert words[:2] == ["run", "--out"]
    assert words[-4:] == ["--name", "two words", "--level", "quick"]
    assert values["adapter"] in words
    assert not (tmp_path / "wrong").exists()
    assert refused(words) is None


def test_the_action_installs_what_is_checked_out() -> None:
    action = read("action.yml")
    (step,) = (step for step in action["runs"]["steps"] if step["name"] == "Install")
    assert '-c "$SOURCE/constraints.txt" "$SOURCE' in step["run"]
    assert all("${{" not in step.get("run", "") for step in action["runs"]["steps"]), "inputs come as variables"


def test_hooks_run_what_is_installed() -> None:
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert {repo["repo"] for repo in read(".pre-commit-config.yaml")["repos"]} == {"local"}, "nothing is fetched"
    assert {hook["language"] for hook in hooks} == {"system", "pygrep"}
    declared = " ".join(PROJECT["project"]["optional-dependencies"]["lint"])
    programs = {hook["entry"].split()[0] for hook in hooks if hook["language"] == "system"}
    assert programs == {"ruff", "lint-imports", "mypy"}
    assert all(name in declared for name in ("ruff", "import-linter", "mypy"))


def test_versions_are_the_packages() -> None:
    cited = read("CITATION.cff")
    assert cited["version"] == __version__
    assert f"## [{__version__}] - {cited['date-released']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert cited["license"] == PROJECT["project"]["license"]
    assert f"/consistency@v{__version__}" in (ROOT / "action.yml").read_text(encoding="utf-8")


def test_the_image_has_what_it_is_built_from(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    oldest = PROJECT["project"]["requires-python"].split(",")[0].removeprefix(">=")
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {f"python:{oldest}-slim"}
    assert re.search(r"^USER \d+$", text, re.MULTILINE)
    assert "HF_HUB_OFFLINE=1" in text
    example = re.sub(r" \\\n#", "", text)
    (arguments,) = re.findall(r"^#\s+podman run .* consistency\s+(run .+)$", example, re.MULTILINE)
    assert refused(shlex.split(arguments)) is None

    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    assert all((ROOT / name).exists() for name in kept)
    build = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*build["packages"], *build["force-include"], *PROJECT["project"]["license-files"],
              PROJECT["project"]["readme"], "pyproject.toml", "hatch_build.py", "constraints.txt"}  # fmt: skip
    assert {name.split("/")[0] for name in needed} == {name.split("/")[0] for name in kept}


def test_editors_leave_compared_files_alone() -> None:
    parser = configparser.ConfigParser()
    parser.read_string("[top]\n" + (ROOT / ".editorconfig").read_text(encoding="utf-8"))
    assert parser["top"]["root"] == "true"
    assert parser["{tests/golden/files,fixtures}/**"]["trim_trailing_whitespace"] == "unset"
    assert any((ROOT / "tests" / "golden" / "files").glob("*.junit.txt"))
