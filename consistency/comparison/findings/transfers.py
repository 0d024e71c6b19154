"""Rows of the stage `transfer` -> a matrix of device pairs; a finding per kind of fault, with likely cause and fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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
from consistency.comparison.outcomes import gathered
from consistency.comparison.result import BAD, Finding, Outcome, TensorComparison
from consistency.devices.host.facts import Gpu, HostFacts
from consistency.devices.host.kernel_log import LOGGED
from consistency.devices.host.pci import REDIRECTS
from consistency.devices.spec import label_of
from consistency.numerics import words
from consistency.numerics.words import Word

Pair = tuple[str, str]
"""Source and destination of copies."""

_MOST_NAMES, _MOST_LOG = 4, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A likely cause of wrong copies, and its fix."""

    text: str
    fix: str | None = None


def reasons(
    host_facts: HostFacts | None, pairs: Sequence[Pair], *, no_peer_access: Sequence[Pair] = ()
) -> list[Reason]:
    """Return what the facts of a host can explain of wrong copies between these pairs."""
    found: list[Reason] = []
    names = dict.fromkeys(name for pair in pairs for name in pair)
    gpus = [gpu for name in names if host_facts and (gpu := host_facts.gpu(name))]
    if host_facts is not None and any(HOST not in pair and pair[0] != pair[1] for pair in pairs):
        found += [*_addresses(host_facts, gpus), *_redirected(gpus)]
    if no_peer_access:
        found.append(Reason(text=f"no peer access {listed([arrow(pair) for pair in no_peer_access[:_MOST_NAMES]])}"))
    for gpu in gpus:
        if gpu.after:
            risen = listed([f"{name} (now {value})" for name, value in gpu.after.items()])
            found.append(Reason(text=f"{risen} rose on {gpu.name}", fix=f"have {gpu.name} tested"))
    if host_facts is not None and host_facts.log:
        found.append(Reason(text=f"the kernel logged {counted(len(host_facts.log), 'line')} of {LOGGED} since boot"))
    return found


def _addresses(host_facts: HostFacts, gpus: Sequence[Gpu]) -> Iterator[Reason]:
    translated = [gpu for gpu in gpus if gpu.is_translated]
    if translated:
        kinds = listed(sorted({gpu.iommu_type or "" for gpu in translated}))
        given = " ".join(host_facts.iommu_options) or "no iommu=pt"
        yield Reason(
            text=f"the IOMMU translates (group type {kinds}; {given})",
            fix="boot with iommu=pt on the kernel's command line, then: consistency doctor",
        )


def _redirected(gpus: Sequence[Gpu]) -> Iterator[Reason]:
    bridges = sorted({bridge for gpu in gpus for bridge, on in gpu.acs.items() if REDIRECTS & set(on)})
    if bridges:
        yield Reason(
            text=f"ACS redirects peer traffic through the root complex at {listed(bridges[:_MOST_NAMES])}",
            fix="disable ACS on the bridges above the GPUs (in the firmware, or with setpci), then: consistency doctor",
        )


def _about(host_facts: HostFacts | None) -> Iterator[str]:
    """Yield what else is known of a host, and what could not be read."""
    if host_facts is None:
        return
    if host_facts.boot_id is not None:
        yield f"{boot(host_facts)}: a reboot may hide the fault; keep this capture and compare it with a later one"
    yield from (f"kernel: {line}" for line in host_facts.log[-_MOST_LOG:])
    if host_facts.unread:
        yield "unknown: " + "; ".join(f"{name} ({why})" for name, why in host_facts.unread.items())


def boot(host_facts: HostFacts) -> str:
    """Return the boot of a host and its uptime: `boot 5f2c, up 3.1 h`."""
    up = "" if host_facts.uptime_s is None else f", up {host_facts.uptime_s / 3600:.1f} h"
    return f"boot {host_facts.boot_id or 'unknown'}{up}"


