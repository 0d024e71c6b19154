"""Load the base and the adapter as a user does, and compare the result with the files. Needs transformers and PEFT.

python load_with_peft.py --base FOLDER --adapter FOLDER [--device cuda:1] [--dtype float32]

Exits with 0 if every tensor of the adapter holds its file's bytes (it does not happen here), else with 1.
"""

import argparse
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FACTS = json.loads((HERE / "finding.json").read_text(encoding="utf-8"))
os.environ.update(FACTS["variables"])  # kernels are chosen when torch is imported

import torch  # noqa: E402 - after the variables
import transformers  # noqa: E402
from peft import PeftModel, get_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


def as_bytes(tensor):
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=FACTS["base"])
    parser.add_argument("--adapter", default=FACTS["adapter"])
    parser.add_argument("--device", default=FACTS["device"])
    parser.add_argument("--dtype", default=FACTS["dtype"])
    options = parser.parse_args()

    config = transformers.AutoConfig.from_pretrained(options.base)
    auto = getattr(transformers, FACTS["class"] or config.architectures[0])
    base = auto.from_pretrained(options.base, dtype=getattr(torch, options.dtype), device_map={"": options.device})
    model = PeftModel.from_pretrained(base, options.adapter, **FACTS["load_arguments"])
    wanted = load_file(Path(options.adapter) / "adapter_model.safetensors")
    found = get_peft_model_state_dict(model)
    wrong = []
    for name, tensor in wanted.items():
        actual = found.get(name)
        if actual is None:
            wrong.append(f"{name!r}: missing in the model")
            continue
        expected = tensor.to(actual.dtype)
        differs = as_bytes(actual) != as_bytes(expected)
        if differs.any():
            elements = int(differs.reshape(-1, expected.element_size()).any(dim=1).sum())
            wrong.append(f"{name!r}: {elements} of {expected.numel()} elements differ from the file")
        elif actual.dtype != tensor.dtype:
            print(f"note: {name!r} is {actual.dtype}, the file has {tensor.dtype}")
    right = len(wanted) - len(wrong)
    print(f"{right} of {len(wanted)} tensors of the adapter match the file bitwise on {options.device}")
    print("\n".join(wrong[:20]))
    print("it happens here" if wrong else "it does not happen here")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
