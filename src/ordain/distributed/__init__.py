"""Orders over the ranks of a data-parallel run: see docs/distributed.md."""

from ordain.distributed.rank_view import Distributed, Mode, view_for
from ordain.distributed.stateful import stateful
from ordain.orders.view import register_views

__all__ = ["Distributed", "Mode", "stateful"]

register_views(view_for)
