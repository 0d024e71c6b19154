"""`consistency show`: print a report again, of a run or a suite, one finding of it, or its tolerances by layer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from consistency.cli.output import add_output_options, print_json
from consistency.errors import UsageError
from consistency.report.formats import View, shared
from consistency.text import one_line

if TYPE_CHECKING:
    from consistency.comparison.result import Comparison
    from consistency.comparison.suite import SuiteResult

EXAMPLES = (
    ("the report of a run again", "consistency show run-1"),
    ("per layer and architecture, worst first", "consistency show run-1 --layers"),
    ("one finding, with the names of its tensors", "consistency show run-1 --finding 1"),
    ("the figures of all layers for a spreadsheet", "consistency show run-1 --csv > layers.csv"),
    ("files to attach to a public issue", "consistency show run-1 --redact --out run-1-public"),
    ("one kind of layer on one architecture", "consistency show run-1 --layers --layer '*.q_proj' --arch sm_90"),
)


def add(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = command("show", _show, "print a report again, or its tolerance report by layer and architecture", EXAMPLES)
    parser.add_argument(
        "report", type=Path, metavar="DIR", help="the --out folder of a run or a suite, or its report.json"
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="per layer and architecture, worst first: the largest "
        "difference, what was allowed, their ratio, ULP, and which devices agree",
    )
    parser.add_argument("--csv", action="store_true", help="the same as CSV, every tensor with full figures")
    parser.add_argument("--stages", metavar="STAGE[,STAGE]", default="", help="of --layers or --csv these stages alone")
    parser.add_argument(
        "--layer",
        metavar="PATTERN",
        default="",
        help="of --layers or --csv layers or tensors by shell pattern ('*.q_proj')",
    )
    parser.add_argument(
        "--arch",
        metavar="NAME",
        default="",
        help="of --layers or --csv architectures by part of their name, such as sm_90",
    )
    parser.add_argument("--finding", type=int, metavar="N", help="this finding alone, with all of its tensors")
    parser.add_argument(
        "--redact",
        action="store_true",
        help="without paths, names of hosts and users, and ids of devices: to be attached to a public issue",
    )
    add_output_options(
        parser,
        "write report.json, report.html and report.md into this folder, or ZIP file, instead of printing",
        json="print JSON: report.json or suite.json, with --layers its layers[], with --finding that finding",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="every layer")


def _show(parsed: argparse.Namespace) -> int:
    """Run the command."""
    from consistency.workflows.report_folder import read_suite

    suite = read_suite(parsed.report)
    if suite is not None:
        return _show_suite(parsed, *suite)
    comparison, folder = _read_report(parsed)
    chosen = _chosen(parsed)
    if parsed.out is not None:
        if chosen:
            got = " and ".join(chosen)
            raise UsageError("--out writes all forms of a report", got=got, hint="leave one of the two out")
        return _write(parsed, comparison)
    for first, second in (("--csv", "--json"), ("--layers", "--finding"), ("--csv", "--finding")):
        if first in chosen and second in chosen:
            raise UsageError("only one of them can be printed", got=f"{first} and {second}")
    if parsed.layers or parsed.csv:
        return _show_layers(parsed, comparison)
    filters = [f"--{name}" for name in ("stages", "layer", "arch") if getattr(parsed, name)]
    if filters:
        raise UsageError(f"{' and '.join(filters)} without --layers", hint="consistency show DIR --layers")
    if parsed.finding is not None:
        return _show_finding(parsed, comparison, folder)
    return _print_report(parsed, comparison, folder)


def _read_report(parsed: argparse.Namespace) -> tuple[Comparison, str | None]:
    """Return the comparison of a run, and its folder for the commands in the report; None without captures."""
    from consistency.workflows.report_folder import CAPTURES, read_comparison, read_redacted

    if parsed.redact:
        comparison, redaction = read_redacted(parsed.report)
        return comparison, redaction.text(str(parsed.report.resolve()))
    comparison, folder = read_comparison(parsed.report)
    has_captures = comparison.captures or (folder / CAPTURES).exists()  # else no command could go on with it
    return comparison, str(folder) if has_captures else None


def _print_report(parsed: argparse.Namespace, report: Comparison | SuiteResult, folder: str | None) -> int:
    """Print a report as text or JSON."""
    from consistency.report import json, terminal

    render = json.render if parsed.json else terminal.render
    sys.stdout.buffer.writelines(render(report, View(verbose=parsed.verbose, folder=folder)))
    return 0


def _chosen(parsed: argparse.Namespace) -> list[str]:
    """Return the options that choose a part of a report, or its form, as far as they are given."""
    names = ("layers", "csv", "finding", "json")
    return [f"--{name}" for name in names if getattr(parsed, name) not in (None, False)]


def _show_suite(parsed: argparse.Namespace, suite: SuiteResult, folder: Path) -> int:
    """Print the report of a suite again, and where the reports of its cases are."""
    names = ("redact", "out", "layers", "csv", "finding", "stages", "layer", "arch")
    options = [f"--{name}" for name in names if getattr(parsed, name) not in (None, False, "")]
    if options:
        hint = f"give the folder of a case, {folder / 'cases' / 'NAME'}"
        raise UsageError(f"{' and '.join(options)} of a suite", where=folder, hint=hint)
    status = _print_report(parsed, suite, str(folder))
    if not parsed.json:
        sys.stdout.buffer.writelines(f"  {one_line(folder / case.folder)}\n".encode() for case in suite.cases)
    return status


def _show_finding(parsed: argparse.Namespace, comparison: Comparison, folder: str | None) -> int:
    """Print one finding, by its number from 1."""
    from consistency.report import terminal
    from consistency.report.findings import findings_of

    findings = findings_of(comparison, folder)
    if not 1 <= parsed.finding <= len(findings):
        wanted = f"1 to {len(findings)}" if findings else "a report with findings"
        raise UsageError("no such finding", where="--finding", got=parsed.finding, wanted=wanted)
    finding = findings[parsed.finding - 1]
    if parsed.json:
        print_json(finding)
    else:
        sys.stdout.buffer.writelines(terminal.render_finding(finding, parsed.finding))
    return 0


def _show_layers(parsed: argparse.Namespace, comparison: Comparison) -> int:
    """Print layers by architecture, as text, CSV or JSON."""
    from consistency.comparison.layers import LayerFilter, layers_of
    from consistency.report import layers

    stages = tuple(name.strip() for name in parsed.stages.split(",") if name.strip())
    _check_names("stages", stages, {tensor.stage for tensor in comparison.tensors})
    names = sorted(group.name for group in comparison.architectures)
    if not any(parsed.arch.casefold() in name.casefold() for name in names):
        raise UsageError("--arch names none of this report's", got=parsed.arch, wanted=", ".join(names))
    chosen = LayerFilter(stages=stages, pattern=parsed.layer, architecture=parsed.arch)
    if parsed.csv:
        sys.stdout.buffer.writelines(layers.render_csv(chosen.chosen(layers_of(comparison))))
    elif parsed.json:
        print_json(list(chosen.chosen(layers_of(comparison))))
    else:
        sys.stdout.buffer.writelines(layers.render(comparison, chosen, verbose=parsed.verbose))
    return 0


def _write(parsed: argparse.Namespace, comparison: Comparison) -> int:
    """Write all forms of a report into a folder or a ZIP file, and print where they are."""
    from consistency.capture.claim import scratch_folder
    from consistency.capture.transport import ARCHIVE, pack

    if not parsed.out.name.endswith(ARCHIVE):
        _write_folder(parsed, comparison, parsed.out)
    elif parsed.out.exists() and not parsed.force:
        raise UsageError("the file exists", where=parsed.out, hint="give --force, or another --out")
    else:
        with scratch_folder("show") as scratch:
            _write_folder(parsed, comparison, scratch / "packed")
            pack(scratch / "packed", parsed.out)
    noun = "redacted report" if parsed.redact else "report"
    print(f"{noun}: {parsed.out}")
    return 0


def _write_folder(parsed: argparse.Namespace, comparison: Comparison, out: Path) -> None:
    """Write all forms of a report into a folder."""
    from consistency.capture.whole_file import write_whole
    from consistency.workflows.report_folder import output

    rows = list(shared())
    # the folder that is read must not be the one that is replaced
    reads = [parsed.report if parsed.report.is_dir() else parsed.report.parent]
    with output(out, replace=parsed.force, reads=reads, writes=[row.name for row in rows]) as folder:
        for row in rows:
            write_whole(folder / row.name, row.render(comparison, View()))


def _check_names(option: str, names: tuple[str, ...], known: set[str]) -> None:
    """Raise UsageError for a name that the report does not have."""
    unknown = [name for name in names if name not in known]
    if unknown:
        wanted = ", ".join(sorted(known))
        raise UsageError(f"--{option} names none of this report's", got=", ".join(unknown), wanted=wanted)
