"""`report.json`, and `suite.json`: the contracts for programs.

`outcomes` is the table of a comparison: a row per tensor and cohort, which is the workers of which the same is true,
bits included. All other fields are those of `Comparison`. A list of more than 16 workers is written as `["@3"]`: the
workers of cohort 3, whose names stand once, as ranges. What the environments of like devices share is written once too,
so the size of a fleet's report depends on distinct results, not on workers. It is written line by line.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from consistency.capture.json_codec import decode_json, encode_json
from consistency.capture.version import __version__
from consistency.case.stages import SPECS
from consistency.comparison import kinds
from consistency.comparison.layers import ByArchitecture, LayerComparison, layers_of
from consistency.comparison.outcomes import Judgement, Outcome, Workers, gathered, worst_of
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
"""Workers, and hosts, of which all is written: as many as the page shows."""

_FIRST = ("created", "host", "command", "elapsed_s", "versions", "simulated", "planted", "verdict")
"""Fields that stand before the others: where a report is from, and what nobody must mistake it for."""

_COHORT = "@"
"""Before the number of a cohort, in the place of a list of its workers."""

_OF_TENSOR = tuple(
    name for name in TensorComparison.__struct_fields__ if name not in ("classes", "outcomes", "workers")
)

_OF_OUTCOME = (
    *_OF_TENSOR, "cohort", "bits", "status", "reference", "max_abs", "allowed", "ratio", "max_ulp", "mismatched",
    "worst_index", "word", "evidence", "reason",
)  # fmt: skip
"""Fields that every outcome has, in this order; others are left out where they say nothing."""

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
"""Fields that every worker has, in this order; others are left out where they say nothing."""

_OF_KIND = ("environment", "asked", "in_force")
"""Fields of a worker that are mostly those of its kind."""


class Cohort(msgspec.Struct, frozen=True, kw_only=True):
    """Workers of which the same is true.

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
_WORKER_DEFAULTS = {
    field.name: field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    for field in msgspec.structs.fields(WorkerSummary)
}


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What workers of one kind share of their environments; what is a worker's own stands in its entry of `workers`."""

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


def _of_suite(suite: SuiteResult) -> bytes:
    """Return `suite.json`; `report` of a case is the path of its own report, null where it could not be checked."""
    table = msgspec.structs.asdict(suite)
    cases = table.pop("cases")
    return (
        encode_json(
            {
                "schema": SUITE_SCHEMA,
                "tool": __version__,
                **{name: table.pop(name) for name in ("created", "host", "command", "elapsed_s")},
                "versions": suite.versions,
                **table,
                "verdict": suite.verdict,
                "sentence": suite.sentence,
                "exit_status": suite.exit_status,
                "simulated": suite.simulated,
                "planted": list(suite.planted),
                "counts": suite.counts,
                "not_checked": suite.not_checked,
                "findings": common_findings(suite.cases),
                "cases": [
                    {
                        **msgspec.structs.asdict(case),
                        "workers": list(map(worker_entry, case.workers)),
                        "report": None if case.error else f"{case.folder}/report.json",
                    }
                    for case in cases
                ],
            },
            indent=1,
        )
        + b"\n"
    )


def as_bytes(comparison: Comparison) -> bytes:
    """Return `report.json` as bytes."""
    return b"".join(render(comparison, View()))


def render(found: Comparison | SuiteResult, view: View) -> Iterator[bytes]:  # noqa: ARG001 - as every format
    """Yield `report.json` piece by piece, a line per entry of a list; or `suite.json`."""
    if isinstance(found, SuiteResult):
        yield _of_suite(found)
        return
    comparison, writer = found, _Writer(found)
    lists: dict[str, list[bytes]] = {
        name: [encode_json(entry) for entry in entries] for name, entries in writer.lists().items()
    }
    lists["cohorts"] = [encode_json(cohort) for cohort in writer.cohorts()]  # which the outcomes have numbered
    facts = {name: getattr(comparison, name) for name in ComparisonFacts.__struct_fields__}
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
        yield opening + encode_json(name) + b": " + (_lines(lists[name]) if name in lists else encode_json(value))
        opening = b",\n"
    yield b"\n}\n"


def _lines(entries: Sequence[bytes]) -> bytes:
    return b"[\n" + b",\n".join(entries) + b"\n]" if entries else b"[]"


