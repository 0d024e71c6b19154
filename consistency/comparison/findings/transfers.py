"""Copies between devices: a matrix of device pairs, and a finding per kind of fault, with likely cause and fix."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from consistency.capture.names import (
    CASTING,
    CHAIN,
    DIRECT,
    FILLING,
    HOST,
    HOST_STAGED,
    OVERLAPPED,
    PINNED,
    READING,
    STRIDED,
    split_pair,
)
from consistency.capture.wording import counted, listed, some
from consistency.case import standard
from consistency.comparison.findings.details import describe
from consistency.comparison.findings.evidence import ComparisonEvidence
from consistency.comparison.findings.finder import Finder, Phase
from consistency.comparison.outcomes import group_by_key, union_of_workers
from consistency.comparison.result import BAD, Consequence, Finding, Outcome, TensorComparison
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.devices.host.kernel_log import LOGGED
from consistency.devices.host.pci import REDIRECTS
from consistency.devices.spec import label_of
from consistency.numerics import words
from consistency.numerics.words import Word

Pair = tuple[str, str]
"""Source and destination of copies, such as `("cuda:0", "host")`."""

_MOST_NAMES, _MOST_LOG = 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A likely cause of wrong copies, and its fix."""

    text: str
    fix: str | None = None


def reasons(
    host_facts: HostFacts | None, pairs: Sequence[Pair], *, no_peer_access: Sequence[Pair] = ()
) -> list[Reason]:
    """Return the facts of a host that can explain wrong copies between these pairs."""
    gpus = [] if host_facts is None else list(_gpus_of(host_facts, pairs))
    likely: list[Reason] = []
    between_devices = any(HOST not in pair and pair[0] != pair[1] for pair in pairs)
    # these explain copies from device to device alone
    if host_facts is not None and between_devices:
        likely += [*_translated_addresses(host_facts, gpus), *_redirected_traffic(gpus)]
    if no_peer_access:
        likely.append(Reason(text=f"no peer access {listed([arrow(pair) for pair in no_peer_access[:_MOST_NAMES]])}"))
    for gpu in gpus:
        if gpu.after:
            counters = listed([f"{name} (now {value})" for name, value in gpu.after.items()])
            likely.append(Reason(text=f"{counters} rose on {gpu.name}", fix=f"have {gpu.name} tested"))
    if host_facts is not None and host_facts.log:
        likely.append(Reason(text=f"the kernel logged {counted(len(host_facts.log), 'line')} of {LOGGED} since boot"))
    return likely


def _gpus_of(host_facts: HostFacts, pairs: Sequence[Pair]) -> Iterator[Gpu]:
    """Yield the facts of the GPUs in some pairs, as far as they are known."""
    for name in dict.fromkeys(itertools.chain.from_iterable(pairs)):
        gpu = host_facts.gpu(name)
        if gpu is not None:
            yield gpu


def _translated_addresses(host_facts: HostFacts, gpus: Sequence[Gpu]) -> Iterator[Reason]:
    """Yield that an IOMMU translates the addresses of peer copies."""
    translated = [gpu for gpu in gpus if gpu.is_translated]
    if translated:
        group_types = listed(sorted({gpu.iommu_type or "" for gpu in translated}))
        options = " ".join(host_facts.iommu_options) or "no iommu=pt"
        yield Reason(
            text=f"the IOMMU translates (group type {group_types}; {options})",
            fix="boot with iommu=pt on the kernel's command line, then: consistency doctor",
        )


def _redirected_traffic(gpus: Sequence[Gpu]) -> Iterator[Reason]:
    """Yield that ACS redirects peer copies at some bridges."""
    redirecting: set[str] = set()
    for gpu in gpus:
        redirecting.update(bridge for bridge, controls in gpu.acs.items() if REDIRECTS & set(controls))
    if redirecting:
        bridges = listed(sorted(redirecting)[:_MOST_NAMES])
        yield Reason(
            text=f"ACS redirects peer traffic through the root complex at {bridges}",
            fix="disable ACS on the bridges above the GPUs (in the firmware, or with setpci), then: consistency doctor",
        )


def _about(host_facts: HostFacts | None) -> Iterator[str]:
    """Yield the boot and the kernel log of a host, and the facts that could not be read."""
    if host_facts is None:
        return
    if host_facts.boot_id is not None:
        yield f"{boot(host_facts)}: a reboot may hide the fault; keep this capture and compare it with a later one"
    yield from (f"kernel: {line}" for line in host_facts.log[-_MOST_LOG:])
    if host_facts.unread:
        yield "unknown: " + "; ".join(f"{name} ({reason})" for name, reason in host_facts.unread.items())


