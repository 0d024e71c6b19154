"""One module per stage: what is looked at, and by which rule."""
