"""Planted faults of the stage `forward`. No torch here."""

from __future__ import annotations

from consistency.case import standard
from consistency.case.stage import Level
from consistency.worker.faults.fault import Fault, Need

_PLANTED = "consistency.stages.forward.planted"
_ROUTING = "consistency.stages.forward.planted_routing"
_SHAPES = "consistency.stages.forward.planted_shapes"
_STAGES = (standard.FORWARD,)

ROWS: tuple[Fault, ...] = (
    Fault(
        name="forward-off", plant=f"{_PLANTED}:results_off", expected="wrong-scale", stages=_STAGES,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="forward-layer-zero", plant=f"{_PLANTED}:layer_zero", expected="differs", stages=_STAGES,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="forward-fails", plant=f"{_PLANTED}:operator_fails", expected="missing", stages=_STAGES,
        needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="router-flipped", plant=f"{_ROUTING}:smallest", expected="decision-flipped", stages=_STAGES,
        base=f"python:{_ROUTING}:mixture", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="rows-beyond-64", plant=f"{_SHAPES}:beyond_64_rows", expected="block", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="rows-beyond-128", plant=f"{_SHAPES}:beyond_128_rows", expected="block", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="rows-beyond-512", plant=f"{_SHAPES}:beyond_512_rows", expected="block", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="last-tile", plant=f"{_SHAPES}:last_tile", expected="block", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="window-of-16", plant=f"{_SHAPES}:wide_window_of_16", expected="block", stages=_STAGES,
        base=f"python:{_SHAPES}:window_of_16", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="window-of-128", plant=f"{_SHAPES}:wide_window_of_128", expected="block", stages=_STAGES,
        base=f"python:{_SHAPES}:window_of_128", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="window-of-1024", plant=f"{_SHAPES}:wide_window_of_1024", expected="block", stages=_STAGES,
        base=f"python:{_SHAPES}:window_of_1024", level=Level.THOROUGH, needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="one-query", plant=f"{_SHAPES}:one_query", expected="wrong-scale", stages=(standard.OPERATORS,),
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="head-size-64", plant=f"{_SHAPES}:head_of_64", expected="wrong-scale", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="head-size-128", plant=f"{_SHAPES}:head_of_128", expected="wrong-scale", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_128", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="long-keys", plant=f"{_SHAPES}:long_keys", expected="wrong-scale", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="batch-of-1", plant=f"{_SHAPES}:batch_of_1", expected="wrong-scale", stages=_STAGES,
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
    Fault(
        name="batch-of-9", plant=f"{_SHAPES}:batch_of_9", expected="wrong-scale", stages=(standard.OPERATORS,),
        base=f"python:{_SHAPES}:heads_of_64", needs=(Need.ANOTHER_WORKER,),
    ),
)  # fmt: skip
