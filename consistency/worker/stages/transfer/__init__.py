"""Stage `transfer`: copies between devices and the host."""
