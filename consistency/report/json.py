"""Write and read `report.json`, and write `suite.json`: the contracts for programs.

`outcomes` is the table of a comparison: a row per tensor and cohort, which is the workers of which the same is true,
bits included. All other fields are those of `Comparison`. A list of more than 16 workers is written as `["@3"]`: the
workers of cohort 3, whose names stand once, as ranges. What the environments of like devices share is written once too,
so the size of a fleet's report depends on distinct results, not on workers. It is written line by line.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.version import __version__
from consistency.case.stages import SPECS
from consistency.comparison import kinds
from consistency.comparison.layers import ByArchitecture, LayerComparison, layers_of
from consistency.comparison.outcomes import Judgement, Outcome, Workers, group_by_key, worst_of
from consistency.comparison.result import Comparison, ComparisonFacts, Finding, TensorComparison, WorkerSummary
from consistency.comparison.suite import SuiteResult, common_findings
from consistency.numerics import words
from consistency.numerics.real import Real
from consistency.report import ranges
from consistency.report.formats import View
from consistency.report.shared_values import beside, joined, shared_by

SCHEMA, SUITE_SCHEMA = "consistency.report/1", "consistency.suite/1"

MOST_ROWS = 16
"""Different rows of a tensor: eight architectures, each with devices that pass and devices that do not. Of more, those
that differ in figures alone are joined."""

MOST_CLASSES = 16
"""Classes of bits of a tensor: the reference worker's and then the largest."""

MOST_IN_FULL = 64
"""Workers, and hosts, that are written with all of their fields: as many as the page shows."""

_FIRST = ("created", "host", "command", "elapsed_s", "versions", "simulated", "planted", "verdict")
"""Fields before all others: where a report is from, and whether devices are simulated or a fault is planted."""

_COHORT = "@"
"""Prefix of the number of a cohort, which stands in the place of a list of its workers."""

_OF_TENSOR = tuple(
    name for name in TensorComparison.__struct_fields__ if name not in ("classes", "outcomes", "workers")
)

_OF_OUTCOME = (
    *_OF_TENSOR, "cohort", "bits", "status", "reference", "max_abs", "allowed", "ratio", "max_ulp", "mismatched",
    "worst_index", "word", "evidence", "reason",
)  # fmt: skip
"""Fields that every outcome has, in this order; others are left out where they have their default."""

_OF_WORKER = (
    "name",
    "architecture",
    "model",
    "load_path",
    "host",
    "device",
    "uuid",
    "status",
    "reason",
    "environment",
)
"""Fields that every worker has, in this order; others are left out where they have their default."""

_OF_KIND = ("environment", "asked", "in_force")
"""Fields of a worker that it mostly shares with devices of its kind."""


class Cohort(msgspec.Struct, frozen=True, kw_only=True):
    """Workers for which the same facts hold.

    Attributes
    ----------
    number : int
        As outcomes refer to it, and, written `@number`, lists of workers.
    workers : tuple of str
        More than 16 are patterns such as `node-[001-128]:cuda:[0-7]`: in brackets are numbers and ranges of them, and
        the last bracket runs fastest. A `[` of a name is always `[[]`.
    count : int
        How many workers it has.
    """

    number: int
    workers: tuple[str, ...]
    count: int


class TableRow(Judgement, frozen=True, kw_only=True):
    """One tensor on one cohort.

    Attributes
    ----------
    cohort : int
        Number of the cohort.
    bits : int or None
        Cohorts with the same number have the same bits in this tensor; 0 are those of the reference worker. None where
        no worker has any, or where the cohort is of many whose bits differ.
    left_out : int
        How many different rows this one stands for, without figures: the worst of them has the row before it.
    """

    stage: str
    load_path: str
    layer: str
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    rule: str
    cohort: int
    bits: int | None = None
    left_out: int = 0


_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(TableRow)}


def _default(worker_field: msgspec.structs.FieldInfo) -> object:
    """Return the default of a field, `NODEFAULT` where it has none."""
    if worker_field.default_factory is msgspec.NODEFAULT:
        return worker_field.default
    return worker_field.default_factory()