def boot(host_facts: HostFacts) -> str:
    """Return the boot of a host and its uptime: `boot 5f2c, up 3.1 h`."""
    up = "" if host_facts.uptime_s is None else f", up {host_facts.uptime_s / 3600:.1f} h"
    return f"boot {host_facts.boot_id or 'unknown'}{up}"


def arrow(pair: Pair) -> str:
    """Return a pair for people: `cuda:0→cuda:1`, `within cuda:1`."""
    source, destination = pair
    if source != destination:
        return f"{source}→{destination}"
    return "within the host" if source == HOST else f"within {source}"


_STAGED = (HOST_STAGED, CHAIN)
_ORDER = (DIRECT, STRIDED, CASTING, OVERLAPPED, PINNED)
_MOST_PAIRS, _MOST_DETAILS = 4, 5

_ONLY = {
    STRIDED: "when they are strided",
    CASTING: "when they cast",
    OVERLAPPED: "under load",
    PINNED: "under load with pinned memory",
    HOST_STAGED: "when staged through the host",
    CHAIN: "through a third device",
}


@dataclass(slots=True)
class Cell:
    """The copies of one ordered pair of devices, by kind."""

    kinds: dict[str, None] = field(default_factory=dict)  # every kind with a row
    tried: set[str] = field(default_factory=set)  # kinds with a result
    skipped: dict[str, str] = field(default_factory=dict)  # kinds without a result, and why
    # by kind, the rows of the workers with wrong bytes, each with its tensor
    wrong: dict[str, list[tuple[TensorComparison, Outcome]]] = field(default_factory=dict)
    # kinds that are wrong because one of their hops is: that pair is reported
    explained: set[str] = field(default_factory=set)
    speeds: dict[str, float] = field(default_factory=dict)  # GB/s of the largest copy by kind, where it was measured
    no_peer_access: bool = False  # whether torch reports that one device cannot reach the other's memory

    @property
    def gb_per_s(self) -> float | None:
        """Return the speed of direct copies."""
        return self.speeds.get(DIRECT)

    @property
    def own(self) -> list[str]:
        """Return the kinds that are wrong here and on none of their hops, the plainest first."""
        kinds = [kind for kind in self.wrong if kind not in self.explained]
        return sorted(kinds, key=_plainness)

    @property
    def plain(self) -> list[str]:
        """Return the kinds of `own` that this pair's own worker reports, or all of `own` where it reports none."""
        return [kind for kind in self.own if kind not in (FILLING, READING)] or self.own

    @property
    def word(self) -> Word:
        return self.word_of(self.plain[0])

    def word_of(self, kind: str) -> Word:
        row = self.wrong[kind][0][1]
        return row.word or Word(row.status)

    @property
    def is_fine(self) -> bool:
        return bool(self.tried) and not self.own


def _plainness(kind: str) -> int:
    """Return the place of a kind of copy in the order from the plainest on."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The copies between all pairs of one machine.

    `home` names its capture where there are several; `places` are the host, first, and the devices.
    """

    home: str
    places: tuple[str, ...]
    cells: Mapping[Pair, Cell]

    @property
    def wrong(self) -> list[Pair]:
        return [pair for pair, cell in self.cells.items() if cell.own]


def matrices(tensors: Iterable[TensorComparison]) -> list[Matrix]:
    """Gather the rows of the stage `transfer`, of all load paths, by machine and pair."""
    cells_by_home: dict[str, dict[Pair, Cell]] = {}
    vias: dict[tuple[str, Pair, str], str] = {}  # the device in between, by home, pair and kind of copy
    for tensor in tensors:
        pair = split_pair(tensor.layer) if tensor.stage == standard.TRANSFER else None
        if pair is None:
            continue
        for worker, row in tensor.by_worker():
            home = home_of(worker)
            cell = cells_by_home.setdefault(home, {}).setdefault(pair, Cell())
            _add_row(cell, tensor, row.of((worker,)))
            via = row.evidence.get("via")
            if isinstance(via, str):
                vias[home, pair, tensor.tensor] = via
    # only once all cells are complete: a hop may come after the copy that takes it
    for (home, pair, kind), via in vias.items():
        cells = cells_by_home[home]
        if _has_wrong_hop(cells, pair, via):
            cells[pair].explained.add(kind)
    return [Matrix(home=home, places=_places(cells), cells=cells) for home, cells in cells_by_home.items()]


def _has_wrong_hop(cells: Mapping[Pair, Cell], pair: Pair, via: str) -> bool:
    """Return whether a copy from device to device is wrong on the way of one through a third device or the host."""
    source, destination = pair
    hops = [cells.get(hop) for hop in ((source, via), (via, destination))]
    return any(hop is not None and set(hop.wrong) - set(_STAGED) for hop in hops)


