"""Stage `generation`: the same tokens in other ways, with a cache or in a batch; and the text that a device writes."""
