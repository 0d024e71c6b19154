"""What all tests share: no network, one property-test profile, and pytest's own tester for the plugin."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

os.environ["HF_HUB_OFFLINE"] = "1"

# machines are shared: an example may take long for reasons that are not ours
settings.register_profile("consistency", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("consistency")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests on one process, so that a run which they share is made once."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)