class _Writer:
    """The lists of a report."""

    def __init__(self, comparison: Comparison) -> None:
        self._comparison = comparison
        self._members = ByArchitecture(comparison)
        self._cohorts: dict[Workers, int] = {}
        self._by_bits = functools.cache(self._split)
        self._hosts = comparison.hosts
        if len(self._hosts) > MOST_IN_FULL:
            ill = (host for host in self._hosts if host.new_log or any(gpu.after for gpu in host.gpus))
            self._hosts = tuple(ill)[:MOST_IN_FULL]
        self.hosts_left_out = len(comparison.hosts) - len(self._hosts)

    def lists(self) -> dict[str, Iterable[object]]:
        """Return the entries of each list that is written a line per entry."""
        comparison = self._comparison
        environments, workers = self._workers()
        return {
            "workers": workers,
            "environments": environments,
            "architectures": map(self._with_names, comparison.architectures),
            "cohorts": (),
            "outcomes": (outcome for tensor in comparison.tensors for outcome in self._outcomes(tensor)),
            "findings": map(self._with_names, comparison.findings),
            "first_divergence": map(self._with_names, comparison.first_divergence),
            "first_bitwise_difference": map(self._with_names, comparison.first_bitwise_difference),
            "hosts": self._hosts,
            "merging": comparison.merging,
            "sources": comparison.sources,
            "layers": map(self._layer, layers_of(comparison)),
        }

    def cohorts(self) -> Iterator[Cohort]:
        for workers, number in self._cohorts.items():
            yield Cohort(number=number, workers=tuple(ranges.written(workers)), count=len(workers))

    def _cohort(self, workers: Workers) -> int:
        return self._cohorts.setdefault(workers, len(self._cohorts))

    def _named(self, workers: Workers) -> Workers:
        """Return a list of workers as it is written: few names, or the number of a cohort."""
        is_short = len(workers) <= ranges.MOST_NAMED and not any(name.startswith(_COHORT) for name in workers)
        return workers if is_short else (f"{_COHORT}{self._cohort(workers)}",)

    def _with_names(self, entry: Any) -> object:
        return _with_workers(entry, self._named)

    def _layer(self, layer: LayerComparison) -> object:
        cells = {
            name: msgspec.structs.replace(
                cell,
                workers=self._named(cell.workers),
                classes=tuple(map(self._named, _largest(cell.classes)[:MOST_CLASSES])),
            )
            for name, cell in layer.architectures.items()
        }
        return msgspec.structs.replace(layer, architectures=cells)

    def _outcomes(self, tensor: TensorComparison) -> Iterator[dict[str, Any]]:
        of_tensor = {name: getattr(tensor, name) for name in _OF_TENSOR}
        for outcome, left_out in self._joined(tensor.outcomes):
            workers = outcome.workers
            for bits, some in [(None, workers)] if left_out else self._by_bits(workers, tensor.classes):
                fields = {name: getattr(outcome, name) for name in Judgement.__struct_fields__}
                fields |= {**of_tensor, "cohort": self._cohort(some), "bits": bits, "left_out": left_out}
                yield _written(fields, _OF_OUTCOME, _DEFAULTS)

    def _joined(self, outcomes: Sequence[Outcome]) -> Iterator[tuple[Outcome, int]]:
        """Yield outcomes; of too many those that differ in figures alone are joined, but for the worst.

        The second value is the number of different outcomes that were joined.
        """
        if len(outcomes) <= MOST_ROWS:
            yield from ((outcome, 0) for outcome in outcomes)
            return
        alike: dict[object, list[Outcome]] = {}
        for one in outcomes:
            architectures = tuple(self._members.split(one.workers))
            alike.setdefault((one.status, one.reference, one.word, one.reason, architectures), []).append(one)
        for found in alike.values():
            worst = worst_of(found)
            yield worst, 0
            others = [one.workers for one in found if one is not worst]
            if others:
                rest = Outcome(
                    workers=tuple(name for names in others for name in names),
                    reference=worst.reference,
                    status=worst.status,
                    elements=worst.elements,
                    word=worst.word,
                    reason=worst.reason,
                )
                yield rest, len(others)

    def _split(self, workers: Workers, classes: tuple[Workers, ...]) -> list[tuple[int | None, Workers]]:
        """Split the workers of a row by the class of their bits; the smallest of many classes stay together."""
        number = {name: place for place, names in enumerate(_largest(classes)[:MOST_CLASSES]) for name in names}
        parts = gathered((number.get(name), name) for name in workers)
        return [(bits, workers if len(parts) == 1 else tuple(names)) for bits, names in parts.items()]

    def _workers(self) -> tuple[list[Environment], list[dict[str, Any]]]:
        """Return what devices of one kind share, and an entry for each worker with what is its own."""
        workers = self._comparison.workers
        in_full = self._in_full() if len(workers) > MOST_IN_FULL else range(len(workers))
        kinds: dict[tuple[str, ...], list[int]] = {}
        for place, worker in enumerate(workers):
            kind = (worker.architecture, worker.model, worker.load_path, worker.status)
            kinds.setdefault(kind, []).append(place)
        environments, own = [], {}
        for places in kinds.values():
            shared = {name: shared_by([getattr(workers[place], name) for place in places]) for name in _OF_KIND}
            names = self._named(tuple(workers[place].name for place in places))
            environments.append(Environment(workers=names, load_path=workers[places[0]].load_path, **shared))
            for place in places:
                own[place] = {name: beside(getattr(workers[place], name), shared[name]) for name in _OF_KIND}
        entries = []
        for place, worker in enumerate(workers):
            memory = worker.stage_memory if place in in_full else ()
            entries.append(worker_entry(msgspec.structs.replace(worker, **own[place], stage_memory=memory)))
        return environments, entries

    def _in_full(self) -> set[int]:
        """Return the places of workers of which all is written: the reference, those with errors, one per model."""
        comparison = self._comparison
        named = {name for finding in comparison.findings if finding.severity == "error" for name in finding.workers}
        kinds: set[tuple[str, ...]] = set()

        def weight(place: int) -> int:
            worker = comparison.workers[place]
            kind = (worker.architecture, worker.model, worker.load_path)
            is_first = kind not in kinds
            kinds.add(kind)
            return 0 if worker.status != "ok" else 1 if worker.name == comparison.reference or is_first else 2

        places = [(weight(place), place) for place in range(len(comparison.workers))]
        chosen = [one for one in places if one[0] < 2 or comparison.workers[one[1]].name in named]
        return {place for _, place in sorted(chosen)[:MOST_IN_FULL]}


