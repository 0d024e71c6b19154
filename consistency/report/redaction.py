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
"""The end of a path that is the same wherever a package is installed."""

_OTHER_BASE = re.compile(rf"{re.escape(ANOTHER_BASE)}(.+?){re.escape(THIS_BASE)}")
"""The name of the base in the adapter's config: the name of a folder, which the report has without its path."""

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
        "an", "as", "at", "be", "by", "do", "gb", "go", "if", "in", "is", "it", "ms", "no", "of", "on", "or", "so",
        "to",
    }
)  # fmt: skip
"""Words that reports are made of: a host or user of such a name stays, because the report could not be read without."""

PATH_OPTIONS = frozenset({
    "--base", "--adapter", "--out", "--inputs", "--engine-outputs", "--device-map", "--history", "--baseline", "--html",
    "--junit", "--groups", "--progress", "--require", "--store", "--together",
})  # fmt: skip
"""Options whose value is a file or a folder, or a URL."""

PRIVATE_OPTIONS = frozenset({"--wrapper", "--command", "--engine-args", "--nodes", "--partition", "--account"})
"""Options whose value is private in whatever form: names of functions, nodes, accounts."""

_FILE = re.compile(r".+\.(?:toml|json|csv|zip|html|xml|safetensors)\Z")

_CASE, _OTHER_CASE = "<case>", "<other-case>"

_ELSEWHERE = "checked_elsewhere"
"""Field of a report: a mapping from a stage to the name of the other case of the suite in which it was checked."""

_SHORTEST = 2
"""Fewest letters of a user's or host's name that is replaced in texts: `a` is in every sentence."""

_HOME_MARK = "/\0home"
"""Stands for a home folder while the other paths of a text are replaced: no text of a report has a NUL in it."""


