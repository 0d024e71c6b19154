"""The page without a browser: what is in it, that names stay text, that it stays small."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest

from consistency import plugins
from consistency.capture.names import OVERLAPPED
from consistency.capture.reader import read_capture
from consistency.capture.records import StageMemory
from consistency.comparison.compare import compare
from consistency.comparison.findings.transfers import matrices
from consistency.comparison.layers import layers_of
from consistency.comparison.result import (
    ArchitectureGroup,
    Comparison,
    Outcome,
    Status,
    TensorComparison,
    WorkerSummary,
)
from consistency.numerics.real import Real
from consistency.report import html as report_html
from consistency.report.formats import Chosen, formats
from consistency.report.html import as_html
from consistency.report.layers import cell_figures, devices_text
from consistency.report.markdown import finding_as_markdown
from consistency.report.marks import letter
from consistency.report.page import cells
from consistency.report.page.cells import KEY
from consistency.report.page.section import PageSection
from consistency.report.page.tables import bits, environments, partitions, ratios
from tests.comparison.made_transfers import ALL as FAULTY
from tests.comparison.made_transfers import CASE, DEVICES, compared, copies, workers
from tests.conftest import FinishedRun, MakeCapture
from tests.report.made_comparisons import (
    ALL,
    SAFE,
    comparison,
    computed_apart,
    faulty,
    four_architectures,
    hostile,
    tensor,
    worker,
)
from tests.report.parsed_page import Page

STATUSES = [status for status, _, _ in KEY]


def test_one_file_that_fetches_nothing() -> None:
    raw = as_html(faulty())
    page = Page(raw)
    assert not re.search(r"https?:|//[a-z]+\.[a-z]|@import|url\(", raw)
    for _, attributes in page.elements:
        assert not {"src", "srcset", "action", "background", "poster"} & attributes.keys()
        assert (attributes.get("href") or "#").startswith("#")
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode() in policy


def test_hostile_names_stay_text() -> None:
    raw = as_html(hostile())
    page = Page(raw)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert SAFE in page.text
    assert SAFE in page.data["strings"]
    assert SAFE in page.data["columns"]
    assert not re.search("[\u2028\u202e<]", page.scripts[0])
    assert "49" not in page.text.replace("{{7*7}}", "")


def test_without_escaping_the_names_break_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: on either side."""
    plain = jinja2.Environment
    with monkeypatch.context() as patched:
        patched.setattr(jinja2, "Environment", lambda **of: plain(**{**of, "autoescape": False}))
        for name in ("_template", "_environment"):
            patched.setattr(report_html, name, getattr(report_html, name).__wrapped__)
        assert "img" in [tag for tag, _ in Page(as_html(hostile())).elements]
    monkeypatch.setattr(report_html, "_ESCAPES", {})
    assert "img" in [tag for tag, _ in Page(as_html(hostile())).elements]


def shown_cells(data: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], str, tuple[str, int, Any] | None]]:
    """Yield tensor, worker, and status, class and ratio, as the page's script reads them out of its data."""
    for section in data["sections"]:
        for row in section["rows"]:
            layer, part, *_ = (data["strings"][place] for place in row[:5])
            for column, (name, *_) in enumerate(data["columns"][section["load_path"]]):
                variant: list[Any] | None = [0]
                if len(row) > 5:
                    which = row[7][column] if len(row) > 7 else 0 if len(row[6]) == 1 else column
                    variant = None if which < 0 else row[6][which]
                key = (section["stage"], layer, part)
                if variant is None:
                    yield key, name, None
                else:
                    more = [*variant, *[None] * (4 - len(variant))]
                    yield key, name, (STATUSES[variant[0]], more[1] or 0, more[3])


