"""PEFT: an AdaLoRA adapter whose ranks were pruned cannot be loaded a second time: an IndexError.

Needs torch, transformers and peft, no download and no GPU:

    python adalora_loads_once.py
"""

import tempfile

import peft
import torch
import transformers


def base() -> torch.nn.Module:
    """Make a model of one layer, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config)


print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
with tempfile.TemporaryDirectory() as folder:
    config = peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"])
    model = peft.get_peft_model(base(), config)
    # what training leaves in the config: which of the four ranks are kept
    name = "model.layers.0.self_attn.q_proj.lora_E.default"
    model.peft_config["default"].rank_pattern = {name: [True, False, True, False]}
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base(), folder)
    layer = loaded.base_model.model.model.layers[0].self_attn.q_proj
    print(f"loaded once: lora_A of shape {tuple(layer.lora_A['default'].shape)}")
    try:
        loaded.load_adapter(folder, "default")
    except IndexError as error:
        print(f"loaded again: IndexError: {error}")
    else:
        print("loaded again")
