"""A page as a parser reads it, for tests without a browser."""

from __future__ import annotations

import html.parser
import re


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and the text outside of the style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._in_style = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"

    def handle_data(self, data: str) -> None:
        if not self._in_style:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))

    def links(self) -> list[str | None]:
        return [of.get("href") for tag, of in self.elements if tag == "a"]
