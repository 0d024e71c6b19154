"""Many names are replaced in a text as one regular expression after the other would do it."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from consistency.report.redaction import Replacements

NAMES = st.text(alphabet="ab1-._/ é", min_size=1, max_size=4)


def one_by_one(of: dict[str, str], before: str, after: str, text: str) -> str:
    for name, instead in of.items():
        text = re.sub(f"{before}{re.escape(name)}{after}", instead, text)
    return text


@given(
    names=st.lists(NAMES, max_size=6, unique=True),
    text=st.text(alphabet="ab1-._/ é", max_size=30),
    edges=st.sampled_from(
        [
            (r"(?<![\w./~-])", r"(?![\w-])"),
            ("(?<![A-Za-z0-9])", "(?![A-Za-z0-9])"),
            (r"(?<![\w./-])", r"(?![\w/-]|\.\w)"),
        ]
    ),
)
def test_as_one_after_the_other(names: list[str], text: str, edges: tuple[str, str]) -> None:
    of = {name: f"<{'x' * number}>" for number, name in enumerate(names)}
    assert Replacements(of, *edges)(text) == one_by_one(of, *edges, text)


def test_one_of_many_hosts() -> None:
    hosts = Replacements({f"gpu-{n:04}": f"<host-{n}>" for n in range(2000)}, "(?<![A-Za-z0-9])", "(?![A-Za-z0-9])")
    assert hosts("gpu-0417 and xgpu-0418, not gpu-04190 or gpu-0420:cuda:1") == (
        "<host-417> and xgpu-0418, not gpu-04190 or <host-420>:cuda:1"
    )
