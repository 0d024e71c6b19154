"""Hold what is refused to what PEFT refuses, over every configuration of PEFT's own tests that can be built here.

    python -m benchmarks.peft_configurations CHECKOUT           # a checkout or an unpacked archive of PEFT's repository
    python -m benchmarks.peft_configurations CHECKOUT --only bd # configurations whose name has this

Each adapter is saved by PEFT, and then loaded by PEFT alone and by the code that a worker loads it with, after the
checks of its files: as it is, and with each of `DAMAGES`. The models of the tests' hub ids are made from their
configurations instead. Prints a Markdown table, and every difference; exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import json
import shutil
import sys
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from benchmarks import zoo
from consistency.case.options import Options
from consistency.case.preflight import prepare_case
from consistency.errors import InputError, UsageError
from consistency.worker.model.loading import load_adapter, load_base

_PACKAGE = "peft_tests"
_LISTS = {
    "test_custom_models": "TEST_CASES",
    "test_decoder_models": "ALL_CONFIGS",
    "test_encoder_decoder_models": "ALL_CONFIGS",
    "test_feature_extraction_models": "ALL_CONFIGS",
    "test_seq_classifier": "ALL_CONFIGS",
}
"""Modules of PEFT's tests, and the list of configurations in each."""

_DENSE = {**zoo.MODELS["llama"].config}
_ENCODER = {**zoo.MODELS["bert"].config}
_MODELS: dict[str, tuple[tuple[str, Mapping[str, Any]], ...]] = {
    "test_decoder_models": (
        ("OPTForCausalLM", {**_DENSE, "ffn_dim": 64, "word_embed_proj_dim": 32}),
        ("GPT2LMHeadModel", zoo.MODELS["gpt2"].config),
        ("GPTJForCausalLM", {**zoo.MODELS["gpt2"].config, "rotary_dim": 4}),
        ("LlamaForCausalLM", _DENSE),
        ("Qwen2ForCausalLM", _DENSE),
        ("Gemma3ForCausalLM", {**_DENSE, "head_dim": 8}),
        ("MistralForCausalLM", _DENSE),
    ),
    "test_encoder_decoder_models": (
        ("T5ForConditionalGeneration", zoo.MODELS["t5"].config),
        ("BartForConditionalGeneration", zoo.MODELS["bart"].config),
    ),
    "test_feature_extraction_models": (
        ("BertModel", _ENCODER),
        ("RobertaModel", {**_ENCODER, "max_position_embeddings": 66}),
        ("DebertaModel", _ENCODER),
        ("DebertaV2Model", _ENCODER),
    ),
    "test_seq_classifier": (
        ("BertForSequenceClassification", _ENCODER),
        ("RobertaForSequenceClassification", {**_ENCODER, "max_position_embeddings": 66}),
        ("LlamaForSequenceClassification", _DENSE),
    ),
}
"""The models of their hub ids, by the class and the fields of the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """An adapter to be made: its name, PEFT's configuration, and a model for it.

    Attributes
    ----------
    base : str
        As `--base` takes it: a folder, or the factory of this module for `make`.
    """

    suite: str
    name: str
    config: Callable[[], Any]
    make: Callable[[], torch.nn.Module]
    base: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why an adapter was not loaded, by PEFT alone and by the tool; empty where it was."""

    by_peft: str
    by_tool: str

    @property
    def differs(self) -> bool:
        return bool(self.by_peft) != bool(self.by_tool)