_WORKER_DEFAULTS = {field.name: _default(field) for field in msgspec.structs.fields(WorkerSummary)}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Values that all workers of a kind have in their environments; a worker's other values are in its entry."""

    workers: tuple[str, ...]
    load_path: str
    environment: dict[str, Any] = {}
    asked: dict[str, Any] = {}
    in_force: dict[str, Any] = {}


class ReportFile(ComparisonFacts, frozen=True, kw_only=True):
    """Everything that a comparison found.

    Attributes
    ----------
    tool : str
        Version that wrote it.
    layers : tuple of LayerComparison
        The tolerance report, which follows from `outcomes`.
    hosts_left_out : int
        Of many hosts, those without a problem of their own are left out of `hosts`.
    """

    schema: str
    tool: str = ""
    cohorts: tuple[Cohort, ...]
    outcomes: tuple[TableRow, ...]
    environments: tuple[Environment, ...] = ()
    layers: tuple[LayerComparison, ...] = ()
    hosts_left_out: int = 0


def _suite_as_bytes(suite: SuiteResult) -> bytes:
    """Return `suite.json`; `report` of a case is the path of its own report, null where it could not be checked."""
    fields = msgspec.structs.asdict(suite)
    cases = [
        {
            **msgspec.structs.asdict(case),
            "workers": list(map(worker_entry, case.workers)),
            "report": None if case.error else f"{case.folder}/report.json",
        }
        for case in fields.pop("cases")
    ]
    table = {
        "schema": SUITE_SCHEMA,
        "tool": __version__,
        **{name: fields.pop(name) for name in ("created", "host", "command", "elapsed_s")},
        "versions": suite.versions,
        **fields,
        "verdict": suite.verdict,
        "sentence": suite.sentence,
        "exit_status": suite.exit_status,
        "simulated": suite.simulated,
        "planted": list(suite.planted),
        "counts": suite.counts,
        "not_checked": suite.not_checked,
        "findings": common_findings(suite.cases),
        "cases": cases,
    }
    return encode_json(table, indent=1) + b"\n"


def as_bytes(comparison: Comparison) -> bytes:
    """Return `report.json` as bytes."""
    return b"".join(render(comparison, View()))


def render(result: Comparison | SuiteResult, view: View) -> Iterator[bytes]:  # noqa: ARG001 - as every format
    """Yield `report.json` piece by piece, a line per entry of a list; or `suite.json`."""
    if isinstance(result, SuiteResult):
        yield _suite_as_bytes(result)
        return
    writer = _Writer(result)
    lists: dict[str, list[bytes]] = {
        name: [encode_json(entry) for entry in entries] for name, entries in writer.lists().items()
    }
    # Last, because cohorts are numbered while the outcomes and the other lists are written.
    lists["cohorts"] = [encode_json(cohort) for cohort in writer.cohorts()]
    facts = {name: getattr(result, name) for name in ComparisonFacts.__struct_fields__}
    table = {
        "schema": SCHEMA,
        "tool": __version__,
        **{name: facts[name] for name in _FIRST},
        **facts,
        **dict.fromkeys(lists),
        "hosts_left_out": writer.hosts_left_out,
    }
    opening = b"{\n"
    for name, value in table.items():
        written_value = _lines(lists[name]) if name in lists else encode_json(value)
        yield opening + encode_json(name) + b": " + written_value
        opening = b",\n"
    yield b"\n}\n"


def _lines(entries: Sequence[bytes]) -> bytes:
    return b"[\n" + b",\n".join(entries) + b"\n]" if entries else b"[]"


