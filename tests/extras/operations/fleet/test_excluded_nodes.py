"""Nodes that are unlike most others are named, with what differs; a fleet of one kind has none."""

from __future__ import annotations

from consistency.capture.node_status import NodeStatus
from consistency.extras.operations.fleet.following import other_software, without_accelerator


def node(peft: str = "0.21.2", accelerators: int = 0, **more: str) -> NodeStatus:
    return NodeStatus(
        software={"torch": "2.13.0", "peft": peft, **more}, accelerators={"H100": accelerators} if accelerators else {}
    )


def test_other_software() -> None:
    fleet = {"n1": node("0.17.0"), "n2": node(), "n3": node(), "n4": node(numpy="2.0")}
    assert other_software(fleet) == {"n1": "peft 0.17.0, not 0.21.2", "n4": "numpy 2.0, not installed"}
    assert other_software({"n1": node(), "n2": node()}) == {}
    assert other_software({}) == {}


def test_missing_library() -> None:
    fleet = {"n1": node(numpy="2.0"), "n2": node(numpy="2.0"), "n3": node()}
    assert other_software(fleet) == {"n3": "numpy missing, not 2.0"}


def test_of_two_the_first_is_the_reference() -> None:
    assert list(other_software({"n1": node("0.17.0"), "n2": node()})) == ["n2"]


def test_node_without_accelerator() -> None:
    fleet = {"n1": node(accelerators=8), "n2": node(accelerators=4), "n3": node()}
    assert without_accelerator(fleet) == {"n3": "no accelerator, but 2 other nodes of the fleet have one"}
    assert without_accelerator({"n1": node(), "n2": node()}) == {}, "a fleet of CPUs"
    assert without_accelerator({"n1": node(accelerators=8), "n2": node(), "n3": node()}) == {}, "most have none"
