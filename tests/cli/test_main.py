"""The command line: bad input, signals, full disks. No traceback ever reaches a user.

It is a process where that matters. Elsewhere an exception that would print a traceback ends the test.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import consistency
from consistency.worker.faults.catalogue import FAULTS
from tests.conftest import Cli, FinishedRun, command
from tests.made_weights import f32, put
from tests.reported import rows


@pytest.fixture
def copies(tmp_path: Path, llama_base: Path, llama_adapter: Path) -> tuple[Path, Path]:
    """Copy base and adapter, so that a test can spoil them."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    shutil.copytree(llama_base, base)
    shutil.copytree(llama_adapter, adapter)
    return base, adapter


def refused(done: subprocess.CompletedProcess[str], *words: object) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stderr.startswith("consistency: ")
    for word in words:
        assert str(word) in done.stderr
    assert ": import" not in done.stderr, "a worker was started"


def edit(path: Path, **changes: object) -> None:
    table = json.loads(path.read_text())
    table.update(changes)
    path.write_text(json.dumps({k: v for k, v in table.items() if v is not None}))


def test_missing_folders(cli_here: Cli, tmp_path: Path, llama_base: Path) -> None:
    refused(cli_here("run", "--base", tmp_path / "nowhere"), "no such folder for the base", tmp_path / "nowhere")
    refused(cli_here("run", "--base", llama_base, "--adapter", "./nowhere"), "no such folder for the adapter")
    refused(cli_here("run", "--base", llama_base, "--adapter", tmp_path), "adapter_config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("atol=1", "without rtol"),
        ("stage=adapter,atol=1,rtol=1", "only moves bytes"),
        ("layers=x,atol=1,rtol=1", "did you mean layer?"),
        ("atol=nan,rtol=0", "finite"),
    ],
)
def test_bad_tolerance(cli_here: Cli, tmp_path: Path, text: str, words: str) -> None:
    refused(cli_here("run", "--tolerance", text), words)
    refused(cli_here("capture", "--out", tmp_path / "out", "--tolerance", "atol=1,rtol=1", "--tolerance", text), words)


def test_tolerances_of_the_command_line_come_after_those_of_the_file(cli_here: Cli, tmp_path: Path) -> None:
    config, out = tmp_path / "mine.toml", tmp_path / "out"
    config.write_text('devices = "cpu"\nstages = "merged"\nlevel = "quick"\n[[tolerance]]\natol = 0\nrtol = 0\n')
    done = cli_here("run", config, "--tolerance", "stage=merged,layer=model.*,atol=1e-3,rtol=0", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: tolerance stage=merged,layer=model.*,atol=0.001,rtol=0.0: 56 tensors judged by it" in done.stdout
    assert "note: tolerance atol=0.0,rtol=0.0: judged no tensor: a later one wins where it matches" in done.stdout
    report = json.loads((out / "report.json").read_text())
    assert {one["rule"] for one in report["outcomes"]} == {"user"}
    case = json.loads((out / "captures" / "capture.json").read_text())["case"]
    assert [table["atol"] for table in case["tolerance"]] == [0, 1e-3]


def test_adapter_without_base(cli_here: Cli, llama_adapter: Path) -> None:
    refused(cli_here("run", "--adapter", llama_adapter), "--base is required with an adapter")


def test_adapter_without_weights(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    base, adapter = copies
    (adapter / "adapter_model.safetensors").unlink()
    refused(cli_here("run", "--base", base, "--adapter", adapter), "no weights", "adapter_model.safetensors", adapter)


@pytest.mark.slow
def test_pickled_adapter_is_refused_with_the_way_out(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    import torch
    from safetensors.torch import load_file

    base, adapter = copies
    weights = load_file(adapter / "adapter_model.safetensors")
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(weights, adapter / "adapter_model.bin")
    run = ("run", "--base", base, "--adapter", adapter, "--devices", "cpu", "--stages", "adapter")
    done = cli_here(*run)
    refused(done, "pickle", "adapter_model.bin", "--allow-pickle", "weights_only=True")

    allowed = cli_here(*run, "--allow-pickle")
    assert allowed.returncode == 0, allowed.stderr
    line = next(line for line in done.stderr.splitlines() if "python -c" in line)
    words = shlex.split(line.partition("convert it: ")[2].partition("; or allow")[0])
    subprocess.run([sys.executable, *words[1:]], cwd=adapter, check=True)
    converted = load_file(adapter / "adapter_model.safetensors")
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[name], weights[name]) for name in weights)
    assert cli_here(*run, "--plan").returncode == 0


def test_a_pickle_that_would_run_code_does_not(cli_here: Cli, copies: tuple[Path, Path], tmp_path: Path) -> None:
    import pickle

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.system, (f"touch {tmp_path / 'owned'}",))

    base, adapter = copies
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps({"lora_A": Evil()}))
    done = cli_here("run", "--base", base, "--adapter", adapter, "--devices", "cpu", "--allow-pickle")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "owned").exists()


