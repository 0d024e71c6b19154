"""A page as a parser reads it, for tests without a browser."""

from __future__ import annotations

import html.parser
import json
import re
from typing import Any


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and the text between them, scripts and styles apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._raw: list[str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._raw = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            if tag == "script":
                self.scripts.append("".join(self._raw or ()))
            self._raw = None

    def handle_data(self, data: str) -> None:
        (self.texts if self._raw is None else self._raw).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    def links(self) -> list[str | None]:
        return [of.get("href") for tag, of in self.elements if tag == "a"]