@dataclass(slots=True, kw_only=True)
class Redaction:
    """Replaces private texts by placeholders; made by `redaction_of`.

    Each mapping is from a private text to its placeholder.

    Attributes
    ----------
    folders : dict
        Known folders. A path below one keeps its part below the folder.
    homes : tuple of str
        Home folders: of a path below one, nothing but a number is kept.
    names : dict
        Names of hosts, users, devices and other bases.
    exact : dict
        Texts that are replaced only as a whole, such as the name of the case.
    given : dict
        Words of command lines that do not look like paths: replaced in command lines and in sentences.
    """

    folders: dict[str, str] = field(default_factory=dict)
    homes: tuple[str, ...] = ()
    names: dict[str, str] = field(default_factory=dict)
    exact: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    _paths: dict[str, str] = field(default_factory=dict)
    _uuids: dict[str, str] = field(default_factory=dict)
    _redacted_texts: dict[str, str] = field(default_factory=dict)
    _replace_folders: Replacements = field(init=False)
    _replace_names: Replacements = field(init=False)
    _replace_exact: Replacements = field(init=False)
    _replace_given: Replacements = field(init=False)

    def __post_init__(self) -> None:
        self._replace_folders = Replacements(self.folders, r"(?<![\w./~-])", r"(?![\w-])")
        # `cpu` may be the value of an option too: in sentences such a word stays readable
        sayable_words = {
            word: placeholder
            for word, placeholder in self.given.items()
            if len(word) >= _SHORTEST and word.lower() not in _VOCABULARY
        }
        self._replace_given = Replacements(sayable_words, r"(?<![\w./~<-])", r"(?![\w>-])")
        self._replace_names = Replacements(self.names, "(?<![A-Za-z0-9])", "(?![A-Za-z0-9])")
        self._replace_exact = Replacements(self.exact, r"(?<![\w./-])", r"(?![\w/-]|\.\w)")

    def text(self, text: str) -> str:
        """Return a text with placeholders in the place of private names."""
        redacted = self._redacted_texts.get(text)  # most texts of a report are in it many times
        if redacted is None:
            redacted = self._redacted_texts[text] = self._redact(text)
        return redacted

    def _redact(self, text: str) -> str:
        # Folders that have a placeholder of their own come first: afterwards every other path becomes `<path-1>`.
        text = self._replace_folders(self._replace_exact(plain_paths(without_credentials(text))))
        text = without_private_forms(text)
        if " " in text:  # a word alone may be one of the report's own
            text = self._replace_given(text)
        for home in self.homes:
            if home in text:  # it may contain spaces, which otherwise end a path
                text = re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w-])", _HOME_MARK, text)
        text = _PATH.sub(self._path_placeholder, text).replace(_HOME_MARK, "<home>")
        return _UUID.sub(self._uuid_placeholder, self._replace_names(text))

    def value(self, value: Any) -> Any:
        """Return a value of JSON with all its texts redacted, and keys that are not names of fields."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self._key(key): self._field_value(key, item) for key, item in value.items()}
        return value

    def _key(self, key: str) -> str:
        return key if _FIELD.match(key) else self.text(key)

    def _field_value(self, name: str, value: Any) -> Any:
        """Return the redacted value of a field; some fields are replaced in another way than texts in general."""
        if name == "command" and isinstance(value, list):
            # The first two words are the program and its command.
            return [*map(self.value, value[:2]), *(self._command_word(str(word)) for word in value[2:])]
        if name == "case" and isinstance(value, str) and value in self.given:
            return self.given[value]
        if name == "host" and isinstance(value, str) and value and value.lower() not in _EVERYBODYS:
            # Even a host whose name is a word of reports, which stays in sentences.
            return self.names.get(value, "<host>")
        if name == _ELSEWHERE and isinstance(value, dict):
            return dict.fromkeys(value, _OTHER_CASE)
        if name == "written" and isinstance(value, list):  # what a model makes of somebody's prompt
            return ["…" for _ in value]
        return self.value(value)

    def _command_word(self, word: str) -> str:
        """Return a redacted word of a command line: a placeholder for the whole word, or for the part after its `=`."""
        name, separator, value = word.partition("=")
        for start, remainder in (("", word), (name + separator, value)):
            if (private := remainder.rstrip("/")) in self.given:
                return f"{start}{self.given[private]}"
        return self.text(word)

    def _path_placeholder(self, match: re.Match[str]) -> str:
        """Return what a path is replaced by: a number, between the mark of a home folder and the public part."""
        path = match.group().rstrip(".")
        full_stops = match.group()[len(path) :]
        is_public = _SYSTEM.match(path) or not re.search(r"[A-Za-z]", path) or path == _HOME_MARK
        if is_public:
            return match.group()
        private, public = path, ""
        if (public_part := _PUBLIC_PART.search(path)) is not None:
            private, public = path[: public_part.start()], public_part.group()
        if private and private != _HOME_MARK:
            number = self._paths.setdefault(private, f"<path-{len(self._paths) + 1}>")
            is_below_home = private.startswith(f"{_HOME_MARK}/")
            private = f"<home>/{number}" if is_below_home else number
        return private + public + full_stops

    def _uuid_placeholder(self, match: re.Match[str]) -> str:
        kind = match.group(1)  # `GPU` or `MIG`, if any
        placeholder = self._uuids.setdefault(match.group().lower(), f"<uuid-{len(self._uuids) + 1}>")
        return f"{kind}-{placeholder}" if kind else placeholder


def redaction_of(report: Mapping[str, Any], *, more: Iterable[str] = ()) -> Redaction:
    """Collect the private names of a report, to redact the report and every text that is made from it.

    Parameters
    ----------
    report : mapping
        The contents of `report.json`, or of a part of it.
    more : iterable of str
        Further texts in which home folders, with the users' names, and names of other bases are looked for.
    """
    folders = _folder_placeholders(report)
    command_words = _model_names(report, folders)
    by_folder_name = _add_command_words(report, folders, command_words)
    exact = _case_placeholders(report)
    # A capture has the name of its folder, which is in the names of workers too where there are several captures.
    for name in _values(report, ("sources",), "name"):
        if name in by_folder_name:
            exact[name] = by_folder_name[name]
    chosen_names = {name: placeholder for name, placeholder in exact.items() if placeholder == _CASE}
    # a name that is a word of reports would be replaced where it is that word
    sayable_exact = {name: placeholder for name, placeholder in exact.items() if name.lower() not in _VOCABULARY}

    texts = [*_texts(report), *more, str(Path.home())]
    home_matches = [match for text in texts for match in _HOME.finditer(text)]
    homes = dict.fromkeys([str(Path.home()), *(match.group() for match in home_matches), "/root"])
    users = dict.fromkeys([_user(), *(match.group(1) for match in home_matches)])
    return Redaction(
        folders=_longest_first(folders),
        homes=tuple(_longest_first({home: "" for home in homes if len(home) > 1})),
        names=_longest_first(_name_placeholders(report, texts, users)),
        exact=_other_cases(report) | sayable_exact,
        given=_longest_first(chosen_names | command_words),
    )


def _folder_placeholders(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the folders of the base, the adapter and the captures, and their placeholders."""
    folders = {}
    for name in ("base", "adapter"):
        path = report.get(name)
        if _is_path(path):
            folders[path] = f"<{name}>"
    captures = [path for path in report.get("captures") or () if isinstance(path, str)]
    for number, path in enumerate(captures, start=1):
        if len(path) >= _SHORTEST:
            folders[path] = f"<capture-{number}>"
    return folders


