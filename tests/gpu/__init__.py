"""What only real accelerators can show; where the software accelerator can stand in, the same tests run on it."""
