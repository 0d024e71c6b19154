"""Text from strangers made fit to be shown."""

from __future__ import annotations


def clean(text: str) -> str:
    """Escape control characters of names that come from models, adapters and strangers' captures."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def one_line(text: object) -> str:
    """Return a text on one line: line feeds are escaped too, because a name with one could forge a line."""
    return clean(str(text)).replace("\n", "\\x0a")
