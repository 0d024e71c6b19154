"""List every planted fault: of a worker's process in `rows`, of stages and plug-ins beside the code that they break.

Drill, tests and documents read these rows. No torch here: a fault's module is imported when it is planted.
"""

from __future__ import annotations

from collections.abc import Iterator

from consistency import plugins
from consistency.case.stages import stage_order
from consistency.worker.faults import rows
from consistency.worker.faults.fault import Fault


def _declared() -> Iterator[Fault]:
    for module in plugins.modules_of("stages", "faults"):
        yield from module.ROWS
    for _, plugin_faults in plugins.offered("faults"):
        yield from plugin_faults
    yield from rows.ROWS


FAULTS: dict[str, Fault] = {
    fault.name: fault for fault in sorted(_declared(), key=lambda fault: stage_order(fault.stages[0]))
}
"""Every fault by its name, in the order of the drill: the order of the stages that find them."""
