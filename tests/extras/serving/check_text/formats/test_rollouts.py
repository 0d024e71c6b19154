"""What a healthy model wrote is consistent in the form of each tool, and a changed token is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from consistency.extras.serving.check_text.judge_texts import check_text
from consistency.extras.serving.check_text.texts import read_texts
from tests.worker.model.made_models import case_of, on_llama

pytestmark = [pytest.mark.filterwarnings("ignore")]  # PEFT and transformers warn

PROMPT = [5, 9, 33, 2]
LORA = peft.LoraConfig(r=8, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])


def as_vllm(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    steps = [{str(one): {"logprob": value, "rank": 1}} for one, value in zip(ids, logprobs, strict=True)]
    return {"prompt_token_ids": PROMPT, "outputs": [{"index": 0, "token_ids": ids, "logprobs": steps}]}


def as_sglang(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    triples = [[value, one, None] for one, value in zip(ids, logprobs, strict=True)]
    return {"text": "", "prompt_token_ids": PROMPT, "meta_info": {"output_token_logprobs": triples}}


def as_trl(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {
        "prompt_ids": [[0, 0, *PROMPT]], "prompt_mask": [[0, 0, 1, 1, 1, 1]], "completion_ids": [[*ids, 0]],
        "completion_mask": [[*[1] * len(ids), 0]], "sampling_per_token_logps": [[*logprobs, 0.0]],
    }  # fmt: skip


def as_prime_rl(ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    mask = [*[0] * len(PROMPT), *[1] * len(ids)]
    return {"token_ids": PROMPT + ids, "loss_mask": mask, "inference_logprobs": [*[0.0] * len(PROMPT), *logprobs]}


def test_healthy_rollouts_are_consistent_and_a_changed_token_is_not(llama: Path, tmp_path: Path) -> None:
    case = case_of(llama, on_llama(llama, LORA))
    base = transformers.AutoModelForCausalLM.from_pretrained(case.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, case.adapter).eval()
    ids = torch.tensor([PROMPT])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, min_new_tokens=8,
        pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    wrote = out.sequences[0, -8:].tolist()
    logprobs = [float(one[0].log_softmax(-1)[token]) for one, token in zip(out.logits, wrote, strict=True)]
    path = tmp_path / "rollouts.jsonl"
    records = [as_tool(wrote, logprobs) for as_tool in (as_vllm, as_sglang, as_trl, as_prime_rl)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    healthy = check_text(case, read_texts(path))
    assert (healthy.verdict, len(healthy.texts)) == ("consistent", 4)
    wrote[4] = (wrote[4] + 1) % 64
    path.write_text(json.dumps(as_prime_rl(wrote, logprobs)) + "\n")
    assert check_text(case, read_texts(path)).verdict == "inconsistent"