class _Writer:
    """Makes the lists of a report, and numbers the cohorts that these refer to."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._members = ByArchitecture(comparison)
        self._cohorts: dict[Workers, int] = {}
        self._by_bits = functools.cache(self._split)
        self._hosts = comparison.hosts
        if len(self._hosts) > MOST_IN_FULL:
            faulty = (host for host in self._hosts if host.new_log or any(gpu.after for gpu in host.gpus))
            self._hosts = tuple(faulty)[:MOST_IN_FULL]
        self.hosts_left_out = len(comparison.hosts) - len(self._hosts)

    def lists(self) -> dict[str, Iterable[object]]:
        """Return the entries of each list that is written a line per entry."""
        comparison = self._comparison
        environments, workers = self._workers()
        return {
            "workers": workers,
            "environments": environments,
            "architectures": map(self._with_written_workers, comparison.architectures),
            "cohorts": (),  # its place among the lists: `render` writes `cohorts()` there when these are encoded
            "outcomes": (outcome for tensor in comparison.tensors for outcome in self._outcomes(tensor)),
            "findings": map(self._with_written_workers, comparison.findings),
            "first_divergence": map(self._with_written_workers, comparison.first_divergence),
            "first_bitwise_difference": map(self._with_written_workers, comparison.first_bitwise_difference),
            "hosts": self._hosts,
            "merging": comparison.merging,
            "sources": comparison.sources,
            "layers": map(self._layer, layers_of(comparison)),
        }

    def cohorts(self) -> Iterator[Cohort]:
        """Yield the cohorts that lists and outcomes refer to, after all of these have been encoded."""
        for workers, number in self._cohorts.items():
            yield Cohort(number=number, workers=tuple(ranges.written(workers)), count=len(workers))

    def _cohort(self, workers: Workers) -> int:
        """Return the number of a cohort, a new one where the report has no such cohort yet."""
        return self._cohorts.setdefault(workers, len(self._cohorts))

    def _as_written(self, workers: Workers) -> Workers:
        """Return a list of workers as it is written: few names, or the number of a cohort."""
        # A worker whose name looks like the number of a cohort is never written as it is.
        is_plain = len(workers) <= ranges.MOST_NAMED and not any(name.startswith(_COHORT) for name in workers)
        return workers if is_plain else (f"{_COHORT}{self._cohort(workers)}",)

    def _with_written_workers(self, entry: Any) -> object:
        return _with_workers(entry, self._as_written)

    def _layer(self, layer: LayerComparison) -> object:
        cells = {
            name: msgspec.structs.replace(
                cell,
                workers=self._as_written(cell.workers),
                classes=tuple(map(self._as_written, _largest(cell.classes))),
            )
            for name, cell in layer.architectures.items()
        }
        return msgspec.structs.replace(layer, architectures=cells)

    def _outcomes(self, tensor: TensorComparison) -> Iterator[dict[str, Any]]:
        """Yield the entries of a tensor: one per outcome and class of bits."""
        tensor_fields = {name: getattr(tensor, name) for name in _OF_TENSOR}
        for outcome, left_out in self._joined(tensor.outcomes):
            # A joined outcome has no class of bits: it is of many workers whose bits differ.
            parts = [(None, outcome.workers)] if left_out else self._by_bits(outcome.workers, tensor.classes)
            for bits, workers in parts:
                fields = {name: getattr(outcome, name) for name in Judgement.__struct_fields__}
                fields |= {**tensor_fields, "cohort": self._cohort(workers), "bits": bits, "left_out": left_out}
                yield _written(fields, _OF_OUTCOME, _DEFAULTS)

    def _joined(self, outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, int]]:
        """Yield each outcome with 0; of more than `MOST_ROWS`, those that differ in figures alone are joined.

        Of such a group the worst outcome comes first, with 0. The others are one outcome without figures, with the
        number of them.
        """
        if len(outcomes) <= MOST_ROWS:
            yield from ((outcome, 0) for outcome in outcomes)
            return
        groups: dict[object, list[Outcome]] = {}
        for outcome in outcomes:
            architectures = tuple(self._members.split(outcome.workers))
            key = (outcome.status, outcome.reference, outcome.word, outcome.reason, architectures)
            groups.setdefault(key, []).append(outcome)
        for group in groups.values():
            worst = worst_of(group)
            yield worst, 0
            others = [outcome.workers for outcome in group if outcome is not worst]
            if others:
                joined_outcome = Outcome(
                    workers=tuple(itertools.chain.from_iterable(others)),
                    reference=worst.reference,
                    status=worst.status,
                    elements=worst.elements,
                    word=worst.word,
                    reason=worst.reason,
                )
                yield joined_outcome, len(others)

    def _split(self, workers: Workers, classes: tuple[Workers, ...]) -> list[tuple[int | None, Workers]]:
        """Split the workers of a row by the class of their bits; the smallest of many classes stay together."""
        numbers = {name: number for number, names in enumerate(_largest(classes)) for name in names}
        parts = group_by_key((numbers.get(name), name) for name in workers)
        if len(parts) == 1:
            (bits,) = parts
            return [(bits, workers)]
        return [(bits, tuple(names)) for bits, names in parts.items()]

    def _workers(self) -> tuple[list[Environment], list[dict[str, Any]]]:
        """Return the values that devices of one kind share, and an entry per worker with the values of its own."""
        workers = self._comparison.workers
        in_full = self._in_full() if len(workers) > MOST_IN_FULL else range(len(workers))
        indices_by_kind = group_by_key(
            ((worker.architecture, worker.model, worker.load_path, worker.status), index)
            for index, worker in enumerate(workers)
        )
        environments, unshared = [], {}
        for indices in indices_by_kind.values():
            shared = {name: shared_by([getattr(workers[index], name) for index in indices]) for name in _OF_KIND}
            names = self._as_written(tuple(workers[index].name for index in indices))
            environments.append(Environment(workers=names, load_path=workers[indices[0]].load_path, **shared))
            for index in indices:
                unshared[index] = {name: beside(getattr(workers[index], name), shared[name]) for name in _OF_KIND}
        entries = []
        for index, worker in enumerate(workers):
            memory = worker.stage_memory if index in in_full else ()
            entries.append(worker_entry(msgspec.structs.replace(worker, **unshared[index], stage_memory=memory)))
        return environments, entries

    def _in_full(self) -> set[int]:
        """Return the indices of the workers whose memory by stage is written.

        These are workers that did not finish, the reference, one per model, and those with errors, in this order as far
        as there is room.
        """
        comparison = self._comparison
        with_errors: set[str] = set()
        for finding in comparison.findings:
            if finding.severity == "error":
                with_errors.update(finding.workers)
        seen_kinds: set[tuple[str, ...]] = set()
        candidates = []  # rank and index
        for index, worker in enumerate(comparison.workers):
            kind = (worker.architecture, worker.model, worker.load_path)
            is_first = kind not in seen_kinds
            seen_kinds.add(kind)
            if worker.status != "ok":
                candidates.append((0, index))
            elif worker.name == comparison.reference or is_first:
                candidates.append((1, index))
            elif worker.name in with_errors:
                candidates.append((2, index))
        return {index for _, index in sorted(candidates)[:MOST_IN_FULL]}


def worker_entry(worker: WorkerSummary) -> dict[str, Any]:
    """Return the fields of a worker, without most of those that have their default."""
    return _written(msgspec.structs.asdict(worker), _OF_WORKER, _WORKER_DEFAULTS)


def _written(fields: Mapping[str, Any], always: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are always written, in this order, and then those that do not have their default."""
    entry = {name: fields[name] for name in always}
    for name, value in fields.items():
        if name not in always and value != defaults[name]:
            entry[name] = value
    return entry


