"""One known fault of another library: where it is described, in which versions it was seen, and its signs."""

from __future__ import annotations

import re
from typing import NamedTuple


class Sign(NamedTuple):
    """How a fault shows in a report: a finding is a sign of it where all that is given here is true of the finding.

    Attributes
    ----------
    stage : str
        The stage of all tensors of the finding.
    kinds : tuple of str
        Its kind is one of these.
    tensor : str
        A pattern that each of its tensors has in its name `layer.tensor`.
    message : str
        A pattern that its message has.
    load_path : str
        A part of the name of each load path.
    methods : tuple of str
        PEFT's names of adapter methods, one of which every worker loaded.
    model_class : str
        A pattern that the name of the base's class begins with.
    """

    stage: str
    kinds: tuple[str, ...]
    tensor: str = ""
    message: str = ""
    load_path: str = ""
    methods: tuple[str, ...] = ()
    model_class: str = ""


class UpstreamFault(NamedTuple):
    """A fault of another library.

    Attributes
    ----------
    title : str
        The heading under which it is described, in Markdown.
    page : str
        The page of that heading, without its ending.
    library : str
        The package to which it is to be reported, as `pip` names it.
    outcome : str
        What the script on the page showed, or what found it.
    helps : str
        What avoids it, as an instruction.
    seen : tuple of str
        The oldest and the newest version of the library that the script was run with; both have the fault.
    sign : Sign or None
        How it shows in a report; None where no report shows it.
    issue : str
        The issue of the library's tracker, `peft#3774`; empty where there is none.
    """

    title: str
    page: str
    library: str
    outcome: str
    helps: str
    seen: tuple[str, str]
    sign: Sign | None = None
    issue: str = ""

    @property
    def anchor(self) -> str:
        """Return the address of the heading within its page, as GitHub and Sphinx make it."""
        plain = re.sub(r"[^\w\- ]", "", self.title.lower())
        return plain.replace(" ", "-")

    @property
    def versions(self) -> str:
        """Return the range of versions in which it was seen, in words."""
        oldest, newest = self.seen
        return oldest if oldest == newest else f"{oldest} to {newest}"

    @property
    def sentence(self) -> str:
        """Return one line: the library with its versions, the fault, what helps, and where it is described."""
        title = self.title.replace("`", "")
        where = f"docs/{self.page}.md#{self.anchor}"
        if self.issue:
            where = f"{self.issue}, {where}"
        return f"{self.library} {self.versions}: {title} ({where}). {self.helps}"
