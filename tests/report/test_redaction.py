"""What names a person, an organisation or a machine is in no file that is made to be attached to a public issue."""

from __future__ import annotations

import argparse
import getpass
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.names import RANK_AND_SCALING, SETTINGS_LAYER, THIS_BASE, TRAINED_ON
from consistency.case import standard
from consistency.case.builtin import builtin_folder
from consistency.case.case import Case
from consistency.cli.main import build_parser, main
from consistency.comparison.result import Comparison, Finding
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.extras.operations.fleet.schedulers.options import FLEET_OPTIONS
from consistency.report.json import as_bytes
from consistency.report.redaction import PATH_OPTIONS, PRIVATE_OPTIONS, Redaction, redaction_of
from consistency.workflows.report_folder import read_comparison
from tests.comparison.made_records import compared, computed, moved
from tests.conftest import MakeCapture
from tests.report.made_comparisons import comparison, faulty, tensor, worker

UUID = "GPU-7f3d2c10-94ab-4e5d-8c11-a0b1c2d3e4f5"
AMD = "GPU-9c1d7e3a5b20f468"  # another vendor's form
BOOT = "3e8f1c52-6b7a-4d0e-9f21-5566778899aa"

PRIVATE = (
    "alice", "gpu17", "corp", "acme", "secret", "wonderland", "/srv", "/mnt", "7f3d2c10", AMD, "3e8f1c52", "/scratch",
    "head-node", "Smith",
)  # fmt: skip

STACK = (
    'File "/home/alice/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 134 in forward\n'
    'File "/srv/acme/tools/wonderland.py", line 7 in main\nFile "/usr/lib/python3.11/runpy.py", line 88 in run\n'
    "rank 0 on gpu17.corp.example killed by alice, home /home/alice; see '/home/Bob Smith/notes.txt' or ~/secret/x"
)


def private() -> Comparison:
    """Return a report with a name of every kind in every kind of place."""
    lost = worker(
        "cuda:1", status="lost", reason="killed by SIGKILL; log in /scratch/alice/secret/worker.log", stack=STACK,
        uuid=UUID, host="gpu17.corp.example", pci_bus_id="0000:17:00.0", device=UUID,
        environment={
            "torch": "2.8.0", "PYTHONPATH": "/srv/acme/tools:/home/alice/secret", "node": "gpu17",
            "variables": {"CUDA_VISIBLE_DEVICES": UUID, "TMPDIR": "/scratch/alice"},
            "model_class": "LlamaForCausalLM", "config": "transformers.models.llama",
        },
    )  # fmt: skip
    finding = Finding(
        kind="lost-worker", severity="error", message="cuda:1 was lost on gpu17: /srv/acme/secret-lora is unreadable",
        workers=("cuda:1",), detail=(*STACK.splitlines(), "adapter /srv/acme/secret-lora/adapter_model.safetensors"),
        next="consistency run --base /mnt/models/llama --adapter /srv/acme/secret-lora --devices cpu,cuda:1",
    )  # fmt: skip
    facts = HostFacts(
        host="gpu17.corp.example", boot_id=BOOT, log=("gpu17 kernel: NVRM: Xid (PCI:0000:17:00): 79, pid=alice",),
        gpus=(Gpu(name="cuda:1", pci_bus_id="0000:17:00.0", uuid=AMD),),
    )  # fmt: skip
    return msgspec.structs.replace(
        faulty(), case="llama + secret-lora", base="/mnt/models/llama", adapter="/srv/acme/secret-lora",
        verdict="incomplete", workers=(*faulty().workers[:2], lost, faulty().workers[3]), hosts=(facts,),
        findings=(finding, *faulty().findings), captures=("/mnt/captures/acme", "s3://acme-bucket/night/gpu17"),
        created="2026-11-20T03:00:00+00:00", host="head-node.corp.example",
        command=("consistency", "run", "--base", "/mnt/models/llama", "--adapter", "../acme/secret-lora",
                 "--out=runs/alice/today", "--devices", "cpu,cuda:1"),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "report.json").write_bytes(as_bytes(private()))
    return tmp_path / "in"


def left(texts: Sequence[str]) -> list[str]:
    names = (*PRIVATE, str(Path.home()), *(name for name in (platform.node(), getpass.getuser()) if name != "root"))
    return [name for name in names if any(name in text for text in texts)]