def _add_command_words(
    report: Mapping[str, Any], folders: dict[str, str], command_words: dict[str, str]
) -> Mapping[str, str]:
    """Add the private words of the command lines: relative paths to `folders`, others to `command_words`.

    Returns
    -------
    mapping
        The placeholder of each folder by the last part of its path, under which other texts may name it.
    """
    by_folder_name: dict[str, str] = {}
    for folder, placeholder in folders.items():
        by_folder_name.setdefault(Path(folder).name, placeholder)
    model_paths = [Path(path) for name in ("base", "adapter") if isinstance(path := report.get(name), str)]
    private_words: dict[str, None] = {}  # each once, in order
    for command in _commands(report):
        private_words |= dict.fromkeys(_private_words(command, model_paths))
    for word in private_words:
        if word in folders or word in command_words:
            continue
        placeholder = by_folder_name.setdefault(Path(word).name, f"<given-{len(folders) + len(command_words) + 1}>")
        if "/" in word and " " not in word:
            folders[word] = placeholder
        else:
            command_words[word] = placeholder
    return by_folder_name


def _name_placeholders(report: Mapping[str, Any], texts: Iterable[str], users: Iterable[str]) -> dict[str, str]:
    """Return placeholders for devices, other bases, hosts and users; a name that is several of these has the first."""
    names = {uuid: f"<device-{number}>" for number, uuid in enumerate(dict.fromkeys(_uuids(report)), start=1)}
    for text in texts:
        for match in _OTHER_BASE.finditer(text):
            name = match.group(1)
            if len(name) >= _SHORTEST and name.lower() not in _VOCABULARY:
                names[name] = "<other-base>"
    hosts: dict[str, None] = {}
    for host in [*_hosts(report), platform.node()]:
        hosts |= {host: None, host.split(".")[0]: None}  # with its domain, and without
    for kind, candidates in (("host", hosts), ("user", users)):
        private_names = [name for name in candidates if _names_somebody(name)]
        # `node-1` and `node-1.example.org` are one host: both have the number of `node-1`.
        numbers: dict[str, int] = {}
        for name in private_names:
            numbers.setdefault(name.split(".")[0], len(numbers) + 1)
        for name in private_names:
            names.setdefault(name, f"<{kind}-{numbers[name.split('.')[0]]}>")
    return names


def _model_names(report: Mapping[str, Any], folders: Mapping[str, str]) -> dict[str, str]:
    """Return the names by which sentences call the folders of the base and the adapter, and their placeholders."""
    base, adapter = report.get("base"), report.get("adapter")
    if isinstance(base, str) and builtin_name(base, adapter) is not None:
        return {}
    names: dict[str, str] = {}
    for path in (base, adapter):
        # A folder in the cache of a hub is called by its id there, which is public.
        if _is_path(path) and not repository_of(Path(path)) and str(Path(path)) in folders:
            placeholder = folders[str(Path(path))]
            names |= {name_of(Path(path)): placeholder, Path(path).name: placeholder}
    return names


