"""The compiled products of a batch's few rows against BLAS: what keeps them."""

from __future__ import annotations

import torch

from benchmarks.timing import interleaved, median_ratio
from ordain.gradients.small import add_products

SIZES = ((64, 784), (64, 4096), (32, 65_536), (20, 200_000), (128, 1024))


def run() -> dict[str, float]:
    torch.set_num_threads(1)
    results = {}
    for size, d in SIZES:
        made, vectors = torch.randn(size, d), torch.randn(2, d)
        gram, dots = torch.zeros(size, size), torch.zeros(2, size)

        def ours(made=made, vectors=vectors, gram=gram, dots=dots, repeat=max(1, 2_000_000 // (size * d))) -> None:
            for _ in range(repeat):
                add_products(made, vectors, gram, dots)

        def blas(made=made, vectors=vectors, gram=gram, dots=dots, repeat=max(1, 2_000_000 // (size * d))) -> None:
            for _ in range(repeat):
                gram.addmm_(made, made.T)
                dots.addmm_(vectors, made.T)

        seconds = interleaved({"ours": ours, "blas": blas}, rounds=9)
        ratio = median_ratio(seconds["blas"], seconds["ours"])
        print(f"  Gram matrix and two products of {size} rows of {d:,}: BLAS takes {ratio:.1f} times our time")
        results[f"blas over ours, {size} x {d}"] = ratio
    return results
