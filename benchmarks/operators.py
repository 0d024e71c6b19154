"""Hold `consistency.testing` against torch's own database of operators: healthy results, of which none may be outside.

    python -m benchmarks.operators                                  # three dtypes, two kinds of kernels: an hour
    python -m benchmarks.operators --dtypes float32 --samples 1 --only softmax,bmm

Every operator is called with torch's own samples. Its results and first gradients are judged as a test would judge
them; each kind of kernels computes in a process of its own. What is not judged is listed with the reason.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from consistency.errors import UsageError
from consistency.testing import Allow, Products, within_rounding

KERNELS: dict[str, dict[str, str]] = {"of this processor": {}, "default": {"ATEN_CPU_CAPABILITY": "default"}}
"""Kinds of kernels, and the variables that choose them."""

LEFT_OUT = {
    "empty": "its result is memory as it was", "empty_like": "the same", "empty_permuted": "the same",
    "empty_strided": "the same", "new_empty": "the same", "new_empty_strided": "the same", "resize_": "the same",
    "resize_as_": "the same",
}  # fmt: skip
"""Operators that are not called, with the reason."""


class SlowError(Exception):
    """A sample takes longer than its time."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise SlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def database() -> list[Any]:
    """Return torch's list of operators; it asks for a package that only its expected texts need."""
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
    sys.modules.setdefault("expecttest", stub)
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def judged(op: Any, dtype: torch.dtype, most: int, seconds: int) -> Iterator[tuple[str, str]]:
    """Yield the status of each result of some samples, and what is to be said of it."""
    label = f"{op.full_name} {str(dtype)[6:]}"
    differentiable = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    try:
        with at_most(seconds):
            drawn = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
            samples = list(itertools.islice(drawn, 30))
    except Exception as error:  # of any operator
        yield "no samples", f"{label}: {type(error).__name__}"
        return
    step = max(1, len(samples) // most)
    for number, sample in [*enumerate(samples)][::step][:most]:

        def called(first: Any, others: Any, named: Any, process: Any = sample.output_process_fn_grad) -> Any:
            return process(op(first, *others, **named))

        name = f"{label} #{number}"
        print(name, file=sys.stderr, flush=True)
        try:
            with at_most(seconds):
                found = within_rounding(
                    called, sample.input, list(sample.args), dict(sample.kwargs), gradients=differentiable,
                    allow=Allow(products=Products(), nan=True),
                )  # fmt: skip
        except SlowError:
            yield "slow", name
        except AssertionError as error:  # of what only a GPU has
            yield "not on a CPU", f"{name}: {error}"
        except UsageError as error:
            yield "no reference", f"{name}: {error.what}; {error.got or ''}"
        except Exception as error:  # of any operator
            yield "raises", f"{name}: {type(error).__name__}: {str(error).splitlines()[:1]}"
        else:
            for one in found.results:
                kind = "gradient" if one.name.startswith("gradient") else "value"
                yield f"{kind} {one.status}", "" if one.status == "within" else f"{name} {one}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument("--samples", type=int, default=3, help="of each operator and dtype, at most")
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--from-to", default="", help="places in the list, such as 0:100")
    parser.add_argument("--seconds", type=int, default=20, help="for one sample")
    parser.add_argument("--kernels", choices=KERNELS, help="one kind, in this process")
    parser.add_argument("--verbose", action="store_true", help="list what is inconclusive too")
    arguments = parser.parse_args()
    if arguments.kernels is None:
        command = [sys.executable, "-m", "benchmarks.operators", *sys.argv[1:], "--kernels"]
        done = [subprocess.run([*command, kind], env=os.environ | KERNELS[kind], check=False) for kind in KERNELS]
        return max(one.returncode for one in done)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: collections.Counter[str] = collections.Counter()
    said: dict[str, list[str]] = collections.defaultdict(list)
    start, _, stop = arguments.from_to.partition(":")
    only = set(filter(None, arguments.only.split(",")))
    for op in database()[int(start or 0) : int(stop or 1 << 20)]:
        if only and op.name not in only:
            continue
        for dtype in (getattr(torch, name) for name in arguments.dtypes.split(",")):
            if op.name in LEFT_OUT:
                counts["left out"] += 1
                said["left out"].append(f"{op.name}: {LEFT_OUT[op.name]}")
            elif op.supports_dtype(dtype, "cpu"):
                for kind, text in judged(op, dtype, arguments.samples, arguments.seconds):
                    counts[kind] += 1
                    if text:
                        said[kind].append(text)
    print(f"kernels {arguments.kernels}: torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("; ".join(f"{status} {count}" for status, count in sorted(counts.items())))
    for status, texts in sorted(said.items()):
        if "inconclusive" not in status or arguments.verbose:
            print(f"--- {status}", *dict.fromkeys(texts), sep="\n")
    return int(any("outside" in status for status in counts))


if __name__ == "__main__":
    raise SystemExit(main())
