"""Stage `wrapping`: a user's wrapper around the base, compared with the base without it.

The base is loaded again: users wrap it without PEFT's layers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from typing import Any

import torch

from consistency.capture.records import RecordStatus
from consistency.errors import InputError, first_line
from consistency.extras.peft_api.wrapping.check import check_wrapped
from consistency.extras.peft_api.wrapping.report import WrapperReport
from consistency.worker.context import Context
from consistency.worker.device_error import is_of_the_device
from consistency.worker.model.loading import load_base
from consistency.worker.model.running import device_of
from consistency.worker.recorder import Skip

STAGE = "wrapping"
WRAPPER = "wrapper"


def run(context: Context) -> None:
    """Wrap the base, check it, and record every check."""
    case = context.job.case
    if case.wrapper is None:
        raise Skip("no wrapper is given: --wrapper python:package.module:function")
    if context.base.offload is not None:
        raise Skip("the base is offloaded: the device does not hold the plain model that is to be wrapped")
    plain = load_base(case, context.job.device).model
    wrapped = wrap(case.wrapper, plain)
    record(context, check_wrapped(wrapped, plain, adapter=_adapter(case.adapter)))


def wrap(text: str, plain: torch.nn.Module) -> torch.nn.Module:
    """Call a user's own wrapper on the plain model.

    Raises
    ------
    InputError
        It cannot be imported, fails, or does not return a module.
    """
    module_name, _, function_name = text.removeprefix("python:").partition(":")
    sys.path.append(os.getcwd())  # a user's own module is in the working directory; installed ones come first
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise InputError("cannot import the wrapper", where=text, got=error) from error
    try:
        wrapped = function(plain)
    except Exception as error:  # a user's own function may raise anything, and is theirs to fix
        if is_of_the_device(error, device_of(plain)):
            raise
        raise InputError("the wrapper failed", where=text, got=first_line(error)) from error
    if not isinstance(wrapped, torch.nn.Module):
        raise InputError(
            "the wrapper does not return a module", where=text, got=type(wrapped).__name__, wanted="Module"
        )
    return wrapped


def record(context: Context, report: WrapperReport) -> None:
    """Record the findings, and the figures of every other check."""
    finding_counts: Counter[str] = Counter()
    for finding in report.findings:
        finding_counts[finding.check] += 1
        name = finding.where if finding.check == "reach" else f"{finding.check} {finding_counts[finding.check]}"
        context.record.fact(
            STAGE,
            WRAPPER,
            name,
            status="outside",
            word=finding.kind,
            reason=finding.sentence,
            evidence={"got": finding.got, "wanted": finding.wanted, "hint": finding.hint},
        )
    for check, figures in report.figures.items():
        if check not in finding_counts:
            status: RecordStatus = "equal"
            ratio = None
            if check == "training_step":  # the only check with a limit; what the others compare is the same or not
                status, ratio = "within", figures["peak_bytes"] / figures["allowed_bytes"]
            context.record.fact(STAGE, WRAPPER, check, status=status, ratio=ratio, evidence=dict(figures))
    for check, reason in report.skipped.items():
        context.record.fact(STAGE, WRAPPER, check, status="skipped", reason=reason)


def _adapter(folder: str | None) -> Any:
    from peft import PeftConfig

    if folder is None:
        return None
    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = False  # it is trained here
    return config
