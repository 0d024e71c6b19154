"""PEFT: Poly's tasks do not reach its layers if the adapter has no task type.

Needs torch, transformers and peft, no download and no GPU:

    python poly_without_task_type.py
"""

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
ids, tasks = torch.arange(8).reshape(2, 4), torch.tensor([0, 1])
for task_type in ("CAUSAL_LM", None):
    config = peft.PolyConfig(r=2, n_tasks=2, target_modules=["q_proj"], task_type=task_type)
    model = peft.get_peft_model(base(), config)
    try:
        model(input_ids=ids, task_ids=tasks)
    except ValueError as error:
        print(f"task_type={task_type}: ValueError: {error}")
    else:
        print(f"task_type={task_type}: it runs")
