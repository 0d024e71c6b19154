"""What is private by its form alone, in any text: addresses, folders of other hosts and systems, names of functions."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import unquote

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
