"""What a case takes of memory and time, estimated before a worker starts: from headers, config and processor alone."""
