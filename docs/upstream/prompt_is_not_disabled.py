"""PEFT: `disable_adapter` of a prompt on a model that does not generate ends in an UnboundLocalError.

Needs torch, transformers and peft, no download and no GPU:

    python prompt_is_not_disabled.py
"""

import peft
import torch
import transformers

config = transformers.BertConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
)
prompt = peft.PromptTuningConfig(num_virtual_tokens=4, task_type="SEQ_CLS")
model = peft.get_peft_model(transformers.BertForSequenceClassification(config), prompt).eval()
ids = torch.arange(8).reshape(1, 8)

print(f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}")
print(f"with the prompt: logits of shape {tuple(model(input_ids=ids).logits.shape)}")
try:
    with model.disable_adapter():
        model(input_ids=ids)
except UnboundLocalError as error:
    print(f"without it: UnboundLocalError: {error}")
else:
    print("without it: it runs")