def _with_workers(entry: Any, convert: Callable[[Workers], Workers]) -> Any:
    """Return an entry with `convert` applied to its list of workers, and to the lists of its consequences."""
    if isinstance(entry, Finding):
        consequences = (
            msgspec.structs.replace(consequence, workers=convert(consequence.workers))
            for consequence in entry.consequences
        )
        entry = msgspec.structs.replace(entry, consequences=tuple(consequences))
    return msgspec.structs.replace(entry, workers=convert(entry.workers))


def _largest(classes: tuple[Workers, ...]) -> tuple[Workers, ...]:
    """Return `MOST_CLASSES` classes at most: the first, which is the reference worker's, and the largest others."""
    if len(classes) <= MOST_CLASSES:
        return classes
    by_size = sorted(classes[1:], key=len, reverse=True)
    return (classes[0], *by_size[: MOST_CLASSES - 1])


def read(content: bytes) -> Comparison:
    """Return the comparison that a `report.json` was written from.

    Left out is what the file does not have: figures of rows that were joined, the smallest classes of bits, and hosts
    without a problem. A file may be a stranger's: cohorts are checked, and how much patterns stand for.

    Raises
    ------
    msgspec.DecodeError
        It is no JSON, a field has another type, or a cohort does not exist or is not what it says.
    """
    try:
        return _Reader(decode_json(content, ReportFile)).comparison()
    except (ValueError, IndexError, KeyError) as error:
        raise msgspec.ValidationError(str(error)) from error


