"""Secrets in the environment, in URLs and in names of folders are in no redacted artefact, in no encoding."""

from __future__ import annotations

import base64
import json
import shutil
import urllib.parse
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Cli

TOKEN, KEY, PERSON = "hf_S3cretT0kenOfMine", "AKIAS3CRETK3Y", "acme-unreleased"


def forms(secret: str) -> Iterator[bytes]:
    raw = secret.encode()
    yield raw
    for encoding in ("utf-16-le", "utf-16-be"):
        yield secret.encode(encoding)
    yield raw.hex().encode()
    for padding in range(3):  # wherever it begins among three bytes
        yield base64.b64encode(b"\0" * padding + raw)[4 if padding else 0 : -4]
    yield "".join(f"%{byte:02X}" for byte in raw).encode()
    yield urllib.parse.quote(secret, safe="").encode()
    yield json.dumps(secret)[1:-1].encode()
    yield "".join(f"\\u{ord(c):04x}" for c in secret).encode()


def everything(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file() and file.suffix != ".zip":
            yield str(file), file.name.encode() + b"\n" + file.read_bytes()
        elif file.suffix == ".zip":
            with zipfile.ZipFile(file) as archive:
                for member in archive.infolist():
                    text = member.filename.encode() + member.comment + member.extra
                    yield f"{file}!{member.filename}", text + archive.read(member) + archive.comment


@pytest.mark.slow
def test_no_secret_is_in_a_redacted_artefact(
    cli_here: Cli, tmp_path: Path, llama_base: Path, llama_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, TOKEN)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama_base, tmp_path / PERSON / "base")
    shutil.copytree(llama_adapter, tmp_path / PERSON / "adapter")
    file = tmp_path / PERSON / "adapter" / "adapter_model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-4:] = b"\x00\x00\xc0\x7f"  # a finding to reproduce
    file.write_bytes(raw)
    url = f"memory://{KEY}:{TOKEN}@bucket/history?token={TOKEN}"
    run = ("run", "--base", f"{PERSON}/base", f"--adapter={PERSON}/adapter", "--devices", "cpu,cpu@baseline")
    done = cli_here(*run, "--stages", "adapter,merged", "--history", url, "--out", f"out-{PERSON}")
    assert TOKEN not in done.stdout + done.stderr
    (out,) = (path for path in (tmp_path / f"out-{PERSON}").iterdir() if path.is_dir() and not path.is_symlink())
    assert cli_here("show", out, "--redact", "--out", "public").returncode == 0
    cli_here("reproduce", out, "--finding", "1", "--redact", "--out", "public/repro.zip")
    seen = list(everything(tmp_path / "public"))
    assert len(seen) >= 3
    for secret in (TOKEN, KEY, PERSON):
        for form in forms(secret):
            assert [name for name, text in seen if form in text] == [], (secret, form)


def test_the_search_finds_what_is_planted(tmp_path: Path) -> None:
    for number, form in enumerate(forms(TOKEN)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.txt", b"before " + form + b" after")
        assert any(form in text for _, text in everything(folder))


@pytest.mark.slow
@pytest.mark.parametrize("written", [("--base", "{}", "--adapter", "{}"), ("--base={}", "--adapter={}")], ids=" ".join)
def test_no_name_of_a_folder_is_in_a_redacted_report(
    written: tuple[str, ...], cli: Cli, tmp_path: Path, llama_base: Path, llama_adapter: Path
) -> None:
    secrets = ("zanzibar-llama", "falkenstein-lora", "quuxville", "wonderful-history")
    shutil.copytree(llama_base, tmp_path / "models" / secrets[0])
    shutil.copytree(llama_adapter, tmp_path / secrets[1])
    places = iter((f"models/{secrets[0]}", secrets[1]))
    given = [word.format(next(places)) if "{}" in word else word for word in written]
    run = cli("run", "--devices", "cpu", "--stages", "base,adapter", *given, "--out", secrets[2], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    history = f"file://{tmp_path}/{secrets[3]}"
    again = cli("compare", secrets[2], "--history", history, "--out", "two", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    for folder in (secrets[2], "two"):
        shown = cli("show", folder, "--redact", "--out", f"public-{folder[0]}", cwd=tmp_path)
        assert shown.returncode == 0, shown.stderr
        seen = list(everything(tmp_path / f"public-{folder[0]}"))
        assert len(seen) >= 3
        for secret in secrets:
            for form in forms(secret):
                assert [name for name, text in seen if form in text] == [], (secret, form)
