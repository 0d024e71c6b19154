"""Make rollouts of a base with an adapter, healthy ones and wrong ones, and see what `check-text` says of each.

    OMP_NUM_THREADS=1 python -m benchmarks.rollouts BASE ADAPTER --dtype float32 --texts 40 --tokens 60

Rollouts are written in one batch with a cache, as transformers does it; the texts are of this repository's docs. For
each kind of `rollout_kinds.py`: the verdict, whether it is right, whether the mistake is named, and the processor time
of the check over that of one pass of the model over all its texts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList

from benchmarks.rollout_kinds import HEALTHY, KINDS, Kind
from consistency.case.case import Case
from consistency.case.named_adapters import NamedAdapter
from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.texts import Text
from consistency.worker.environment import release

_PROMPT = 24
"""Tokens of a prompt."""

_CACHE = "cache" if release("transformers") >= (5, 24) else "past_key_values"
"""Name of the cache in what a model takes and returns."""


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
        padding = self.ends[0]  # what a batch is filled up with where a tokenizer has no other token for it
        ids = torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        if kind.sees_padding:
            mask = torch.ones_like(mask)
        processors, stream = LogitsProcessorList(kind.processors), torch.Generator().manual_seed(7)
        new, written, cache, chosen, logprobs = ids, ids, None, list[torch.Tensor](), list[torch.Tensor]()
        for place in range(tokens):
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -new.shape[1] :] + (kind.gap if place else 0)
            seen = kind.seen(mask, place)
            with kind.change(self.model, place):
                output = self.model(
                    input_ids=new, attention_mask=seen, position_ids=positions, use_cache=True, **{_CACHE: cache}
                )
            logits, cache = output.logits[:, -1].float(), output[_CACHE]
            without_end = logits.clone()
            without_end[:, self.ends] = -torch.inf
            processed = processors(written, without_end if kind.masks_end else logits)
            token = (processed if kind.processors else without_end).argmax(-1)
            if kind.is_drawn:
                token = torch.multinomial(processed.softmax(-1), 1, generator=stream)[:, 0]
            given = logits if kind.is_raw else processed
            if kind.draft_each and place % kind.draft_each == kind.draft_each - 1:
                given = self._logits_of_the_base(written, mask)
                token = given.argmax(-1)
            chosen.append(token)
            written = torch.cat([written, token[:, None]], 1)
            logprobs.append(given.log_softmax(-1).gather(1, token[:, None])[:, 0])
            new, mask = token[:, None], torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        given = kind.given(torch.stack(logprobs, 1))
        rows = zip(self.prompts, torch.stack(chosen, 1).tolist(), given.tolist(), strict=True)
        return [self._text(prompt, *row, has_logprobs=kind.has_logprobs) for prompt, *row in rows]

    def _logits_of_the_base(self, written: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the base's logits of the next token, without the cache of the model with the adapter."""
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with self.model.disable_adapter():
            output = self.model(input_ids=written, attention_mask=mask, position_ids=positions, use_cache=False)
        logits: torch.Tensor = output.logits
        return logits[:, -1].float()

    def _text(self, prompt: list[int], ids: list[int], logprobs: list[float], *, has_logprobs: bool) -> Text:
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
        given = Case(**{**_fields(case), "adapters": both}) if "earlier step" in name else case
        started = time.process_time()
        report = check_text(given, texts)
        ratio = (time.process_time() - started) / one_pass_s
        said = " ".join(line.strip() for line in report.lines())
        is_consistent = report.verdict == "consistent"
        # an earlier step that is named wrote its texts, and is no fault
        is_right = is_consistent == (name in HEALTHY or name == "earlier step")
        is_named = ""
        if kind.wanted:
            is_named = "yes" if kind.wanted in said else "no"
        tokens = sum(len(text.text) for text in texts)
        print(f"{name:30}{tokens:8}{ratio:12.1f}  {'yes' if is_right else 'NO':6}{is_named:6}{said[:150]}", flush=True)


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in ("name", "base", "adapter", "dtype")}


if __name__ == "__main__":
    main()
