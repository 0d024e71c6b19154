"""Run LongT5 in float16 on a text with padding after it: its mask of -1e10 is -inf there, and rows of it are NaN.

python docs/upstream/longt5_mask_in_float16.py
"""

import torch
import transformers

print(f"torch {torch.__version__}, transformers {transformers.__version__}")
torch.manual_seed(0)
config = transformers.LongT5Config(
    vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, local_radius=8
)
model = transformers.LongT5Model(config).eval()
ids = torch.arange(2, 34)[None]
padded = torch.nn.functional.pad(ids, (0, 7))
for dtype in (torch.bfloat16, torch.float16):
    for name, text in (("alone", ids), ("padded", padded)):
        with torch.no_grad():
            found = model.to(dtype)(text, attention_mask=(text != 0).long(), decoder_input_ids=ids).last_hidden_state
        print(f"{dtype} {name}: {int(found.isnan().sum())} of {found.numel()} elements are NaN")
