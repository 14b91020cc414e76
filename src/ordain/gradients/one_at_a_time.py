"""Per-example gradients one example at a time: slow, obviously right, and what tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def per_example_loop(loss: Callable[[int], Tensor], size: int, parameters: Iterable[Tensor]) -> Tensor:
    """``[size, d]``: row i is the gradient of ``loss(i)``, the loss of example i alone.

    Args:
        loss: runs the model on example i and gives its scalar loss.
        size: the number of examples.
        parameters: in the order in which their gradients are joined; those without one give zeros.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> per_example_loop(lambda i: (w * i).sum(), 3, [w])
    tensor([[0., 0.],
            [1., 1.],
            [2., 2.]])
    """
    trained = list(parameters)
    rows = []
    for i in range(size):
        grads = torch.autograd.grad(loss(i), trained, materialize_grads=True)
        rows.append(torch.cat([grad.reshape(-1) for grad in grads]))
    return torch.stack(rows)
