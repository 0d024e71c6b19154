"""Facts of a host that explain a copy that delivers the wrong bytes. No torch here.

Read by the parent process before and after a run. A fact that cannot be read is left out, and `HostFacts.unread`
states why.
"""

from consistency.devices.host.facts import Gpu, HostFacts, Link
from consistency.devices.host.reading import read_host, since

__all__ = ["Gpu", "HostFacts", "Link", "read_host", "since"]
