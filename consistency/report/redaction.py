"""Take out of a report what names a person, an organisation or a machine, before it is attached to a public issue.

By value, wherever it occurs in any text: folders of the base, the adapter and the captures, home folders and all other
paths, files and folders that a command line names, however they were written, the name that `--name` gave the case,
names of hosts and users. And by form: UUIDs, which identify a device (or a boot) for its whole life, addresses and
shares, and credentials in URLs. Each has a placeholder that is the same in the whole report, so
that two paths on one host are still seen to be that.

Kept are PCI bus ids, which name a slot, are the same in every machine of a model, and say which bridge or copy is at
fault; folders of the system (`/usr`, `/proc`), the part of a path below `site-packages`; ids of models on a hub; and
names of tensors.
"""

from __future__ import annotations

import getpass
import ipaddress
import platform
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import unquote

from consistency.capture.names import ANOTHER_BASE, THIS_BASE
from consistency.case.builtin import builtin_name
from consistency.case.case import in_other_case
from consistency.case.recognition import name_of, repository_of
from consistency.case.stage import Level
from consistency.case.stages import SPECS
from consistency.numerics import words
from consistency.numerics.rules import Rule
from consistency.text import without_credentials

_HOME = re.compile(r"(?:/(?:export/)?(?:home|Users)/|[A-Za-z]:\\Users\\)([^\s/\\:'\"<>|,;)]+)")

_PATH = re.compile(
    r"(?<=[\"'])/(?!/)[^\"'\n]+(?=[\"'])|(?<![\w.<>/~$%-])(?:~?/(?!/)|[A-Za-z]:\\)[^\s:;,'\"()<>\[\]{}|`]+"
)
"""A path from the root or the home folder; one with spaces only where it is quoted."""

_UUID = re.compile(r"(?i)(?<![0-9a-z])(?:(GPU|MIG)-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![0-9a-f])")

_SYSTEM = re.compile(r"/(?:usr|lib|lib32|lib64|bin|sbin|proc|sys|dev|etc)(?:/|\Z)")

_PUBLIC_PART = re.compile(r"/(?:(?:(?:site|dist)-packages|lib/python3[\d.]*)/.+|consistency/[\w/]+\.py)\Z")
"""The part of a path that is the same wherever a package is installed."""

_OTHER_BASE = re.compile(rf"{re.escape(ANOTHER_BASE)}(.+?){re.escape(THIS_BASE)}")
"""What the adapter's config calls the base: a folder's name, which the report has without its path."""

_IS_URL = re.compile(r"\A[A-Za-z][\w+.-]+://")

_FIELD = re.compile(r"[a-z][a-z0-9_]*\Z")

_EVERYBODYS = frozenset(
    {"root", "user", "users", "home", "localhost", "runner", "admin", "shared", "public", "none", "unknown"}
)
"""Names of users and hosts that name nobody."""

_VOCABULARY = frozenset(
    {
        *SPECS, *Level, *Rule, *words.declared(), "cpu", "cuda", "xpu", "npu", "mps", "hpu", "gpu", "torch", "python",
        "consistency", "file", "float64", "float32", "bfloat16", "float16", "equal", "within", "outside", "missing",
        "unexpected", "skipped", "blocked", "consistent", "inconsistent", "incomplete", "error", "warning", "note",
        "lost", "failed", "nan", "inf", "worker", "device", "model", "layer", "tensor", "isolated", "linux",
    }
)  # fmt: skip
"""Words that reports are made of: a host or user of such a name stays, because the report could not be read without."""

PATH_OPTIONS = frozenset({
    "--base", "--adapter", "--out", "--inputs", "--engine-outputs", "--device-map", "--history", "--baseline", "--html",
    "--junit", "--groups", "--progress", "--require", "--store", "--together",
})  # fmt: skip
"""Options whose value is a file or a folder, or a URL."""

PRIVATE_OPTIONS = frozenset({"--wrapper", "--command", "--engine-args", "--nodes", "--partition", "--account"})
"""Options whose value names what is somebody's own, in whatever form."""

_FILE = re.compile(r".+\.(?:toml|json|csv|zip|html|xml|safetensors)\Z")

_CASE, _OTHER_CASE = "<case>", "<other-case>"

