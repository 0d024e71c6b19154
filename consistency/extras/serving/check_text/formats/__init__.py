"""What engines and trainers write: each tool is a file of this folder, which `registry` finds by its `FORMAT`."""
