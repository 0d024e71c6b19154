"""A wrapper around a model: whether PEFT, transformers and trainers still find the model inside it."""
