"""What the workers of a machine with four GPUs record of their copies."""

from __future__ import annotations

from typing import Any

from consistency.capture.names import CASTING, CHAIN, DIRECT, HOST_STAGED, OVERLAPPED, STRIDED, pair_name
from consistency.capture.reader import read_capture
from consistency.capture.records import TensorRecord
from consistency.case import standard
from consistency.comparison.compare import compare
from consistency.comparison.result import Comparison
from consistency.devices.host import HostFacts
from consistency.numerics.words import Word
from tests.comparison.made_records import measured
from tests.conftest import MakeCapture

DEVICES = ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
CASE: dict[str, Any] = {"base": "", "adapter": None, "stages": (standard.TRANSFER,)}


def copies(pair: tuple[str, str], kind: str = DIRECT, word: str | None = None, **of: Any) -> TensorRecord:
    evidence = {"bytes": [8], "read_back": "agree", **of.pop("evidence", {})}
    if kind == DIRECT and word is None:
        evidence.setdefault("gb_per_s", 20.0)
    return TensorRecord(
        stage="transfer", layer=pair_name(*pair), tensor=kind, shape=(8,), dtype="uint8", reference="payload",
        rule="bitwise",
        digest=("ab" if word else "cd") * 16, reference_digest="cd" * 16, evidence=evidence,
        word=None if word is None else Word(word),
        status="outside" if word else "equal", measure=measured(ratio=None) if word else None, **of,
    )  # fmt: skip


def workers(wrong: dict[tuple[str, str], dict[str, str]]) -> dict[str, list[TensorRecord]]:
    """Return what the workers of four GPUs record, all of them right but these kinds of these pairs."""
    found = {"cpu": [copies(("cpu", "cpu"))]}
    for own in DEVICES:
        pairs = [(own, "cpu"), ("cpu", own), (own, own), *((other, own) for other in DEVICES if other != own)]
        found[own] = []
        for pair in pairs:
            kinds = [DIRECT, STRIDED, CASTING, OVERLAPPED]
            words = wrong.get(pair, {})
            found[own] += [copies(pair, kind, words.get(kind)) for kind in kinds]
            if "cpu" not in pair and pair[0] != pair[1]:
                via = next(d for d in DEVICES if d not in pair)
                found[own].append(copies(pair, HOST_STAGED, words.get(HOST_STAGED), evidence={"via": "cpu"}))
                broken = any(wrong.get(hop, {}).get(DIRECT) for hop in ((pair[0], via), (via, pair[1])))
                word = "zeros" if broken else words.get(CHAIN)
                found[own].append(copies(pair, CHAIN, word, evidence={"via": via}))
    return found


ALL = {DIRECT: "never-written", STRIDED: "never-written", CASTING: "never-written", OVERLAPPED: "never-written"}
TWO = {("cuda:0", "cuda:1"): ALL, ("cuda:0", "cuda:3"): ALL}


def compared(
    make: MakeCapture, wrong: dict[tuple[str, str], dict[str, str]], host_facts: HostFacts | None = None
) -> Comparison:
    info = {name: {"load_path": "shared", "stages_done": ("transfer",)} for name in DEVICES}
    return compare([read_capture(make("a", workers(wrong), info=info, case=CASE, host_facts=host_facts))])