@pytest.mark.parametrize("seed", range(20))
def test_the_data_say_what_the_comparison_says(seed: int) -> None:
    rng = random.Random(seed)
    tensors = []
    wanted: dict[tuple[str, ...], tuple[str, int, float | None]] = {}
    for number in range(12):
        present = [name for name in ALL if rng.random() < rng.choice([0.5, 1.0])]
        kinds = {name: rng.randrange(rng.choice([1, 4])) for name in present}
        classes = tuple(tuple(n for n in present if kinds[n] == kind) for kind in dict.fromkeys(kinds.values()))
        rows = []
        for name in present:
            status: Status = rng.choice(STATUSES) if rng.random() < 0.5 else "equal"  # type: ignore[arg-type]
            ratio = rng.choice([None, rng.random(), 3e7 * rng.random(), float("nan"), float("inf")])
            ratio = None if status == "equal" else ratio
            rows.append(
                Outcome(workers=(name,), reference="file", status=status, ratio=None if ratio is None else Real(ratio))
            )
            text = ratio if ratio is None else float(f"{ratio:.3g}")
            of = next(place for place, names in enumerate(classes) if name in names)
            wanted["adapter", f"l{number}", "w", name] = (status, of, text)
        tensors.append(
            TensorComparison(
                stage="adapter", load_path="isolated", layer=f"l{number}", tensor="w", shape=(1,), dtype="float32",
                rule="bound", classes=classes, outcomes=tuple(rows),
            )
        )  # fmt: skip
    found = {(*key, name): cell for key, name, cell in shown_cells(Page(as_html(comparison(tensors))).data)}
    for key, cell in found.items():
        want = wanted.get(key)
        if want is None or cell is None:
            assert (want, cell) == (None, None), key
        else:
            assert cell[:2] == want[:2], key
            assert str(cell[2]) == str(want[2]), key
    assert wanted.keys() <= found.keys()


@pytest.mark.parametrize("made", [four_architectures, faulty, lambda: computed_apart(5, 300)])
def test_the_cells_say_what_the_tolerance_report_says(made: Callable[[], Comparison]) -> None:
    found = made()
    data = Page(as_html(found)).data
    names = [name for name, _ in data["architectures"]["isolated"]]
    shown = {
        (section["stage"], *(data["strings"][place] for place in row[:2]), name): cell
        for section in data["sections"]
        for row in section["rows"]
        for name, cell in zip(names, row[5] if len(row) > 5 else [[0]] * len(names), strict=True)
    }
    wanted = {(o.stage, o.layer, o.tensor, name): c for o in layers_of(found) for name, c in o.architectures.items()}
    assert shown.keys() == wanted.keys()
    for key, (status, *more) in shown.items():
        figures, agreement = [*more[1:], None, None][:2]
        assert STATUSES[status] == wanted[key].status
        assert (figures or KEY[status][1]) == cell_figures(wanted[key])
        if len(wanted[key].classes) > 1:
            assert data["strings"][agreement] == devices_text(wanted[key])
        else:
            assert agreement in (None, cells.AGREE)


