"""The built-in cases: small models with adapters that ship with the package."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from consistency.errors import InputError, did_you_mean

BUILTIN_CASES = ("llama", "gpt2", "bert")


def builtin_folder(name: str) -> Path:
    """Return the folder of a case that ships with the package."""
    if name not in BUILTIN_CASES:
        raise InputError(
            f"there is no built-in case {name!r}",
            where="--base",
            wanted="one of " + ", ".join(BUILTIN_CASES),
            hint=did_you_mean(name, BUILTIN_CASES),
        )
    here = Path(__file__).resolve().parents[1]
    for root in (here / "fixtures", here.parent / "fixtures"):
        if (root / name / "base" / "config.json").exists():
            return root / name
    raise InputError(f"the built-in case {name!r} is not installed", where=here, wanted=f"fixtures/{name}/base")


def builtin_name(base: str, adapter: str | None) -> str | None:
    """Return the name of the built-in case in these folders, None if they are the user's."""
    for name in BUILTIN_CASES:
        with suppress(InputError):
            if (base, adapter) == resolve(f"builtin:{name}", None):
                return name
    return None


def resolve(base: str | None, adapter: str | None) -> tuple[str | None, str | None]:
    """Replace `builtin:NAME` by folders; without base and adapter, use the first built-in case."""
    if base is None and adapter is None:
        base = f"builtin:{BUILTIN_CASES[0]}"
    if base is not None and base.startswith("builtin:"):
        folder = builtin_folder(base.removeprefix("builtin:"))
        base, adapter = str(folder / "base"), adapter or str(folder / "adapter")
    if adapter is not None and adapter.startswith("builtin:"):
        adapter = str(builtin_folder(adapter.removeprefix("builtin:")) / "adapter")
    return base, adapter
