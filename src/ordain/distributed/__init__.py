"""Orders over the ranks of a data-parallel run: see docs/distributed.md."""

from ordain.distributed.share import Distributed
from ordain.distributed.stateful import stateful

__all__ = ["Distributed", "stateful"]