def with_names(table: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Return a decoded report after a change to the form that `named` gives, with its cohorts as patterns again."""
    return _with_cohorts(change(named(table)), ranges.written)


def named(table: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded report whose cohorts list each worker's name, instead of patterns of names."""
    return _with_cohorts(table, lambda patterns: list(ranges.unfolded(patterns)))


def _with_cohorts(table: dict[str, Any], convert: Callable[[list[str]], list[str]]) -> dict[str, Any]:
    """Return a decoded report with `convert` applied to the list of workers of each cohort."""
    cohorts = [{**cohort, "workers": convert(cohort["workers"])} for cohort in table.get("cohorts") or ()]
    return {**table, "cohorts": cohorts}


class _Reader:
    """Makes a comparison from a report, which may be a stranger's."""

    def __init__(self, report: ReportFile) -> None:
        self._report = report
        names = dict.fromkeys(worker.name for worker in report.workers)
        self._indices = {name: index for index, name in enumerate(names)}
        self._cohorts = {cohort.number: self._names(cohort) for cohort in report.cohorts}
        # Most tensors have the same cohorts: the tuples of names are made once, and shared.
        self._workers_of, self._classes_of = functools.cache(self._in_order), functools.cache(self._classes)

    def _names(self, cohort: Cohort) -> Workers:
        """Return the names of a cohort's workers; raise `ValueError` if they are not as many or not of the report."""
        workers = tuple(ranges.unfolded(cohort.workers))
        if len(workers) != cohort.count:
            raise ValueError(f"a cohort of {cohort.count} names {len(workers)} workers")
        if not workers:
            raise ValueError("a cohort of no worker")
        if strangers := [name for name in workers if name not in self._indices]:
            raise ValueError(f"a cohort names a worker that is none of the report's: {strangers[0]}")
        return workers

    def _cohort(self, number: int) -> Workers:
        if number not in self._cohorts:
            raise ValueError(f"there is no cohort {number}")
        return self._cohorts[number]

    def _as_read(self, workers: Workers) -> Workers:
        """Return the names that a list of workers in the file stands for: the list itself, or the names in a cohort."""
        if len(workers) == 1 and workers[0].startswith(_COHORT):
            return self._cohort(int(workers[0].removeprefix(_COHORT)))
        return workers

    def comparison(self) -> Comparison:
        """Return the comparison; raise `ValueError`, `IndexError` or `KeyError` where the report contradicts itself."""
        report = self._report
        fields = {name: getattr(report, name) for name in ComparisonFacts.__struct_fields__}
        for name in ("architectures", "findings", "first_divergence", "first_bitwise_difference"):
            fields[name] = tuple(_with_workers(entry, self._as_read) for entry in fields[name])
        return Comparison(**{**fields, "workers": tuple(self._workers())}, tensors=tuple(self._tensors()))

    def _workers(self) -> Iterator[WorkerSummary]:
        """Yield the workers with the values that they share with others of their kind."""
        environments = {}
        for environment in self._report.environments:
            for name in self._as_read(environment.workers):
                environments[name, environment.load_path] = environment
        for worker in self._report.workers:
            environment = environments[worker.name, worker.load_path]
            fields = {name: joined(getattr(environment, name), getattr(worker, name)) for name in _OF_KIND}
            yield msgspec.structs.replace(worker, **fields)

    def _tensors(self) -> Iterator[TensorComparison]:
        """Yield the tensors, each made of all of its rows."""
        rows_by_tensor = group_by_key(
            ((row.load_path, row.stage, row.layer, row.tensor), row) for row in self._report.outcomes
        )
        for rows in rows_by_tensor.values():
            yield TensorComparison(
                **{name: getattr(rows[0], name) for name in _OF_TENSOR},
                classes=self._classes_of(tuple((row.cohort, row.bits) for row in rows)),
                outcomes=tuple(map(self._outcome, rows)),
                workers=self._workers_of(tuple(row.cohort for row in rows)),
            )

    def _outcome(self, row: TableRow) -> Outcome:
        fields = {name: getattr(row, name) for name in Judgement.__struct_fields__}
        return Outcome(workers=self._cohort(row.cohort), **fields)

    def _in_order(self, cohorts: tuple[int, ...]) -> Workers:
        """Return the workers of several cohorts in the order of the report."""
        names = [worker for number in cohorts for worker in self._cohort(number)]
        if len(set(names)) != len(names):
            raise ValueError("a worker with two outcomes of one tensor")
        return tuple(sorted(names, key=self._indices.__getitem__))

    def _classes(self, rows: tuple[tuple[int, int | None], ...]) -> tuple[Workers, ...]:
        """Return the workers of each class of bits, the reference worker first, from cohorts and numbers of classes."""
        workers_by_bits: dict[int, list[str]] = {}
        for cohort, bits in rows:
            if bits is not None:
                workers_by_bits.setdefault(bits, []).extend(self._cohort(cohort))
        return tuple(tuple(sorted(names, key=self._order)) for _, names in sorted(workers_by_bits.items()))

    def _order(self, name: str) -> tuple[bool, int]:
        return (name != self._report.reference, self._indices[name])


def schema() -> dict[str, Any]:
    """Return the JSON schema."""
    (reference,), components = msgspec.json.schema_components(
        (ReportFile,), schema_hook=_schema_of, ref_template="#/$defs/{name}"
    )
    components["ReportFile"]["properties"]["schema"] = {"const": SCHEMA}
    for name, (fields, definition) in _open_names().items():
        components[name] = {"type": "string", "title": name, **definition}
        for component in components.values():
            _refer(component.get("properties", {}), fields, name)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "report.json of consistency",
        **reference,
        "$defs": components,
    }


