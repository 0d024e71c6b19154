"""A trained model for tests, from a package that holds one: converted once, with the adapter of `fixtures/`."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from filelock import FileLock

from benchmarks.trained import NotInstalledError, make
from tests.accelerator.fixtures import shared_temp


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of SmolLM2-135M with `base` and `adapter`, or skip with the reason why it is not here."""
    cache = getattr(pytestconfig, "cache", None)  # none with `-p no:cacheprovider`
    name = f"trained-{transformers.__version__}"  # another version may convert otherwise
    home = shared_temp(tmp_path_factory) / name if cache is None else Path(cache.mkdir(name))
    home.mkdir(exist_ok=True)
    with FileLock(home / "lock"):
        try:
            return make("smollm2", home)
        except NotInstalledError as error:
            pytest.skip(str(error))