def test_git_lfs_pointer(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    base, adapter = copies
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 269216\n"
    (adapter / "adapter_model.safetensors").write_text(pointer)
    refused(cli_here("run", "--base", base, "--adapter", adapter), "Git LFS pointer", "git lfs pull", "269216")


@pytest.mark.parametrize("keep", [0, 5, 300, 100_000])
def test_truncated_weights(cli_here: Cli, copies: tuple[Path, Path], keep: int) -> None:
    base, adapter = copies
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(cli_here("run", "--base", base, "--adapter", adapter), "cut short or corrupt", path)


def test_corrupt_base_header(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    base, adapter = copies
    path = base / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[20:60] = os.urandom(40)
    path.write_bytes(raw)
    refused(cli_here("run", "--base", base, "--adapter", adapter), "cut short or corrupt", path)


def test_configs_without_their_keys(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    base, adapter = copies
    run = ("run", "--base", base, "--adapter", adapter)
    edit(adapter / "adapter_config.json", peft_type=None)
    refused(cli_here(*run), "adapter_config.json lacks the field 'peft_type'")
    edit(base / "config.json", model_type=None)
    refused(cli_here(*run), "config.json lacks the field 'model_type'", base)
    (base / "config.json").write_text("{")
    refused(cli_here(*run), "config.json is not JSON")


def test_config_that_transformers_cannot_use(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    base, adapter = copies
    edit(base / "config.json", model_type="no-such-model", architectures=["NoSuchModel"])
    done = cli_here("run", "--base", base, "--adapter", adapter, "--devices", "cpu")
    assert done.returncode == 2
    assert "transformers cannot use this config" in done.stderr
    assert "Traceback" not in done.stderr


def test_adapter_for_another_base(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    _, adapter = copies
    refused(cli_here("run", "--base", "builtin:bert", "--adapter", adapter), "the adapter is for another base")


def test_rank_that_the_weights_do_not_have(cli_here: Cli, copies: tuple[Path, Path]) -> None:
    base, adapter = copies
    edit(adapter / "adapter_config.json", r=16)
    refused(cli_here("run", "--base", base, "--adapter", adapter), "16", "rank")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--devices", "cuda:99"), ("this machine has no device cuda:99",)),
        (("--devices", "cpu@sse9"), ("unknown variant of cpu: sse9",)),
        (("--json", "--format", "text"), ("give one format", "--json and --format text")),
        (("--devices", "c p u"), ("not a device",)),
        (("--devices", ","), ("no device given",)),
        (("--stages", "base,merge"), ("unknown stage: merge", "base, adapter, merged, forward")),
        (("--load-paths", "motorway"), ("unknown load path: motorway", "--load-paths")),
        (("--load-paths", "motorway"), ("unknown load path: motorway",)),
        (("--dtype", "int3"), ("--dtype: invalid choice: 'int3'", "bfloat16")),
        (("--level", "extreme"), ("--level: invalid choice: 'extreme'", "thorough")),
        (("--repeat", "0"), ("repeat", "above 0")),
        (("--stall", "-1"), ("stall", "above 0")),
        (("--base", "python:no module"), ("not a model factory",)),
        (("--inputs", "nowhere.safetensors"), ("no such inputs file",)),
        (("nowhere.toml",), ("no such configuration file",)),
        (("--dev", "cpu"), ("consistency run has no option --dev",)),
    ],
)
def test_bad_usage(cli_here: Cli, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(cli_here("run", *arguments), *words)


def test_unknown_command_and_help(cli: Cli) -> None:
    refused(cli("frobnicate"), "frobnicate")
    alone, done = cli(), cli("--help")
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, "", done.stdout)
    assert done.returncode == 0
    assert "exit status: 0 consistent" in done.stdout


def test_versions_are_of_what_is_installed(cli: Cli) -> None:
    done = cli("--version")
    assert done.returncode == 0
    versions = dict(line.split() for line in done.stdout.splitlines())
    assert versions["consistency"] == consistency.__version__
    assert {name: versions[name] for name in ("torch", "transformers", "peft")} == {
        name: metadata.version(name) for name in ("torch", "transformers", "peft")
    }


def test_drill_lists_its_faults_and_plants_none(cli_here: Cli) -> None:
    done = cli_here("drill", "--list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    rows = json.loads(done.stdout)
    assert [row["fault"] for row in rows] == list(FAULTS)
    assert {row["needs"] for row in rows} == {"", "an accelerator", "two accelerators", "a quantized base"}
    assert "adapter-zeros" in cli_here("drill", "--list").stdout


def test_configuration_file(cli_here: Cli, tmp_path: Path, copies: tuple[Path, Path]) -> None:
    config = tmp_path / "case.toml"
    config.write_text('base = "base"\nadapter = "adapter"\nstages = "adapter"\ndevices = ["cpu"]\nnames = "x"\n')
    refused(cli_here("run", config), "names", config)
    config.write_text(config.read_text().replace("names =", "name ="))
    done = cli_here("run", config, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["case"] == "x"
    assert {one["stage"] for one in report["outcomes"]} == {"adapter"}


@pytest.mark.slow
def test_factory_without_adapter(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "factory.py").write_text(
        "import torch\n\n"
        "def make():\n    torch.manual_seed(0)\n    return torch.nn.Linear(8, 8)\n\n"
        "def number():\n    return 3\n\n"
        "def broken():\n    raise ValueError('no luck')\n"
    )
    done = cli("run", "--devices", "cpu", "--base", "python:factory:make", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {one["layer"] for one in json.loads(done.stdout)["outcomes"] if one["stage"] == "base"} == {"weight", "bias"}
    bad = {
        "nothing": "cannot import the model factory",
        "number": "does not return a module",
        "broken": "did not finish",
    }
    config = [f'[[case]]\nname = "{function}"\nbase = "python:factory:{function}"\n' for function in bad]
    (tmp_path / "bad.toml").write_text('devices = "cpu"\n' + "".join(config))
    done = cli("run", "bad.toml", "--json", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert "ValueError: no luck" in done.stderr, "what a factory raises is of the worker in which it does"
    said = {case["name"]: case["error"] or case["headline"] for case in json.loads(done.stdout)["cases"]}
    assert said.keys() == bad.keys()
    for function, words in bad.items():
        assert words in said[function]


@pytest.mark.slow
def test_inputs_from_a_file(cli_here: Cli, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save_file({"input_ids": np.arange(12, dtype=np.int64).reshape(2, 6)}, good)
    save_file({"input_ids": np.full((2, 6), 10**6, dtype=np.int64)}, bad)  # past the vocabulary
    run = ("run", "--devices", "cpu", "--stages", "forward", "--json", "--inputs")
    done = cli_here(*run, good)
    assert done.returncode == 0, done.stderr
    logits = next(one for one in json.loads(done.stdout)["outcomes"] if one["layer"] == "logits")
    assert logits["shape"][:2] == [2, 6]
    done = cli_here(*run, bad)
    assert done.returncode == 1, done.stdout + done.stderr
    (finding,) = [f for f in json.loads(done.stdout)["findings"] if f["severity"] == "error"]
    assert finding["kind"] == "ids-past-vocabulary"
    assert "ids past the vocabulary: largest id 1000000, embedding has 512 rows" in finding["message"]


@pytest.mark.slow
def test_libraries_that_do_not_fit_one_another(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("raise ImportError(\"cannot import name 'HybridCache'\")")
    done = cli("run", "--devices", "cpu", by_exec=True, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2, done.stdout
    assert "cannot be imported together" in done.stderr
    assert "HybridCache" in done.stderr


def test_out_is_not_overwritten_unasked(cli_here: Cli, finished_run: FinishedRun, tmp_path: Path) -> None:
    refused(cli_here("run", "--out", finished_run.folder), "in the way", "--force")
    (tmp_path / "file").write_text("")
    refused(cli_here("run", "--out", tmp_path / "file"), "must be a folder")
    refused(cli_here("compare", finished_run.folder, "--out", finished_run.folder), "choose another folder")


def test_the_nightly_command_serves_every_night(cli_here: Cli, tmp_path: Path) -> None:
    command_line = ("run", "--history", "history", "--baseline", "baseline.json", "--out", "runs")
    stage = ("--devices", "cpu", "--stages", "base", "--load-paths", "isolated")
    said = "baseline baseline.json does not exist: no finding is accepted"
    for night in (1, 2):
        done = cli_here(*command_line, *stage, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(said) == (night == 1)
        folders = sorted(path.name for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
        assert len(folders) == night
        assert f"runs/{folders[-1]}" in done.stdout
        assert (tmp_path / "runs" / "latest").readlink() == Path(folders[-1])
        assert len(list((tmp_path / "history" / "runs").iterdir())) == night
        cli_here("baseline", "init", "baseline.json", cwd=tmp_path)
    last = max((tmp_path / "history" / "runs").iterdir())
    assert json.loads(last.read_bytes())["report"] == str(tmp_path / "runs" / folders[-1])
    refused(
        cli_here("baseline", "accept", "runs", "--baseline", "b", "--reason", "r", cwd=tmp_path), "no error to accept"
    )


def test_force_and_the_option_keep_a_run_in_the_folder_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from consistency.cli.commands.run import _folder
    from consistency.cli.main import build_parser

    def places(*options: str) -> list[str]:
        out = tmp_path / "out"
        with _folder(build_parser().parse_args(["run", "--out", str(out), *options])) as folder:
            assert folder is not None
            found = folder.relative_to(tmp_path).parts
        shutil.rmtree(out, ignore_errors=True)
        return list(found)

    assert len(places("--history", "h")) == 2
    assert len(places("--dated")) == 2
    assert len(places("--history", "h", "--force", "--dated")) == 2
    for options in ((), ("--history", "h", "--force"), ("--history", "h", "--no-dated")):
        assert places(*options) == ["out"]


def test_compare_what_is_no_capture(cli_here: Cli, finished_run: FinishedRun, tmp_path: Path) -> None:
    refused(cli_here("compare", tmp_path), "no capture here", tmp_path)
    broken = tmp_path / "broken"
    shutil.copytree(finished_run.folder / "captures", broken)
    manifest = broken / "capture.json"
    manifest.write_text(manifest.read_text().replace("consistency.capture/1", "consistency.capture/9"))
    refused(cli_here("compare", broken), "another schema", "consistency.capture/9")
    done = cli_here("compare", finished_run.folder, broken)
    assert done.returncode == 3, "what can be read is compared, and what cannot is said"
    assert "broken: left out: a capture of another schema (consistency.capture/9, wanted" in done.stdout


def test_edited_capture_is_named_and_the_rest_is_compared(
    cli_here: Cli, finished_run: FinishedRun, tmp_path: Path
) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(finished_run.folder / "captures", edited)
    records = edited / "workers" / "cpu.isolated" / "records.jsonl"
    records.write_text(records.read_text().replace('"digest":"', '"digest":7,"x":"', 1))
    done = cli_here("compare", finished_run.folder, edited)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "edited: worker cpu.isolated: line 1 is damaged" in done.stdout


def test_devices_lists_the_cpu_without_torch(cli: Cli) -> None:
    done = cli("devices", "--json")
    assert done.returncode == 0
    rows = json.loads(done.stdout)
    assert rows[0]["name"] == "cpu"
    assert {"architecture", "model", "uuid", "pci_bus_id", "driver", "capability"} <= set(rows[0])
    assert "architecture" in cli("devices").stdout


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_stopping_leaves_no_process_and_no_half_written_capture(
    tmp_path: Path, number: signal.Signals, worker_commands: Callable[[], list[str]]
) -> None:
    out = tmp_path / "out"
    # A background job of a script inherits an ignored signal, which the tool rightly keeps ignoring. A signal that this
    # process handles is reset to its default in the child.
    inherited = signal.signal(number, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command("run", "--out", out, "--devices", "cpu,cpu@baseline", "--stages", "base,adapter,merged"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        signal.signal(number, inherited)
    assert process.stderr is not None
    started = process.stderr.readline()
    assert ": import" in started
    time.sleep(1.0)
    assert any(str(tmp_path) in line for line in worker_commands())
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped" in errors
    assert "Traceback" not in errors
    assert not any(str(tmp_path) in line for line in worker_commands())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path, worker_commands: Callable[[], list[str]]) -> None:
    run = command("run", "--out", tmp_path / "out", "--devices", "cpu,cpu@baseline")
    process = subprocess.Popen(run, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert ": import" in process.stderr.readline()
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 30
    while any(str(tmp_path) in line for line in worker_commands()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(str(tmp_path) in line for line in worker_commands())


@pytest.mark.slow
@pytest.mark.process
def test_file_size_limit_is_told_as_what_it_is(tmp_path: Path) -> None:
    """A capture that cannot be written is status 2, not a lost worker."""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    done = subprocess.run(
        command("run", "--out", tmp_path / "out", "--devices", "cpu", "--stages", "base,adapter"),
        capture_output=True, text=True, check=False, timeout=300, preexec_fn=limit,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "cannot" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kib", [64, 500])  # before the first tensor is written, and while the merged ones are
def test_full_disk(cli: Cli, tmp_path: Path, kib: int) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small disk")
    try:
        done = cli("run", "--out", disk / "out", "--devices", "cpu", "--stages", "base,adapter,merged", "--keep")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "INCOMPLETE   cpu did not finish" in done.stdout
    assert "No space left on device" in done.stdout or "is the disk full?" in done.stdout
    assert "make room on the disk of --out" in done.stdout
    assert "File " not in done.stdout + done.stderr, "where this tool was writing helps nobody"


def test_a_disk_that_fills_up_late_leaves_the_verdict_of_what_was_checked(cli: Cli, tmp_path: Path) -> None:
    """The room that is kept for the tables of a capture is enough to compare what was recorded before."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(disk)], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small disk")
    try:
        done = cli("run", "--out", disk / "out", "--devices", "cpu", "--stages", "base,adapter,merged", "--keep")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "INCOMPLETE   cpu did not finish" in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if line.strip().startswith("cpu (reference)"))
    assert "=" in row, "the base was compared with its file before the disk was full"


@pytest.mark.parametrize("words", ["devices --json", "compare {} -v", "compare {} --json", "run --base gone"])
def test_output_that_nobody_reads(words: str, finished_run: FinishedRun) -> None:
    """It has a status of its own: 1 would be a verdict."""
    reading, writing = os.pipe()
    os.close(reading)
    line = command(*words.format(finished_run.folder).split())
    try:
        done = subprocess.run(line, stdout=writing, stderr=writing, check=False)
        told = subprocess.run(line, stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert done.returncode == 141
    assert b"Traceback" not in told.stderr
    assert b"Exception ignored" not in told.stderr


@pytest.mark.parametrize("words", [("show",), ("show", "--json"), ("compare",)])
def test_output_that_is_closed(words: tuple[str, ...], finished_run: FinishedRun) -> None:
    """As in `consistency show run-1 >&-`."""
    line = command(*words, finished_run.folder)
    for closed in (">&-", ">&- 2>&- <&-"):
        done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *line], capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("word", ["show", "status"])
def test_output_that_cannot_be_written(word: str, finished_run: FinishedRun) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # it fails when flushed
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(word, finished_run.folder), stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=env
        )
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.process
@pytest.mark.parametrize(("other", "status", "verdict"), [("llama", 2, "consistent"), ("gpt2", 1, "inconsistent")])
def test_a_verdict_that_cannot_be_printed_is_said_on_stderr(other: str, status: int, verdict: str) -> None:
    """Where it is `consistent`, the status is not 0: what was asked for is not there."""
    words = ("diff", "fixtures/llama/adapter", f"fixtures/{other}/adapter")
    for options in ((), ("--json",)):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                command(*words, *options), stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert done.returncode == status
        assert done.stderr.startswith(f"consistency: the verdict is {verdict}, but the output cannot be written")
        assert "Traceback" not in done.stderr


@pytest.mark.process
def test_an_error_that_cannot_be_printed_has_its_status() -> None:
    """As in a job whose log is on a full disk: 1 would say that devices differ."""
    for words in (("show", "/nowhere"), ("run", "--nonsense"), ("devices", "--nonsense")):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command(*words), stdout=subprocess.PIPE, stderr=full, check=False)
        assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.slow
@pytest.mark.process
def test_a_run_whose_progress_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("run", "--devices", "cpu", "--stages", "adapter", "--level", "quick"),
            stdout=subprocess.PIPE, stderr=full, check=False,
        )  # fmt: skip
    assert done.returncode == 0
    assert b"CONSISTENT" in done.stdout


@pytest.mark.slow
@pytest.mark.process
def test_a_run_whose_progress_nobody_reads(tmp_path: Path, worker_commands: Callable[[], list[str]]) -> None:
    """As in `consistency run 2>&1 | head -1`."""
    out = tmp_path / "out"
    process = subprocess.Popen(
        command("run", "--out", out, "--devices", "cpu", "--stages", "base,adapter"),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    assert b": import" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert not any(str(tmp_path) in line for line in worker_commands())
    assert not out.exists()


def test_the_width_of_a_pipe(cli: Cli) -> None:
    """`COLUMNS` counts as on a terminal; without it a pipe is wide."""
    lines = cli("devices", env={**os.environ, "COLUMNS": "60"}).stdout.splitlines()
    assert max(map(len, lines)) <= 60
    assert max(map(len, cli("devices").stdout.splitlines())) > 60


def test_plain_text_where_the_terminal_has_no_unicode(cli: Cli, finished_run: FinishedRun) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = cli("compare", finished_run.folder, "-v", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "<= 0." in done.stdout


def weights(folder: Path, **changes: tuple[float, ...]) -> Path:
    values = {"x.a": (1.0, 2.0), "x.b": (3.0,)} | changes
    return put(folder / "model.safetensors", {name: f32(*numbers) for name, numbers in values.items()})


def test_diff_tells_by_its_exit_status(cli_here: Cli, tmp_path: Path) -> None:
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b", **{"x.b": (4.0,)})
    same = cli_here("diff", a, a)
    assert (same.returncode, same.stderr) == (0, "")
    assert "CONSISTENT   all 2 tensors are bitwise equal" in same.stdout
    done = cli_here("diff", a.parent, b, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["reference"]) == (1, str(a.parent)), "the first is the reference"
    (row,) = (row for row in rows(report) if row["tensor"] == "b" and row["worker"] == str(b))
    assert (row["worker"], row["evidence"]["actual"], row["evidence"]["expected"]) == (str(b), 4.0, 3.0)


def test_diff_refuses_what_it_cannot_read(cli_here: Cli, tmp_path: Path) -> None:
    a = weights(tmp_path / "a")
    refused(cli_here("diff", a, tmp_path / "nowhere"), "no such file or folder", tmp_path / "nowhere")
    refused(cli_here("diff", a), "the following arguments are required: B")
    cut = weights(tmp_path / "cut")
    os.truncate(cut, cut.stat().st_size - 2)
    refused(cli_here("diff", cut, a), "cut short or corrupt", cut)
    hostile = put(tmp_path / "h.safetensors", {"x": ("\x1b[31mF32", (1,), b"1234")})
    done = cli_here("diff", a, hostile)
    refused(done, "cut short or corrupt")
    assert "\x1b" not in done.stderr


def test_diff_writes_a_report_where_nothing_is_in_the_way(cli_here: Cli, tmp_path: Path) -> None:
    a, b, out = weights(tmp_path / "a"), weights(tmp_path / "b", **{"x.a": (1.0, 5.0)}), tmp_path / "out"
    done = cli_here("diff", a, b, "--out", out)
    assert done.returncode == 1
    assert f"report: {out}" in done.stdout
    first = (out / "report.json").read_bytes()
    refused(cli_here("diff", a, a, "--out", out), "in the way", "--force")
    assert (out / "report.json").read_bytes() == first
    assert cli_here("diff", a, a, "--out", out, "--force").returncode == 0
    assert json.loads((out / "report.json").read_bytes())["verdict"] == "consistent"
    for there in (a.parent, b.parent):
        found = cli_here("diff", a.parent, b.parent, "--out", there, "--force")
        refused(found, "--out is inside a folder of weights", there)
    refused(cli_here("diff", a, b, "--out", a), "--out must be a folder")
    refused(cli_here("diff", a, tmp_path / "gone", "--out", tmp_path / "new"), "no such file")
    assert not (tmp_path / "new").exists()
    assert sorted(p.name for p in a.parent.iterdir()) == ["model.safetensors"]


@pytest.mark.slow
def test_diff_on_a_terminal_without_unicode(cli: Cli, tmp_path: Path) -> None:
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b", **{"x.b": (4.0,)})
    done = cli("diff", a, b, "-v", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (1, "")


def test_a_plan_is_printed_and_nothing_is_run(cli_here: Cli, tmp_path: Path) -> None:
    done = cli_here("run", "--base", "builtin:llama", "--devices", "cpu", "--plan", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.startswith("consistency plan · llama")
    assert "cpu (reference)" in done.stdout
    assert not (tmp_path / "out").exists()
    table = json.loads(cli_here("run", "--base", "builtin:llama", "--devices", "cpu", "--plan", "--json").stdout)
    assert table["schema"] == "consistency.plan/2"
    assert table["workers"][0]["host_private_bytes"] > 0


def test_a_plan_of_bad_input_is_refused(cli_here: Cli, tmp_path: Path) -> None:
    refused(cli_here("run", "--base", tmp_path / "nowhere", "--plan"), "no such folder for the base")


def test_a_plan_of_a_suite_is_refused_where_no_case_can_be_checked(cli_here: Cli, tmp_path: Path) -> None:
    config = tmp_path / "night.toml"
    config.write_text(
        'base = "builtin:llama"\ndevices = "cpu"\n[[case]]\nname = "good"\n[[case]]\nname = "bad"\nwrapper = "x"\n'
    )
    done = cli_here("run", config, "--plan")
    assert (done.returncode, done.stderr) == (0, "")
    assert "bad: cannot be checked: not a wrapper" in done.stdout
    assert "cpu (reference)" in done.stdout, "the other case is planned"
    done = cli_here("run", config, "--plan", "--case", "bad", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["cases"]["bad"]["refusal"]["what"] == "not a wrapper"


def test_a_folder_above_that_is_not_utf8(tmp_path: Path, finished_run: FinishedRun) -> None:
    """Only what is named relatively can be worked with there."""
    home = tmp_path / os.fsdecode(b"bad\xff")
    home.mkdir()
    done = subprocess.run(
        command("compare", finished_run.folder, "--out", "out", "--history", "history"),
        cwd=home, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 2), done.stderr
    assert "mistake of this tool" not in done.stderr
