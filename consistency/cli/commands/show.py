"""`consistency show`: a report again, or its tolerances by layer and architecture."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.cli.output import add_output_options, add_schema_option, print_json

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison

EXAMPLES = (
    ("the report of a run again", "consistency show run-1"),
    ("per layer and architecture, worst first", "consistency show run-1 --layers"),
    ("files to attach to a public issue", "consistency show run-1 --redact --out run-1-public"),
    ("one kind of layer on one architecture", "consistency show run-1 --layers --layer '*.q_proj' --arch sm_90"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("show", _show, "print a report again, or its tolerance report by layer and architecture",
                     EXAMPLES)  # fmt: skip
    parser.add_argument("report", type=Path, metavar="DIR", help="the --out folder of a run, or its report.json")
    parser.add_argument("--layers", action="store_true", help="per layer and architecture, worst first: the largest "
                        "difference, what was allowed, their ratio, ULP, and which devices agree")  # fmt: skip
    parser.add_argument("--stage", metavar="STAGE[,STAGE]", default="", help="with --layers: these stages alone")
    parser.add_argument("--layer", metavar="PATTERN", default="",
                        help="with --layers: layers or tensors by shell pattern ('*.q_proj'), unfolded")  # fmt: skip
    parser.add_argument("--arch", metavar="NAME", default="",
                        help="with --layers: architectures by part of their name, such as sm_90")  # fmt: skip
    parser.add_argument("--redact", action="store_true", help="without paths, names of hosts and users, and ids of "
                        "devices: to be attached to a public issue")  # fmt: skip
    add_output_options(parser, "write report.json, report.html and report.md here instead of printing",
                       json="print JSON: report.json, or with --layers its layers[]")  # fmt: skip
    add_schema_option(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="every layer")


def _show(parsed: argparse.Namespace) -> int:
    from consistency.comparison.layers import LayerFilter, layers_of
    from consistency.errors import UsageError
    from consistency.report import json, layers, terminal
    from consistency.report.formats import View
    from consistency.workflows.saved_report import read_comparison, read_redacted

    if parsed.redact:
        comparison, redaction = read_redacted(parsed.report)
        folder = redaction.text(str(parsed.report.resolve()))
    else:
        comparison, read = read_comparison(parsed.report)
        folder = str(read)
    if parsed.out is not None:
        if parsed.layers or parsed.json:
            got = "--layers" if parsed.layers else "--json"
            raise UsageError("--out writes all forms of a report", got=got, hint="leave one of the two out")
        return _write(parsed, comparison)
    if not parsed.layers:
        if left := [f"--{name}" for name in ("stage", "layer", "arch") if getattr(parsed, name)]:
            raise UsageError(f"{' and '.join(left)} without --layers", hint="consistency show DIR --layers")
        view = View(schema=parsed.schema, verbose=parsed.verbose, folder=folder)
        render = json.render if parsed.json else terminal.render
        sys.stdout.buffer.writelines(render(comparison, view))
        return 0
    stages = tuple(name.strip() for name in parsed.stage.split(",") if name.strip())
    _check("stage", stages, {tensor.stage for tensor in comparison.tensors})
    names = sorted(group.name for group in comparison.architectures)
    if not any(parsed.arch.casefold() in name.casefold() for name in names):
        raise UsageError("--arch names none of this report's", got=parsed.arch, wanted=", ".join(names))
    chosen = LayerFilter(stages=stages, pattern=parsed.layer, architecture=parsed.arch)
    if parsed.json:
        print_json(list(chosen.chosen(layers_of(comparison))))
    else:
        sys.stdout.buffer.writelines(layers.render(comparison, chosen, verbose=parsed.verbose))
    return 0


def _write(parsed: argparse.Namespace, comparison: Comparison) -> int:
    from consistency.capture.whole_file import write_whole
    from consistency.report.formats import View, shared
    from consistency.workflows.report_folder import output

    rows = list(shared())
    reads = [parsed.report if parsed.report.is_dir() else parsed.report.parent]
    with output(parsed.out, replace=parsed.force, reads=reads, writes=[row.name for row in rows]) as out:
        for row in rows:
            write_whole(out / row.name, row.render(comparison, View(schema=parsed.schema)))
    print(f"{'redacted report' if parsed.redact else 'report'}: {parsed.out}")
    return 0


def _check(option: str, given: tuple[str, ...], known: set[str]) -> None:
    from consistency.errors import UsageError

    unknown = [name for name in given if name not in known]
    if unknown:
        wanted = ", ".join(sorted(known))
        raise UsageError(f"--{option} names none of this report's", got=", ".join(unknown), wanted=wanted)