def _case_placeholders(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of the case and its placeholder; nothing where the name is public.

    A name that is made of the folders becomes `<base> + <adapter>`, one that somebody chose becomes `<case>`.
    """
    case, base, adapter = (report.get(name) for name in ("case", "base", "adapter"))
    if not isinstance(case, str) or not isinstance(base, str):
        return {}
    options = [option for command in _commands(report) for option in _options(command)]
    if ("--name", case) in options:
        return {case: _CASE}
    if builtin_name(base, adapter) is not None or not _is_path(base):
        return {}
    redacted_parts = {}
    for path, placeholder in ((adapter, "<adapter>"), (base, "<base>")):
        if _is_path(path):
            redacted_parts[name_of(Path(path))] = repository_of(Path(path)) or placeholder
    parts = case.split(" + ")
    if not redacted_parts.keys() >= set(parts):
        return {case: _CASE}  # somebody chose it
    redacted = " + ".join(redacted_parts[part] for part in parts)
    return {} if redacted == case else {case: redacted}


def _other_cases(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the sentences that name another case of the suite, each with the sentence that does not."""
    elsewhere = report.get(_ELSEWHERE)
    if not isinstance(elsewhere, Mapping):
        return {}
    return {in_other_case(stage, str(name)): in_other_case(stage, _OTHER_CASE) for stage, name in elsewhere.items()}


def _is_path(text: object) -> TypeGuard[str]:
    """Return whether a value is an absolute path, and no URL."""
    return isinstance(text, str) and not _IS_URL.match(text) and Path(text).is_absolute()


def _commands(report: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield the command line of the report, and the command lines of its captures."""
    for record in (report, *(report.get("sources") or ())):
        if isinstance(record, Mapping) and isinstance(record.get("command"), (list, tuple)):
            yield [str(word) for word in record["command"]]


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the words of a command line that are no options, each with the option before it; empty where it has none.

    The words are values of options and the command's own. Which of these a word is, is known only after an option that
    takes one value (`PATH_OPTIONS`, `PRIVATE_OPTIONS`); after any other, all words up to the next option are its own.
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
            # Any other option stays: it may be a flag, or take several values.
            if option in PATH_OPTIONS | PRIVATE_OPTIONS:
                option = ""


def _private_words(command: Sequence[str], model_paths: Sequence[Path]) -> Iterator[str]:
    """Yield the files and folders that a command line names by relative paths, and the values of private options.

    The base and the adapter may be ids of a hub, which stay: `model_paths`, where these were found, are then in its
    cache.
    """
    for option, word in _options(command):
        if option in PRIVATE_OPTIONS:
            yield word
            continue
        value = word
        if option in ("--adapter", "--engine-outputs"):  # these may be `NAME=PATH`
            value = word.partition("=")[2] or word
        value = value.rstrip("/")
        if value and not _has_other_form(value) and not _is_public_value(option, value, model_paths):
            yield value


def _has_other_form(value: str) -> bool:
    """Return whether a value is no relative path, so that it is replaced by its form or not at all."""
    is_absolute = value.startswith("/") or bool(_IS_URL.match(value))
    has_colon = "::" in value or ":" in value.partition("/")[0]  # `builtin:…`, `python:…`, `cuda:0`
    return is_absolute or has_colon


def _is_public_value(option: str, value: str, model_paths: Sequence[Path]) -> bool:
    """Return whether the value of an option is an id of a hub, or names no file or folder."""
    if option in ("--base", "--adapter"):
        folder_in_cache = f"models--{value.replace('/', '--')}"
        return Path(value) in model_paths or any(folder_in_cache in path.parts for path in model_paths)
    is_own_word = not option  # a word of the command's own may be a folder
    return not (is_own_word or option in PATH_OPTIONS or "/" in value or _FILE.match(value))


def _hosts(report: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(report.get("host"), str):
        yield report["host"]
    yield from _values(report, ("workers", "hosts", "sources"), "host")


def _uuids(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the identifiers of devices: not every vendor's has the form of a UUID."""
    gpus = [gpu for host in report.get("hosts") or () for gpu in host.get("gpus") or ()]
    candidates = (*_values(report, ("workers",), "uuid"), *(gpu.get("uuid") for gpu in gpus))
    yield from (uuid for uuid in candidates if isinstance(uuid, str) and len(uuid) >= _SHORTEST)


def _values(report: Mapping[str, Any], lists: Iterable[str], name: str) -> Iterator[str]:
    """Yield the texts in a field of all entries of some lists of a report."""
    for list_name in lists:
        for entry in report.get(list_name) or ():
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
    """Yield every text in a value of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _longest_first(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the same texts, longest first: a folder is replaced before the folder that it is in."""
    return dict(sorted(texts.items(), key=lambda item: -len(item[0])))


_IPV4 = re.compile(
    r"(?<![\w.:-])(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\w.]\w|\w)"
    r"|(?<![\w.:-])(?:\d{1,3}\.){3}\d{1,3}(?=:\d)"
)
"""An address from 10.0.0.0 on, as a lower one may be the version of a library; before a port, any address."""

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
    """Return a text in which each `file://` URL is the path that it names, so that the path is replaced.

    A path with spaces stays as the URL writes it, `%20` for a space: a space would end it.
    """
    return _FILE_URL.sub(_path_of_url, text) if "file://" in text else text


def without_private_forms(text: str) -> str:
    """Return a text with placeholders for addresses, folders of other hosts and systems, and names of functions."""
    text = _WINDOWS.sub("<path>", _SHARE.sub("<path>", text))
    text = _MAYBE_IPV6.sub(_redact_address, _MAC.sub("<address>", _IPV4.sub("<address>", text)))
    return _FUNCTION.sub("python:<function>", text)


def _path_of_url(match: re.Match[str]) -> str:
    quoted_path = match.group(1)
    path = unquote(quoted_path)
    return quoted_path if re.search(r"\s", path) else path


def _redact_address(match: re.Match[str]) -> str:
    """Return a placeholder for an address of IPv6; anything else with colons stays."""
    candidate = match.group()
    if "::" in candidate and not re.search(r"\d", candidate):  # a name of two parts: `dead::beef`
        return candidate
    try:
        ipaddress.IPv6Address(candidate)
    except ValueError:
        return candidate
    return "<address>"


_WORD = re.compile(r"[A-Za-z0-9]+")


@dataclass(slots=True)
class Replacements:
    """Names and their placeholders; in a text, names are replaced in the order of the mapping.

    A text is searched only for names whose rarest word is in it: a fleet has thousands of names, and a report has
    thousands of texts.

    Attributes
    ----------
    of : mapping
        Placeholder by name.
    before, after : str
        What a name must not follow, and must not be followed by, as assertions of a regular expression. They exclude
        at least all letters and digits of ASCII, so that the words of a name are whole words (`_WORD`) of its text.
    """

    of: Mapping[str, str]
    before: str
    after: str
    _names: tuple[str, ...] = field(init=False)
    # indices into `_names`: by the rarest word of the name, and of names without a word
    _by_word: dict[str, list[int]] = field(init=False)
    _without_word: list[int] = field(init=False)
    _may_begin: re.Pattern[str] = field(init=False)
    _may_end: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = tuple(self.of)
        self._may_begin, self._may_end = re.compile(self.before), re.compile(self.after)
        words_by_name = [_WORD.findall(name) for name in self._names]
        names_with_word = Counter(word for name_words in words_by_name for word in set(name_words))
        self._by_word, self._without_word = {}, []
        for index, name_words in enumerate(words_by_name):
            if name_words:
                rarest = min(name_words, key=lambda word: names_with_word[word])
                self._by_word.setdefault(rarest, []).append(index)
            else:
                self._without_word.append(index)

    def __call__(self, text: str) -> str:
        """Return a text in which all names are replaced."""
        for index in self._candidates(text):
            name = self._names[index]
            if name in text:
                text = self._replace(text, name, self.of[name])
        return text

    def _replace(self, text: str, name: str, placeholder: str) -> str:
        """Return a text without one name. A regular expression per name would take longer to compile than to use."""
        pieces, end_of_last, start = [], 0, text.find(name)
        while start >= 0:
            end = start + len(name)
            if self._may_begin.match(text, start) and self._may_end.match(text, end):
                pieces += [text[end_of_last:start], placeholder]
                end_of_last = next_search = end
            else:
                next_search = start + 1
            start = text.find(name, next_search)
        return "".join([*pieces, text[end_of_last:]])

    def _candidates(self, text: str) -> Iterable[int]:
        """Return the indices of the names that a text may have, in order."""
        if not self._names:
            return ()
        candidates = set(self._without_word)
        for word in _WORD.findall(text):
            candidates.update(self._by_word.get(word, ()))
        return sorted(candidates)
