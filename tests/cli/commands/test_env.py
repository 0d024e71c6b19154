"""`consistency env` as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from consistency.cli.main import main


def test_it_prints_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    assert "\nPyTorch version: " in capsys.readouterr().out


def test_json_has_versions_devices_and_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["env", "--json"]) == 0
    stated = json.loads(capsys.readouterr().out)
    assert list(stated) == ["consistency", "environment", "devices", "no_devices"]
    assert stated["environment"]["variables"]["OMP_NUM_THREADS"] == "3"
    assert stated["environment"]["compiled_kernel"].startswith(("compiled: ", "numpy: "))
    assert stated["devices"][0]["name"] == "cpu"
    assert not {"uuid", "pci_bus_id"} & {*stated["devices"][0]}


@pytest.mark.slow
@pytest.mark.process
def test_no_device_is_opened_and_no_model_library_is_imported() -> None:
    code = (
        "import sys\nfrom consistency.cli.main import main\nassert main(['env']) == 0\nimport torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'transformers', 'peft', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)
