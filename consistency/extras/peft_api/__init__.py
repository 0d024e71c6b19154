"""Checks of what PEFT and transformers do to a model besides loading an adapter: so far, of wrapping it."""