_ELSEWHERE = "checked_elsewhere"
"""The field that names the case of the same suite in which a stage was checked, by stage."""

_SHORTEST = 2
"""Letters of a user's or host's name in a text: `a` is in every sentence."""


@dataclass(slots=True, kw_only=True)
class Redaction:
    """Replaces texts; made by `redaction_of`."""

    # known folders and their placeholders; what is below one keeps its place in it
    folders: dict[str, str] = field(default_factory=dict)
    homes: tuple[str, ...] = ()  # folders of which nothing below is kept
    names: dict[str, str] = field(default_factory=dict)  # hosts and users, and their placeholders
    exact: dict[str, str] = field(default_factory=dict)  # whole texts
    # words of a command line that are no path by their form: replaced there, and in sentences
    given: dict[str, str] = field(default_factory=dict)
    _paths: dict[str, str] = field(default_factory=dict)
    _uuids: dict[str, str] = field(default_factory=dict)
    _done: dict[str, str] = field(default_factory=dict)
    _folders: Replacements = field(init=False)
    _names: Replacements = field(init=False)
    _exact: Replacements = field(init=False)
    _given: Replacements = field(init=False)

    def __post_init__(self) -> None:
        self._folders = Replacements(self.folders, r"(?<![\w./~-])", r"(?![\w-])")
        said = {
            word: instead
            for word, instead in self.given.items()
            if len(word) > _SHORTEST and word.lower() not in _VOCABULARY
        }
        self._given = Replacements(said, r"(?<![\w./~<-])", r"(?![\w>-])")
        self._names = Replacements(self.names, "(?<![A-Za-z0-9])", "(?![A-Za-z0-9])")
        self._exact = Replacements(self.exact, r"(?<![\w./-])", r"(?![\w/-]|\.\w)")

    def text(self, text: str) -> str:
        """Return a text without what is to be taken out."""
        done = self._done.get(text)  # most texts of a report are in it many times
        if done is None:
            done = self._done[text] = self._redacted(text)
        return done

    def _redacted(self, text: str) -> str:
        text = self._folders(self._exact(plain_paths(without_credentials(text))))
        text = without_private_forms(text)
        if " " in text:  # a word alone may be one of the report's own
            text = self._given(text)
        for home in self.homes:
            if home in text:  # it may contain spaces, which otherwise end a path
                text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w-])", "/\0home", text)
        text = _PATH.sub(self._path, text).replace("/\0home", "<home>")
        return _UUID.sub(self._uuid, self._names(text))

    def value(self, value: Any) -> Any:
        """Return a value of JSON, all its texts replaced, keys among them that are no names of fields."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if isinstance(value, dict):
            return {key if _FIELD.match(key) else self.text(key): self._of(key, one) for key, one in value.items()}
        return value

    def _of(self, key: str, value: Any) -> Any:
        """Return the value of a field; of a host and a case whatever its name is, of a command line word by word."""
        if key == "command" and isinstance(value, list):
            return [*map(self.value, value[:2]), *(self._word(str(word)) for word in value[2:])]
        if key == "case" and isinstance(value, str) and value in self.given:
            return self.given[value]
        if key == "host" and isinstance(value, str) and value and value.lower() not in _EVERYBODYS:
            return self.names.get(value, "<host>")
        if key == _ELSEWHERE and isinstance(value, dict):
            return dict.fromkeys(value, _OTHER_CASE)
        if key == "written" and isinstance(value, list):  # what a model makes of somebody's prompt
            return ["…" for _ in value]
        return self.value(value)

    def _word(self, word: str) -> str:
        name, separator, value = word.partition("=")
        for start, rest in (("", word), (name + separator, value)):
            if (given := rest.rstrip("/")) in self.given:
                return f"{start}{self.given[given]}"
        return self.text(word)

    def _path(self, match: re.Match[str]) -> str:
        path = match.group().rstrip(".")
        rest = match.group()[len(path) :]
        if _SYSTEM.match(path) or not re.search(r"[A-Za-z]", path) or path == "/\0home":
            return match.group()
        public = _PUBLIC_PART.search(path)
        private = path[: public.start()] if public else path
        start = "<home>/" if private.startswith("/\0home/") else ""
        if private and private != "/\0home":
            number = self._paths.setdefault(private, f"<path-{len(self._paths) + 1}>")
            private = f"{start}{number}"
        return private + (public.group() if public else "") + rest

    def _uuid(self, match: re.Match[str]) -> str:
        kind = match.group(1)
        placeholder = f"<uuid-{len(self._uuids) + 1}>"
        return (f"{kind}-" if kind else "") + self._uuids.setdefault(match.group().lower(), placeholder)


def redaction_of(report: Mapping[str, Any], *, more: Iterable[str] = ()) -> Redaction:
    """Collect what is to be taken out of a report, and of all that is made of it.

    Parameters
    ----------
    report : mapping
        The contents of `report.json`, or of a part of it.
    more : iterable of str
        Further texts in which home folders are looked for.
    """
    folders = {text: f"<{name}>" for name in ("base", "adapter") if _is_path(text := report.get(name))}
    captures = [text for text in report.get("captures") or () if isinstance(text, str)]
    folders |= {text: f"<capture-{number}>" for number, text in enumerate(captures, start=1) if len(text) >= _SHORTEST}
    places = [Path(text) for name in ("base", "adapter") if isinstance(text := report.get(name), str)]
    relative = dict.fromkeys(word for one in _commands(report) for word in _paths_given(one, places))
    by_name: dict[str, str] = {}
    for folder, placeholder in folders.items():
        by_name.setdefault(Path(folder).name, placeholder)
    given = _called(report, folders)
    for word in relative:
        if word not in folders and word not in given:
            table = folders if "/" in word and " " not in word else given
            table[word] = by_name.setdefault(Path(word).name, f"<given-{len(folders) + len(given) + 1}>")
    case = _case(report)
    # a capture is called as its folder, and so are the workers of several
    case |= {name: by_name[name] for name in _values(report, ("sources",), "name") if name in by_name}
    given = {name: instead for name, instead in case.items() if instead == _CASE} | given
    texts = [*_texts(report), *more, str(Path.home())]
    found = [match for text in texts for match in _HOME.finditer(text)]
    homes = dict.fromkeys([str(Path.home()), *(match.group() for match in found), "/root"])
    users = dict.fromkeys([_user(), *(match.group(1) for match in found)])
    hosts = dict.fromkeys(name for host in [*_hosts(report), platform.node()] for name in (host, host.split(".")[0]))
    devices = dict.fromkeys(_uuids(report))
    names = {name: f"<device-{number}>" for number, name in enumerate(devices, start=1)}
    others = dict.fromkeys(match.group(1) for text in texts for match in _OTHER_BASE.finditer(text))
    names |= {name: "<other-base>" for name in others if len(name) > _SHORTEST and name.lower() not in _VOCABULARY}
    for kind, some in (("host", hosts), ("user", users)):
        chosen = [name for name in some if _names_somebody(name)]
        first: dict[str, int] = {}
        for name in chosen:
            first.setdefault(name.split(".")[0], len(first) + 1)
        names |= {name: f"<{kind}-{first[name.split('.')[0]]}>" for name in chosen if name not in names}
    return Redaction(
        folders=_longest_first(folders),
        homes=tuple(_longest_first({home: "" for home in homes if len(home) > 1})),
        names=_longest_first(names),
        exact=_other_cases(report)
        | {name: instead for name, instead in case.items() if name.lower() not in _VOCABULARY},
        given=_longest_first(given),
    )


def _called(report: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, str]:
    """Return what the folders of the base and the adapter are called in sentences, and their placeholders."""
    base, adapter = report.get("base"), report.get("adapter")
    if isinstance(base, str) and builtin_name(base, adapter) is not None:
        return {}
    own = [Path(text) for text in (base, adapter) if _is_path(text) and not repository_of(Path(text))]
    return {name: folders[str(path)] for path in own if str(path) in folders for name in (name_of(path), path.name)}


def _case(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the case, and what stands for it: the folders that it is made of, or one word for another."""
    case, base, adapter = (report.get(name) for name in ("case", "base", "adapter"))
    names = {option[1] for command in _commands(report) for option in _options(command) if option[0] == "--name"}
    if not isinstance(case, str) or not isinstance(base, str):
        return {}
    if case in names:
        return {case: _CASE}
    if builtin_name(base, adapter) is not None:
        return {}
    if not _is_path(base):
        return {}
    folders = {"<adapter>": adapter, "<base>": base}
    known = {
        name_of(Path(text)): (repository_of(Path(text)), instead) for instead, text in folders.items() if _is_path(text)
    }
    parts = case.split(" + ")
    if not known.keys() >= set(parts):
        return {case: _CASE}  # somebody chose it
    redacted = " + ".join(repository or instead for repository, instead in map(known.__getitem__, parts))
    return {} if redacted == case else {case: redacted}


