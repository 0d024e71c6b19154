"""Of many devices of one model the minority is named; without a majority all are, and nobody who agrees is accused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from consistency.capture.folder import SCHEMA, Capture, CaptureManifest, WorkerCapture
from consistency.capture.names import SUM_OVER_RANKS
from consistency.capture.records import TensorRecord, WorkerInfo
from consistency.case.case import Case
from consistency.comparison.compare import compare
from consistency.comparison.result import Finding
from tests.comparison.made_records import computed, moved

H100: dict[str, Any] = {
    "load_path": "isolated", "architecture": "Hopper sm_90", "model": "H100", "status": "ok", "kernel_key": "torch 2",
}  # fmt: skip


def node(name: str, workers: Mapping[str, Sequence[TensorRecord]], *, host: str = "", **info: Any) -> Capture:
    """Return a capture of a host whose devices have no UUID: they are told apart by host and name."""
    found = []
    for device, records in workers.items():
        device, _, load_path = device.partition(" ")
        fields = {**H100, **info, "load_path": load_path or "isolated"}
        found.append(WorkerCapture(info=WorkerInfo(name=device, **fields), parts=(tuple(records),)))
    manifest = CaptureManifest(
        schema=SCHEMA, tool="0", created="2026-01-01", host=host or name, workers=(),
        case=Case(name="made-up", base="base", adapter="adapter"),
    )  # fmt: skip
    return Capture(folder=Path("/nowhere", name), manifest=manifest, workers=tuple(found))


def bits(*digests: str) -> list[TensorRecord]:
    return [computed(one, layer=f"layers.{place}.q") for place, one in enumerate(digests) if one]


def fleet(*of_nodes: Sequence[str], **info: Any) -> list[Capture]:
    """Return a capture with one device per node, with these bits."""
    return [node(f"n{place}", {"cuda:0": bits(*digests)}, **info) for place, digests in enumerate(of_nodes)]


def same_model(*captures: Capture) -> Finding:
    (finding,) = [finding for finding in compare(captures).findings if finding.kind == "same-device-type"]
    return finding


def test_the_minority_is_named() -> None:
    finding = same_model(*fleet(*[("a", "a")] * 7, ("a", "b"), *[("a", "a")] * 1992))
    assert finding.workers == ("n7:cuda:0",)
    assert finding.severity == "error"
    assert finding.message == (
        "merged · n7:cuda:0 differs bitwise in 1 tensor from 1,999 others of the same device type with the same "
        "software, which agree"
    )
    assert finding.tensors == ("merged::layers.1.q.weight",)
    first, others, common = finding.detail
    assert first == "first: merged::layers.1.q.weight"
    assert others.startswith("the others, which agree bitwise in merged: n0:cuda:0, n1:cuda:0, ")
    assert others.endswith(" and 1994 more")
    assert common == "no recorded fact sets them apart"


@pytest.mark.parametrize(
    ("of_nodes", "odd"),
    [
        ((("a",), ("a",), ("b",)), (2,)),
        ((("b",), ("a",), ("a",)), (0,)),  # though it is the reference
        ((("a",), ("b",), ("c",), ("a",), ("a",)), (1, 2)),
        ((("a", "a"), ("a", "b"), ("b", "a"), ("a", "a"), ("a", "a")), (1, 2)),  # each in another tensor
        ((("a", "a"), ("a", ""), ("b", "b"), ("a", "a"), ("a", "a")), (2,)),  # what was not recorded is not known
        ((("a", ""), ("a", "x"), ("a", "x"), ("a", "x"), ("b", "y")), (4,)),
    ],
)
def test_who_is_odd(of_nodes: Sequence[Sequence[str]], odd: Sequence[int]) -> None:
    assert same_model(*fleet(*of_nodes)).workers == tuple(f"n{place}:cuda:0" for place in odd)


@pytest.mark.parametrize(
    "of_nodes",
    [
        (("a",), ("b",)),
        (("a",), ("b",), ("c",)),
        (("a",), ("a",), ("b",), ("b",)),
        (("a",), ("a",), ("b",), ("c",)),  # half is no majority
        (("a", "a"), ("b", "a"), ("a", "b")),  # most agree tensor by tensor, but no two in both
        (("a", ""), ("a", ""), ("a", ""), ("a", "x"), ("a", "y")),  # most have not recorded what differs
        (*[("a", "")] * 4, ("a", "x"), ("a", "y"), ("b", "")),  # one is odd, but two others differ too
    ],
)
def test_without_a_majority_all_are_named(of_nodes: Sequence[Sequence[str]]) -> None:
    finding = same_model(*fleet(*of_nodes))
    assert finding.workers == tuple(f"n{place}:cuda:0" for place in range(len(of_nodes)))
    assert " are of one device type with the same software, but differ bitwise in " in finding.message


def test_devices_that_agree_are_no_finding() -> None:
    assert not compare(fleet(*[("a", "b")] * 5)).findings


def test_other_models_have_no_vote() -> None:
    a100 = [node(f"old{n}", {"cuda:0": bits("b")}, model="A100") for n in range(5)]
    finding = same_model(*fleet(("a",), ("a",), ("b",)), *a100)
    assert finding.workers == ("n2:cuda:0",)
    assert "from 2 others" in finding.message


def test_a_device_with_the_wrong_weights_has_no_vote() -> None:
    wrong = [node(f"wrong{n}", {"cuda:0": [moved("x"), *bits("b")]}) for n in range(5)]
    right = [
        node(f"n{n}", {"cuda:0": [moved(), *bits(digest)]}) for n, digest in enumerate(("a", "a", "b"))
    ]  # fmt: skip
    assert same_model(*right, *wrong).workers == ("n2:cuda:0",)


def test_a_device_has_one_vote_however_often_it_was_captured() -> None:
    """Two devices, one of which was captured five times: there is no majority."""
    nights = [node(f"night{n}", {"cuda:0": bits("a")}, host="h") for n in range(5)]
    finding = same_model(*nights, node("other", {"cuda:0": bits("b")}, host="i"))
    assert len(finding.workers) == 6


def test_a_device_that_differs_from_itself_has_no_vote() -> None:
    both = {"cuda:0": bits("a"), "cuda:0 shared": bits("b")}
    assert len(same_model(node("n0", both), node("n1", both), node("n2", {"cuda:0": bits("a")})).workers) == 3
    healthy = [node(f"n{n}", {"cuda:0": bits("a"), "cuda:0 shared": bits("a")}) for n in (1, 2)]
    assert same_model(node("n0", both), *healthy).workers == ("n0:cuda:0",)


CUMSUM = ("cumsum_cuda_kernel",)


def reached(*digests: str) -> list[TensorRecord]:
    """Return records of which all but the first come after an operation without a deterministic version."""
    first, *others = bits(*digests)
    return [first, *(msgspec.structs.replace(one, nondeterministic=CUMSUM) for one in others)]


def test_what_comes_after_an_operation_without_a_deterministic_version_is_a_note_that_names_it() -> None:
    captures = [node(f"n{place}", {"cuda:0": reached("a", last)}) for place, last in enumerate("xyx")]
    finding = same_model(*captures)
    assert (finding.severity, finding.tensors) == ("note", ("merged::layers.1.q.weight",))
    assert finding.message == (
        "merged · n0:cuda:0, n1:cuda:0, n2:cuda:0 are of one device type with the same software, but differ bitwise "
        "in 1 tensor: torch has no deterministic version of cumsum_cuda_kernel, which ran before"
    )


def test_what_came_before_that_operation_is_an_error_of_its_own() -> None:
    captures = [node(f"n{place}", {"cuda:0": reached(*both)}) for place, both in enumerate(("ax", "by", "ax"))]
    found = {f.severity: f for f in compare(captures).findings if f.kind == "same-device-type"}
    assert found.keys() == {"error", "note"}
    assert found["error"].tensors == ("merged::layers.0.q.weight",)
    assert found["error"].workers == ("n1:cuda:0",)
    assert found["note"].tensors == ("merged::layers.1.q.weight",)


def test_devices_without_that_operation_are_still_held_to_each_other() -> None:
    captures = [node("n0", {"cuda:0": reached("a", "x")})]
    captures += [node(f"m{place}", {"cuda:0": bits("a", last)}) for place, last in enumerate("ab")]
    (error,) = [f for f in compare(captures).findings if f.severity == "error"]
    assert error.tensors == ("merged::layers.1.q.weight",)


def summed(bits: str) -> list[TensorRecord]:
    """Return what every rank of a group has of a sum over three ranks."""
    return [computed(bits, stage="collectives", layer="all_reduce.sum", nondeterministic=(SUM_OVER_RANKS,))]


def of_ranks(*of_hosts: Sequence[str]) -> list[Capture]:
    """Return a capture per host, whose ranks have these bits of a sum."""
    return [
        node(f"n{place}", {f"cuda:{rank}": summed(digest) for rank, digest in enumerate(digests)})
        for place, digests in enumerate(of_hosts)
    ]


def test_hosts_that_add_up_ranks_in_another_order_are_a_note() -> None:
    found = compare(of_ranks("aaa", "bbb", "aaa"))
    (finding,) = [one for one in found.findings if one.kind == "same-device-type"]
    assert finding.severity == "note"
    assert finding.message.endswith(
        "differ bitwise in 1 tensor: ranks may be added up in another order on another host"
    )
    assert found.verdict == "consistent"


def test_ranks_of_one_group_share_the_bits_of_a_sum() -> None:
    found = [one for one in compare(of_ranks("aaa", "bxb", "aaa")).findings if one.kind == "same-device-type"]
    assert [(one.severity, one.workers) for one in found] == [("error", ("n1:cuda:1",))]


def test_hosts_share_the_bits_of_what_no_order_explains() -> None:
    """A sum of two ranks, for one: it is recorded without an operation that excuses it."""
    captures = [node(f"n{place}", {"cuda:0": bits(digest)}) for place, digest in enumerate("aba")]
    assert same_model(*captures).severity == "error"
