"""The bytes that a rank sends in a step, from the shapes of a model's layers in float32.

Counts each contribution once: how often a network passes it on (W - 1 times in a ring, back and forth with a server) is
the same factor for all methods. The optimizer's own exchange of d numbers comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

_FLOAT = 4


@dataclass(frozen=True)
class Layer:
    """One layer, with a weight of ``outputs`` x ``inputs``."""

    inputs: int
    outputs: int
    steps: int = 1  # T, the number of tokens, or of positions of a convolution, in one example
    bias: bool = True
    table: bool = False  # an embedding, of which an example uses ``steps`` rows

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return self.outputs * (self.inputs + self.bias)

    @property
    def exact(self) -> int:
        """The numbers that determine an example's gradient: its factors, or the gradient itself if that is smaller."""
        factors = self.inputs + (1 if self.table else self.outputs)  # of an embedding: the ids and their rows
        return min(self.steps * factors, self.numel)


def _norm(width: int) -> Layer:
    return Layer(1, width)


def _bert(tokens: int, width: int, blocks: int) -> tuple[Layer, ...]:
    """BERT with a head for two classes, on examples of ``tokens`` tokens."""
    block = (
        *(Layer(width, width, tokens) for _ in range(4)),
        Layer(width, 4 * width, tokens),
        Layer(4 * width, width, tokens),
        _norm(width),
        _norm(width),
    )
    tables = [Layer(width, rows, tokens, bias=False, table=True) for rows in (30_522, 512, 2)]
    return (*tables, _norm(width), *(block * blocks), Layer(width, width), Layer(width, 2))


DIGITS = (Layer(64, 10),)
MODELS: dict[str, tuple[Layer, ...]] = {
    "logistic 784-10": (Layer(784, 10),),
    "MLP 4 x 1024": (*(Layer(1024, 1024) for _ in range(4)), Layer(1024, 10)),
    "LeNet": (Layer(75, 6, 28 * 28), Layer(150, 16, 100), Layer(400, 120), Layer(120, 84), Layer(84, 10)),
    "tiny BERT, T=32": _bert(32, 128, 2),
}


def payload(layers: tuple[Layer, ...], method: str, *, each: int, sketch: int | None = None) -> int:
    """The bytes that a rank with ``each`` examples per step contributes to it.

    - exact: the factors or the gradients of its examples, whichever is smaller, layer by layer.
    - exact with a sketch: ``sketch`` numbers per example.
    - sum: the d numbers that it has added to s, and one byte per example for its sign.
      Centred vectors need another d numbers per epoch for the mean, which are not counted here.
    - cd-grab: the gradients of its examples, d numbers each.
    - independent, rr: nothing.
    """
    d = sum(layer.numel for layer in layers)
    if method == "exact":
        return _FLOAT * each * (sum(layer.exact for layer in layers) if sketch is None else sketch)
    return {"sum": _FLOAT * d + each, "cd-grab": _FLOAT * each * d, "independent": 0, "rr": 0}[method]
