"""Stage `adapter`: the adapter's bytes on the device against its file."""
