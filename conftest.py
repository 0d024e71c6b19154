"""What all tests share: no network, one property-test profile, and pytest's own tester for the plugin."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

os.environ["HF_HUB_OFFLINE"] = "1"

# machines are shared: an example may take long for reasons that are not ours
settings.register_profile("consistency", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("consistency")
