"""What is checked: options, load paths, tolerances, and what can be checked before a worker starts."""