def arrow(pair: Pair) -> str:
    """Return a pair for people: `cuda:0→cuda:1`, `within cuda:1`."""
    return f"within {'the host' if pair[0] == HOST else pair[0]}" if pair[0] == pair[1] else f"{pair[0]}→{pair[1]}"


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

    kinds: dict[str, None] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)  # kinds with a result
    skipped: dict[str, str] = field(default_factory=dict)  # kinds without one, and why
    # by kind, the tensor and the rows of the workers with wrong bytes
    wrong: dict[str, list[tuple[TensorComparison, Outcome]]] = field(default_factory=dict)
    # kinds that are wrong because one of their hops is: that pair is reported
    explained: set[str] = field(default_factory=set)
    speeds: dict[str, float] = field(default_factory=dict)  # GB/s of the largest copy by kind, where it was measured
    no_peer_access: bool = False  # whether torch reports that one device cannot reach the other's memory

    @property
    def gb_per_s(self) -> float | None:
        return self.speeds.get(DIRECT)

    @property
    def own(self) -> list[str]:
        """Return the kinds that are wrong here and on none of their hops, the plainest first."""
        kinds = [kind for kind in self.wrong if kind not in self.explained]
        return sorted(kinds, key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER))

    @property
    def plain(self) -> list[str]:
        """Return the kinds of `own` that this pair's own worker reports, or all where it reports none."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All pairs of one machine; `home` names its capture where there are several, `places` begins with the host."""

    home: str
    places: tuple[str, ...]
    cells: Mapping[Pair, Cell]

    @property
    def wrong(self) -> list[Pair]:
        return [pair for pair, cell in self.cells.items() if cell.own]


def matrices(tensors: Iterable[TensorComparison]) -> list[Matrix]:
    """Gather the rows of the stage `transfer`, of all load paths, by machine and pair."""
    homes: dict[str, dict[Pair, Cell]] = {}
    vias: dict[tuple[str, Pair, str], str] = {}
    for tensor in tensors:
        pair = split_pair(tensor.layer) if tensor.stage == standard.TRANSFER else None
        for worker, row in tensor.by_worker() if pair is not None else ():
            assert pair is not None
            home = home_of(worker)
            cell = homes.setdefault(home, {}).setdefault(pair, Cell())
            _take(cell, tensor, row.of((worker,)))
            via = row.evidence.get("via")
            if isinstance(via, str):
                vias[home, pair, tensor.tensor] = via
    for (home, (source, destination), kind), via in vias.items():
        cells = homes[home]
        hops = [cells.get(hop) for hop in ((source, via), (via, destination))]
        if any(hop is not None and set(hop.wrong) - set(_STAGED) for hop in hops):
            cells[source, destination].explained.add(kind)
    places = {home: sorted({name for pair in cells for name in pair}, key=_by_number) for home, cells in homes.items()}
    return [Matrix(home=home, places=tuple(places[home]), cells=cells) for home, cells in homes.items()]


def home_of(worker: str) -> str:
    """Return the name of the capture that a worker's name begins with, empty where it begins with none."""
    label = label_of(worker)
    return "" if label is None else label.capture


def _take(cell: Cell, tensor: TensorComparison, row: Outcome) -> None:
    kind = tensor.tensor
    cell.kinds[kind] = None
    if row.status in BAD:
        cell.wrong.setdefault(kind, []).append((tensor, row))
    if row.status in BAD or row.status == "equal":
        cell.tried.add(kind)
    else:
        cell.skipped[kind] = row.reason or row.status
    speed = row.evidence.get("gb_per_s")
    if isinstance(speed, int | float) and not isinstance(speed, bool):
        cell.speeds[kind] = max(float(speed), cell.speeds.get(kind, 0.0))
    cell.no_peer_access = cell.no_peer_access or row.evidence.get("peer_access") is False


def _by_number(name: str) -> tuple[bool, str, int]:
    """Order devices: the host first, and `cuda:2` before `cuda:10`."""
    kind, _, index = name.rpartition(":")
    return (name != HOST, kind or name, int(index) if index.isdigit() else 0)


def find_transfers(evidence: ComparisonEvidence) -> Iterator[Finding]:
    """Report for each machine which copies are wrong, which are fine, and the likely cause."""
    hosts = {home_of(worker.label): worker.capture.manifest.host_facts for worker in evidence.workers}
    for matrix in matrices(evidence.tensors):
        by_word = gathered((matrix.cells[pair].word, pair) for pair in matrix.wrong)
        for word, pairs in by_word.items():
            yield _finding(matrix, word, pairs, hosts.get(matrix.home))