def worker_entry(worker: WorkerSummary) -> dict[str, Any]:
    """Return a worker without what says nothing."""
    return _written(msgspec.structs.asdict(worker), _OF_WORKER, _WORKER_DEFAULTS)


def _written(fields: Mapping[str, Any], always: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are always written, in this order, and then those that say something."""
    rest = {name: value for name, value in fields.items() if name not in always and value != defaults[name]}
    return {name: fields[name] for name in always} | rest


def _with_workers(entry: Any, named: Callable[[Workers], Workers]) -> Any:
    """Return an entry with its list of workers, and those of its consequences, written or read."""
    if isinstance(entry, Finding):
        led_to = (msgspec.structs.replace(one, workers=named(one.workers)) for one in entry.consequences)
        entry = msgspec.structs.replace(entry, consequences=tuple(led_to))
    return msgspec.structs.replace(entry, workers=named(entry.workers))


def _largest(classes: tuple[Workers, ...]) -> tuple[Workers, ...]:
    """Return the first class, which is the reference worker's, and then, of too many, the largest."""
    if len(classes) <= MOST_CLASSES:
        return classes
    return (classes[0], *sorted(classes[1:], key=len, reverse=True))


def read(content: bytes) -> Comparison:
    """Return the comparison that `report.json` was written of.

    What the file does not have stays out: figures of rows that were joined, the smallest classes of bits, and hosts
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
    """Return a decoded report that was changed while every name in it stood alone, outside of patterns."""
    return _renamed(change(named(table)), ranges.written)


def named(table: dict[str, Any]) -> dict[str, Any]:
    """Return a decoded report with every name alone, outside of patterns."""
    return _renamed(table, lambda patterns: list(ranges.unfolded(patterns)))


def _renamed(table: dict[str, Any], convert: Callable[[list[str]], list[str]]) -> dict[str, Any]:
    """Return a decoded report with the names of all cohorts converted."""
    return {**table, "cohorts": [{**one, "workers": convert(one["workers"])} for one in table.get("cohorts") or ()]}


class _Reader:
    """A report as a comparison."""

    def __init__(self, report: ReportFile) -> None:
        self._report = report
        self._places = {name: place for place, name in enumerate(dict.fromkeys(w.name for w in report.workers))}
        self._cohorts = {cohort.number: self._names(cohort) for cohort in report.cohorts}
        self._order, self._classes_of = functools.cache(self._in_order), functools.cache(self._classes)

    def _names(self, cohort: Cohort) -> Workers:
        workers = tuple(ranges.unfolded(cohort.workers))
        if len(workers) != cohort.count:
            raise ValueError(f"a cohort of {cohort.count} names {len(workers)} workers")
        if not workers:
            raise ValueError("a cohort of no worker")
        if strangers := [name for name in workers if name not in self._places]:
            raise ValueError(f"a cohort names a worker that is none of the report's: {strangers[0]}")
        return workers

    def _cohort(self, number: int) -> Workers:
        if number not in self._cohorts:
            raise ValueError(f"there is no cohort {number}")
        return self._cohorts[number]

    def _named(self, workers: Workers) -> Workers:
        """Return the names that a list stands for."""
        if len(workers) == 1 and workers[0].startswith(_COHORT):
            return self._cohort(int(workers[0].removeprefix(_COHORT)))
        return workers

    def comparison(self) -> Comparison:
        report = self._report
        fields = {name: getattr(report, name) for name in ComparisonFacts.__struct_fields__}
        for name in ("architectures", "findings", "first_divergence", "first_bitwise_difference"):
            fields[name] = tuple(_with_workers(entry, self._named) for entry in fields[name])
        return Comparison(**{**fields, "workers": tuple(self._workers())}, tensors=tuple(self._tensors()))

    def _workers(self) -> Iterator[WorkerSummary]:
        kinds = {
            (name, kind.load_path): kind for kind in self._report.environments for name in self._named(kind.workers)
        }
        for worker in self._report.workers:
            kind = kinds[worker.name, worker.load_path]
            whole = {name: joined(getattr(kind, name), getattr(worker, name)) for name in _OF_KIND}
            yield msgspec.structs.replace(worker, **whole)

    def _tensors(self) -> Iterator[TensorComparison]:
        found = gathered(((one.load_path, one.stage, one.layer, one.tensor), one) for one in self._report.outcomes)
        for outcomes in found.values():
            yield TensorComparison(
                **{name: getattr(outcomes[0], name) for name in _OF_TENSOR},
                classes=self._classes_of(tuple((outcome.cohort, outcome.bits) for outcome in outcomes)),
                outcomes=tuple(
                    Outcome(
                        workers=self._cohort(one.cohort),
                        **{name: getattr(one, name) for name in Judgement.__struct_fields__},
                    )
                    for one in outcomes
                ),
                workers=self._order(tuple(outcome.cohort for outcome in outcomes)),
            )

    def _in_order(self, cohorts: tuple[int, ...]) -> Workers:
        names = [worker for number in cohorts for worker in self._cohort(number)]
        if len(set(names)) != len(names):
            raise ValueError("a worker with two outcomes of one tensor")
        return tuple(sorted(names, key=self._places.__getitem__))

    def _classes(self, rows: tuple[tuple[int, int | None], ...]) -> tuple[Workers, ...]:
        classes = gathered((bits, name) for cohort, bits in rows if bits is not None for name in self._cohort(cohort))
        return tuple(
            tuple(sorted(names, key=lambda name: (name != self._report.reference, self._places[name])))
            for _, names in sorted(classes.items())
        )


def schema() -> dict[str, Any]:
    """Return the JSON schema."""
    (found,), components = msgspec.json.schema_components(
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
        **found,
        "$defs": components,
    }


def _open_names() -> dict[str, tuple[set[str], dict[str, Any]]]:
    """Return the names that stages and plug-ins may add to: by title, the fields that have them, and what they are."""
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
    """Let fields of texts refer to the definition of a name."""
    for field in fields & properties.keys():
        types = properties[field].get("anyOf", [properties[field]])
        for number, kind in enumerate(types):
            if kind.get("type") == "string":
                types[number] = {"$ref": f"#/$defs/{name}"} | {key: kind[key] for key in kind if key != "type"}
        if "anyOf" not in properties[field]:
            properties[field] = types[0]


def _schema_of(kind: type) -> dict[str, Any]:
    if kind is Real:
        return {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    raise NotImplementedError(kind)
