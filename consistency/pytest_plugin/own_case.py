"""Check the case of a user's own test: once per pytest session, in the process of xdist that needs it first."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.whole_file import write_whole
from consistency.comparison import kinds
from consistency.comparison.result import Comparison
from consistency.errors import UsageError, did_you_mean
from consistency.pytest_plugin.failures import leaving_its_error, raise_error, without_stack
from consistency.pytest_plugin.given import by_attribute
from consistency.pytest_plugin.session import Session
from consistency.workflows.api import run

_MARKER = "consistency"
_SPELLED = f"@pytest.mark.{_MARKER}"


def own_options(node: pytest.Item, config: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options that the fixture `consistency_config` gives, and those of the markers, the nearest winning."""
    if not isinstance(config, Mapping):
        pytest.fail(f"consistency_config returns no options by name, but {config!r}", pytrace=False)
    marker_options: dict[str, Any] = {}
    with without_stack():
        for marker in reversed(list(node.iter_markers(_MARKER))):
            if marker.args:
                raise UsageError(f"{_SPELLED} takes options by name, got {marker.args[0]!r}")
            marker_options |= by_attribute(marker.kwargs, _SPELLED)
        return by_attribute(config, "the fixture consistency_config"), marker_options


def without_case(config: pytest.Config, node: pytest.Item | None = None) -> NoReturn:
    """Fail the set-up of a test that asks for a report and has no case, or skip it where an option says so."""
    names = () if node is None else (marker.name for marker in node.iter_markers())
    misspelt = next((name for name in names if did_you_mean(name, [_MARKER])), None)
    if misspelt is not None:
        pytest.fail(f"no case: the marker {misspelt} is unknown; did you mean {_SPELLED}?", pytrace=False)
    text = f"no case: give {_SPELLED}(base=…), --consistency-base=…, --consistency-adapter=… or --consistency-config=…"
    if config.getoption("consistency_skip_without_case"):
        pytest.skip(text)
    pytest.fail(f"{text}; --consistency-skip-without-case skips such tests", pytrace=False)


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder of the pytest session that all processes of xdist share."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # a worker has a folder of its own in the session's
        base = base.parent
    folder = base / "consistency"
    folder.mkdir(exist_ok=True)
    return folder


def without_items(config: pytest.Config, folder: Path) -> Session:
    """Return a session whose cases have no items, for fixtures alone."""
    home = folder / "session"
    home.mkdir(exist_ok=True)
    with without_stack():
        return Session.from_config(config, home)


def own_comparison(options: Mapping[str, Any], folder: Path) -> Comparison:
    """Return the comparison of a case; run its devices if nobody has yet."""
    from filelock import FileLock

    if not options.get("base") and not options.get("adapter"):
        pytest.fail(
            f"the test names no model: give base or adapter to {_SPELLED} or in consistency_config", pytrace=False
        )
    key = hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest()[:16]
    path, error = folder / f"{key}.json", folder / f"{key}.error.json"
    with without_stack(), FileLock(folder / f"{key}.lock"):
        raise_error(error)
        if not path.exists():
            with leaving_its_error(error):
                write_whole(path, [encode_json(run(**options).comparison)])
    comparison = decode_json(path.read_bytes(), Comparison)
    for finding in comparison.findings:
        if finding.kind == kinds.TOLERANCE and not finding.tensors:  # a misspelt pattern is seen nowhere else
            warnings.warn(pytest.PytestWarning(finding.message), stacklevel=2)
    return comparison