def _places(cells: Iterable[Pair]) -> tuple[str, ...]:
    """Return the names in some pairs, in order."""
    return tuple(sorted(set(itertools.chain.from_iterable(cells)), key=_by_number))


def home_of(worker: str) -> str:
    """Return the name of the capture that a worker's name begins with, empty where it begins with none."""
    label = label_of(worker)
    return "" if label is None else label.capture


def _add_row(cell: Cell, tensor: TensorComparison, row: Outcome) -> None:
    """Add the result of one kind of copy on one worker to the cell of its pair."""
    kind = tensor.tensor
    cell.kinds[kind] = None
    is_wrong = row.status in BAD
    if is_wrong:
        cell.wrong.setdefault(kind, []).append((tensor, row))
    if is_wrong or row.status == "equal":
        cell.tried.add(kind)
    else:
        cell.skipped[kind] = row.reason or row.status
    speed = row.evidence.get("gb_per_s")
    # evidence may come from a stranger's capture, and a bool is an int
    if isinstance(speed, int | float) and not isinstance(speed, bool):
        cell.speeds[kind] = max(float(speed), cell.speeds.get(kind, 0.0))
    cell.no_peer_access = cell.no_peer_access or row.evidence.get("peer_access") is False


def _by_number(name: str) -> tuple[bool, str, int]:
    """Order devices: the host first, and `cuda:2` before `cuda:10`."""
    kind, _, index = name.rpartition(":")
    number = int(index) if index.isdigit() else 0
    return name != HOST, kind or name, number