def test_findings_can_be_linked_to_and_have_their_markdown_in_the_page() -> None:
    page = Page(as_html(faulty()))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert [name for name in ids if name and name.startswith("finding-")] == ["finding-1", "finding-2"]
    assert "#finding-1" in [attributes.get("href") for _, attributes in page.elements]
    (text,) = [attributes["data-markdown"] for _, attributes in page.elements if "data-markdown" in attributes]
    assert text == finding_as_markdown(faulty(), faulty().findings[0], 1)
    for made in ({"simulated": True}, {"planted": ("copies-dropped in cuda:1",)}):
        drill = msgspec.structs.replace(faulty(), **made)
        assert "Not a fault of a device" in finding_as_markdown(drill, drill.findings[0], 1)
    elements = Page(as_html(hostile())).elements
    (text,) = [attributes["data-markdown"] for _, attributes in elements if "data-markdown" in attributes]
    assert text is not None
    assert "\u202e" not in text
    assert not re.search(r"(?<!\\)<img", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def test_equal_tensors_take_five_numbers() -> None:
    section = Page(as_html(comparison([tensor([ALL])]))).data["sections"][0]
    assert [len(row) for row in section["rows"]] == [5]
    assert (section["bad"], section["unlike"]) == (0, 0)


@pytest.mark.slow
def test_two_thousand_tensors_on_64_devices_stay_below_5_mb() -> None:
    raw = as_html(computed_apart(2000, 64))
    assert len(raw.encode()) < 5_000_000
    data = json.loads(raw.split('id="data">')[1].split("</script>")[0])
    assert sum(len(section["rows"]) for section in data["sections"]) == 2000
    assert len(data["columns"]["isolated"]) == 64


def test_a_fleet_is_shown_by_its_groups_and_says_so() -> None:
    found = computed_apart(20, 300)
    raw = as_html(found)
    page = Page(raw)
    labels = page.data["columns"]["isolated"]
    assert len(labels) <= 8
    assert sum(many for _, many, _ in labels) == 300
    assert "Too many workers for a column each" in page.text
    assert "236 more workers" in page.text
    assert len(raw) < 200_000
    assert "Too many workers for a column each" not in Page(as_html(computed_apart(2, 64))).text


def test_the_worst_of_many_workers_is_shown() -> None:
    """Of workers that share a column because there are too many kinds, none that is off is lost."""
    names = [f"cuda:{n}" for n in range(100)]
    tensors = [
        tensor([names[:n], [names[n]], names[n + 1 :]], layer=f"l{n}", statuses={names[n]: "outside"})
        for n in range(1, 99)
    ]
    found = comparison(tensors, workers=tuple(map(worker, names)), verdict="inconsistent", findings=faulty().findings)
    data = Page(as_html(found)).data
    assert len(data["columns"]["isolated"]) <= 8
    by_tensor: dict[tuple[str, ...], list[Any]] = {}
    for key, _, cell in shown_cells(data):
        by_tensor.setdefault(key, []).append(cell)
    assert all(any(cell and cell[0] == "outside" for cell in row) for row in by_tensor.values())


def test_what_has_no_room_is_left_out_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "MOST_TENSORS", 4)
    sections = {section["stage"]: section for section in Page(as_html(faulty())).data["sections"]}
    assert {stage: len(section["rows"]) for stage, section in sections.items()} == {
        "base": 0,
        "adapter": 3,
        "merged": 1,
    }
    assert {stage: section["left_out"] for stage, section in sections.items()} == {"base": 3, "adapter": 0, "merged": 2}
    monkeypatch.setattr(cells, "MOST_TENSORS", 100)
    monkeypatch.setattr(cells, "MOST_VARIANTS", 16)
    left = {section["stage"]: section["left_out"] for section in Page(as_html(faulty())).data["sections"]}
    assert left == {"base": 0, "adapter": 0, "merged": 2}


def test_simulated_devices_are_told_as_such() -> None:
    text = as_html(comparison([tensor([ALL])], simulated=True))
    assert "SIMULATED DEVICES" in text
    assert "<title>CONSISTENT · simulated" in text
    assert "SIMULATED" not in as_html(comparison([tensor([ALL])]))


def test_histogram_of_what_is_used_of_the_bound() -> None:
    values = [0.0, 0.1, 0.1000001, 1.0, 1.5, 1e9, float("inf"), float("nan")]
    within: dict[str, Status] = {"cpu": "within"}
    made = [
        tensor([["cpu"]], stage="merged", ratio=value, layer=f"l{i}", statuses=within) for i, value in enumerate(values)
    ]
    (found,) = ratios([*made, tensor([ALL]), tensor([["cpu"]], stage="merged", ratio=1.0, max_ulp=0, statuses=within)])
    assert (found.stage, found.rows, found.tensors) == ("merged", 8, 8)
    counts = {one.label: one.count for one in found.bins if one.count}
    assert counts == {"0.0 – 0.1": 2, "0.1 – 0.2": 1, "0.9 – 1.0": 1, "1 – 2": 1, "over 100": 2, "NaN": 1}
    assert [one.label for one in found.bins if one.outside] == ["1 – 2", "over 100", "NaN"]


