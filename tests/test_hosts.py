"""Captures of real hosts, in `fixtures/hosts/`, agree with one another and with the machine that runs this."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import consistency
from consistency.capture.folder import MANIFEST
from consistency.capture.seal import files_of, sealed
from consistency.devices.discovery import cpu_flags, cpu_variants
from tests.conftest import command

HOSTS = Path(__file__).parents[1] / "fixtures" / "hosts"
DTYPES = ("float32", "bfloat16")
MOST_BYTES = 1_000_000

Record = dict[str, Any]


def captures_of(dtype: str) -> list[Path]:
    return sorted(HOSTS.glob(f"*-{dtype}.zip"))


def unpacked(path: Path, folder: Path) -> Path:
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


def altered(path: Path, folder: Path, change: Callable[[Record, Record], None]) -> Path:
    """Unpack a capture with what `change` makes of each record and its worker, and sums that fit."""
    unpacked(path, folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    (slug,) = manifest["workers"]
    place = folder / "workers" / slug
    info = json.loads((place / "worker.json").read_bytes())
    records = [json.loads(line) for line in (place / "records.jsonl").read_bytes().splitlines()]
    for record in records:
        change(info, record)
    (place / "worker.json").write_text(json.dumps(info))
    (place / "records.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    files = files_of(place)
    sums = {"info": files.info, "records": files.records, "lines": files.lines}
    (folder / MANIFEST).write_bytes(sealed({**manifest, "host": "another-host", "files": {slug: sums}, "sha256": ""}))
    return folder


def other_bits(record: Record) -> None:
    """Give a tensor other bits than it had."""
    record["digest"] = f"{int(record['digest'], 16) ^ 1:032x}"


def adapter_bit(info: Record, record: Record) -> None:
    if (record["stage"], record["tensor"]) == ("adapter", "lora_A") and record["layer"].endswith("0.self_attn.q_proj"):
        other_bits(record)


def base_bit(info: Record, record: Record) -> None:
    if (record["stage"], record["layer"]) == ("base", "model.embed_tokens"):
        other_bits(record)


def wrong_block(info: Record, record: Record) -> None:
    """A block of `forward` is off by twice what rounding may do: its device judges it so."""
    if (record["stage"], record["layer"], record["tensor"]) == ("forward", "model.layers.1", "adapter_on"):
        other_bits(record)
        record["status"] = "outside"
        record["measure"] |= {"max_abs": 2 * record["measure"]["allowed"], "ratio": 2.0}


def other_program(info: Record, record: Record) -> None:
    """Another processor rounds otherwise, within what rounding may do."""
    info["kernel_key"], info["model"] = "another", "Another processor"
    if record["status"] == "within" and "digest" in record:
        other_bits(record)


def same_program(info: Record, record: Record) -> None:
    """A processor of the same kind, with the same libraries, has other bits."""
    if record["status"] == "within" and "digest" in record:
        other_bits(record)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (adapter_bit, "inconsistent"),
        (base_bit, "inconsistent"),
        (wrong_block, "inconsistent"),
        (same_program, "inconsistent"),
        (other_program, "consistent"),
    ],
)
def test_a_capture_that_is_altered_by_more_than_rounding_is_seen(
    change: Callable[[Record, Record], None], verdict: str, dtype: str, tmp_path: Path
) -> None:
    path = captures_of(dtype)[0]
    compared = consistency.compare([unpacked(path, tmp_path / "is"), altered(path, tmp_path / "other", change)])
    assert compared.verdict == verdict, [finding.message for finding in compared.findings]


def test_captures_are_small_listed_and_name_no_machine() -> None:
    captures = sorted(HOSTS.glob("*.zip"))
    page = (HOSTS / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w.-]+)` \|", page, re.MULTILINE) == [path.stem for path in captures]
    for dtype in DTYPES:
        assert captures_of(dtype)
    for path in captures:
        assert path.stat().st_size < MOST_BYTES
        with zipfile.ZipFile(path) as archive:
            manifest = json.loads(archive.read(MANIFEST))
            (slug,) = manifest["workers"]
            info = json.loads(archive.read(f"workers/{slug}/worker.json"))
        name, _, dtype = path.stem.rpartition("-")
        assert (manifest["host"], info["environment"]["dtype"]) == (name, dtype)
        assert manifest["host_facts"] is None
        assert (manifest["case"]["base"], info["environment"]["platform"]) == ("fixtures/llama/base", "Linux")
        assert (info["uuid"], info["pci_bus_id"], info["planted"], info["simulated"]) == (None, None, None, False)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_host_agrees_with_this_machine(dtype: str, tmp_path: Path) -> None:
    """With the plainest kernels that this processor has too: a stand-in where all hosts have the same."""
    variants = [f"cpu@{variant.name}" for variant in cpu_variants(cpu_flags())[:1]]
    today = tmp_path / "today"
    words = ("--base", "builtin:llama", "--devices", ",".join(["cpu", *variants]), "--dtype", dtype)
    subprocess.run(
        command("capture", *words, "--level", "standard", "--quiet", "--out", today), check=True, capture_output=True
    )
    captures = captures_of(dtype)
    compared = consistency.compare([today, *captures])
    assert compared.verdict == "consistent", [finding.message for finding in compared.findings]
    assert len(compared.workers) == 1 + len(variants) + len(captures)
    judged = [
        row
        for row in compared.tensors
        if all(outcome.status in ("equal", "within") for outcome in row.outcomes)
        and sum(len(outcome.workers) for outcome in row.outcomes) == len(compared.workers)
    ]
    assert {"base", "adapter", "merged", "forward", "gradient"} <= {row.stage for row in judged}
    assert len(judged) > 500
