"""Test files of public projects, rewritten with `consistency.testing`: each finds the mistake its thread is about.

    python -m pytest benchmarks/rewritten_tests/rms_norm.py benchmarks/rewritten_tests/attention.py \
        benchmarks/rewritten_tests/lora_merge.py

The kernels are for GPUs, so what is tested here are functions that compute as they do, block by block, on the CPU. The
tolerances of the original tests stand beside, and what they let through.
"""