def _open_names() -> dict[str, tuple[set[str], dict[str, Any]]]:
    """Return the sets of names that stages and plug-ins may extend: by title, their fields and their definition."""
    return {
        "Stage": (
            {"stage"},
            {
                "description": "A stage, or what was compared in its place. Open: a plug-in may add others.",
                "examples": sorted(SPECS),
            },
        ),
        "Word": (
            {"word"},
            {
                "description": "What a difference looks like. Open: a stage or a plug-in may add others.",
                "examples": sorted(words.declared()),
            },
        ),
        "FindingKind": (
            {"kind"},
            {
                "description": "What a finding is about: a word, or another kind. Open: a plug-in may add others.",
                "examples": sorted(kinds.known()),
            },
        ),
    }


def _refer(properties: dict[str, Any], fields: set[str], name: str) -> None:
    """Replace the type `string` of some fields, in the schema of a type, by a reference to the definition `name`."""
    for field in fields & properties.keys():
        types = properties[field].get("anyOf", [properties[field]])
        for index, definition in enumerate(types):
            if definition.get("type") == "string":
                others = {key: definition[key] for key in definition if key != "type"}
                types[index] = {"$ref": f"#/$defs/{name}"} | others
        if "anyOf" not in properties[field]:
            properties[field] = types[0]


def _schema_of(kind: type) -> dict[str, Any]:
    """Return the schema of a type that msgspec does not know: JSON has words for the numbers that are not finite."""
    if kind is Real:
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    raise NotImplementedError(kind)
