"""Wrong on which load paths, right on which: what the tool says of the cause, from captures made by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.case.load_path import LoadPath
from consistency.comparison.compare import compare
from consistency.comparison.findings.load_paths import copies, judge_load_paths
from consistency.comparison.result import Comparison, Finding
from consistency.numerics import words
from consistency.numerics.words import Word
from consistency.pytest_plugin.items import _is_alternative
from tests.conftest import MakeCapture

EVERY = {load_path.value for load_path in LoadPath}
STANDARD = ("", "cpu", "low-memory")
LAYERS = ("layers.0.q", "layers.1.q")


def digest(text: str) -> str:
    return text.encode().hex().ljust(32, "0")


def held(layer: str, load_path: str, word: str | None = None, **changes: Any) -> TensorRecord:
    """Make the record of one lora_B that is right, or wrong in a word, to which `/` adds whose bits they are."""
    bits, word = word, word and word.partition("/")[0]
    fields: dict[str, Any] = {
        "stage": "adapter", "layer": layer, "tensor": "lora_B", "shape": (2, 2), "dtype": "float32",
        "rule": "bitwise", "digest": digest(bits or "file"), "reference_digest": digest("file"), "reference": "file",
        "status": "outside" if word else "equal", "word": word and Word(word),
        "load_path": load_path if "+" in load_path else "",
    }  # fmt: skip
    return TensorRecord(**{**fields, **changes})


LoadPaths = Mapping[str, str | None]
"""Word by load path, None where the bytes are right."""


def seen(make_capture: MakeCapture, workers: Mapping[str, LoadPaths], **changes: Any) -> Comparison:
    """Compare one capture per default load path, for a worker is named once in each."""
    folders = []
    for main in ("isolated", "shared"):
        here = {
            device: [held(layer, load_path, word, **changes)
                     for load_path, word in load_paths.items() for layer in LAYERS
                     if load_path.partition("+")[0] == main]
            for device, load_paths in workers.items()
        }  # fmt: skip
        here = {device: records for device, records in here.items() if records}
        if here:
            info = {device: {"load_path": main} for device in here}
            folders.append(make_capture(main, here, info=info))
    return compare([read_capture(folder) for folder in folders])


def on(mains: Iterable[str], sides: Iterable[str], wrong: Mapping[str, str] = {}) -> LoadPaths:
    names = [f"{main}+{side}" if side else main for main in mains for side in sides]
    return {name: wrong.get(name) for name in names}


def only_error(comparison: Comparison) -> Finding:
    (finding,) = [f for f in comparison.findings if f.severity == "error"]
    return finding


BOTH = ("isolated", "shared")
CPU = on(["isolated"], STANDARD)
HOP = {"shared": "zeros", "shared+low-memory": "never-written"}


def test_wrong_only_by_way_of_device_0_is_the_copy_between_devices(make_capture: MakeCapture) -> None:
    """The case that the tool was made for: one finding for all load paths and devices, and the copies by name."""
    right, wrong = on(BOTH, STANDARD), on(BOTH, STANDARD, HOP)
    found = seen(make_capture, {"cpu": CPU, "cuda:0": right, "cuda:1": wrong, "cuda:2": right, "cuda:3": wrong})
    finding = only_error(found)
    assert finding.message == (
        "adapter · cuda:1, cuda:3 · zeros where the file is nonzero in 2 of 2 lora_B tensors when all devices are "
        "visible, and correct when isolated or with torch_device=cpu: "
        "peer copies 0→1 and 0→3 drop data; 0→2 is fine"
    )
    assert (finding.kind, finding.workers) == ("zeros", ("cuda:1", "cuda:3"))
    assert finding.load_paths == ("shared", "shared+low-memory")
    assert found.verdict == "inconsistent"


def test_wrong_on_every_path_is_the_device(make_capture: MakeCapture) -> None:
    wrong = on(BOTH, STANDARD, dict.fromkeys(on(BOTH, STANDARD), "bit-flip"))
    finding = only_error(seen(make_capture, {"cpu": CPU, "cuda:0": on(BOTH, STANDARD), "cuda:1": wrong}))
    assert finding.kind == "bit-flip"
    assert finding.message.endswith("but the device or its memory")
    assert "copies" not in finding.message
    assert len(finding.load_paths) == 6


@pytest.mark.parametrize(
    ("word", "why"),
    [("rounded-to-bf16", "a dtype conversion while loading"), ("zeros", "an effect of low_cpu_mem_usage=True")],
)
def test_wrong_with_low_cpu_mem_usage_alone(make_capture: MakeCapture, word: str, why: str) -> None:
    wrong = on(BOTH, STANDARD, {"isolated+low-memory": word, "shared+low-memory": word})
    finding = only_error(seen(make_capture, {"cpu": CPU, "cuda:0": on(BOTH, STANDARD), "cuda:1": wrong}))
    assert (finding.kind, finding.workers) == (word, ("cuda:1",))
    assert finding.message.endswith(f"with low_cpu_mem_usage=True, and correct without: {why}")


def test_wrong_with_one_loader_is_the_loader(make_capture: MakeCapture) -> None:
    sides = ("", "cpu", "target", "transformers")
    theirs = on(BOTH, sides, {"isolated+transformers": "zeros", "shared+transformers": "zeros"})
    finding = only_error(seen(make_capture, {"cpu": CPU, "cuda:1": theirs}))
    assert finding.message.endswith("with transformers' load_adapter, and correct with PEFT's: "
                                    "transformers' loader")  # fmt: skip


def test_wrong_with_peft_alone_is_pefts_loader(make_capture: MakeCapture) -> None:
    sides = ("", "cpu", "target", "transformers")
    wrong = {load_path: "zeros" for load_path in on(BOTH, sides) if "transformers" not in load_path}
    finding = only_error(seen(make_capture, {"cpu": CPU, "cuda:1": on(BOTH, sides, wrong)}))
    assert finding.message.endswith("with PEFT's loader, and correct with transformers': PEFT's loader")


def test_what_the_cpu_does_too_to_the_bit_is_the_softwares_doing(make_capture: MakeCapture) -> None:
    """A loader that leaves a tensor out does so everywhere: to be told, and no reason to take a machine out of use."""
    wrong = on(["isolated"], ("", "transformers"), {"isolated+transformers": "never-written"})
    found = seen(make_capture, {"cpu": wrong, "cuda:0": wrong})
    (finding,) = found.findings
    assert (finding.severity, finding.workers) == ("warning", ("cpu", "cuda:0"))
    assert finding.message.endswith("transformers' loader, identical on every device, so no device is at fault")
    assert found.exit_status == 0


@pytest.mark.parametrize("case", ["another device is right", "no CPU", "other bits", "the default load path too"])
def test_what_is_not_everywhere_alike_is_an_error(make_capture: MakeCapture, case: str) -> None:
    sides = ("", "transformers")
    wrong = on(["isolated"], sides, {"isolated+transformers": "never-written"})
    workers = {
        "another device is right": {"cpu": wrong, "cuda:0": wrong, "cuda:1": on(["isolated"], sides)},
        "no CPU": {"cuda:0": wrong, "cuda:1": wrong},
        "other bits": {"cpu": wrong, "cuda:0": on(["isolated"], sides, {"isolated+transformers": "never-written/2"})},
        "the default load path too": dict.fromkeys(
            ("cpu", "cuda:0"), on(["isolated"], sides, dict.fromkeys(wrong, "zeros"))
        ),
    }[case]
    found = seen(make_capture, workers)
    assert {f.severity for f in found.findings} == {"error"}
    assert found.exit_status == 1


def test_a_cpu_that_is_wrong_is_not_told_by_a_path_that_it_cannot_take(make_capture: MakeCapture) -> None:
    """It stands on the shared load path for the others to be held against, and no copy between devices leads to it."""
    wrong = on(["isolated"], ("", "cpu"), dict.fromkeys(("isolated", "isolated+cpu"), "bit-flip"))
    finding = only_error(seen(make_capture, {"cpu": wrong, "cuda:1": on(BOTH, ("", "cpu"))}))
    assert finding.workers == ("cpu",)
    assert finding.load_paths == ("isolated", "isolated+cpu")


def test_two_causes_stay_two_findings(make_capture: MakeCapture) -> None:
    """A device whose memory is bad beside one that a copy does not reach."""
    broken = on(BOTH, STANDARD, dict.fromkeys(on(BOTH, STANDARD), "zeros"))
    found = seen(make_capture, {"cpu": CPU, "cuda:1": broken, "cuda:2": on(BOTH, STANDARD, HOP)})
    ends = {f.workers: f.message.rpartition(": ")[2] for f in found.findings if f.severity == "error"}
    assert ends == {
        ("cuda:1",): "not a copy between devices or a loader, but the device or its memory",
        ("cuda:2",): "peer copies 0→2 drop data",
    }


@pytest.mark.parametrize(
    ("wrong", "taken", "text"),
    [
        ({"isolated", "isolated+low-memory"}, {"isolated", "isolated+low-memory", "isolated+cpu"},
         "where PEFT chooses the device, and correct with torch_device=cpu: copies through the device that"),
        ({"isolated", "isolated+target"}, {"isolated", "isolated+target", "isolated+cpu"},
         "directly onto the device, and correct when staged through the host: the copy from the file"),
        ({"shared", "shared+cpu"}, {"isolated", "shared", "shared+cpu"},
         "and correct when isolated: an effect of other visible devices"),
        ({"shared"}, {"shared", "shared+target"}, "where PEFT chooses the device, and correct with torch_d"),
        ({"isolated"}, {"isolated", "isolated+low-memory"}, "on load path isolated, and correct on isolated+l"),
        ({"isolated"}, {"isolated"}, "on load path isolated"),
        ({"a-later-path"}, {"a-later-path", "isolated"}, "on load path a-later-path"),
        ({"shared+low-memory"}, {"isolated", "shared", "shared+low-memory"}, "with low_cpu_mem_usage=True, and corr"),
    ],
)  # fmt: skip
def test_what_the_paths_say(wrong: set[str], taken: set[str], text: str) -> None:
    found = judge_load_paths(words.ZEROS, wrong, taken)
    assert text in f"{found.where}: {found.why}"


def test_outside_of_the_adapter_no_option_of_its_loading_is_blamed() -> None:
    shared, isolated = (
        judge_load_paths(words.ZEROS, {wrong}, {"isolated", "shared"}, stage="base") for wrong in ("shared", "isolated")
    )
    assert (shared.where, shared.why) == (
        " when all devices are visible, and correct when isolated", "a copy between devices",
    )  # fmt: skip
    assert (isolated.where, isolated.why) == (" on load path isolated", "")


@pytest.mark.parametrize("wrong", sorted(EVERY))
def test_one_wrong_path_of_all_is_never_blamed_on_the_device(wrong: str) -> None:
    found = judge_load_paths(words.ZEROS, {wrong}, EVERY)
    assert "its memory" not in found.why
    assert "and correct " in found.where


def test_copies_are_named_by_their_ends() -> None:
    assert copies(words.ZEROS, ["host-a:cuda:1"], []) == "peer copies 0→1 drop data"
    assert copies(words.BIT_FLIP, ["cuda:1@tf32", "cuda:3"], ["cuda:0", "cpu", "cuda:2", "cuda:4"]) == (
        "peer copies 0→1 and 0→3 change data; 0→2 and 0→4 are fine"
    )
    assert copies(words.ZEROS, ["gaudi_3:1"], ["xpu2:2"]) == "peer copies 0→1 drop data; 0→2 is fine"
    assert copies(words.STALE, ["cuda:0", "cuda:1"], []) == "copies through device 0 drop data"
    assert copies(words.STALE, ["mps"], []) == "copies through device 0 drop data"


def cast(load_path: str) -> TensorRecord:
    through = {"digest": digest("rounded"), "reference_digest": digest("rounded")}
    return held("layers.0.q", load_path, cast="bfloat16", **through)


def test_a_cast_that_every_device_makes_is_a_note(make_capture: MakeCapture) -> None:
    records = [held("layers.0.q", "isolated"), cast("isolated+low-memory")]
    found = compare([read_capture(make_capture("a", {"cpu": records, "cuda:0": records}))])
    assert found.verdict == "consistent"
    (note,) = found.findings
    assert (note.kind, note.severity, note.workers) == ("dtype-on-the-way", "note", ("cpu", "cuda:0"))
    assert "rounded through bfloat16 in 1 tensor with low_cpu_mem_usage=True (isolated+low-memory)" in note.message
    assert note.load_paths == ("isolated+low-memory",)


@pytest.mark.parametrize("casts", ["cpu", "cuda:0"])
def test_a_cast_that_one_device_alone_makes_is_an_error(make_capture: MakeCapture, casts: str) -> None:
    """Whether it is the reference worker or another, and whichever of the two captures comes first."""
    plain = [held("layers.0.q", "isolated"), held("layers.0.q", "isolated+low-memory")]
    through = [plain[0], cast("isolated+low-memory")]
    workers = {name: through if name == casts else plain for name in ("cpu", "cuda:0")}
    found = compare([read_capture(make_capture("a", workers))])
    finding = only_error(found)
    assert (finding.kind, finding.workers) == ("dtype-on-the-way", (casts,))
    assert "not on the other devices" in finding.message
    assert found.exit_status == 1


def test_a_dtype_that_one_path_keeps_is_a_note(make_capture: MakeCapture) -> None:
    records = [held("layers.0.q", "isolated"), held("layers.0.q", "isolated+transformers", dtype="bfloat16")]
    found = compare([read_capture(make_capture("a", {"cpu": records}))])
    assert found.verdict == "consistent"
    (note,) = found.findings
    assert note.message == "adapter · 1 tensor stored in bfloat16 on isolated+transformers, and in float32 by default"


# who owes what on a alternative load path


def merged(bits: str) -> TensorRecord:
    return TensorRecord(rule="bitwise",
        stage="base", layer="norm", tensor="weight", shape=(2,), dtype="float32", digest=digest(bits),
        reference_digest=digest(bits), reference="file", status="equal",
    )  # fmt: skip


def test_a_alternative_path_owes_the_adapter_alone(make_capture: MakeCapture) -> None:
    """No row of another stage is missing there, and the worker stands in the report once."""
    records = [merged("a"), held("layers.0.q", "isolated"), held("layers.0.q", "isolated+cpu")]
    found = compare([read_capture(make_capture("a", {"cpu": [*records[:2]], "cuda:0": records, "cuda:1": records}))])
    assert found.verdict == "consistent"
    assert found.load_paths == ("isolated", "isolated+cpu")
    assert [w.name for w in found.workers] == ["cpu", "cuda:0", "cuda:1"]
    beside = [t for t in found.tensors if t.load_path == "isolated+cpu"]
    assert [(t.stage, [worker for worker, row in t.by_worker()]) for t in beside] == [("adapter", ["cuda:0", "cuda:1"])]
    assert {row.status for t in beside for row in t.outcomes} == {"equal"}


def test_a_worker_lost_before_a_alternative_path_is_blocked_there(make_capture: MakeCapture) -> None:
    whole = [held("layers.0.q", load_path) for load_path in ("isolated", "isolated+cpu")]
    lost = {"cuda:1": {"status": "lost", "reason": "was killed by SIGKILL"}}
    found = compare([read_capture(make_capture("a", {"cpu": whole, "cuda:1": whole[:1]}, info=lost))])
    beside = next(t for t in found.tensors if t.load_path == "isolated+cpu")
    assert {worker: row.status for worker, row in beside.by_worker()} == {"cpu": "equal", "cuda:1": "blocked"}
    assert found.exit_status == 3
    assert [f.kind for f in found.findings] == ["lost-worker"]


def test_a_path_that_one_device_alone_cannot_take_is_one_finding(make_capture: MakeCapture) -> None:
    settings: dict[str, Any] = {
        "stage": "adapter",
        "layer": "adapter_settings",
        "tensor": "loaded_again",
        "rule": "limit",
    }
    took = TensorRecord(**settings, status="equal", load_path="isolated+cpu")
    path_unavailable = TensorRecord(
        **settings, load_path="isolated+cpu", status="skipped", reason="PEFT cannot load it: KeyError"
    )
    alone = held("layers.0.q", "isolated")
    found = compare(
        [read_capture(make_capture("a", {"cpu": [alone, took, held("layers.0.q", "isolated+cpu")],
                                         "cuda:0": [alone, path_unavailable]}))]
    )  # fmt: skip
    finding = only_error(found)
    assert (finding.kind, finding.workers) == ("missing", ("cuda:0",))
    assert "KeyError" in finding.message
    assert finding.tensors == ("adapter::adapter_settings.loaded_again",)


def test_roads_that_were_not_taken_are_said(make_capture: MakeCapture) -> None:
    found = compare([read_capture(make_capture("a", {"cpu": [held("layers.0.q", load_path) for load_path in CPU]}))])
    assert found.not_checked[-1] == (
        "the load paths +target +cpu+low-memory +target+low-memory +transformers +transformers+low-memory"
    )
    none = compare([read_capture(make_capture("b", {"cpu": [held("layers.0.q", "isolated")]}))])
    assert none.not_checked[-1] == "the adapter's alternative load paths"
    base = compare([read_capture(make_capture("c", {"cpu": [merged("a")]}, case={"adapter": None}))])
    assert not any("load path" in text for text in base.not_checked)


def test_an_item_that_is_no_tensors_own_fails_for_alternative_paths_alone() -> None:
    """Every other tensor has an item of its own, on the default load path of its device."""
    fields: dict[str, Any] = {"kind": "zeros", "severity": "error", "message": "x"}
    assert _is_alternative(Finding(**fields, load_paths=("isolated+cpu", "shared+cpu")))
    assert not _is_alternative(Finding(**fields, load_paths=("isolated", "isolated+cpu")))
    assert not _is_alternative(Finding(**fields))


def test_what_is_wrong_beside_a_path_leaves_its_computed_stages_alone(make_capture: MakeCapture) -> None:
    """Where only a alternative load path is wrong, merging stands on the right bytes: its own fault does not follow."""
    wrong = [held("layers.0.q", "isolated"), held("layers.0.q", "isolated+low-memory", "zeros")]
    off = TensorRecord(
        stage="merged", layer="layers.0.q", tensor="weight", shape=(2, 2), dtype="float32", rule="bound",
        digest=digest("off"), status="outside", word=words.WRONG_SCALE,
    )  # fmt: skip
    found = compare([read_capture(make_capture("a", {"cuda:0": [*wrong, off]}))])
    assert not any("follows" in f.message for f in found.findings)
    (first,) = found.first_divergence
    assert (first.load_path, first.stage) == ("isolated", "merged")