def test_histogram_of_bits() -> None:
    def flipped(found: dict[Any, Any]) -> TensorComparison:
        row = Outcome(workers=("cpu",), reference="file", status="outside", evidence={"flipped_bits": found})
        return TensorComparison(
            stage="adapter", load_path="isolated", layer="l", tensor="w", shape=(1,), dtype="bfloat16", rule="bitwise",
            classes=(), outcomes=(row,),
        )  # fmt: skip

    (found,) = bits([flipped({15: 1, 7: 4}), flipped({"7": 2, 0: 3}), tensor([ALL])])
    assert (found.dtype, found.tensors, len(found.bits)) == ("bfloat16", 2, 16)
    assert {b.place: (b.field, b.count) for b in found.bits if b.count} == {
        15: ("sign", 1),
        7: ("exponent", 6),
        0: ("fraction", 3),
    }
    assert bits([flipped({"x": 1, -3: 1, 10**9: 1, 3: "many", 4: -1})]) == []


def test_classes_are_gathered() -> None:
    found, left_out = partitions(faulty().tensors)
    assert [(way.stage, way.tensors, list(way.classes)) for way in found] == [
        ("base", 3, [tuple(ALL)]),
        ("adapter", 3, [("cpu", "cuda:0", "cuda:2"), ("cuda:1",)]),
        ("merged", 3, [("cpu",), tuple(ALL[1:])]),
    ]
    assert left_out == 0
    apart = [tensor([[name for name in ALL if name != out], [out]], layer=out) for out in ALL]
    apart += [tensor([[one], [name for name in ALL if name != one]], layer=f"{one}'") for one in ALL]
    assert partitions(apart)[1] == 2
    assert [letter(n) for n in (0, 25, 26, 701, 702)] == ["A", "Z", "AA", "ZZ", "AAA"]


def test_environments_say_what_differs() -> None:
    def of(name: str, torch: str, uuid: str) -> WorkerSummary:
        environment = {"torch": torch, "python": "3.11", "device_uuid": uuid, "variables": {"OMP_NUM_THREADS": "1"}}
        return worker(name, environment=environment, asked={"tf32": False}, in_force={"tf32": torch == "2.8"})

    found = environments([of("a", "2.8", "1"), of("b", "2.9", "2"), of("c", "2.9", "3")])
    assert found.columns == [["a"], ["b", "c"]]
    assert dict(found.differing) == {
        "torch": [("A", "2.8"), ("B", "2.9")],
        "in force: tf32": [("A", "True (asked for: False)"), ("B", "False")],
    }
    assert "variables.OMP_NUM_THREADS" in dict(found.same)
    many = environments([of(str(n), str(n), "") for n in range(20)])
    assert (len(many.columns), many.left_out) == (12, 8)


