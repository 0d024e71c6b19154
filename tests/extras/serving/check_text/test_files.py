"""Records are read from JSON lines, one JSON value, tables and files of `torch.save`; nothing in a file is run."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from consistency.errors import InputError
from consistency.extras.serving.check_text.files import read_records
from consistency.extras.serving.check_text.texts import read_texts

ONE, TWO = {"prompt": [1], "text": [2]}, {"prompt": [1], "text": [3]}


def records(path: Path) -> list[tuple[str, Any]]:
    return list(read_records(path))


@pytest.mark.parametrize(
    ("content", "places"),
    [
        (f"{json.dumps(ONE)}\n\n{json.dumps(TWO)}\n", ["line 1", "line 3"]),
        (f"\ufeff{json.dumps(ONE)}\r\n{json.dumps(TWO)}", ["line 1", "line 2"]),
        (json.dumps([ONE, TWO]), ["record 1", "record 2"]),
        (json.dumps([ONE, TWO], indent=1), ["record 1", "record 2"]),
    ],
)
def test_json_lines_and_an_array(tmp_path: Path, content: str, places: list[str]) -> None:
    path = tmp_path / "texts.json"
    path.write_text(content, encoding="utf-8")
    assert records(path) == list(zip(places, [ONE, TWO], strict=True))
    packed = tmp_path / "texts.jsonl.gz"
    packed.write_bytes(gzip.compress(content.encode()))
    assert records(packed) == records(path)


def test_one_object(tmp_path: Path) -> None:
    path = tmp_path / "texts.json"
    for indent, place in ((None, "line 1"), (1, "record 1")):
        path.write_text(json.dumps(ONE, indent=indent))
        assert records(path) == [(place, ONE)]


def test_an_end_of_line_inside_a_text_ends_no_record(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    text = "a\u2028b\u0085c\x7f"
    path.write_text(json.dumps({"prompt": "a", "text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [one.text for one in read_texts(path)] == [text]


def test_nan_as_python_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"prompt": [1], "text": [2, 3], "logprobs": [NaN, -Infinity]}')
    assert str(read_texts(path)[0].logprobs) == "[nan, -inf]"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": [1], "text": [2]}\n{"prompt": [1], "te', "line 2 is no text"),
        (b'[{"prompt": [1],\n "te', "line 1 is no text"),
        (b"[" * 100_000, "line 1 is no text"),
        (b'{"prompt": [1], "text": [' + b"1" * 5000 + b"]}", "line 1 is no text"),
        (b"\xff\xfe\x00", "the texts cannot be read"),
        (gzip.compress(b"{}" * 100, mtime=0)[:-9], "the texts cannot be read"),
        (b"PK\x03\x04 and no more", "without running code"),
        (b"[]", "the file has no text"),
        (b"3", "line 1 is no text"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_texts(path)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


def test_a_file_of_torch_is_read_and_its_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "3.pt"
    sample = {"tokens": torch.tensor([5, 9, 7]), "response_length": 1, "rollout_log_probs": [-0.5], "prompt": "a"}
    torch.save({"rollout_id": 3, "samples": [sample, sample]}, path)
    assert [(one.name, one.prompt, one.text) for one in read_texts(path)] == [
        ("record 1, sample 1", [5, 9], [7]), ("record 1, sample 2", [5, 9], [7]),
    ]  # fmt: skip
    torch.save({"samples": [_Code()]}, path)
    with pytest.raises(InputError, match="without running code"):
        read_texts(path)
    assert not (tmp_path / "ran").exists()


def test_a_table_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "completions_00010.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="a Parquet file needs pyarrow"):
        read_texts(path)


def test_a_table_is_read(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "completions_00010.parquet"
    rows = [{"step": 10, "prompt": "a", "completion": [{"role": "assistant", "content": "b"}], "advantage": 0.5}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (text,) = read_texts(path)
    assert (text.name, text.prompt, text.text, text.step) == ("row 1", "a", "b", "10")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(path)