def _other_cases(report: Mapping[str, Any]) -> dict[str, str]:
    """Return what is said of the stages that other cases have, and the same without the names of these."""
    elsewhere = report.get(_ELSEWHERE)
    if not isinstance(elsewhere, Mapping):
        return {}
    return {in_other_case(stage, str(name)): in_other_case(stage, _OTHER_CASE) for stage, name in elsewhere.items()}


def _is_path(text: object) -> TypeGuard[str]:
    return isinstance(text, str) and not _IS_URL.match(text) and Path(text).is_absolute()


def _commands(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for one in (report, *(report.get("sources") or ())):
        if isinstance(one, Mapping) and isinstance(one.get("command"), (list, tuple)):
            yield [str(word) for word in one["command"]]


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the words of a command line that are no options, each with the option before it; empty where it has none.

    Only options that are known to take a value are known not to be flags, before a word of the command's own.
    """
    option = ""
    for word in command[2:]:
        if word.startswith("--"):
            option, separator, value = word.partition("=")
            if separator:
                yield option, value
                option = ""
        elif not word.startswith("-"):
            yield option, word
            option = "" if option in PATH_OPTIONS | PRIVATE_OPTIONS else option


def _paths_given(command: Sequence[str], places: Sequence[Path]) -> Iterator[str]:
    """Yield the files and folders that a command line names by relative paths, and what else is somebody's own.

    The base and the adapter may be ids of a hub, which stay: `places`, where they were found, are then in its cache.
    """
    for option, word in _options(command):
        if option in PRIVATE_OPTIONS:
            yield word
            continue
        value = word.partition("=")[2] or word if option in ("--adapter", "--engine-outputs") else word
        value = value.rstrip("/")
        if (
            not value
            or value.startswith("/")
            or _IS_URL.match(value)
            or "::" in value
            or ":" in value.partition("/")[0]
        ):
            continue
        if option in ("--base", "--adapter"):
            cached = f"models--{value.replace('/', '--')}"
            is_kept = Path(value) in places or any(cached in place.parts for place in places)
        else:
            is_kept = not ("/" in value or option in PATH_OPTIONS or not option or _FILE.match(value))
        if not is_kept:
            yield value


def _hosts(report: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(report.get("host"), str):
        yield report["host"]
    yield from _values(report, ("workers", "hosts", "sources"), "host")


def _uuids(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what identifies devices: not every vendor's has the form of a UUID."""
    gpus = [gpu for host in report.get("hosts") or () for gpu in host.get("gpus") or ()]
    found = (*_values(report, ("workers",), "uuid"), *(gpu.get("uuid") for gpu in gpus))
    yield from (uuid for uuid in found if isinstance(uuid, str) and len(uuid) >= _SHORTEST)


def _values(report: Mapping[str, Any], lists: Iterable[str], name: str) -> Iterator[str]:
    """Yield a field of all entries of some lists."""
    for entry in (entry for of in lists for entry in report.get(of) or ()):
        if isinstance(entry, Mapping) and isinstance(entry.get(name), str):
            yield entry[name]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return ""


def _names_somebody(name: str) -> bool:
    return len(name) >= _SHORTEST and name.lower() not in _EVERYBODYS and name.lower() not in _VOCABULARY


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _texts(key)
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


def _longest_first(texts: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(texts.items(), key=lambda item: -len(item[0])))


_IPV4 = re.compile(
    r"(?<![\w.:-])(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\w.]\w|\w)"
    r"|(?<![\w.:-])(?:\d{1,3}\.){3}\d{1,3}(?=:\d)"
)
"""From 10.0.0.0 on, below are versions of libraries; any before a port."""

_MAC = re.compile(r"(?i)(?<![\w:])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:])")
_MAYBE_IPV6 = re.compile(r"(?i)(?<![\w:.])[0-9a-f]*:[0-9a-f]*:[0-9a-f:.]*[0-9a-f](?![\w:])")
_FILE_URL = re.compile(r"file://[^\s/'\"<>]*(/[^\s'\"<>]*)")
_SHARE = re.compile(
    r"(?<!\\)\\{2,4}[^\s\\'\"]+\\{1,2}(?:[^\\\n'\"]+\\{1,2})*[^\s\\'\"]+"
    r"|(?<![\w:/.<>-])//[A-Za-z0-9][\w.-]*/[^\s'\"]+"
)
_WINDOWS = re.compile(r"(?<![\w.])[A-Za-z]:\\{1,2}(?:[^\\\n:;,'\"()<>|]+\\{1,2})*[^\s\\:;,'\"()<>|]+")
"""A path of Windows, whose folders may have spaces."""

_FUNCTION = re.compile(r"(?<![\w.:-])python:[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def plain_paths(text: str) -> str:
    """Return a text whose `file://` URLs are paths, to be replaced as such; with blanks, as the URL writes them."""
    return _FILE_URL.sub(_path, text) if "file://" in text else text


def without_private_forms(text: str) -> str:
    """Return a text with placeholders for addresses, folders of other hosts and systems, and names of functions."""
    text = _WINDOWS.sub("<path>", _SHARE.sub("<path>", text))
    text = _MAYBE_IPV6.sub(_address, _MAC.sub("<address>", _IPV4.sub("<address>", text)))
    return _FUNCTION.sub("python:<function>", text)


def _path(match: re.Match[str]) -> str:
    path = unquote(match.group(1))
    return match.group(1) if re.search(r"\s", path) else path


def _address(match: re.Match[str]) -> str:
    found = match.group()
    if "::" in found and not re.search(r"\d", found):  # a name of two parts: `dead::beef`
        return found
    try:
        ipaddress.IPv6Address(found)
    except ValueError:
        return found
    return "<address>"


_WORD = re.compile(r"[A-Za-z0-9]+")


@dataclass(slots=True)
class Replacements:
    """Texts and what stands in their place, tried in this order."""

    of: Mapping[str, str]
    # before, after: what a text must not follow, and not be followed by, as assertions of a regular expression. They
    # exclude at least all letters and digits of ASCII.
    before: str
    after: str
    _by_word: dict[str, list[int]] = field(init=False)
    _always: list[int] = field(init=False)
    _texts: tuple[str, ...] = field(init=False)
    _may_begin: re.Pattern[str] = field(init=False)
    _may_end: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._texts = tuple(self.of)
        self._may_begin, self._may_end = re.compile(self.before), re.compile(self.after)
        words_by_text = [_WORD.findall(text) for text in self._texts]
        common = Counter(word for some in words_by_text for word in set(some))
        self._by_word, self._always = {}, []
        for place, some in enumerate(words_by_text):
            if some:
                self._by_word.setdefault(min(some, key=lambda word: common[word]), []).append(place)
            else:
                self._always.append(place)

    def __call__(self, text: str) -> str:
        """Return a text in which all of them are replaced."""
        for place in self._candidates(text):
            name = self._texts[place]
            if name in text:
                text = self._replaced(text, name, self.of[name])
        return text

    def _replaced(self, text: str, name: str, instead: str) -> str:
        """Return a text without one name: a regular expression of each would take longer to compile than to use."""
        parts, done, start = [], 0, text.find(name)
        while start >= 0:
            end = start + len(name)
            if self._may_begin.match(text, start) and self._may_end.match(text, end):
                parts += [text[done:start], instead]
                done = end
            else:
                end = start + 1
            start = text.find(name, end)
        return "".join([*parts, text[done:]])

    def _candidates(self, text: str) -> Iterable[int]:
        if not self._texts:
            return ()
        found = {place for word in _WORD.findall(text) for place in self._by_word.get(word, ())}
        return sorted({*found, *self._always})
