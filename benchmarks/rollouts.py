"""Make rollouts of a base with an adapter, healthy ones and wrong ones, and see what `check-text` says of each.

    OMP_NUM_THREADS=1 python -m benchmarks.rollouts BASE ADAPTER --dtype float32 --texts 40 --tokens 60

Rollouts are written in one batch with a cache, as transformers does it; the texts are of this repository's docs. For
each kind: the verdict, whether it is right, whether the mistake is named, and the processor time of the check over that
of one pass of the model over all its texts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from consistency.case.case import Case
from consistency.case.named_adapters import NamedAdapter
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.texts import Text
from consistency.worker.environment import release

_PROMPT = 24
"""Tokens of a prompt."""

_CACHE = "cache" if release("transformers") >= (5, 24) else "past_key_values"
"""Name of the cache in what a model takes and returns."""

_OFF_FROM = 10
"""Token from which on the adapter is off, where an engine loses it."""

Prompt = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to write rollouts.

    Attributes
    ----------
    wanted : str
        A part of what has to be said of them; empty for healthy ones.
    is_drawn : bool
        Tokens are drawn, and not the most likely ones.
    processors : sequence
        Change the logits that tokens are drawn from.
    is_raw : bool
        Log probabilities are the model's own, and not those after the processors.
    has_logprobs : bool
        Log probabilities are in the rollouts.
    masks_end : bool
        The end of the text is never written, and log probabilities are without it.
    change : callable
        What is wrong with the model while it computes the token of a place.
    prompt : callable
        What the writer made of a prompt.
    """

    wanted: str = ""
    is_drawn: bool = True
    processors: Sequence[Any] = ()
    is_raw: bool = True
    has_logprobs: bool = True
    masks_end: bool = False
    change: Callable[[Any, int], AbstractContextManager[Any]] = field(default=lambda _model, _place: nullcontext())
    prompt: Callable[[Prompt], Prompt] = list


@contextmanager
def _scaled(model: Any, factor: float) -> Iterator[None]:
    """Apply the adapter with another scaling."""
    layers = [layer for layer in model.modules() if isinstance(getattr(layer, "scaling", None), dict)]
    for layer in layers:
        layer.scaling["default"] *= factor
    try:
        yield
    finally:
        for layer in layers:
            layer.scaling["default"] /= factor


@contextmanager
def _other_rotary_base(model: Any) -> Iterator[None]:
    """Compute rotary positions of base 10,000, which engines take where a config's own is not read."""
    rotary = [module for module in model.modules() if isinstance(getattr(module, "inv_freq", None), torch.Tensor)]
    kept = [module.inv_freq for module in rotary]
    for module, frequencies in zip(rotary, kept, strict=True):
        size = 2 * frequencies.numel()
        module.inv_freq = 1.0 / 10_000.0 ** (torch.arange(0, size, 2).float() / size)
    try:
        yield
    finally:
        for module, frequencies in zip(rotary, kept, strict=True):
            module.inv_freq = frequencies


@contextmanager
def _cache_in_eight_bits(model: Any) -> Iterator[None]:
    """Round keys and values to float8_e4m3fn as they leave their projections."""

    def rounded(_module: Any, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.float8_e4m3fn).to(output.dtype)

    # values are rounded here as they are kept; keys before their rotation, as an engine without a fused kernel does
    names = ("k_proj", "v_proj")
    handles = [module.register_forward_hook(rounded) for name, module in model.named_modules() if name.endswith(names)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _earlier_step(model: Any) -> Iterator[None]:
    model.set_adapter("earlier")
    try:
        yield
    finally:
        model.set_adapter("default")


def _off_from(model: Any, place: int) -> AbstractContextManager[Any]:
    return model.disable_adapter() if place >= _OFF_FROM else nullcontext()


_QWEN = (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8))

KINDS = {
    "greedy": Kind(is_drawn=False),
    "greedy, no log probabilities": Kind(is_drawn=False, has_logprobs=False),
    "temperature 1": Kind(),
    "temperature 0.7": Kind(processors=[TemperatureLogitsWarper(0.7)]),
    "top-p 0.9": Kind(processors=[TopPLogitsWarper(0.9)]),
    "after temperature 0.7": Kind(
        processors=[TemperatureLogitsWarper(0.7)], is_raw=False, wanted="taken with temperature 0.7"
    ),
    "after top-k 20": Kind(processors=[TopKLogitsWarper(20)], is_raw=False, wanted="taken with top-k 20"),
    "after top-p 0.9": Kind(processors=[TopPLogitsWarper(0.9)], is_raw=False, wanted="taken with top-p 0.9"),
    "after min-p 0.05": Kind(processors=[MinPLogitsWarper(0.05)], is_raw=False, wanted="taken with min-p 0.05"),
    "after three of them": Kind(
        processors=_QWEN, is_raw=False, wanted="taken with temperature 0.7 and top-k 20 and top-p 0.8"
    ),
    "after a masked end": Kind(is_raw=False, masks_end=True, wanted="the end of the text masked"),
    "base alone": Kind(change=lambda model, _: model.disable_adapter(), wanted="as the base alone"),
    "adapter lost": Kind(change=_off_from, wanted=f"as the base alone from token {_OFF_FROM + 1} on"),
    "earlier step": Kind(change=lambda model, _: _earlier_step(model), wanted="written by: earlier"),
    "other rotary base": Kind(change=lambda model, _: _other_rotary_base(model), wanted="rotary positions"),
    "scaling x 2": Kind(change=lambda model, _: _scaled(model, 2.0), wanted="twice"),
    "scaling x 1.1": Kind(change=lambda model, _: _scaled(model, 1.1), wanted="scal"),
    "cache in 8 bits": Kind(change=lambda model, _: _cache_in_eight_bits(model), wanted="float8"),
    "prompt cut": Kind(prompt=lambda prompt: prompt[-8:], wanted="a part of the prompt"),
    "begin token twice": Kind(prompt=lambda prompt: [prompt[0], *prompt], wanted="begin token"),
}
"""Healthy kinds first."""


