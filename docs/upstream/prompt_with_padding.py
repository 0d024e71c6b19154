"""PEFT: a text with padding before it is answered otherwise with a prompt, whose tokens PEFT puts before the padding.

Needs torch, transformers and peft, no download and no GPU:

    python prompt_with_padding.py
"""

import peft
import torch
import transformers

print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
)
ids = torch.arange(3, 11)[None]
padded = torch.nn.functional.pad(ids, (3, 0))
for name in ("PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"):
    torch.manual_seed(0)
    adapter = getattr(peft, name)(num_virtual_tokens=4, task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        alone, beside = (
            model.generate(
                input_ids=text, attention_mask=(text > 0).long(), max_new_tokens=1, do_sample=False, pad_token_id=0,
                output_logits=True, return_dict_in_generate=True,
            ).logits[0]
            for text in (ids, padded)
        )  # fmt: skip
    print(f"{name}: logits of float64 are off by {float((alone - beside).abs().max()):.2g} with padding")
