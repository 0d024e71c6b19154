"""The options of a fleet, each declared once; options of the case that its nodes check are in `case/options.py`."""

from __future__ import annotations

from dataclasses import dataclass

from consistency.case.options import Option, declare, declared

SCHEDULERS: dict[str, str] = {
    "slurm": "consistency.extras.operations.fleet.schedulers.slurm:SlurmScheduler",
    "ray": "consistency.extras.operations.fleet.schedulers.ray:RayScheduler",
}
"""Places of the classes of schedulers, by name; one is made with the options of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Everything a user can set about a fleet, as parsed values."""

    engine: str = declare("", "what starts the captures", choices=tuple(SCHEDULERS))
    nodes: str | None = declare(
        None,
        "nodes as the engine writes them, gpu[001-128],login1, or all (default: those of the allocation that "
        "this runs in)",
        "LIST",
    )
    store: str | None = declare(
        None, "folder or URL that every node can write to, for its capture and progress (default: OUT/captures)", "URL"
    )
    gpus: int | None = declare(
        None, "accelerators that each node must have; also requested from the engine", "N", type=int
    )
    partition: str | None = declare(None, "Slurm partition", "NAME")
    account: str | None = declare(None, "Slurm account", "NAME")
    exclusive: bool = declare(False, "reserve whole nodes, including all memory", type=bool)
    engine_args: tuple[str, ...] = declare(
        (), 'more arguments for sbatch or srun: "--qos=low --time=30"; may be repeated', "TEXT", repeatable=True
    )
    command: str | None = declare(
        None,
        'what starts this tool on a node (default: this interpreter): "apptainer exec --nv tool.sif consistency"',
        "TEXT",
    )
    node_timeout: float | None = declare(
        None, "how long a node may take, waiting for it included: 90s, 10m, 2h (default: no limit)", "TIME"
    )
    node_stall: float = declare(60.0, "seconds a running node may be silent (default: 60)", "S", type=float)
    together: bool = declare(
        False,
        "one group of the devices of all nodes, in place of one per node, for the stages of devices together; "
        "--store is a folder that all nodes see",
        type=bool,
    )
    resume: bool = declare(False, "keep what an earlier run delivered to --out, and start only the rest", type=bool)


FLEET_OPTIONS: tuple[Option, ...] = declared(FleetOptions)