class RolloutWriter:
    """A base with an adapter, and the prompts that it goes on with."""

    def __init__(self, base: Path, adapter: Path, dtype: str, *, texts: int) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, dtype))
        self.model = PeftModel.from_pretrained(model, adapter).eval()
        ends = self.model.generation_config.eos_token_id
        self.ends = ends if isinstance(ends, list) else [ends]
        pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
        ids = self.tokenizer("".join(page.read_text(encoding="utf-8") for page in pages[:20]))["input_ids"]
        starts = range(300, 300 + 211 * texts, 211)
        # prompts of unequal lengths, as in any batch
        self.prompts = [ids[start : start + _PROMPT - number % 5] for number, start in enumerate(starts)]

    def add_earlier_step(self, folder: Path) -> None:
        """Add an adapter that is near the first one, as a checkpoint some steps before it, and save it."""
        stream = torch.Generator().manual_seed(1)
        self.model.save_pretrained(folder)
        self.model.load_adapter(str(folder), adapter_name="earlier")
        for name, parameter in self.model.named_parameters():
            if "lora_B.earlier" in name:
                noise = torch.randn(parameter.shape, generator=stream).to(parameter)
                parameter.data.mul_(0.85).add_(0.1 * parameter.data.std() * noise)
        self.model.save_pretrained(folder, selected_adapters=["earlier"])
        self.model.set_adapter("default")

    @torch.no_grad()
    def write(self, kind: Kind, tokens: int) -> list[Text]:
        """Return rollouts of a kind."""
        prompts = [kind.prompt(list(prompt)) for prompt in self.prompts]
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        processors, stream = LogitsProcessorList(kind.processors), torch.Generator().manual_seed(7)
        new, cache, chosen, logprobs = ids, None, list[torch.Tensor](), list[torch.Tensor]()
        for place in range(tokens):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -new.shape[1] :]
            with kind.change(self.model, place):
                output = self.model(
                    input_ids=new, attention_mask=mask, position_ids=positions, use_cache=True, **{_CACHE: cache}
                )
            logits, cache = output.logits[:, -1].float(), output[_CACHE]
            without_end = logits.clone()
            without_end[:, self.ends] = -torch.inf
            processed = processors(ids, without_end if kind.masks_end else logits)
            token = without_end.argmax(-1)
            if kind.is_drawn:
                token = torch.multinomial(processed.softmax(-1), 1, generator=stream)[:, 0]
            given = logits if kind.is_raw else processed
            chosen.append(token)
            logprobs.append(given.log_softmax(-1).gather(1, token[:, None])[:, 0])
            new, mask = token[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        rows = zip(self.prompts, torch.stack(chosen, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
        return [self._text(prompt, *row, has_logprobs=kind.has_logprobs) for prompt, *row in rows]

    def _text(self, prompt: Prompt, ids: list[int], logprobs: list[float], *, has_logprobs: bool) -> Text:
        """Return a rollout, up to its end."""
        ends = [ids.index(end) + 1 for end in self.ends if end in ids]
        length = min(ends, default=len(ids))
        return Text(prompt=prompt, text=ids[:length], logprobs=logprobs[:length] if has_logprobs else None)

    @torch.no_grad()
    def seconds_of_one_pass(self, texts: Sequence[Text]) -> float:
        """Return the processor time of a pass over each text."""
        started = time.process_time()
        for text in texts:
            self.model(input_ids=torch.tensor([[*text.prompt, *text.text]]), use_cache=False)
        return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--only", nargs="*", choices=KINDS, metavar="KIND", help="kinds of texts; all by default")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    writer = RolloutWriter(arguments.base, arguments.adapter, arguments.dtype, texts=arguments.texts)
    home = tempfile.TemporaryDirectory()
    writer.add_earlier_step(Path(home.name))
    case = Case(name="rollouts", base=str(arguments.base), adapter=str(arguments.adapter), dtype=arguments.dtype)
    both = (
        NamedAdapter(name="now", path=str(arguments.adapter)),
        NamedAdapter(name="earlier", path=str(Path(home.name) / "earlier")),
    )
    print(f"{'kind':30}{'tokens':>8}{'x one pass':>12}  {'right':6}{'named':6}said")
    for name in arguments.only or KINDS:
        kind = KINDS[name]
        texts = writer.write(kind, arguments.tokens)
        one_pass_s = writer.seconds_of_one_pass(texts)
        given = Case(**{**_fields(case), "adapters": both}) if name == "earlier step" else case
        started = time.process_time()
        report = check_text(given, texts)
        ratio = (time.process_time() - started) / one_pass_s
        said = " ".join(line.strip() for line in report.lines())
        is_consistent = report.verdict == "consistent"
        # an earlier step that is named wrote its texts, and is no fault
        is_right = is_consistent == (not kind.wanted or name == "earlier step")
        is_named = ""
        if kind.wanted:
            is_named = "yes" if kind.wanted in said else "no"
        tokens = sum(len(text.text) for text in texts)
        print(f"{name:30}{tokens:8}{ratio:12.1f}  {'yes' if is_right else 'NO':6}{is_named:6}{said[:150]}", flush=True)


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("name", "base", "adapter", "dtype")}


if __name__ == "__main__":
    main()
