"""What lies beside the weights of two folders and differs: settings, and how text is read, written and ended.

`diff` compares two folders by it, and `check-merged` a merged folder with its base. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from consistency.capture.wording import and_more, counted, some

HARMLESS = frozenset(
    (
        "_name_or_path",
        "_commit_hash",
        "base_model_name_or_path",
        "revision",
        "dtype",
        "torch_dtype",  # as which it was saved; the tensors themselves show it
        "peft_version",
        "transformers_version",
        "auto_mapping",
        "inference_mode",
        "use_cache",
    )
)
"""Origin, versions and intended use: no value of a forward pass depends on these."""

GENERATION = "generation_config.json"

_OTHERWISE = "the same text may be read or written otherwise"
_MOST_KEYS = 5  # of a sentence; the files are there to be read
_LONGEST = 60
"""Characters of a value that a sentence shows."""

_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """A setting that two files have with different values; None is the value of one that a file lacks."""

    key: str
    actual: Any
    expected: Any

    @property
    def name(self) -> str:
        """Return the last component of the key: `rope_theta` of `text_config.rope_theta`."""
        return self.key.rpartition(".")[2]

    @property
    def is_harmless(self) -> bool:
        """Return whether no value of a forward pass depends on the setting."""
        return self.name in HARMLESS

    @property
    def text(self) -> str:
        """Return the setting with both values."""
        return f"{self.key} is {_shown(self.actual)}, was {_shown(self.expected)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDifference:
    """How two folders read, write or end text differently.

    Attributes
    ----------
    file : str
        The file that differs, or what lies in one of several files.
    text : str
        What differs; empty where the actual folder has no such file.
    """

    file: str
    text: str = ""

    def sentence(self, actual: str, expected: str) -> str:
        """Return the difference of two folders with these names in a sentence."""
        if not self.text:
            return f"{actual} has no {self.file}, which {expected} has"
        return f"{self.file} of {actual} differs: {self.text}"


def differences(actual: Mapping[str, Any], expected: Mapping[str, Any], within: str = "") -> list[SettingDifference]:
    """Return the settings with different values, in the order of the expected ones; tables are compared key by key."""
    found: list[SettingDifference] = []
    for key in dict.fromkeys((*expected, *actual)):
        got, wanted = actual.get(key), expected.get(key)
        if _is_same_value(got, wanted):
            continue
        if isinstance(got, dict) and isinstance(wanted, dict):
            found += differences(got, wanted, f"{within}{key}.")
        else:
            found.append(SettingDifference(key=f"{within}{key}", actual=got, expected=wanted))
    return found


def listed_differences(found: Sequence[SettingDifference]) -> str:
    """Return some differences in a sentence, and how many there are more."""
    parts = [difference.text for difference in found[:_MOST_KEYS]]
    parts.append(and_more(len(found) - _MOST_KEYS))
    return "; ".join(filter(None, parts))


def text_differences(actual: Path, expected: Path) -> Iterator[TextDifference]:
    """Yield how a folder reads, writes and ends text otherwise than the expected one; nothing for two files."""
    if not (actual.is_dir() and expected.is_dir()):
        return
    yield from _table_differences(actual, expected, GENERATION)
    yield from _vocabulary_differences(actual, expected)
    yield from _table_differences(actual, expected, "tokenizer_config.json", left_out=("chat_template",))
    yield from _template_differences(actual, expected)


def _table_differences(
    actual: Path, expected: Path, name: str, *, left_out: Sequence[str] = ()
) -> Iterator[TextDifference]:
    """Yield the settings of a JSON file that differ."""
    lost = _lost(actual, expected, name)
    if lost is not None:
        yield lost
    if not _both_differ(actual, expected, name):
        return
    got, wanted = _json(actual / name), _json(expected / name)
    if not (isinstance(got, dict) and isinstance(wanted, dict)):
        yield TextDifference(file=name, text=_OTHERWISE)
        return
    found = [one for one in differences(got, wanted) if not one.is_harmless and one.key not in left_out]
    if found:
        yield TextDifference(file=name, text=listed_differences(found))


def _vocabulary_differences(actual: Path, expected: Path) -> Iterator[TextDifference]:
    """Yield what differs of the tokenizers."""
    has_one = [any((folder / name).is_file() for name in _VOCABULARIES) for folder in (actual, expected)]
    if has_one == [False, True]:
        yield TextDifference(file="tokenizer")
    for name in _VOCABULARIES:
        if _both_differ(actual, expected, name):
            got, wanted = _json(actual / name), _json(expected / name)
            if name != "tokenizer.json" or not (isinstance(got, dict) and isinstance(wanted, dict)):
                yield TextDifference(file=name, text=_OTHERWISE)
            elif text := "; ".join(_tokenizer_parts(got, wanted)):
                yield TextDifference(file=name, text=text)


def _tokenizer_parts(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of two files tokenizer.json that differ."""
    got, wanted = _ids(actual), _ids(expected)
    moved = [token for token in wanted if token in got and got[token] != wanted[token]]
    if moved:
        first = moved[0]
        yield f"{counted(len(moved), 'token')} with another id, such as {first!r}: {got[first]}, was {wanted[first]}"
    for text, tokens in (
        ("more", [token for token in got if token not in wanted]),
        ("fewer", [token for token in wanted if token not in got]),
    ):
        if tokens:
            yield f"{counted(len(tokens), 'token')} {text}: {some([repr(token) for token in tokens], 3)}"
    if _merges(actual) != _merges(expected):
        yield "other merges"
    changed = [name for name in _SECTIONS if actual.get(name) != expected.get(name)]
    if changed:
        yield f"another {', '.join(changed)}"


