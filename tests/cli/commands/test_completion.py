"""The script of a shell completes commands, options and values, as that shell runs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from consistency.cli.commands.completion import SHELLS
from consistency.cli.main import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_gets_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(word in text for word in ("capture", "drill", "load-paths", "bfloat16"))


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("comp", {"compare", "completion"}),
        ("run --adap", {"--adapter"}),
        ("run --dtype b", {"bfloat16"}),
        ("run --base mo", {"model"}),
        ("run --adapter mo", {"model"}),
        ("run --inputs in", {"in.safetensors"}),
        ("run --stages ada", {"adapter", "adapters"}),
        ("show run-1 --stages for", {"forward"}),
        ("run --devices cpu@avx2", {"cpu@avx2"}),
        ("run --load-paths al", {"all"}),
        ("run --level q", {"quick"}),
        ("run --format g", {"github"}),
        ("run --only mer", {"merged"}),
        ("drill --only adapter-nan", {"adapter-nan"}),
        ("explain wrong-sc", {"wrong-scale"}),
        ("explain zeros wrong-sc", {"wrong-scale"}),
    ],
)
def test_bash_completes(words: str, completed: set[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "in.safetensors").touch()
    (tmp_path / "script").write_text(script("bash", capsys))
    typed = words.split()
    program = (
        "source ./script\n"
        f"COMP_WORDS=(consistency {words}); COMP_CWORD={len(typed)}; _shtab_consistency\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == completed
