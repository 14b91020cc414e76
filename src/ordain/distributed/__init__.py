"""Orders over the ranks of a data-parallel run: see docs/distributed.md."""

from ordain.distributed.share import Distributed

__all__ = ["Distributed"]
