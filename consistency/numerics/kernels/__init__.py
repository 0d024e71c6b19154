"""The compiled and the Triton kernel, and when either may be trusted."""
