"""Stage `adapters`: several adapters in one model."""