def _finding(matrix: Matrix, word: Word, pairs: Sequence[Pair], host_facts: HostFacts | None) -> Finding:
    cells = matrix.cells
    seen = [entry for pair in pairs for kind in cells[pair].plain for entry in cells[pair].wrong[kind]]
    workers = tuple(sorted({worker for _, row in seen for worker in row.workers}, key=_by_number))
    # a copy that is wrong because one of its hops is belongs to the finding of that hop
    for pair, cell in cells.items():
        for kind in cell.explained & set(cell.wrong):
            via = cell.wrong[kind][0][1].evidence.get("via")
            if (pair[0], via) in pairs or (via, pair[1]) in pairs:
                seen += cell.wrong[kind]
    why = reasons(host_facts, pairs, no_peer_access=[pair for pair in pairs if cells[pair].no_peer_access])
    parts = [f"copies {_arrows(pairs)} {words.of_copies(word)}{_when(cells, pairs)}"]
    parts += [*_fine(matrix, pairs), *(reason.text for reason in why)]
    return Finding(
        kind=word,
        severity="error",
        message=f"{standard.TRANSFER} · {some(workers)} · {'; '.join(parts)}",
        workers=workers,
        tensors=tuple(dict.fromkeys(tensor.name for tensor, _ in seen)),
        cause="; ".join(reason.text for reason in why) or None,
        detail=(*(_describe(*entry) for entry in seen[:_MOST_DETAILS]), *_about(host_facts)),
        next=next(
            (reason.fix for reason in why if reason.fix), "run consistency doctor --out DIR before and after a reboot"
        ),
    )


def _arrows(pairs: Sequence[Pair]) -> str:
    texts = [arrow(pair) for pair in pairs]
    return listed(texts) if len(texts) <= _MOST_PAIRS else some(texts, _MOST_PAIRS)


def _when(cells: Mapping[Pair, Cell], pairs: Sequence[Pair]) -> str:
    """Name the kinds of copy that are wrong, where plain ones are not."""
    kinds = [set(cells[pair].own) for pair in pairs]
    if any(found - set(_ONLY) for found in kinds):
        return ""
    return ", but only " + listed([_ONLY[kind] for kind in _ONLY if any(kind in found for found in kinds)])


def _fine(matrix: Matrix, pairs: Sequence[Pair]) -> Iterator[str]:
    """Name the pairs of the same kind that are fine: those between devices, from the same sources first."""
    between = any(HOST not in pair for pair in pairs)
    fine = [
        pair
        for pair, cell in matrix.cells.items()
        if cell.is_fine and pair[0] != pair[1] and (HOST not in pair) == between
    ]
    fine.sort(key=lambda pair: pair[0] not in {source for source, _ in pairs})
    if len(fine) > _MOST_PAIRS:
        yield f"{arrow(fine[0])} and {len(fine) - 1} others are fine"
    elif fine:
        yield f"{_arrows(fine)} {'is' if len(fine) == 1 else 'are'} fine"


def _describe(tensor: TensorComparison, row: Outcome) -> str:
    parts = [describe(tensor, row)]
    if row.evidence.get("copy"):
        parts.append(f"first wrong: {row.evidence['copy']}")
    if row.evidence.get("copies"):
        parts.append(f"{row.evidence.get('wrong_copies')} of {row.evidence['copies']} copies")
    if row.evidence.get("read_back") not in (None, "agree"):
        parts.append(str(row.evidence["read_back"]))
    return " · ".join(parts)


def without_transfers(_: ComparisonEvidence, tensors: Sequence[TensorComparison]) -> list[TensorComparison]:
    """Return tensors without copies between devices."""
    return [tensor for tensor in tensors if tensor.stage != standard.TRANSFER]


FINDERS = (
    Finder(name="transfers", phase=Phase.DEVICES, position=3, find=find_transfers, without_own=without_transfers),
)