def test_no_file_of_a_redacted_report_has_them(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = left([(folder / "report.json").read_text()])
    assert there[: len(PRIVATE)] == list(PRIVATE), "they are in the report itself"
    assert main(["show", str(folder), "--redact", "--out", str(tmp_path / "out")]) == 0
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["report.html", "report.json", "report.md"]
    assert left([file.read_text() for file in files]) == []
    capsys.readouterr()
    assert main(["show", str(folder), "--redact", "--verbose"]) == 0
    assert left([capsys.readouterr().out]) == []


def test_it_is_the_same_report(folder: Path, tmp_path: Path) -> None:
    assert main(["show", str(folder), "--redact", "--out", str(tmp_path / "out")]) == 0
    redacted, _ = read_comparison(tmp_path / "out")
    found, _ = read_comparison(folder)
    assert (redacted.verdict, redacted.tensors, redacted.architectures) == (
        found.verdict, found.tensors, found.architectures
    )  # fmt: skip
    assert [finding.kind for finding in redacted.findings] == [finding.kind for finding in found.findings]
    assert redacted.case == "<base> + <adapter>"
    assert redacted.findings[0].next == "consistency run --base <base> --adapter <adapter> --devices cpu,cuda:1"
    lost = redacted.workers[2]
    assert lost.pci_bus_id == "0000:17:00.0", "a slot, not a machine"
    assert lost.environment["config"] == "transformers.models.llama"
    assert lost.stack is not None
    assert lost.stack.splitlines()[0].endswith('/site-packages/torch/nn/modules/linear.py", line 134 in forward')
    assert '"/usr/lib/python3.11/runpy.py"' in lost.stack
    assert (lost.host, redacted.hosts[0].host) == ("<host-2>", "<host-2>")
    assert redacted.host == "<host-1>"
    assert redacted.hosts[0].log[0].startswith("<host-2> kernel: NVRM: Xid (PCI:0000:17:00)")


@pytest.mark.parametrize("taken", ["folders", "names", "exact"])
def test_each_part_of_it_is_needed(taken: str) -> None:
    """The search above can fail: with any part of the redaction taken away, a name is left."""
    table = json.loads(as_bytes(private()))
    whole = redaction_of(table)
    assert left([json.dumps(whole.value(table))]) == []
    parts = {name: getattr(whole, name) for name in ("folders", "homes", "names", "exact") if name != taken}
    assert left([json.dumps(Redaction(**parts).value(table))]) != []


@pytest.mark.parametrize(
    "words",
    [
        ("--base", "acme-llama", "--adapter", "wonder-lora"),
        ("--base=acme-llama", "--adapter=wonder-lora"),
        ("--base", "models/acme-llama", "--adapter", "./wonder-lora"),
        ("--base", "acme-llama/", "--adapter", "mine=wonder-lora", "--adapter", "other=alice-lora"),
        ("--force", "wonder.toml", "--out", "alice-night", "--history", "acme-history"),
        ("acme-night", "--name", "acme llama"),
        ("--wrapper", "acme.wonder:alice", "--base=x/acme", "--store", "file:///srv/acme"),
        (
            "--nodes",
            "acme1,alice2",
            "--account=acme",
            "--engine-args=--wckey=alice --qos=wonder",
            "--partition",
            "acme",
        ),
        ("--command", "env KEY=alice acme exec", "--out", "alice"),
        ("--base", "Бо́б für 日本 🦙", "--adapter", "../wonder-lora"),
    ],
    ids=" ".join,
)
def test_a_word_that_leads_to_a_folder_is_taken_out_however_it_is_written(words: tuple[str, ...]) -> None:
    base = "/srv/Бо́б für 日本 🦙" if any("🦙" in word for word in words) else "/srv/models/acme-llama"
    told = f"give {' '.join(words)} again"
    found = comparison(
        [tensor([["cpu"]])], base=base, adapter="/srv/wonder-lora", command=("consistency", "run", *words),
        case="acme llama" if "acme llama" in words else f"{Path(base).name} + wonder-lora",
        findings=(Finding(kind="note", severity="note", message=told),),
    )  # fmt: skip
    table = json.loads(as_bytes(found))
    text = json.dumps(redaction_of(table).value(table), ensure_ascii=False)
    assert [name for name in ("acme", "wonder", "alice", "Бо́б", "日本") if name in text] == []
    assert '"run"' in text


def test_every_option_of_a_fleet_that_takes_a_text_is_known() -> None:
    named = [option.name for option in FLEET_OPTIONS if option.metavar in ("TEXT", "NAME", "LIST")]
    texts = {f"--{name.replace('_', '-')}" for name in named}
    assert "--nodes" in texts
    assert texts - PRIVATE_OPTIONS == set()


@pytest.mark.parametrize("name", ["forward", "cpu", "adapter"])
def test_a_folder_called_like_a_word_of_the_report_is_taken_out_of_the_command_alone(name: str) -> None:
    found = comparison([tensor([["cpu"]])], base="/srv/llama", adapter=f"/srv/{name}", case=name,
                       command=("consistency", "run", "--adapter", name, "--level", "quick"))  # fmt: skip
    table = json.loads(as_bytes(found))
    redacted = redaction_of(table).value(table)
    assert redacted["command"] == ["consistency", "run", "--adapter", "<adapter>", "--level", "quick"]
    assert redacted["workers"] == table["workers"]


@pytest.mark.parametrize("base", ["/srv/llama", str(builtin_folder("llama") / "base")])
def test_a_name_that_was_given_is_taken_out_whatever_it_is(base: str) -> None:
    found = comparison([tensor([["cpu"]])], base=base, adapter=None, case="forward",
                       command=("consistency", "run", "--name", "forward"))  # fmt: skip
    table = json.loads(as_bytes(found))
    redacted = redaction_of(table).value(table)
    assert (redacted["command"][3], redacted["case"]) == ("<case>", "<case>")
    assert redacted["outcomes"] == table["outcomes"]


@pytest.mark.parametrize("name", ["acme-secret", "a", "forward"])
def test_the_case_that_has_a_stage_of_this_one_is_taken_out(name: str) -> None:
    case = Case(name="second", base="/b", stages=(standard.FORWARD,), host_checked_by=name)
    elsewhere: dict[str, Any] = {"not_checked": case.not_checked(), "checked_elsewhere": case.checked_elsewhere}
    found = comparison([tensor([["cpu"]])], base="/srv/llama", adapter=None, **elsewhere)
    table = json.loads(as_bytes(found))
    redacted = redaction_of(table).value(table)
    assert set(redacted["checked_elsewhere"].values()) == {"<other-case>"}
    assert "stage transfer (checked in case <other-case>)" in redacted["not_checked"]
    assert not any(f"checked in case {name}" in text for text in redacted["not_checked"])
    assert redacted["outcomes"] == table["outcomes"]


def test_every_option_that_takes_a_path_is_known() -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    taken = set()
    for name in ("run", "capture", "compare", "fleet", "diff", "doctor", "drill"):  # what a report can be of
        for action in commands.choices[name]._actions:
            is_path = action.type is Path or re.search("DIR|FILE|PATH|URL", str(action.metavar or ""))
            taken |= {word for word in action.option_strings if is_path and word.startswith("--")}
    assert "--out" in taken
    assert taken - PATH_OPTIONS == set()


def test_a_home_folder_is_named_and_may_have_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/scratch/Bob Smith")
    redaction = redaction_of({})
    assert redaction.text("in /scratch/Bob Smith/runs/x and /scratch/Bob Smith") == "in <home>/<path-1> and <home>"


@pytest.mark.parametrize("name", ["acme-secret-model", "Acme secret model", "acme, the 2nd"])
def test_the_base_that_an_adapter_names_is_taken_out_and_short_words_stay(name: str) -> None:
    """`a` is a folder that a command names, and a word of every sentence."""
    said = f"adapter_config.json names another base: {name}, this one is llama; a second run"
    command = ["consistency", "run", "--base", "../cp/llama", "--adapter", "../cp/a"]
    report = {"command": command, "base": "/cp/llama", "adapter": "/cp/a", "findings": [{"message": said}]}
    found = redaction_of(report).value(report)["findings"][0]["message"]
    assert found == "adapter_config.json names another base: <other-base>, this one is <base>; a second run"


@pytest.mark.parametrize("name", ["m7", "m7b"])
def test_a_name_of_two_letters_is_taken_out_as_a_longer_one_is(name: str) -> None:
    said = f"adapter_config.json names another base: x{name}, this one is {name}; it is as in a second run of it"
    command = ["consistency", "run", "--base", f"../cp/{name}", "--adapter", "../cp/is"]
    report = {"command": command, "base": f"/cp/{name}", "adapter": "/cp/is", "findings": [{"message": said}]}
    found = redaction_of(report).value(report)
    assert found["findings"][0]["message"] == (
        "adapter_config.json names another base: <other-base>, this one is <base>; it is as in a second run of it"
    )
    assert found["command"][3:] == ["<base>", "--adapter", "<adapter>"]
    other = f"adapter_config.json names another base: {name}, this one is llama"
    assert name not in redaction_of({"findings": [{"message": other}]}).text(other)


def test_what_the_comparison_says_of_another_base_is_what_is_looked_for(make_capture: MakeCapture) -> None:
    evidence = {TRAINED_ON: f"acme-secret-model{THIS_BASE}llama"}
    settings = computed(
        stage="adapter", layer=SETTINGS_LAYER, tensor=RANK_AND_SCALING, rule="peer", status="measured", measure=None,
        word=None, evidence=evidence,
    )  # fmt: skip
    table = json.loads(as_bytes(compared(make_capture("a", {"cpu": [moved(), settings]}))))
    assert "acme-secret-model" in json.dumps(table["findings"])
    assert "acme-secret-model" not in json.dumps(redaction_of(table).value(table))


def test_what_names_nobody_stays() -> None:
    plain = comparison([tensor([["cpu"]])], host="localhost", base="meta-llama/Llama-3.1-8B", case="Llama-3.1-8B",
                       command=("consistency", "run", "--base", "meta-llama/Llama-3.1-8B"))  # fmt: skip
    table = json.loads(as_bytes(plain))
    redaction = redaction_of(table)
    assert redaction.value(table) == table
    for text in (
        "✗ 6.5e-05 / 2e-05  3.25  12 ULP", "error/tolerance", "58/256", "https://pytorch.org/docs", "cpu→cuda:0",
        "model.layers.0.self_attn.q_proj", "20 GB/s and/or", "/proc/self/status", "sha256 0f3a", "0000:17:00.0",
    ):  # fmt: skip
        assert redaction.text(text) == text


def test_a_host_called_like_a_word_of_the_report_does_not_garble_it() -> None:
    first = worker("cpu", "x86-64", host="a")
    found = msgspec.structs.replace(faulty(), host="cuda", workers=(first, *faulty().workers[1:]))
    table = json.loads(as_bytes(found))
    redacted = redaction_of(table).value(table)
    assert (redacted["host"], redacted["workers"][0]["host"]) == ("<host>", "<host>")
    redacted["host"], redacted["workers"][0]["host"] = "cuda", "a"
    assert redacted == table


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("connect to 10.1.2.3:29500 failed", "connect to <address>:29500 failed"),
        ("at 192.168.0.17.", "at <address>."),
        ("link aa:bb:cc:dd:ee:ff is down", "link <address> is down"),
        ("fe80::1ff:fe23:4567:890a", "<address>"),
        ("to 9.8.7.6:80", "to <address>:80"),
        ("2001:db8::1", "<address>"),
        ("tcp://[2001:db8::7]:29500", "tcp://[<address>]:29500"),
        ("::ffff:10.1.2.3", "<address>"),
        (r"\\server\share\models\x", "<path>"),
        (r"in '\\server\my share\x'", "in '<path>'"),
        (r"in '\\\\server\\share\\x'", "in '<path>'"),
        ("//server/share/x", "<path>"),
        (r"C:\Users\Bob Smith\x", "<path>"),
        ("file:///srv/acme%20llama/x and file://gpu17/srv/y", "<path-1> and <path-2>"),
        ("--base python:acme.secret:factory", "--base python:<function>"),
        ("memory://AKIA:KEY@bucket/h?token=t", "memory://bucket/h"),
        ("cudnn 9.1.0.70, driver 580.126.16.99, 0000:16:01.0", "cudnn 9.1.0.70, driver 580.126.16.99, 0000:16:01.0"),
        ("adapter::model.layers.0.q_proj", "adapter::model.layers.0.q_proj"),
        ("12:30:45, 3:1, dead::beef, a // b, x:y::z", "12:30:45, 3:1, dead::beef, a // b, x:y::z"),
    ],
)
def test_addresses_functions_and_credentials_are_taken_out(text: str, redacted: str) -> None:
    assert Redaction().text(text) == redacted


def test_the_folder_that_a_run_is_written_to_is_no_name_of_it() -> None:
    report = {
        "command": ["consistency", "run", "--out", "falcon"],
        "sources": [{"name": "falcon", "command": ["consistency", "run", "--out", "falcon"]}],
        "workers": [{"name": "falcon:cpu"}],
    }
    assert "falcon" not in json.dumps(redaction_of(report).value(report))
