"""What a saved adapter holds, and whether it is whole, trained, and what its config says. No torch here."""