def find_transfers(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report for each machine which copies are wrong, which are fine, and the likely cause."""
    hosts = {home_of(worker.label): worker.capture.manifest.host_facts for worker in evidence.workers}
    for matrix in matrices(evidence.tensors):
        by_word = group_by_key((matrix.cells[pair].word, pair) for pair in matrix.wrong)
        for word, pairs in by_word.items():
            finding = _report(matrix, word, pairs, hosts.get(matrix.home))
            yield _with_moves(finding, evidence.tensors, {(matrix.home, pair) for pair in pairs})


def _with_moves(finding: Finding, tensors: Sequence[TensorComparison], pairs: Set[tuple[str, Pair]]) -> Finding:
    """Return a finding with what other stages saw change on the way between the same devices: it follows from it."""
    moved: dict[str, list[tuple[TensorComparison, Outcome]]] = {}
    for tensor in tensors:
        for row in tensor.outcomes:
            if _is_move_over(tensor, row, pairs):
                moved.setdefault(tensor.stage, []).append((tensor, row))
    consequences = []
    for stage, rows in moved.items():
        workers = tuple(sorted(union_of_workers(row.workers for _, row in rows), key=_by_number))
        reasons_of_rows = list(dict.fromkeys(row.reason for _, row in rows if row.reason))
        reason = f": {reasons_of_rows[0]}" if reasons_of_rows else ""
        consequences.append(
            Consequence(
                stage=stage,
                message=f"{stage} · {some(workers)} · {counted(len(rows), 'check')} of what is moved there{reason}",
                workers=workers,
                tensors=tuple(dict.fromkeys(tensor.name for tensor, _ in rows)),
            )
        )
    caused_names = itertools.chain.from_iterable(consequence.tensors for consequence in consequences)
    names = tuple(dict.fromkeys([*finding.tensors, *caused_names]))
    return msgspec.structs.replace(finding, tensors=names, consequences=tuple(consequences))


def _is_move_over(tensor: TensorComparison, row: Outcome, pairs: Set[tuple[str, Pair]]) -> bool:
    """Return whether a row of another stage states a wrong move between two devices of these pairs, each with its home.

    Such a row names both ends in its evidence, which may come from a stranger's capture.
    """
    if tensor.stage == standard.TRANSFER or row.status not in BAD:
        return False
    source, destination = row.evidence.get("from"), row.evidence.get("to")
    if not isinstance(source, str) or not isinstance(destination, str):
        return False
    return any((home_of(worker), (source, destination)) in pairs for worker in row.workers)


def _report(matrix: Matrix, word: Word, pairs: Sequence[Pair], host_facts: HostFacts | None) -> Finding:
    """Report the pairs of devices of a machine whose copies are wrong in the same way.

    Parameters
    ----------
    word : Word
        The kind of difference.
    host_facts : HostFacts or None
        The facts of the machine, None where they are not known.
    """
    cells = matrix.cells
    wrong_rows: list[tuple[TensorComparison, Outcome]] = []
    for pair in pairs:
        for kind in cells[pair].plain:
            wrong_rows += cells[pair].wrong[kind]
    # the workers of copies over these hops are not named: the hop is to blame
    workers = tuple(sorted(union_of_workers(row.workers for _, row in wrong_rows), key=_by_number))
    wrong_rows += _rows_over(cells, pairs)
    likely = reasons(host_facts, pairs, no_peer_access=[pair for pair in pairs if cells[pair].no_peer_access])
    causes = [reason.text for reason in likely]
    statement = f"copies {_arrows(pairs)} {words.of_copies(word)}{_only_when(cells, pairs)}"
    clauses = [statement, *_fine_pairs(matrix, pairs), *causes]
    fixes = [reason.fix for reason in likely if reason.fix]
    default_fix = "run consistency doctor --out DIR before and after a reboot"
    return Finding(
        kind=word,
        severity="error",
        message=f"{standard.TRANSFER} · {some(workers)} · {'; '.join(clauses)}",
        workers=workers,
        tensors=tuple(dict.fromkeys(tensor.name for tensor, _ in wrong_rows)),
        cause="; ".join(causes) or None,
        detail=(*(_describe(tensor, row) for tensor, row in wrong_rows[:_MOST_DETAILS]), *_about(host_facts)),
        next=next(iter(fixes), default_fix),
    )


def _rows_over(cells: Mapping[Pair, Cell], hops: Sequence[Pair]) -> Iterator[tuple[TensorComparison, Outcome]]:
    """Yield the rows of copies that are wrong because one of these hops is: they belong to the finding of that hop."""
    for (source, destination), cell in cells.items():
        for kind in cell.explained & set(cell.wrong):
            via = cell.wrong[kind][0][1].evidence.get("via")
            if (source, via) in hops or (via, destination) in hops:
                yield from cell.wrong[kind]


def _arrows(pairs: Sequence[Pair]) -> str:
    names = [arrow(pair) for pair in pairs]
    return listed(names) if len(names) <= _MOST_PAIRS else some(names, _MOST_PAIRS)


def _only_when(cells: Mapping[Pair, Cell], pairs: Sequence[Pair]) -> str:
    """Name the kinds of copy that are wrong, where plain ones are not."""
    wrong_kinds = [set(cells[pair].own) for pair in pairs]
    if any(kinds_of_pair - set(_ONLY) for kinds_of_pair in wrong_kinds):
        return ""
    all_kinds = set[str]().union(*wrong_kinds)
    return ", but only " + listed([condition for kind, condition in _ONLY.items() if kind in all_kinds])


def _fine_pairs(matrix: Matrix, pairs: Sequence[Pair]) -> Iterator[str]:
    """Name the pairs of the same kind that are fine: between devices, if these are; from the same sources first."""
    between_devices = any(HOST not in pair for pair in pairs)
    fine = []
    for pair, cell in matrix.cells.items():
        is_same_kind = (HOST not in pair) == between_devices
        if cell.is_fine and pair[0] != pair[1] and is_same_kind:
            fine.append(pair)
    sources = {source for source, _ in pairs}
    fine.sort(key=lambda pair: pair[0] not in sources)
    if len(fine) > _MOST_PAIRS:
        yield f"{arrow(fine[0])} and {len(fine) - 1} others are fine"
    elif len(fine) == 1:
        yield f"{_arrows(fine)} is fine"
    elif fine:
        yield f"{_arrows(fine)} are fine"


def _describe(tensor: TensorComparison, row: Outcome) -> str:
    """Describe the wrong copies of one kind in one line."""
    parts = [describe(tensor, row)]
    if row.evidence.get("copy"):
        parts.append(f"first wrong: {row.evidence['copy']}")
    if row.evidence.get("copies"):
        parts.append(f"{row.evidence.get('wrong_copies')} of {row.evidence['copies']} copies")
    if row.evidence.get("read_back") not in (None, "agree"):
        parts.append(str(row.evidence["read_back"]))
    return " · ".join(parts)


def without_transfers(evidence: ComparisonEvidence, tensors: Sequence[TensorComparison]) -> list[TensorComparison]:
    """Return tensors without copies between devices, and without moves that follow from wrong copies."""
    pairs: set[tuple[str, Pair]] = set()
    for matrix in matrices(evidence.tensors):
        pairs.update((matrix.home, pair) for pair in matrix.wrong)
    kept = []
    for tensor in tensors:
        if tensor.stage == standard.TRANSFER:
            continue
        if pairs and any(_is_move_over(tensor, row, pairs) for row in tensor.outcomes):
            outcomes = tuple(row for row in tensor.outcomes if not _is_move_over(tensor, row, pairs))
            tensor = msgspec.structs.replace(tensor, outcomes=outcomes)
        if tensor.outcomes:
            kept.append(tensor)
    return kept


FINDERS = (
    Finder(name="transfers", phase=Phase.DEVICES, position=3, find=find_transfers, without_own=without_transfers),
)
