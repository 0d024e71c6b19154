"""Count what a run on eight H100 takes, from the shapes of a model and the constants of the code; nothing is run.

    python -m benchmarks.on_paper            # print the generated parts of `docs/on-paper.md`
    python -m benchmarks.on_paper --write    # put them into the page

`consistency run --base BASE --adapter ADAPTER` at level `standard` on a host with eight GPUs and 64 cores, in bfloat16,
with a LoRA of rank 16 on all linear layers. Workers, waves and threads are those that `launch` plans; sequences, passes
and sampled rows those that the stages take. Here are formulas (`counts.py`) and the rates of the hardware
(`machine.py`). What an element of a result takes on the host is measured by `benchmarks.host_rates`.
"""