class Matrices(html.parser.HTMLParser):
    """The transfer matrices of a page: status and text of each cell by caption, source and destination."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: dict[tuple[str, str, str], tuple[str, str]] = {}
        self._inside = False
        self._caption, self._source, self._columns, self._place, self._status = "", "", [""], 0, ""
        self._text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        if tag == "table":
            self._inside, self._columns = of.get("class") == "matrix", []
        if tag in ("caption", "th", "td"):
            self._text, self._status = [], (of.get("class") or "").removeprefix("k-")
        if tag == "tr":
            self._place = 0

    def handle_endtag(self, tag: str) -> None:
        text = " ".join("".join(self._text).split())
        if not self._inside:
            return
        if tag == "caption":
            self._caption = text
        elif tag == "th" and self._place:
            self._columns.append(text)
        elif tag == "th":
            self._source = text
        elif tag == "td" and self._columns:
            self.cells[self._caption, self._source, self._columns[self._place - 1]] = (self._status, text)
        self._place += tag in ("th", "td")

    def handle_data(self, data: str) -> None:
        self._text.append(data)


def test_the_page_and_the_findings_agree_on_every_pair_of_devices(make_capture: MakeCapture) -> None:
    """A broken pair breaks the chains that lead over it, and the page blames the pair alone."""
    found = compared(make_capture, {("cuda:0", "cuda:1"): FAULTY})
    shown = Matrices(as_html(found)).cells
    (matrix,) = matrices(found.tensors)
    status = {(source, target): status for (_, source, target), (status, _) in shown.items() if status}
    assert {pair for pair, of in status.items() if of == "outside"} == set(matrix.wrong) == {("cuda:0", "cuda:1")}
    assert {pair for pair, of in status.items() if of == "equal"} == {p for p, c in matrix.cells.items() if c.is_fine}
    texts = {(source, target): text for (_, source, target), (_, text) in shown.items()}
    assert "✗outside direct never-written" in texts["cuda:0", "cuda:1"]
    assert "=equal direct 20 GB/s" in texts["cuda:0", "cuda:2"]
    assert "–skipped chain wrong on one of its hops" in texts["cuda:0", "cuda:2"]
    assert "Copies between devices" not in Page(as_html(faulty())).text


def test_the_page_has_a_matrix_for_each_machine(make_capture: MakeCapture) -> None:
    info = {name: {"load_path": "shared"} for name in DEVICES}
    a = make_capture("host-a", workers({}), info=info, case=CASE)
    b = make_capture("host-b", workers({("cuda:0", "cuda:1"): FAULTY}), info=info, case=CASE)
    shown = Matrices(as_html(compare([read_capture(a), read_capture(b)]))).cells
    status = {(caption.partition(":")[0], source, target): of for (caption, source, target), (of, _) in shown.items()}
    assert status["host-a", "cuda:0", "cuda:1"] == "equal"
    assert status["host-b", "cuda:0", "cuda:1"] == "outside"


def test_a_copy_that_was_not_tried_says_why(make_capture: MakeCapture) -> None:
    skipped = msgspec.structs.replace(
        copies(("cpu", "cpu"), OVERLAPPED), status="skipped", digest=None, reference_digest=None, reason="no memory"
    )
    found = compare([read_capture(make_capture("a", {"cpu": [copies(("cpu", "cpu")), skipped]}, case=CASE))])
    ((status, text),) = Matrices(as_html(found)).cells.values()
    assert status == "equal"
    assert "–skipped overlapped no memory" in text


def test_memory_by_stage_where_it_was_measured() -> None:
    measured = (
        StageMemory(stage="base", host_resident_bytes=2**30, host_peak_bytes=2**31),
        StageMemory(
            stage="merged", host_resident_bytes=2**29, host_peak_bytes=2**29, device_resident_bytes=2**20,
            device_peak_bytes=5 * 2**20,
        ),
    )  # fmt: skip
    plain = worker("cpu", "x86-64", peak_bytes=400 * 2**20)
    found = comparison([tensor([["cpu"]])], workers=(msgspec.structs.replace(plain, stage_memory=measured),))
    text = Page(as_html(found)).text
    assert "host 1.0 GiB · peak 2.0 GiB" in text
    assert "host 512 MiB" in text
    assert "peak 5.0 MiB" in text
    assert "At the end of each stage" not in Page(as_html(comparison([tensor([["cpu"]])], workers=(plain,)))).text
    assert "400 MiB" in text


def contrast(one: str, other: str) -> float:
    """Return the ratio of WCAG 2.2: relative luminance of sRGB, plus 0.05 of flare."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_every_text_can_be_read_in_both_schemes() -> None:
    style = (Path(report_html.__file__).parent / "page" / "style.css").read_text()
    found = dict(re.findall(r"--([a-z0-9-]+): light-dark\((#\w{6}, #\w{6})\)", style))
    colours = {name: value.split(", ") for name, value in found.items()}
    pairs = [(f"{name.removesuffix('-ground')}-text", name) for name in colours if f"{name[:-7]}-text" in colours]
    assert len(pairs) == 14
    pairs += [(text, ground) for text in ("text", "quiet", "link") for ground in ("ground", "raised")]
    pairs += [("text", f"{kind}-ground") for kind in ("good", "bad", "warn")] + [("quiet", "bad-ground")]
    pairs += [(kind, f"{kind}-ground") for kind in ("good", "bad", "warn")] + [("bad", "ground"), ("warn", "ground")]
    for text, ground in pairs:
        for scheme in (0, 1):
            assert contrast(colours[text][scheme], colours[ground][scheme]) >= 4.5, (text, ground, scheme)
    for line in ("edge", "focus"):  # 1.4.11: what is not text, but has to be seen
        assert all(contrast(*pair) >= 3 for pair in zip(colours[line], colours["ground"], strict=True))
    assert contrast("#777777", "#ffffff") < 4.5 < contrast("#767676", "#ffffff")


