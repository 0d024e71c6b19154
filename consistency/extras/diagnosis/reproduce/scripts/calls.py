"""Make the calls of calls.txt on this machine, and check their result. Needs only torch and safetensors.

python reproduce.py [--device cuda:1] [--times 3] [--as-recorded]

calls.txt is what the wrong module called: operations of ATen, on the recorded inputs. Its result is compared with
float64, by the error that each element, each row and the scale of all may have: what random rounding errors make, in
passes on the CPU.

Where it happens here, the calls are made again with one operation after the other in float64: the one without whose
errors the result is right is off. If the result is wrong in float64 too, the calls themselves are wrong, as Python code
makes them, or what they take, as a weight that has changed in memory.

Exits with 0 if the result is right (it does not happen here) and 1 if it is not (it happens here). With --as-recorded
the recorded result is checked instead.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

from shared import FACTS, HERE, as_bytes, choose_device, load_tensors, refuse, torch  # noqa: E402

# isort: split
import aten_calls  # noqa: E402 - after `shared`, which sets what torch reads when it is imported


def apply_settings(settings):
    """Compute as the worker did, as far as settings outside of the environment go."""
    torch.set_float32_matmul_precision(settings.get("float32_matmul_precision", "highest"))
    torch.use_deterministic_algorithms(bool(settings.get("deterministic_algorithms")), warn_only=True)
    if isinstance(settings.get("threads"), int):
        torch.set_num_threads(max(1, min(settings["threads"], os.cpu_count() or 1)))
    for name, owner, attribute in (
        ("matmul_allow_tf32", torch.backends.cuda.matmul, "allow_tf32"),
        ("cudnn_allow_tf32", torch.backends.cudnn, "allow_tf32"),
        ("fp16_reduced_precision_reduction", torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        ("bf16_reduced_precision_reduction", torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    ):
        if isinstance(settings.get(name), bool) and torch.cuda.is_available():
            setattr(owner, attribute, settings[name])


def cause(calls, inputs, device, ratio_of):
    """Return a sentence that names the operation that is off; `ratio_of` takes the results of all calls by name."""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # an operation has no kernel in float64
        if ratio_of(aten_calls.run_exactly(calls, inputs)) > 1:
            return "in float64 too: what is called is wrong, or what it takes, and not how it is computed"
    wrong = aten_calls.blamed(calls, inputs, device, ratio_of)
    if not wrong:
        return "no operation explains it alone"
    shown = "".join(f"\n    {calls[number]}" for number in wrong[:4])
    if len(wrong) > 4:
        shown += f"\n    and {len(wrong) - 4} more"
    return f"{calls[wrong[0]].operation}: with its result in float64, rounded, all is right{shown}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=FACTS["device"])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--as-recorded", action="store_true", help="check the recorded result instead of computing")
    options = parser.parse_args()

    tensors = load_tensors()
    actual, expected, allowed = (tensors.pop(name) for name in ("actual", "expected", "allowed"))
    start, window = FACTS["start"], actual.numel()

    def recorded_part(result):
        """Return the elements of a result that were recorded."""
        return result.detach().to("cpu").reshape(-1)[start : start + window]

    def ratio_of(result):
        return aten_calls.largest_ratio(result, expected, allowed, FACTS["limits"])[0]

    def describe(result):
        ratio, worst, whose = aten_calls.largest_ratio(result, expected, allowed, FACTS["limits"])
        got, exact, limit = (tensor.reshape(-1)[worst].item() for tensor in (result, expected, allowed))
        element = f"element {start + worst}: got {got!r}, exact {exact!r}, tolerance +-{limit:.3g}"
        article = "an" if whose == "element" else "a"
        return f"{ratio:.3g} times the tolerance of {article} {whose}; {element}"

    try:
        calls, result = aten_calls.read_calls((HERE / "calls.txt").read_text(encoding="utf-8"), tensors)
    except aten_calls.CallsError as error:
        refuse(f"calls.txt: {error}")
    print(f"finding:  {FACTS['message']}")
    print(f"tensor:   {FACTS['tensor']}, {FACTS['window']}")
    print(f"recorded: on {FACTS['worker']}: {describe(actual)}")
    if options.as_recorded:
        return 1 if ratio_of(actual) > 1 else 0

    device = choose_device(options.device)
    apply_settings(FACTS["settings"])
    print(f"here:     torch {torch.__version__}, {device}, {len(calls)} calls")
    wrong = 0
    with torch.no_grad():
        for _ in range(options.times):
            try:
                computed = recorded_part(aten_calls.run_calls(calls, tensors, device)[result])
            except Exception as error:  # a traceback would end with the status that means: it happens here
                refuse(f"the calls do not run here: {error}")
            if computed.numel() != window:
                refuse(f"the calls make {computed.numel()} elements, and {window} were recorded")
            wrong += ratio_of(computed) > 1
        same = torch.equal(as_bytes(computed), as_bytes(actual))
        as_recorded = ", bitwise as recorded" if same else ""
        print(f"  {wrong} of {options.times} results wrong; the last: {describe(computed)}{as_recorded}")
        if wrong:

            def ratio_of_results(results):
                return ratio_of(recorded_part(results[result]))

            print(f"cause:    {cause(calls, tensors, device, ratio_of_results)}")
    print("it happens here" if wrong else "it does not happen here")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
