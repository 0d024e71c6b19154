"""PEFT with transformers 5.24: a prompt is answered otherwise with a cache, which PEFT looks for under its former name.

Needs torch, transformers and peft, no download and no GPU:

    python prompt_without_cache.py
"""

import peft
import torch
import transformers

print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
)
ids = torch.arange(3, 11)[None]
for name in ("PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"):
    torch.manual_seed(0)
    adapter = getattr(peft, name)(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        text = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        written = text.sequences
        whole = model(input_ids=written, attention_mask=torch.ones_like(written)).logits[:, -2]
    error = float((text.logits[-1] - whole).abs().max())
    print(f"{name}: logits of float64 at the fourth token are off by {error:.2g} with a cache")
