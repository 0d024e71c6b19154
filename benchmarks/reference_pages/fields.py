"""Fields of records, each with its type and its meaning: types from a JSON schema, meanings from docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
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
    "Stage": "[a stage](glossary.md)",
    "FindingKind": "[a kind of finding](glossary.md)",
    "Rule": "[a rule](glossary.md)",
    "Level": "[a level](glossary.md)",
    "LoadPath": "[a load path](glossary.md)",
    "Vendor": " or ".join(map(code, Vendor)),
}
"""Types without fields: another page lists their values."""

NAMES = {"stages": "[a stage](glossary.md)", "word": "[a word of a diagnosis](glossary.md)"}
"""Fields with names that stages and plug-ins declare, which are texts in the schema: another page lists them."""

COMMON = {
    "a": "One device of the two.",
    "b": "The other device.",
    "allow_pickle": "Whether pickled weights were read.",
    "trust_remote_code": "Whether code that comes with the model was run.",
    "adapter": "The adapter, as it was given.",
    "architecture": "Of the device: vendor's name and capability.",
    "architectures": "What each architecture has, by its name.",
    "base": "The base, as it was given.",
    "case": "Name of the case, or the case itself: what was checked, and how.",
    "cohorts": "Workers that recorded the same, once each.",
    "command": "The command line, word by word.",
    "created": "When it was written: ISO 8601, UTC.",
    "device": "Name of the device: `cpu`, `cuda:0`, `cpu@avx2`.",
    "driver": "Version of the device's driver; null where it is not reported.",
    "dtype": "Name of the dtype, as torch spells it.",
    "elapsed_s": "Time that it took, in seconds.",
    "environment": "Versions, threads and kernels in force, by name.",
    "environments": "Versions and settings, once for all workers that have the same.",
    "evidence": "Further figures that a diagnosis rests on, by name.",
    "findings": "What to act on, the worst first.",
    "gpus": "The accelerators that the host has.",
    "host": "Name of the host.",
    "in_force": "What torch reports of the settings after they were set.",
    "kernel": "Version of the operating system's kernel.",
    "asked": "What was requested of the settings.",
    "asked_s": "Time that was requested, in seconds.",
    "layer": "Name of the module; empty for what belongs to none.",
    "level": "Level of the run.",
    "links": "How the accelerators are connected.",
    "load_path": "How the adapter reached the device.",
    "load_paths": "The load paths that were compared.",
    "measure": "How far the tensor was off; null where it was not measured.",
    "message": "The sentence.",
    "name": "Its name.",
    "numa_node": "NUMA node of the slot; null where it is not reported.",
    "occurrences": "In which repeats, and when.",
    "outcomes": "The table: a row per tensor, load path and set of workers that are alike.",
    "path": "Folder or file.",
    "records": "SHA-256 of the records.",
    "reference": "The worker that the others' bits are compared with.",
    "rule": "By which it is judged.",
    "schema": "Name and number of the schema.",
    "shape": "Sizes of the dimensions.",
    "simulated": "True for a software device, which is never presented as a real one.",
    "stage": "The stage.",
    "stages": "The stages, in their order.",
    "stages_done": "The stages that were completed.",
    "status": "How it was judged, or how the worker ended.",
    "tensor": "Name of the tensor in its layer.",
    "tensors": "Names of the tensors, as `stage::layer.tensor`.",
    "tool": "Version of this tool.",
    "uptime_s": "Time since the host was started, in seconds.",
    "uuid": "UUID of the device; null where it is not reported.",
    "value": "The value.",
    "verdict": "The verdict.",
    "word": "What the difference looks like; null where there is none.",
    "worker": "Name of the worker.",
    "workers": "Names of the workers.",
    "worst_actual": "The worst element on the device; null where bits are equal.",
    "worst_expected": "The worst element of the reference; null where bits are equal.",
    "worst_index": "Place of the worst element; null where there is none.",
}
"""Fields that mean the same in every record; a docstring that says more is used instead."""


def introduction(kind: type) -> str:
    """Return what a docstring says before its first section."""
    text = inspect.getdoc(kind) or ""
    match = _SECTION.search(text)
    return text[: match.start()].strip() if match else text.strip()


def meanings(kind: type) -> dict[str, str]:
    """Return the meanings of a class's fields, those of its bases first."""
    told: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        told |= _of_docstring(inspect.cleandoc(one.__dict__.get("__doc__") or "")) | _below_fields(one)
    return told


def _below_fields(kind: type) -> dict[str, str]:
    """Return what stands below the fields of a class, each by its name; one for several begins with their names."""
    if kind is object or not kind.__module__.startswith("consistency."):
        return {}
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    told: dict[str, str] = {}
    for field, below in itertools.pairwise(tree.body):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                names, _, its = text.rpartition("`: ") if text.startswith("`") else ("", "", text)
                meaning = " ".join(its.split())
                told |= dict.fromkeys(re.findall(r"\w+", names) or [name], meaning[0].upper() + meaning[1:])
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
        [code(field), _of_field(field, about), prose(told.get(field) or COMMON.get(field, ""))]
        for field, about in schema.get("properties", {}).items()
    ]
    yield from table(("field", "type", "meaning"), rows)
    yield ""


def _of_field(field: str, schema: Mapping[str, Any]) -> str:
    """Return the type of a field in words: one of names is a link to the page that lists them."""
    text = type_text(schema)
    return text.replace("string", NAMES[field]) if field in NAMES else text


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
