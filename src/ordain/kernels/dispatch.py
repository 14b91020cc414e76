"""Products of the few rows of a batch: compiled where that is faster than BLAS, which is built for larger matrices."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

FEW_EXAMPLES, FEW_ROWS = 128, 32  # up to here the compiled products win (``make bench``)
DTYPES = (torch.float32, torch.float64)


def compiled(*tensors: Tensor) -> bool:
    """Are the compiled products of these faster than BLAS? Few rows in the first."""
    return tensors[0].shape[0] <= FEW_EXAMPLES and on_cpu(*tensors)


def on_cpu(*tensors: Tensor) -> bool:
    """Can compiled loops take these at all? One dtype, on the CPU."""
    first = tensors[0].dtype
    return first in DTYPES and all(t.dtype is first and t.device.type == "cpu" for t in tensors)


def add_products(grads: Tensor, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
    """Gram += grads grads' (where j >= i, at least) and dots += vectors grads', for ``[B, m]`` and ``[k, m]``."""
    if not compiled(grads, vectors, gram):
        gram.addmm_(grads, grads.T)
        dots.addmm_(vectors, grads.T)
        return
    from ordain.kernels import products

    rows, flat, totals = grads.contiguous().numpy(), vectors.numpy(), dots.numpy()
    count = len(flat)
    first, second = (flat[min(i, count - 1)] if count else rows[0] for i in (0, 1))
    into = [totals[min(i, count - 1)] if count else np.empty(len(rows), rows.dtype) for i in (0, 1)]
    products.row_products(rows, min(count, 2), first, second, gram.numpy(), into[0], into[1])
    if count > 2:
        dots[2:].addmm_(vectors[2:], grads.T)


def row_dots(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out[i] = <a_i, b_i>, for ``[N, m]`` each."""
    if not on_cpu(a, b):
        torch.linalg.vecdot(a, b, out=out)
        return
    from ordain.kernels import products

    products.row_dots(a.numpy(), b.numpy(), out.numpy())


def norm_sums(x: Tensor, b: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``[B, C]`` each: sums over T of b * layer_norm(x), and of b, for ``[B, T, C]``."""
    from ordain.kernels import products

    weight, bias = x.new_empty(x.shape[0], x.shape[2]), x.new_empty(x.shape[0], x.shape[2])
    products.norm_sums(x.contiguous().numpy(), b.contiguous().numpy(), eps, weight.numpy(), bias.numpy())
    return weight, bias


def differences(gram: Tensor, dots: Tensor) -> tuple[Tensor, Tensor]:
    """From products of g_1, g_2, ... to those of g_1 - g_2, g_3 - g_4, ...; right where j >= i, as gram is."""
    from ordain.kernels import products

    half = len(gram) // 2
    new_gram, new_dots = gram.new_zeros(half, half), dots.new_empty(len(dots), half)
    if gram.is_cuda:
        blocks = gram.view(half, 2, half, 2)
        new_gram += blocks[:, 0, :, 0] - blocks[:, 0, :, 1] - blocks[:, 1, :, 0] + blocks[:, 1, :, 1]
        # On the diagonal, one of the two that are subtracted is below gram's and need not be right.
        new_gram.diagonal().add_(blocks[:, 1, :, 0].diagonal() - blocks[:, 0, :, 1].diagonal())
        return new_gram, dots[:, 0::2] - dots[:, 1::2]
    products.pair_products(gram.numpy(), dots.numpy(), new_gram.numpy(), new_dots.numpy())
    return new_gram, new_dots


def mirrored(gram: Tensor) -> Tensor:
    """The symmetric matrix whose upper triangle this is."""
    return gram.triu() + gram.triu(1).T
