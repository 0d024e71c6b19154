"""The file of `--groups`: both forms say the same, and what is wrong in it is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from consistency.capture.reader import read_capture
from consistency.comparison.site_groups import NO_GROUPS, SiteGroups, read_site_groups
from consistency.errors import UsageError
from tests.comparison.made_records import moved
from tests.conftest import MakeCapture

CSV = "host,rack,row\n\ngpu-1,r12,b\ngpu-2, r13 ,\n"
TOML = '[gpu-1]\nrack = "r12"\nrow = "b"\n\n["gpu-2"]\nrack = "r13"\n'


@pytest.mark.parametrize(("name", "text"), [("g.csv", CSV), ("g.txt", "\ufeff" + CSV), ("g.toml", TOML)])
def test_both_forms(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_site_groups(tmp_path / name).hosts == {"gpu-1": {"rack": "r12", "row": "b"}, "gpu-2": {"rack": "r13"}}


@pytest.mark.parametrize(
    ("name", "text", "line", "what"),
    [
        ("g.csv", "host,rack\ngpu-1,r1\ngpu-1,r2\n", "line 3", "named twice"),
        ("g.csv", "host,rack\ngpu-1,r1,b\n", "line 2", "as many values"),
        ("g.csv", "host,rack\ngpu-1\n", "line 2", "as many values"),
        ("g.csv", "host,rack\n\n,r1\n", "line 3", "no host"),
        ("g.csv", "host;rack\ngpu-1;r1\n", "line 1", "first line has to name"),
        ("g.csv", "host,rack,rack\n", "line 1", "each once"),
        ("g.csv", 'host,rack\ngpu-1,"r1\n', "line 2", "not CSV"),
        ("g.csv", "", "g.csv", "no host"),
        ("g.csv", None, "g.csv", "no such file"),
        ("g.toml", '[gpu-1]\nrack = "r1"\n[gpu-2\n', "line 3", "not TOML"),
        ("g.toml", '[gpu-1]\nrack = "r1"\n[gpu-2]\nrack = ["r1"]\n', "line 3", "a table of texts"),
        ("g.toml", 'gpu-1 = "r1"\n', "line 1", "a table of texts"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path: Path, name: str, text: str | None, line: str, what: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as found:
        read_site_groups(tmp_path / name)
    assert line in str(found.value)
    assert what in str(found.value)
    assert name in str(found.value)


def test_a_host_is_found_with_its_domain_without_it_or_as_its_node(make_capture: MakeCapture) -> None:
    capture = read_capture(make_capture("gpu-1.example.org", {"cpu": [moved()]}))  # its host has this name too
    for host in ("gpu-1.example.org", "gpu-1"):
        assert SiteGroups(hosts={host: {"rack": "r1"}}).of(capture) == {"rack": "r1"}, host
    assert SiteGroups(hosts={"gpu-2": {"rack": "r1"}}).of(capture) is None
    assert NO_GROUPS.of(capture) is None
    renamed = capture.folder.rename(capture.folder.with_name("n7"))
    assert SiteGroups(hosts={"n7": {"rack": "r2"}}).of(read_capture(renamed)) == {"rack": "r2"}
