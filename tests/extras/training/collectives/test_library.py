"""What is told of the library behind the collectives, and what is not."""

from __future__ import annotations

import pytest

from consistency.extras.training.collectives.worker import variables


def test_what_the_library_was_told_is_evidence_without_places_and_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "NCCL_ALGO": "Ring",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "HCCL_DETERMINISTIC": "true",
    }
    private = {"NCCL_COMM_ID": "10.0.0.1:5", "NCCL_TOPO_FILE": "/x", "HCCL_IF_IP": "10.0.0.1", "NCCL_HOSTID": "node7"}
    for name, value in {**told, **private, "HOME": "/home/somebody", "MASTER_ADDR": "node7"}.items():
        monkeypatch.setenv(name, value)
    found = variables()
    assert told.items() <= found.items()
    assert found.keys().isdisjoint(private)
    assert all(name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_", "HCCL_", "RCCL_", "CCL_")) for name in found)
