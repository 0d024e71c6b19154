"""What is done to a model by PEFT's and transformers' interfaces besides loading an adapter: wrapping it."""