def main() -> int:
    """Load every configuration both ways; return 1 if one alone refuses."""
    parser = argparse.ArgumentParser(description="Hold what is refused to what PEFT refuses.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--only", default="", help="configurations whose name has this")
    arguments = parser.parse_args()
    zoo.quiet()
    counts: dict[str, Counter[str]] = {}
    differences = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, one in enumerate(configurations(arguments.checkout, Path(scratch))):
            if arguments.only.lower() not in one.name.lower():
                continue
            adapter = Path(scratch) / f"adapter-{number}"
            count = counts.setdefault(one.suite, Counter())
            why = _save(one, adapter)
            count["built" if not why else "not built"] += 1
            if why:
                print(f"not built: {one.suite} · {one.name}: {why}", file=sys.stderr, flush=True)
                continue
            for damage, do in {"": None, **DAMAGES}.items():
                folder = adapter if do is None else _damaged(adapter, do)
                if folder is None:
                    continue
                outcome = _load(one, folder)
                column = "whole" if do is None else "damaged"
                count[column] += 1
                count[f"{column}, loaded"] += not outcome.by_peft
                if outcome.differs:
                    count["differences"] += 1
                    differences.append((one, damage, outcome))
                if do is not None:
                    shutil.rmtree(folder)
            shutil.rmtree(adapter)
    _report(counts, differences)
    return int(bool(differences))


def configurations(checkout: Path, scratch: Path) -> Iterator[Configuration]:
    """Yield the configurations of PEFT's tests, each with a model of its own."""
    modules = {name: _test_module(checkout, name) for name in _LISTS}
    custom = modules.pop("test_custom_models")
    for name, model_id, kind, fields in custom.TEST_CASES:
        yield Configuration(
            suite="test_custom_models", name=name, config=partial(kind, **fields),
            make=partial(custom.MockTransformerWrapper.from_pretrained, model_id), base=FACTORY,
        )  # fmt: skip
    for suite, module in modules.items():
        for model, fields in _MODELS[suite]:
            base = scratch / suite / model
            _made(model, fields).save_pretrained(base)
            lists = [*getattr(module, _LISTS[suite]), *(_BLOCK_DIAGONAL if model == "LlamaForCausalLM" else ())]
            for kind, given in lists:
                yield Configuration(
                    suite=suite, name=f"{model} {kind.__name__} {_shown(given)}",
                    config=partial(kind, **given),
                    make=partial(getattr(transformers, model).from_pretrained, base), base=str(base),
                )  # fmt: skip


_BLOCK_DIAGONAL: tuple[tuple[type[Any], dict[str, Any]], ...] = (
    (
        peft.LoraConfig,  # tests/test_bdlora.py makes its own within the tests
        {
            "task_type": "CAUSAL_LM",
            "r": 8,
            "target_modules": ["q_proj", "v_proj", "o_proj"],
            "use_bdlora": {
                "target_modules_bd_a": ["o_proj"],
                "target_modules_bd_b": ["q_proj", "v_proj"],
                "nblocks": 2,
            },
        },
    ),
)

_made_by_factory: list[Callable[[], torch.nn.Module]] = []
FACTORY = "python:benchmarks.peft_configurations:made"


def made() -> torch.nn.Module:
    """Return the model of the configuration at hand, as a user's factory does."""
    return _made_by_factory[-1]()


def _made(name: str, fields: Mapping[str, Any]) -> Any:
    model = getattr(transformers, name)
    torch.manual_seed(0)
    return model(model.config_class(**fields))


def _shown(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if name != "task_type")[:80]


def _test_module(checkout: Path, name: str) -> types.ModuleType:
    """Import a module of PEFT's tests; libraries that others of its tests use may be missing."""
    folder = checkout / "tests"
    if _PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        package = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    while True:
        try:
            return importlib.import_module(f"{_PACKAGE}.{name}")
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing in sys.modules or missing.startswith(_PACKAGE):
                raise
            stand_in = sys.modules[missing] = MagicMock()
            stand_in.__spec__ = importlib.machinery.ModuleSpec(missing, None)
            stand_in.__path__ = []


def _save(one: Configuration, folder: Path) -> str:
    """Save an adapter by PEFT; return why it cannot be made."""
    try:
        torch.manual_seed(1)
        model = peft.get_peft_model(one.make(), one.config())
        model.save_pretrained(folder)
    except Exception as error:  # code of PEFT's or of a model's may raise anything
        return _first_line(error)
    return "" if (folder / "adapter_model.safetensors").exists() else "saved without a file"


