"""Orders over the ranks of a data-parallel run: see docs/distributed.md."""

from ordain.distributed.rank_view import Distributed, Mode, TorchDistributed
from ordain.distributed.stateful import stateful
from ordain.orders.coordination import register_provider

__all__ = ["Distributed", "Mode", "stateful"]

register_provider(TorchDistributed())
