"""Start workers and watch them."""
