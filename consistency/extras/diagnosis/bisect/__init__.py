"""Which setting explains a finding."""