def _load(one: Configuration, adapter: Path) -> Outcome:
    by_peft = by_tool = ""
    _made_by_factory.append(one.make)
    try:
        peft.PeftModel.from_pretrained(one.make(), adapter)
    except Exception as error:
        by_peft = _first_line(error)
    try:
        case = prepare_case(Options(base=one.base, adapter=str(adapter)))
        load_adapter(load_base(case, "cpu"), case)
    except (InputError, UsageError) as error:
        by_tool = _first_line(error)
    except Exception:
        by_tool = f"not refused, but failed: {traceback.format_exc(limit=-3)}"
    return Outcome(by_peft=by_peft, by_tool=by_tool)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


# --- damages --------------------------------------------------------------------------------------------------------

Damage = Callable[[dict[str, Any], dict[str, torch.Tensor]], bool]
"""Changes a config and the tensors of a file; returns whether there was anything to change."""


def _other_rank(config: dict[str, Any], _tensors: dict[str, torch.Tensor]) -> bool:
    rank = config.get("r")
    config["r"] = rank * 2 if isinstance(rank, int) else rank
    return isinstance(rank, int)


def _without_a_tensor(_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    if tensors:
        tensors.pop(min(tensors))
    return bool(tensors)


def _shorter(_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    name = next((name for name in sorted(tensors) if tensors[name].dim() and tensors[name].shape[-1] > 1), None)
    if name is not None:
        tensors[name] = tensors[name][..., :-1].contiguous()
    return name is not None


def _renamed(_config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    for name in sorted(tensors):
        tensors[name.replace("base_model.model.", "base_model.model.of_another.", 1)] = tensors.pop(name)
    return bool(tensors)


def _other_layers(config: dict[str, Any], _tensors: dict[str, torch.Tensor]) -> bool:
    named = bool(config.get("target_modules"))
    config["target_modules"] = ["a_layer_of_another_model"]
    return named


def _unknown_field(config: dict[str, Any], _tensors: dict[str, torch.Tensor]) -> bool:
    config["a_field_of_a_later_version"] = True
    return True


def _no_fields(config: dict[str, Any], _tensors: dict[str, torch.Tensor]) -> bool:
    removed = [config.pop(name, None) for name in ("r", "target_modules")]
    return any(value is not None for value in removed)


DAMAGES: dict[str, Damage] = {
    "another rank in the config": _other_rank,
    "a tensor left out": _without_a_tensor,
    "a tensor shorter by a column": _shorter,
    "all tensors renamed": _renamed,
    "layers of another model in the config": _other_layers,
    "an unknown field in the config": _unknown_field,
    "neither rank nor layers in the config": _no_fields,
}


def _damaged(adapter: Path, damage: Damage) -> Path | None:
    """Return a damaged copy of an adapter, None where this damage does not apply."""
    folder = adapter.with_name(f"{adapter.name}-damaged")
    shutil.copytree(adapter, folder)
    config, tensors = (
        json.loads((folder / "adapter_config.json").read_text()),
        load_file(folder / "adapter_model.safetensors"),
    )
    if not damage(config, tensors):
        shutil.rmtree(folder)
        return None
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def _report(counts: Mapping[str, Counter[str]], differences: list[tuple[Configuration, str, Outcome]]) -> None:
    columns = ("built", "not built", "whole, loaded", "damaged", "damaged, loaded", "differences")
    print("| tests of PEFT |", " | ".join(columns), "|")
    print("|---" * (len(columns) + 1) + "|")
    for suite, count in counts.items():
        print(f"| `{suite}` |", " | ".join(str(count[column]) for column in columns), "|")
    for one, damage, outcome in differences:
        print(f"\n{one.suite} · {one.name}" + (f" · {damage}" if damage else ""))
        print(f"  PEFT: {outcome.by_peft or 'loaded'}\n  consistency: {outcome.by_tool or 'loaded'}")


if __name__ == "__main__":
    # the worker's code imports the factory by the module's name, which is not `__main__`
    sys.exit(importlib.import_module("benchmarks.peft_configurations").main())