def test_a_run_leaves_all_files_of_the_report(finished_run: FinishedRun) -> None:
    files = {row.name for row in formats(Chosen.OUT)}
    assert {path.name for path in finished_run.folder.iterdir()} == {*files, "captures"}
    text = (finished_run.folder / "report.html").read_text()
    report = json.loads((finished_run.folder / "report.json").read_text())
    data = Page(text).data
    assert sum(section["total"] for section in data["sections"]) == len(
        {(one["load_path"], one["stage"], one["layer"], one["tensor"]) for one in report["outcomes"]}
    )
    assert report["verdict"].upper() in Page(text).text


def test_two_files_have_a_page_too(tmp_path: Path) -> None:
    from consistency.extras.merging.diff.result import diff
    from tests.made_weights import f32, put

    put(tmp_path / "a.safetensors", {"x.w": f32(1, 2), "y.w": f32(1, 1)})
    put(tmp_path / "b.safetensors", {"x.w": f32(1, 2, 3), "y.w": f32(1, 1)})
    diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", out=tmp_path / "out")
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert "1 of 2 tensors differs" in page.text
    (section,) = page.data["sections"]
    assert (section["stage"], section["bad"], section["total"]) == ("file", 1, 2)
    assert (tmp_path / "out" / "report.md").exists()


def test_alternative_load_path_is_a_sentence_and_has_its_columns_in_the_map() -> None:
    fine = tensor([["cpu", "cuda:0"]], load_path="isolated+cpu")
    found = comparison(
        [tensor([["cpu", "cuda:0"]]), fine], load_paths=("isolated", "isolated+cpu"),
        workers=(worker("cpu", "x86-64"), worker("cuda:0", "Ampere")),
        architectures=(
            ArchitectureGroup(name="x86-64", workers=("cpu",)), ArchitectureGroup(name="Ampere", workers=("cuda:0",)),
        ),
    )  # fmt: skip
    page = as_html(found)
    text = Page(page).text
    assert "1 more load path checked, equal (isolated+cpu)" in text
    assert "load path: isolated+cpu" not in text  # no table of its own
    data = json.loads(re.findall(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.S)[0])
    assert [label for label, *_ in data["columns"]["isolated+cpu"]] == ["cpu", "cuda:0"]


def test_a_section_tells_skipped_checks_from_tensors_that_differ() -> None:
    """Facts about a process are checks, and one that was skipped does not differ."""
    skipped: dict[str, Status] = {"cpu": "skipped"}
    found = comparison(
        [
            tensor([ALL], stage="memory", layer="a", rule="limit"),
            tensor([ALL], stage="memory", layer="b", rule="limit", statuses=skipped),
            tensor([["cpu"], ALL[1:]], stage="merged", layer="a"),
            tensor([ALL], stage="merged", layer="b", statuses=skipped),
        ]
    )
    sections = {one["stage"]: one for one in Page(as_html(found)).data["sections"]}
    kinds = ("total", "bad", "unchecked", "unlike", "checks")
    assert [sections["memory"][kind] for kind in kinds] == [2, 0, 1, 0, True]
    assert [sections["merged"][kind] for kind in kinds] == [2, 0, 1, 1, False]


# --- sections of plug-ins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_own", [False, True])
def test_a_section_that_fails_costs_itself_alone_unless_it_is_ours(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    def broken(_: Comparison) -> dict[str, Any]:
        raise RuntimeError("no such figure")

    reference = "consistency.ours:SECTION" if is_own else "theirs:SECTION"
    section = PageSection(package="theirs", template="theirs.html", values=broken)
    before = as_html(hostile())
    real = plugins.offered
    monkeypatch.setattr(plugins, "_failures", [])
    monkeypatch.setattr(
        plugins, "offered", lambda part: iter([(reference, section)]) if part == "sections" else real(part)
    )
    if is_own:
        with pytest.raises(RuntimeError, match="no such figure"):
            as_html(hostile())
        return
    assert len(as_html(hostile())) > len(before) // 2
    (failure,) = plugins.failures()
    assert failure.sentence == "the section theirs:SECTION cannot be used: RuntimeError: no such figure"
