"""Fields of records, each with its type and its meaning: types from a JSON schema, meanings from docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from benchmarks.reference_pages.markdown import code, prose, table
from consistency.devices.vendors import Vendor
from consistency.numerics.real import Real

_SECTION = re.compile(r"^(?P<title>\w+)\n-+\n", re.MULTILINE)
_NAMES = re.compile(r"^(?P<names>\w+(?:, \w+)*)(?: : (?P<type>.+))?$")

LINKS = {
    "Word": "[a word of a diagnosis](glossary.md)",
    "Rule": "[a rule](glossary.md)",
    "Stage": "[a stage](glossary.md)",
    "Level": "[a level](glossary.md)",
    "LoadPath": "[a load path](glossary.md)",
    "Vendor": " or ".join(map(code, Vendor)),
}
"""Types without fields: another page lists their values."""


def introduction(kind: type) -> str:
    """Return what a docstring says before its first section."""
    text = inspect.getdoc(kind) or ""
    match = _SECTION.search(text)
    return text[: match.start()].strip() if match else text.strip()


def meanings(kind: type) -> dict[str, str]:
    """Return the meanings of a class's fields, those of its bases first."""
    told: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        told |= _of_docstring(inspect.cleandoc(one.__dict__.get("__doc__") or ""))
    return told


def _of_docstring(text: str) -> dict[str, str]:
    """Return the entries of the section `Attributes` of a numpydoc docstring."""
    sections = list(_SECTION.finditer(text))
    told: dict[str, str] = {}
    for number, section in enumerate(sections):
        if section["title"] != "Attributes":
            continue
        end = sections[number + 1].start() if number + 1 < len(sections) else len(text)
        names: list[str] = []
        for line in text[section.end() : end].splitlines():
            match = _NAMES.match(line)
            if match is not None:
                names = match["names"].split(", ")
                told.update(dict.fromkeys(names, ""))
            elif line.strip():
                told.update({name: f"{told[name]} {line.strip()}".strip() for name in names})
    return told


def schema_of(*kinds: type) -> dict[str, Any]:
    """Return the JSON schemas of types and of those inside them, by name."""
    _, components = msgspec.json.schema_components(kinds, schema_hook=_hook, ref_template="{name}")
    return components


def _hook(kind: type) -> dict[str, Any]:
    if kind is Real:
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    raise NotImplementedError(kind)


def classes_of(*kinds: type) -> dict[str, type]:
    """Return the classes of types and of those inside them, by name, in the order in which they are met."""
    found: dict[str, type] = {}
    waiting: list[msgspec.inspect.Type] = [msgspec.inspect.type_info(kind) for kind in kinds]
    while waiting:
        info = waiting.pop(0)
        kind = getattr(info, "cls", None)
        inner = [getattr(info, name, None) for name in ("type", "item_type", "key_type", "value_type")]
        inner += [*getattr(info, "types", ()), *getattr(info, "item_types", ())]
        if isinstance(kind, type) and hasattr(info, "fields"):
            if kind.__name__ in found:
                continue
            found[kind.__name__] = kind
            inner += [field.type for field in info.fields]
        waiting += [one for one in inner if isinstance(one, msgspec.inspect.Type)]
    return found


def section(name: str, kind: type, schema: Mapping[str, Any], *, title: str = "") -> Iterator[str]:
    """Yield the heading, the docstring and the table of a record."""
    yield f"## {title or name}"
    yield ""
    yield prose(introduction(kind))
    yield ""
    told = meanings(kind)
    rows = [
        [code(field), type_text(about), prose(told.get(field, ""))]
        for field, about in schema.get("properties", {}).items()
    ]
    yield from table(("field", "type", "meaning"), rows)
    yield ""


def type_text(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema's type in words; a type of its own is a link to its section."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return LINKS.get(name, f"[{name}](#{name.lower()})")
    if "anyOf" in schema:
        parts = [type_text(part) for part in schema["anyOf"]]
        if parts[:1] == ["number"] and "`nan`" in parts[-1]:
            return "number, `nan`, `inf` or `-inf`"
        return " or ".join(dict.fromkeys(parts))
    if "const" in schema:
        return code(str(schema["const"]))
    if "enum" in schema:
        return " or ".join(code(str(value) or '""') for value in schema["enum"])
    match schema.get("type"):
        case "array" if "prefixItems" in schema:
            return f"list of {', '.join(type_text(part) for part in schema['prefixItems'])}"
        case "array":
            return f"list of {type_text(schema.get('items') or {})}"
        case "object" if "additionalProperties" in schema:
            inner = schema["additionalProperties"]
            return f"object of {type_text(inner)}" if isinstance(inner, Mapping) else "object"
        case str() as kind:
            return kind
    return "any"


def is_record(kind: type) -> bool:
    """Report whether a class has fields of its own."""
    return issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)
