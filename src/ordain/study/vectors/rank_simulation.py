"""Herding on W ranks, simulated in one process: the quality of the order by what the ranks share.

Position p of an epoch's order belongs to rank p mod W, so a step of b examples per rank is W b consecutive positions.
The vectors are the same in every epoch, as gradients nearly are; means are those of the epoch before, and 0 in the
first (Algorithm 4). Signs are those of Algorithm 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ordain.errors import InputError
from ordain.herding import rearranged
from ordain.study.vectors.vector_study import (
    Figures,
    Floats,
    Ints,
    Names,
    Point,
    Record,
    Seeds,
    Table,
    estimate,
    settings,
    where,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Indices = NDArray[np.int64]

_TRAINED, _RATE, _BATCH = 5, 0.1, 32  # epochs of SGD before gradients are taken
_LEVELS = 16  # grey levels of a digit

METHODS = {
    "rr": "a new random order each epoch",
    "exact": "every rank knows the gradients of all ranks, as in one process",
    "sum": "each rank balances its examples against the sum at the start of the step; then the sums are added",
    "independent": "each rank orders a fixed shard, without communication",
    "cd-grab": "fixed shards; a server balances the pairs of a step, one rank after another",
}


# Label and style by (method, paired), in the order of the legend. There are fewer colours than lines: both kinds of
# ``independent`` share one, and sketches have those of ``exact``.
_LINES = {
    ("rr", False): ("RR", 0),
    ("exact", False): ("exact, mean", 1),
    ("exact", True): ("exact, pair", 2),
    ("sum", False): ("sum, mean", 3),
    ("sum", True): ("sum, pair", 4),
    ("independent", False): ("independent, mean", 5),
    ("independent", True): ("independent, pair", 11),
    ("cd-grab", True): ("CD-GraB", 6),
}
_SKETCH_STYLES = {False: 7, True: 8}
_TITLES = {"uniform": "{n:,} vectors from $[0,1]^{{{d}}}$", "digits": "{n:,} gradients on digits, d = 650"}
_SAME = ("rr", "exact")  # the same order for any number of ranks
_MOST_SHOWN = 64  # ranks in the figure of bytes

# Bytes are counted from the shapes of layers in float32, each contribution once: how often a network passes it on
# (W - 1 times in a ring, back and forth with a server) is the same factor for all methods. The optimizer's own exchange
# of d numbers comes on top.
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


def _bert(tokens: int, width: int, blocks: int) -> tuple[Layer, ...]:
    """BERT with a head for two classes, on examples of ``tokens`` tokens."""
    norm = Layer(1, width)
    block = (
        *(Layer(width, width, tokens) for _ in range(4)),
        Layer(width, 4 * width, tokens),
        Layer(4 * width, width, tokens),
        norm,
        norm,
    )
    tables = [Layer(width, rows, tokens, bias=False, table=True) for rows in (30_522, 512, 2)]
    return (*tables, norm, *(block * blocks), Layer(width, width), Layer(width, 2))


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


@dataclass(frozen=True)
class Sharing:
    """What the ranks share."""

    method: str  # one of METHODS
    paired: bool = False  # balance differences of consecutive vectors instead of centred vectors; CD-GraB always does
    world: int = 1  # W, the number of ranks
    each: int = 1  # b, the examples of a rank in a step; used by "sum" only

    def check(self, n: int) -> None:
        """Every rank needs the same number of the ``n`` vectors, and CD-GraB whole pairs."""
        if self.method not in METHODS:
            raise InputError(f"a method {self.method!r}", expected=f"one of {', '.join(METHODS)}", remedy="Use one.")
        share = 2 * self.world if self.method == "cd-grab" else self.world
        if self.world < 1 or self.each < 1 or n % share:
            raise InputError(
                f"{n:,} vectors on {self.world} ranks, {self.each} a step",
                expected=f"at least one of each, and a multiple of {share}",
                remedy="Use powers of two.",
            )


def simulate(z: NDArray[Any], sharing: Sharing, *, epochs: int, seed: int) -> Iterator[Indices]:
    """The first order of ``z [n, d]``, which is random and depends only on the seed, and the order after each epoch."""
    sharing.check(len(z))
    rng = np.random.default_rng(seed)
    sigma: Indices = rng.permutation(len(z))
    yield sigma
    for epoch in range(epochs):
        sigma = rng.permutation(len(z)) if sharing.method == "rr" else _next(z, sigma, sharing, first=epoch == 0)
        yield sigma


def _next(z: NDArray[Any], sigma: Indices, sharing: Sharing, *, first: bool) -> Indices:
    """The order after an epoch in the order ``sigma``; ``first``: there is no mean from an epoch before."""
    from ordain.study.vectors.compiled import signs_by_steps  # numba is slow to import

    paired, world = sharing.paired, sharing.world

    def alone(visits: Indices) -> NDArray[np.int8]:
        """The signs that one process finds for these vectors."""
        visits = np.ascontiguousarray(visits)  # or the loop is compiled once more, for rows with gaps
        return signs_by_steps(z, visits, 1, len(visits), paired, _mean(z, visits, first))

    if sharing.method == "exact":
        return rearranged(alone(sigma), sigma)
    if sharing.method == "sum":
        return rearranged(signs_by_steps(z, sigma, world, sharing.each, paired, _mean(z, sigma, first)), sigma)
    if sharing.method == "independent":
        signs = np.stack([alone(sigma[rank::world]) for rank in range(world)], axis=1).ravel()
    else:
        # [pair, first or second, rank]: the server takes the first pair of every rank, then the second, ...
        turns = sigma.reshape(-1, 2, world).transpose(0, 2, 1)
        signs = alone(turns.ravel()).reshape(turns.shape).transpose(0, 2, 1).ravel()
    new = np.empty_like(sigma)
    for rank in range(world):  # an example never leaves its rank
        new[rank::world] = rearranged(signs[rank::world], sigma[rank::world])
    return new


def _mean(z: NDArray[Any], rows: Indices, first: bool) -> Floats:
    if first:
        return np.zeros(z.shape[1])
    mean: Floats = (z[rows] if len(rows) < len(z) else z).mean(axis=0, dtype=np.float64)
    return mean


def sketched(z: NDArray[Any], k: int, *, seed: int) -> NDArray[Any]:
    """Sketches ``[n, k]`` of the rows of ``z``, without the columns that are zero for all of them."""
    import torch

    from ordain.gradients import sketch

    block = sketch(torch.from_numpy(z), k, seed=seed).rows()
    small: NDArray[Any] = block.numpy()
    return np.ascontiguousarray(small[:, small.any(axis=0)])


@settings
class RankSimulation:
    """``each`` examples per rank and step, or as many as make ``batch`` examples per step over all ranks."""

    name: ClassVar = "simulate-ranks"
    title: ClassVar = "Orders that W ranks find together, by what they tell each other"
    quick: ClassVar = {"n": 128, "d": 4, "epochs": 2, "worlds": (1, 2, 4), "each": 4, "batch": 8, "sketches": (4, 64)}
    seeds: Seeds = 2
    n: int = 32_768
    d: int = 128
    epochs: int = 10
    worlds: Ints = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    each: int = 16
    batch: int = 1024
    sketches: Ints = (64, 256, 1024, 4096)
    data: Names = ("uniform", "digits")

    def points(self) -> Iterator[Point]:
        """Methods that do not depend on the number of ranks are measured once, as one rank with 0 examples per step."""
        common = {"paired": False, "sketch": 0, "world": 1, "each": 0}
        for data, seed, (method, more) in product(self.data, range(self.seeds), self._methods()):
            yield {"data": data, "seed": seed, "method": method} | common | more

    def _methods(self) -> Iterator[tuple[str, dict[str, int]]]:
        yield "rr", {}
        for paired in (False, True):
            for sketch in (0, *self.sketches):
                yield "exact", {"paired": paired, "sketch": sketch}
            for world in self.worlds:
                yield "independent", {"paired": paired, "world": world}
                for each in sorted({self.each, self.batch // world}):
                    if each > paired:  # a pair of a rank needs two examples of a step
                        yield "sum", {"paired": paired, "world": world, "each": each}
        for world in self.worlds:
            yield "cd-grab", {"paired": True, "world": world}

    def measure(self, point: Point) -> dict[str, Any]:
        """Both norms of the longest prefix sum, in the first order and after each epoch."""
        from ordain.study.vectors.compiled import measure_orders  # numba is slow to import

        z = vectors(point["data"], self.n, self.d, point["seed"])
        sharing = Sharing(point["method"], paired=point["paired"], world=point["world"], each=max(1, point["each"]))
        seen = sketched(z, point["sketch"], seed=point["seed"]) if point["sketch"] else z
        return measure_orders(z, simulate(seen, sharing, epochs=self.epochs, seed=point["seed"]))

    def draw(self, records: list[Record]) -> Figures:
        """Quality by number of ranks, for a fixed batch per rank and in total; and by the bytes that a rank sends."""
        from ordain.study.style import LEGEND, grid_figure

        figure, grid = grid_figure(4.6 * len(self.data) + 2.8, 7.8, rows=2, columns=len(self.data), sharex=True)
        kept = (f"{self.each} examples a rank and step", f"{self.batch:,} examples a step of all ranks")
        for column, name in enumerate(self.data):
            for row in range(2):
                self._draw_by_ranks(grid[row, column], records, name, fixed=bool(row))
                title = _TITLES[name].format(n=self.n, d=self.d)
                grid[row, column].set_title(kept[row] if row else f"{title}\n{kept[row]}", fontsize=10)
            grid[1, column].set_xlabel("ranks W")
        for row in range(2):
            grid[row, 0].set_ylabel(f"longest prefix sum, l2, after {self.epochs} epochs")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, **LEGEND)
        figures = {"quality-by-ranks": figure}
        return figures | {"bytes-and-quality": self._draw_by_bytes(records)} if "digits" in self.data else figures

    def _draw_by_ranks(self, axes: Axes, records: list[Record], data: str, *, fixed: bool) -> None:
        from ordain.study.style import finish, style

        for (method, paired), (label, position) in _LINES.items():
            means = {}
            for world in self.worlds:
                each = self.batch // world if fixed else self.each
                if found := _last_on(world, records, data=data, method=method, paired=paired, each=each):
                    means[world] = np.mean(found)
            if means:
                look = style(position).line(2 if method in _SAME else 1)
                axes.plot(list(means), list(means.values()), label=label, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(self.worlds[::2], [f"{world}" for world in self.worlds[::2]])
        finish(axes)

    def _draw_by_bytes(self, records: list[Record]) -> Figure:
        """For the model on digits, whose gradients these are."""
        from ordain.study.style import LEGEND, finish, grid_figure, style

        world = max((w for w in self.worlds if w <= _MOST_SHOWN), default=self.worlds[0])
        figure, ((axes,),) = grid_figure(8.8, 4.8)
        for (method, paired), (label, position) in _LINES.items():
            found = _last_on(world, records, data="digits", method=method, paired=paired, each=self.each)
            look, sent = style(position), payload(DIGITS, method, each=self.each)
            if found and sent:
                axes.plot(
                    [sent], [np.mean(found)], label=label, **look.line(1) | {"linestyle": "none", "markersize": 8}
                )
            elif found:  # zero has no place on a log scale
                axes.axhline(
                    float(np.mean(found)), label=f"{label} (no bytes)", color=look.color, linestyle=look.linestyle
                )
        for paired, position in _SKETCH_STYLES.items():
            found_by = {
                k: _last(records, data="digits", method="exact", paired=paired, sketch=k) for k in self.sketches
            }
            sizes = [payload(DIGITS, "exact", each=self.each, sketch=k) for k in found_by]
            label = f"sketches, {'pair' if paired else 'mean'}:\nk = {', '.join(map(str, found_by))}"
            axes.plot(sizes, [np.mean(found) for found in found_by.values()], label=label, **style(position).line(1))
        axes.set(xscale="log", yscale="log", ylabel=f"longest prefix sum, l2, after {self.epochs} epochs")
        axes.set_xlabel(f"bytes that a rank sends, {self.each} examples a rank and step")
        axes.set_title(f"Gradients on digits (d = 650), {world} ranks", fontsize=10)
        finish(axes)
        figure.legend(loc="outside right upper", **LEGEND)
        return figure

    def tabulate(self, records: list[Record]) -> Table:
        """A row for each method and number of ranks: both norms on all data, and the bytes for the model on digits."""
        rows: list[tuple[str, ...]] = []
        names = ("method", "paired", "sketch", "world", "each")
        for values in dict.fromkeys(tuple(record[name] for name in names) for record in records):
            way = dict(zip(names, values, strict=True))
            method, sketch, each = way["method"], way["sketch"], way["each"] or self.each
            found = [_last(records, data=data, norm=norm, **way) for data in self.data for norm in ("l2", "linf")]
            rows.append(
                (
                    _LINES[method, way["paired"]][0] + (f", sketch {sketch}" if sketch else ""),
                    "any" if method in _SAME else str(way["world"]),
                    str(each),
                    *(f"{estimate(one):.3g}" if one else "-" for one in found),
                    f"{payload(DIGITS, method, each=each, sketch=sketch or None):,}",
                )
            )
        norms = tuple(f"{data}, {norm}" for data in self.data for norm in ("l2", "l-inf"))
        return ("way", "ranks", "examples a rank", *norms, "bytes a rank, digits"), rows

    def traffic_table(self) -> Table:
        """The bytes that a rank contributes to a step, for models of different shapes."""
        ways: list[tuple[str, str, int | None]] = [("exact", "exact", None), ("sum", "sum", None)]
        ways += [(f"sketch {k}", "exact", k) for k in self.sketches]
        ways += [("CD-GraB", "cd-grab", None)]
        rows = []
        for name, layers in MODELS.items():
            sent = [payload(layers, method, each=self.each, sketch=sketch) for _, method, sketch in ways]
            rows.append((name, f"{sum(layer.numel for layer in layers):,}", *(f"{one:,}" for one in sent)))
        return ("model", "d", *(label for label, _, _ in ways)), rows

    def say(self, records: list[Record]) -> list[str]:
        """Each method on the most ranks, compared with one process and with random orders."""
        world, said = self.worlds[-1], []
        for data in self.data:
            random = _last(records, data=data, method="rr")
            for (method, paired), (label, _) in _LINES.items():
                found = _last_on(world, records, data=data, method=method, paired=paired, each=self.each)
                exact = _last(records, data=data, method="exact", paired=paired)
                if method not in _SAME and found:  # none for pairs of one example
                    mean, one = float(np.mean(found)), float(np.mean(exact))
                    said.append(
                        f"{data}: {label} on {world:,} ranks leaves a longest prefix sum (l2) of {mean:.3g}, "
                        f"{mean / one:.2f} times that of one process ({one:.3g}); random orders have "
                        f"{float(np.mean(random)):.3g}."
                    )
        return said


def _last(records: list[Record], *, norm: str = "l2", **fields: Any) -> list[float]:
    """The values after the last epoch, by seed."""
    return [record[norm][-1] for record in where(records, **{"sketch": 0} | fields)]


def _last_on(world: int, records: list[Record], *, method: str, each: int, **fields: Any) -> list[float]:
    """Likewise on ``world`` ranks, with ``each`` examples per rank and step where that matters."""
    world, each = 1 if method in _SAME else world, each if method == "sum" else 0
    return _last(records, method=method, world=world, each=each, **fields)


@lru_cache(maxsize=1)
def vectors(data: str, n: int, d: int, seed: int) -> NDArray[np.float32]:
    """``[n, d]`` uniform in [0, 1]^d (the paper's toy), or ``[n, 650]``, gradients of a logistic regression on digits.

    The gradients are taken after five epochs of SGD. There are 1,294 training digits: n are drawn with replacement, and
    each pixel is changed by up to half a grey level, so that no two are equal.
    """
    rng = np.random.default_rng([n, d, seed])
    return rng.random((n, d), dtype=np.float32) if data == "uniform" else _gradients(n, rng, seed)


def _gradients(n: int, rng: np.random.Generator, seed: int) -> NDArray[np.float32]:
    import torch

    from ordain.study.runs.probe import per_example_gradients
    from ordain.study.tasks import TASKS

    problem = TASKS["digits"].load(Path())  # part of scikit-learn: no folder is read
    model = problem.build(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    for _ in range(_TRAINED):
        for rows in torch.split(torch.from_numpy(rng.permutation(len(problem.train_x))), _BATCH):
            optimizer.zero_grad()
            problem.loss(model(problem.train_x[rows]), problem.train_y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    chosen = torch.from_numpy(rng.integers(0, len(problem.train_x), n))
    dither = (rng.random((n, problem.train_x.shape[1]), dtype=np.float32) - np.float32(0.5)) / np.float32(_LEVELS)
    drawn = problem.train_x[chosen] + torch.from_numpy(dither)
    many = replace(problem, train_x=drawn, train_y=problem.train_y[chosen])
    found: NDArray[np.float32] = per_example_gradients(many, model).numpy()
    return found
