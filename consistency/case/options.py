"""The options that a user can set, each declared once for the command line, TOML files, pytest and Python.

Every pytest session of an environment reads this table, so this module needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import enum
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from consistency.case.load_path import GRAMMAR, LoadPath
from consistency.case.stage import Level, Stage
from consistency.case.stages import LEVELS, SPECS, stages_of
from consistency.errors import ConsistencyError

if TYPE_CHECKING:
    from consistency.case.engine_file import EngineFile
    from consistency.case.named_adapters import NamedAdapter
    from consistency.case.profile import Switch
    from consistency.case.tolerance import Override

T = TypeVar("T")

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Profile = Literal["pinned", "deployed"]

Placement = Literal["auto", "device", "offload"]


class Edge(enum.Enum):
    """A place where options are given."""

    COMMAND_LINE = "--"
    TOML = ""
    PYTEST = "--consistency-"
    PYTEST_INI = "consistency_"

    def spell(self, name: str) -> str:
        """Return an option's name as it is written in this place: `load_paths` is `--load-paths` on a command line."""
        return self.value + (name.replace("_", "-") if self.value.startswith("--") else name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where options were given, so that an error found later names them in the words of who gave them.

    Attributes
    ----------
    places : mapping of str to str
        The place of each option that is not of the edge itself, by name: `base in case.toml`.
    """

    edge: Edge = Edge.COMMAND_LINE
    places: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Reword errors, which are written for the command line."""
        try:
            yield
        except ConsistencyError as error:
            self.reword(error)
            raise

    def reword(self, error: ConsistencyError) -> ConsistencyError:
        """Name the options in an error as they were given, and return it."""
        if error.where is not None:
            error.where = _SPELLED.sub(self._place_of, error.where)
        error.reword(lambda text: _SPELLED.sub(lambda match: self.edge.spell(_option_name(match)), text))
        return error

    def _place_of(self, match: re.Match[str]) -> str:
        """Return the place of an option that an error names; the text as it is where the edge itself is the place."""
        return self.places.get(_option_name(match), match[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """How one field of `Options` is given."""

    name: str
    """The option's name in TOML; a command line spells it with dashes."""
    attribute: str
    """The field of `Options`; it differs from `name` where that is a word of Python."""
    help: str
    metavar: str | None = None
    type: Callable[[str], object] = str
    """Converts the text of a command line; `bool` stands for a switch that takes no value."""
    choices: tuple[str, ...] | None = None
    most: int | None = None
    """The largest number that it takes."""
    repeatable: bool = False
    """Whether it is given several times on a command line, and is a list in TOML."""
    gathers: bool = False
    """Whether it may be given several times on a command line; it is a list only then."""
    is_path: bool = False
    """Whether it is a path: a relative one in a TOML file is relative to that file."""
    absent: Mapping[Edge, str] = field(default_factory=dict)
    """The places where the option does not exist, each with the reason."""
    help_of_one_case: str = ""
    """The help of a command that takes no suite; empty where that is the same."""


def declare(default: T, help: str, metavar: str | None = None, **more: Any) -> T:
    """Return a field of options; the further arguments are those of `Option`."""
    return field(default=default, metadata={"help": help, "metavar": metavar, **more})


def _levels_text() -> str:
    """Return, for the help, the time that each level takes, and the stages that it has beyond the level before."""
    times = {Level.QUICK: "a minute", Level.STANDARD: "default, some minutes", Level.THOROUGH: "overnight"}
    texts = []
    before: set[Stage] = set()
    for level, plan in LEVELS.items():
        new_stages = ", ".join(stage for stage in plan.stages if stage not in before)
        also = "also " if before else ""
        texts.append(f"{level} ({times[level]}): {also}{new_stages}")
        before.update(plan.stages)
    card_stages = " and ".join(stages_of(lambda spec: spec.with_equal_cards))
    card_text = f", and {card_stages} where two GPUs are equal" if card_stages else ""
    return f"stages, and how much of each: {'; '.join(texts)}{card_text}"


_YEAR_S = 366 * 86400

_MOST_THREADS = 1024
"""More than the processors of nearly any host: with many times as many, OpenMP ends the worker without a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything a user can set about a case and where it runs, as parsed values; no file has been opened yet."""

    base: str | None = declare(
        None, "folder, hub id, python:package.module:function, or builtin:llama|gpt2|bert", "MODEL", is_path=True
    )
    adapter: str | None = declare(
        None,
        "folder saved by PEFT, or hub id; several, or a pattern, are a suite; several as NAME=PATH are one case",
        "[NAME=]ADAPTER",
        is_path=True,
        gathers=True,
        help_of_one_case="folder saved by PEFT, or hub id; several, as NAME=PATH, are checked in one model",
    )
    name: str | None = declare(None, "name of the case in reports and test items", "TEXT")
    adapters: tuple[NamedAdapter, ...] | None = declare(
        None,
        'several adapters of one case: {one = "PATH", two = "PATH"}; NAME=PATH, one a line, in an ini file',
        "TABLE",
        absent=dict.fromkeys((Edge.COMMAND_LINE, Edge.PYTEST), "there it is --adapter NAME=PATH"),
    )
    devices: tuple[str, ...] = declare(("auto",), "auto (default), or cpu,cuda:0,cpu@avx2,…", "LIST")
    dtype: Dtype = declare(
        "auto", "dtype to load the base in (default: the one its config declares)", choices=get_args(Dtype)
    )
    profile: Profile = declare(
        "pinned",
        "pinned: every numerical setting fixed (default); deployed: settings and environment as they are, recorded",
        choices=get_args(Profile),
    )
    set: tuple[Switch, ...] = declare(
        (), "one numerical setting of torch, on top of the profile; may be repeated", "NAME=VALUE", repeatable=True
    )
    placement: Placement = declare(
        "auto",
        "base on the device, or streamed from the host to the device layer by layer (default: streamed if it does not "
        "fit)",
        choices=get_args(Placement),
    )
    stages: tuple[Stage, ...] | None = declare(
        None, f"any of {', '.join(SPECS)}, with commas (default: by level)", "LIST"
    )
    load_paths: tuple[LoadPath, ...] | None = declare(None, f"{GRAMMAR} (default: by level and devices)", "LIST")
    level: Level = declare(Level.STANDARD, _levels_text(), choices=tuple(level.value for level in Level))
    inputs: str | None = declare(
        None,
        "safetensors file with the model's keyword arguments, or a text for the base's tokenizer (.txt)",
        "FILE",
        is_path=True,
    )
    device_map: str | None = declare(
        None, "how the stage sharding also splits the base: auto, balanced, sequential, FILE.json", "MAP", is_path=True
    )
    wrapper: str | None = declare(
        None, "python:package.module:function that wraps the base, for the stage wrapping", "FACTORY"
    )
    engine_outputs: tuple[EngineFile, ...] | None = declare(
        None,
        "outputs of another inference engine on the inputs of `consistency inputs`, checked like those of a device in "
        "the stage forward; may be repeated",
        "NAME=FILE",
        repeatable=True,
        absent=dict.fromkeys(
            (Edge.PYTEST, Edge.PYTEST_INI), "an engine's file belongs to one case: give it on the command line"
        ),
    )
    repeat: int | None = declare(
        None, "runs per device, to check that results repeat bitwise (default: by level)", "N", type=int, most=10_000
    )
    steps: int | None = declare(
        None,
        "let every device train the adapter alone for so many steps, in the stage trajectory (20 where it is in "
        "--stages)",
        "N",
        type=int,
        most=1_000_000,
    )
    soak: float | None = declare(
        None,
        "after all stages, compute the same again until this time is up, and compare every repeat with the first: "
        "90s, 10m, 2h, 1h30m",
        "TIME",
        name="for",
        most=_YEAR_S,
    )
    load: bool = declare(False, "run matrix products on every device during --for, to test it hot", type=bool)
    tolerance: tuple[Override, ...] = declare(
        (),
        "atol=…,rtol=… instead of the derived bound, after any of stage=…, arch=PATTERN, layer=PATTERN and dtype=…, "
        "with commas; may be repeated, and the last one that matches a tensor applies",
        "LIST",
        repeatable=True,
    )
    only: tuple[str, ...] = declare(
        (),
        "check only what starts with one of these stage::layer prefixes",
        "LIST",
        absent=dict.fromkeys(
            (Edge.PYTEST, Edge.PYTEST_INI),
            "node ids and -k select test items, and the run is narrowed to those selected",
        ),
    )
    keep: bool = declare(False, "store every computed tensor in the capture", type=bool)
    allow_pickle: bool = declare(False, "read .bin weights, with weights_only=True", type=bool)
    trust_remote_code: bool = declare(False, "run code that comes with the model", type=bool)
    timeout: float | None = declare(
        None, "seconds a worker may take (default: no limit)", "S", type=float, most=_YEAR_S
    )
    stall: float = declare(300.0, "seconds a worker may be silent (default: 300)", "S", type=float, most=_YEAR_S)
    threads: int | None = declare(
        None,
        "threads per worker (default: an equal share of the cores, at most OMP_NUM_THREADS)",
        "N",
        type=int,
        most=_MOST_THREADS,
    )
    source: Source = field(default=Source(), compare=False, repr=False)


def declared(kind: type[Any]) -> tuple[Option, ...]:
    """Return the options of a class whose fields are made by `declare`; other fields are left out."""
    options = []
    for each in fields(kind):
        if each.metadata:
            options.append(Option(**{"name": each.name, "attribute": each.name, **each.metadata}))
    return tuple(options)


OPTIONS: tuple[Option, ...] = declared(Options)

_ON_A_COMMAND_LINE = [option.name.replace("_", "-") for option in OPTIONS if Edge.COMMAND_LINE not in option.absent]
_SPELLED = re.compile(r"(?<![\w-])--(" + "|".join(_ON_A_COMMAND_LINE) + r")(?![\w-])")


def _option_name(match: re.Match[str]) -> str:
    """Return the name in TOML of an option that is spelled as on a command line."""
    return match[1].replace("-", "_")


class _Gather(argparse.Action):
    """Keep one value as it is, and several as a list."""

    def __call__(self, _parser: object, namespace: argparse.Namespace, values: object, _name: object = None) -> None:
        earlier = getattr(namespace, self.dest, None)
        if earlier is None:
            setattr(namespace, self.dest, values)
        else:
            earlier_values = earlier if isinstance(earlier, list) else [earlier]
            setattr(namespace, self.dest, [*earlier_values, values])


def add_options(
    add: Callable[..., object],
    edge: Edge,
    *,
    only: Collection[str] = (),
    prefix: str = "",
    options: Iterable[Option] = OPTIONS,
    one_case: bool = False,
) -> None:
    """Declare the options of a command line by `add`, which takes what `argparse` takes; `only` narrows them.

    A value is left as None where its option is not given; `prefix` precedes the name of its attribute. With `one_case`,
    the help tells of no suites.
    """
    for option in options:
        if edge in option.absent or (only and option.name not in only):
            continue
        keywords: dict[str, Any] = {"dest": prefix + option.name, "default": None}
        if option.type is bool:
            keywords["action"] = "store_true"
        elif option.gathers:
            keywords |= {"action": _Gather, "metavar": option.metavar}
        elif option.repeatable:
            keywords |= {"action": "append", "metavar": option.metavar}
        elif option.choices:
            keywords["choices"] = option.choices
        else:
            keywords |= {"type": option.type, "metavar": option.metavar}
        help_text = option.help
        if one_case and option.help_of_one_case:
            help_text = option.help_of_one_case
        add(edge.spell(option.name), help=help_text, **keywords)


def words_of(given: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that gives these values, by the name of the option; None is one not given."""
    words = []
    for option in OPTIONS:
        value = given.get(option.name)
        if value is None:
            continue
        values = value if isinstance(value, list) else [value]
        spelled = Edge.COMMAND_LINE.spell(option.name)
        words += [spelled if option.type is bool else f"{spelled}={each}" for each in values]
    return words


def add_ini_options(add: Callable[..., object], edge: Edge) -> None:
    """Declare the options by `add`, which takes what `pytest.Parser.addini` takes; one not given is None."""
    for option in OPTIONS:
        if edge in option.absent:
            continue
        kind = "string"
        if option.type is bool:
            kind = "bool"
        elif option.repeatable or option.metavar in ("LIST", "TABLE"):
            kind = "linelist"
        add(edge.spell(option.name), help=option.help, type=kind, default=None)
