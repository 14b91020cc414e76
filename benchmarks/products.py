"""The compiled products of a batch's few rows against BLAS: what keeps them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ordain.kernels.dispatch import add_products
from torch import Tensor

from benchmarks.timing import interleaved, median_ratio

SIZES = ((64, 784), (64, 4096), (32, 65_536), (20, 200_000), (128, 1024))


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    results = {}
    for size, d in SIZES:
        seconds = interleaved({"ours": job(add_products, size, d), "blas": job(by_blas, size, d)}, rounds=9)
        ratio = median_ratio(seconds["blas"], seconds["ours"])
        print(f"  Gram matrix and two products of {size} rows of {d:,}: BLAS takes {ratio:.1f} times our time")
        results[f"blas over ours, {size} x {d}"] = ratio
    return results


def by_blas(made: Tensor, vectors: Tensor, gram: Tensor, dots: Tensor) -> None:
    gram.addmm_(made, made.T)
    dots.addmm_(vectors, made.T)


def job(products: Callable[[Tensor, Tensor, Tensor, Tensor], None], size: int, d: int) -> Callable[[], None]:
    made, vectors = torch.randn(size, d), torch.randn(2, d)
    gram, dots = torch.zeros(size, size), torch.zeros(2, size)

    def go() -> None:
        for _ in range(max(1, 2_000_000 // (size * d))):
            products(made, vectors, gram, dots)

    return go
