"""PEFT: Arrow's routing depends on the vector that a power iteration starts from, which each device draws itself.

Needs torch, transformers and peft, no download and no GPU; two seeds stand for the generators of two devices:

    python arrow_depends_on_the_seed.py
"""

import tempfile
from pathlib import Path

import peft
import torch
import transformers

CONFIG = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
)


def base() -> torch.nn.Module:
    """Return the same model every time."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG).eval()


print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
with tempfile.TemporaryDirectory() as folder:
    paths = [str(Path(folder) / str(number)) for number in range(4)]
    for number, path in enumerate(paths):
        model = base()
        torch.manual_seed(number + 1)
        config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(model, config).save_pretrained(path)
    ids = torch.arange(64).reshape(2, 32)
    found = []
    for seed in (0, 1):
        config = peft.ArrowConfig(top_k=1, rng_seed=seed)
        model = peft.create_arrow_model(base(), paths, config).eval()
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        layer = model.base_model.model.model.layers[0].self_attn.q_proj
        found.append((logits, layer.lora_arrow["arrow_router"].prototypes))
    exact = torch.stack(
        [
            torch.linalg.svd((layer.lora_B[f"task_{n}"].weight @ layer.lora_A[f"task_{n}"].weight).detach())[2][0]
            for n in range(4)
        ]
    )
    for seed, (_, prototypes) in enumerate(found):
        cosines = (prototypes * exact).sum(1).abs()
        print(f"seed {seed}: |cosine| with the first singular vector: {', '.join(f'{c:.4f}' for c in cosines)}")
    (one, _), (two, _) = found
    moved = (one - two).abs().max()
    print(f"logits differ by up to {moved:.2g} of {one.abs().max():.2g} between the two seeds")
