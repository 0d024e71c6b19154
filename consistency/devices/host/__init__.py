"""What a machine is beside its devices: what explains a copy that delivers the wrong bytes. No torch here.

Read by the parent process before and after a run. Everything degrades: a fact that cannot be read is left out, and
`Box.unread` says why.
"""

from consistency.devices.host.facts import Gpu, HostFacts, Link
from consistency.devices.host.reading import read_host, since

__all__ = ["Gpu", "HostFacts", "Link", "read_host", "since"]
