"""What tests need of the installed versions, and skip without."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
from pathlib import Path

import peft
import pytest

from consistency.worker.environment import release

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_PYTHON = (3, 11)
_SHOWN_ON_PAGES = ("torch", "transformers", "peft", "msgspec")
"""What help, schemas and lists of methods are made from."""


def _others() -> list[str]:
    """Return what is installed in another version than constraints.txt has."""
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", _CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    found = {name: importlib.metadata.version(name).partition("+")[0] for name in _SHOWN_ON_PAGES}
    others = [f"{name} {version}" for name, version in found.items() if version != pinned[name].partition("+")[0]]
    return (
        others if sys.version_info[:2] == _PYTHON else [*others, f"Python {sys.version_info[0]}.{sys.version_info[1]}"]
    )


made_with_constraints = pytest.mark.skipif(
    bool(_others()), reason=f"the page is made with Python 3.11 and constraints.txt; here is {', '.join(_others())}"
)


def _offers_what_transformers_does_not_take() -> bool:
    from transformers import core_model_loading

    convert = core_model_loading.WeightRenaming.convert
    conversion = Path(peft.__file__).with_name("utils") / "transformers_weight_conversion.py"
    offered = conversion.exists() and "loading_info" in conversion.read_text(encoding="utf-8")
    return offered and "loading_info" not in inspect.signature(convert).parameters


loads_onto_mixtures = pytest.mark.skipif(
    _offers_what_transformers_does_not_take(),
    reason="this PEFT loads no adapter onto a mixture of experts of this transformers: it calls a later one's function",
)


def _asks_peft_for_what_it_lacks() -> bool:
    from transformers.integrations import peft as integration

    lacks = not Path(peft.__file__).with_name("utils").joinpath("transformers_weight_conversion.py").exists()
    return lacks and "transformers_weight_conversion" in inspect.getsource(integration)


loads_by_transformers = pytest.mark.skipif(
    _asks_peft_for_what_it_lacks(), reason="this transformers loads no adapter with this PEFT: it needs a later one"
)


CACHE = "cache" if release("transformers") >= (5, 24) else "past_key_values"
"""Name of the cache in what a model takes and returns."""

_PREPARED = inspect.getsource(peft.PeftModelForCausalLM.prepare_inputs_for_generation)
LOSES_THE_CACHE = CACHE == "cache" and 'get("cache"' not in _PREPARED
"""Whether this PEFT looks for the cache under its former name alone, when it generates a text."""


def needs_method(config: str) -> pytest.MarkDecorator:
    """Skip a test of a method that the installed PEFT may not have."""
    version = importlib.metadata.version("peft")
    return pytest.mark.skipif(not hasattr(peft, config), reason=f"PEFT {version} has no {config}")


def needs_peft(major: int, minor: int, *, to: str) -> pytest.MarkDecorator:
    """Skip a test of what an older PEFT does not do."""
    return pytest.mark.skipif(release("peft") < (major, minor), reason=f"PEFT {major}.{minor} is the first {to}")
