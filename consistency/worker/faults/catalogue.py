"""Every planted fault: those of a worker's process here, and those of stages and plug-ins beside what they break.

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
    for _, of_plugin in plugins.offered("faults"):
        yield from of_plugin
    yield from rows.ROWS


FAULTS: dict[str, Fault] = {
    fault.name: fault for fault in sorted(_declared(), key=lambda fault: stage_order(fault.stages[0]))
}
"""Every fault by its name, in the order of the drill: that of the stages that find them."""
