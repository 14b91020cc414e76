"""How many bytes a rank sends a step, by how ranks share: from the shapes of a model's layers, in float32.

Counted is what a rank contributes, once: what a network makes of it (a ring passes W - 1 contributions on, a server
sends something back) is the same factor for all of them. The optimizer's own exchange of d numbers comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DIGITS", "MODELS", "Layer", "payload"]

_FLOAT = 4


@dataclass(frozen=True)
class Layer:
    """One layer as the exact engine sees it: ``outputs`` x ``inputs`` weights, met at ``steps`` places of an example.

    Attributes:
        inputs: columns of the weight.
        outputs: rows of it.
        steps: T: tokens, or places of a convolution.
        bias: whether ``outputs`` numbers are added.
        table: whether it is an embedding, of which an example touches ``steps`` rows.
    """

    inputs: int
    outputs: int
    steps: int = 1
    bias: bool = True
    table: bool = False

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return self.outputs * (self.inputs + self.bias)

    @property
    def exact(self) -> int:
        """The numbers that say an example's gradient: its factors, or the gradient if that is smaller."""
        if self.table:  # ids, and what is added to their rows
            return min(self.steps * (self.inputs + 1), self.numel)
        return min(self.steps * (self.inputs + self.outputs), self.numel)


def _norm(width: int) -> Layer:
    return Layer(1, width)


def _bert(tokens: int, width: int, blocks: int) -> tuple[Layer, ...]:
    """BERT with heads for two classes; an example is ``tokens`` long."""
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
    """Bytes that a rank with ``each`` examples a step contributes to it.

    - exact: the factors of its examples, or their gradients, layer by layer, whichever is less.
    - exact with a sketch: ``sketch`` numbers an example.
    - sum: the d numbers that it has added to s, and a byte an example for its sign, from which all make the order.
      Centred vectors need d numbers more an epoch, for the mean: not counted here.
    - cd-grab: the gradients of its examples, d numbers each.
    - independent, rr: nothing.
    """
    d = sum(layer.numel for layer in layers)
    if method == "exact":
        return _FLOAT * each * (sum(layer.exact for layer in layers) if sketch is None else sketch)
    return {"sum": _FLOAT * d + each, "cd-grab": _FLOAT * each * d, "independent": 0, "rr": 0}[method]
