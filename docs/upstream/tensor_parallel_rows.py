"""Train a LoRA on a layer that a tensor parallel plan splits by rows, which raises, and on one split by columns.

torchrun --nproc-per-node 2 docs/upstream/tensor_parallel_rows.py
"""

import tempfile

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from transformers.distributed import DistributedConfig

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
if dist.get_rank() == 0:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=97,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder[0])
dist.barrier()
ids = torch.arange(32).view(2, 16)
for target, split in (("q_proj", "columns"), ("o_proj", "rows")):
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder[0], distributed_config=DistributedConfig(tp_size=dist.get_world_size())
    )
    model = get_peft_model(base, LoraConfig(target_modules=[target], init_lora_weights=False))
    with torch.no_grad():
        model(input_ids=ids)
    (factor,) = (
        m for name, m in model.named_modules() if name.endswith("layers.0.self_attn." + target + ".lora_A.default")
    )
    said = f"{target}, split by {split}: lora_A reads {factor.in_features} of {base.config.hidden_size} features; "
    try:
        model(input_ids=ids, labels=ids).loss.backward()
        said += "forward and backward pass"
    except RuntimeError as error:
        said += f"forward passes without gradients, and with them: {error}"
    if dist.get_rank() == 0:
        print(said)
dist.destroy_process_group()
