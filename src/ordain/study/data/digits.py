"""The digits that ship with scikit-learn."""

from __future__ import annotations

import numpy as np

from ordain.study.data.content import Shelf
from ordain.study.data.kinds import Labelled, Splits

__all__ = ["read_digits"]


def read_digits(shelf: Shelf) -> Splits:
    """Pixels float32 ``[n, 64]`` in [0, 1]; a fixed fifth, with as many of each digit, is test."""
    from sklearn.datasets import load_digits  # takes a while to import
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    x, test_x, y, test_y = train_test_split(pixels / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    return Splits(
        train=Labelled(x.astype(np.float32), y.astype(np.int64)),
        test=Labelled(test_x.astype(np.float32), test_y.astype(np.int64)),
    )
