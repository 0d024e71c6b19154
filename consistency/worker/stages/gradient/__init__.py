"""Stage `gradient`: one backward pass and one optimizer step."""
