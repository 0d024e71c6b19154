"""What this process takes of memory, on the host and on its devices."""
