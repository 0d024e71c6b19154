"""Text from strangers, escaped to be shown: names in models, adapters, captures and reports can be anybody's.

On a terminal a control character moves the cursor, and a line feed forges a line of its own. GitHub's log obeys lines
that begin with `::` and a command, after blanks too, and `##[` anywhere. A line may begin at any blank of a text, where
reports fold it, and in the middle of a long name, where a table does.
"""

from __future__ import annotations

import re

_COMMAND = re.compile(
    r"(?i)(?<!\S):(?=:)|:(?=:(?:add-(?:mask|matcher|path)|debug|echo|endgroup|error|group|notice|remove-matcher|save-state"
    r"|set-(?:env|output)|stop-commands|warning)\b)"
)
"""A colon that begins a command to GitHub's runner.

Source: https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions, and what the runner also
obeys.
"""

# scheme; user and password, without which a URL is shown; host and path; query and fragment
_URL = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*://)"
    r"(?:[^\s?#'\"]*?:[^\s?#'\"]*@|[^\s/@'\"]*:[^\s/'\"]*@|[^\s/?#@'\"]*@)?"  # a password may have any of /?#@
    r"([^\s?#'\"]*)(?:[?#][^\s'\"]*)?"
)


def clean(text: str) -> str:
    """Escape control characters, and what a log takes for a command; line feeds stay."""
    escaped = text
    if not text.isprintable():  # hardly ever
        unprintable = {character for character in text if not character.isprintable() and character != "\n"}
        escaped = text.translate({ord(character): f"\\x{ord(character):02x}" for character in unprintable})
    return _COMMAND.sub(r"\\x3a", escaped).replace("##[", "#\\x23[")


def one_line(text: object) -> str:
    """Return a text on one line: line feeds are escaped too."""
    return clean(str(text).replace("\n", "\\x0a"))


def without_credentials(text: str) -> str:
    """Return a text whose URLs have no user, no password, no query and no fragment: those hold keys and tokens."""
    if "://" not in text:
        return text
    return _URL.sub(r"\1\2", text)