def _ids(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the id of each token of a tokenizer.json; of a unigram model a token's place is its id."""
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):
        vocabulary = {str(entry[0]): number for number, entry in enumerate(vocabulary)}
    added = {str(token.get("content")): token.get("id") for token in tokenizer.get("added_tokens") or ()}
    return {**vocabulary, **added}


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the merges of a tokenizer.json as strings: later versions write each as a list of two."""
    merges = (tokenizer.get("model") or {}).get("merges") or ()
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _template_differences(actual: Path, expected: Path) -> Iterator[TextDifference]:
    """Yield whether the chat template differs, which lies in one of several files."""
    got, wanted = chat_template(actual), chat_template(expected)
    has_tokenizer = any((actual / name).is_file() for name in ("tokenizer_config.json", *_VOCABULARIES))
    if got == wanted or not has_tokenizer:  # without a tokenizer, its template is no news
        return
    if not got:
        yield TextDifference(file="chat template")
    elif not wanted:
        yield TextDifference(file="chat template", text=f"it is {_shown(got)}, and there was none")
    else:
        start = next(
            (n for n, (one, other) in enumerate(zip(got, wanted, strict=False)) if one != other),
            min(len(got), len(wanted)),
        )
        there, here = _shown(wanted[start : start + 40]), _shown(got[start : start + 40])
        yield TextDifference(file="chat template", text=f"from character {start} on it is {here}, was {there}")


def chat_template(folder: Path) -> str:
    """Return the chat template of a folder; empty where it has none."""
    for name in _TEMPLATES:
        if (folder / name).is_file():
            table = _json(folder / name) if name.endswith(".json") else None
            return str(table.get("chat_template")) if isinstance(table, dict) else _text(folder / name)
    table = _json(folder / "tokenizer_config.json")
    template = table.get("chat_template") if isinstance(table, dict) else None
    if template is None:
        return ""
    return template if isinstance(template, str) else json.dumps(template, sort_keys=True)


def end_tokens(folder: Path) -> tuple[Any, ...]:
    """Return the ids of the tokens at which generation ends: those of generation_config.json, or of config.json."""
    for name in (GENERATION, "config.json"):
        table = _json(folder / name)
        if not isinstance(table, dict):
            continue
        inner = table.get("text_config")
        ids = table.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def _lost(actual: Path, expected: Path, name: str) -> TextDifference | None:
    if (expected / name).is_file() and not (actual / name).is_file():
        return TextDifference(file=name)
    return None


def _both_differ(actual: Path, expected: Path, name: str) -> bool:
    """Return whether both folders have a file, with other bytes."""
    files = [folder / name for folder in (actual, expected)]
    return all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes()


def _json(file: Path) -> Any:
    """Return what a JSON file holds; None where it is absent, or no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _is_same_value(actual: Any, expected: Any) -> bool:
    """Report whether two values of JSON are the same; PEFT writes sets of names as lists in any order."""
    are_lists = isinstance(actual, list) and isinstance(expected, list)
    if are_lists and all(isinstance(item, str) for item in (*actual, *expected)):
        return sorted(actual) == sorted(expected)
    # 1 and 1.0 are the same, 1 and true are not
    if isinstance(actual, float | int) and isinstance(expected, float | int):
        return actual == expected and isinstance(actual, bool) == isinstance(expected, bool)
    return bool(actual == expected)
