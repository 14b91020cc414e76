"""Figures and tables of the slow benchmarks, for docs/performance.md."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ordain.study.report.statistics import compare
from ordain.study.style import LEGEND, finish, grid_figure, png, style

TITLES = {
    "logistic": "Logistic regression 784-10",
    "mlp": "MLP 4 x 1024",
    "lenet": "LeNet, 32 x 32",
    "bert": "Tiny BERT, T = 32",
}
LABELS = {
    "mean": "ours, mean",
    "pair": "ours, pair",
    "pair, head": "ours, pair, head",
    "herding, head": "ours, herding, head",
}
AXES = {
    "n": ("n, examples", "seconds an epoch"),
    "d": ("d, parameters (B = 64)", "seconds a batch"),
    "B": ("B, batch size", "seconds a batch"),
    "T": ("T, positions of a linear layer (B = 16)", "seconds a batch"),
}
Record = dict[str, Any]


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(figure))


def quartiles(ratios: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high


def peers_chart(record: Record, path: Path) -> None:
    figure, axes = grid_figure(11, 7.2, rows=2, columns=2, sharex=True)
    names = list(next(iter(record["time"].values()))["contenders"])
    for panel, case in zip(axes.flat, TITLES, strict=True):
        for position, name in enumerate(names):
            points = []
            for size in (16, 64, 256):
                one = record["time"].get(f"{case}/{size}", {"contenders": {}})["contenders"].get(name, {})
                if "ratios" in one:
                    points.append((size, *quartiles(one["ratios"])))
            if points:
                at, low, middle, high = zip(*points, strict=True)
                look = style(position)
                panel.plot(at, middle, label=LABELS.get(name, name), **look.line(1))
                panel.fill_between(at, low, high, color=look.color, alpha=0.15, linewidth=0)
        panel.set(xscale="log", yscale="log", title=TITLES[case])
        panel.xaxis.set_major_locator(FixedLocator([16, 64, 256]))
        panel.xaxis.set_minor_locator(NullLocator())
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        finish(panel)
    for panel in axes[-1]:
        panel.set_xlabel("batch size B")
    for panel in axes[:, 0]:
        panel.set_ylabel("time of an epoch over RR's")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, **LEGEND)
    save(figure, path)


def growth_chart(curves: Record, path: Path) -> None:
    figure, axes = grid_figure(11, 8, rows=2, columns=2)
    for axis, (panel, (x, y)) in zip(axes.flat, AXES.items(), strict=True):
        mine = {name: one for name, one in curves.items() if one["panel"] == panel}
        for position, (name, one) in enumerate(mine.items(), 1):
            label = f"{name.removesuffix(f', by {panel}')}: {panel}^{one['exponent']:.2f}"
            axis.plot(one["sizes"], one["seconds"], label=label, **style(position).line(1))
        axis.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        axis.legend(**LEGEND)
        finish(axis)
    save(figure, path)


def peers_tables(record: Record) -> str:
    """Markdown: ratios with quartiles and what could not run, then memory."""
    names = [name for name in next(iter(record["time"].values()))["contenders"] if name != "RR"]
    head = "| model | B | RR, ms | " + " | ".join(LABELS.get(name, name) for name in names) + " |"
    lines, memory, reasons = [head, "| --- " * (len(names) + 3) + "|"], [head.replace("RR, ms", "RR"), ""], {}
    memory[1] = lines[1]
    for case, title in TITLES.items():
        for size in (16, 64, 256):
            found = record["time"].get(f"{case}/{size}")
            if found is None:
                continue
            contenders, peaks = found["contenders"], record["memory"].get(f"{case}/{size}", {})
            reasons |= {
                f"{name} on {case}": contenders[name]["reason"] for name in names if "reason" in contenders[name]
            }
            cells = [spread(contenders[name]["ratios"]) if "ratios" in contenders[name] else "-" for name in names]
            lines.append(f"| {title} | {size} | {contenders['RR']['ms']:.2f} | " + " | ".join(cells) + " |")
            if peaks:
                rr = peaks["RR"]
                cells = [extra(peaks[name], rr) if name in peaks else "-" for name in names]
                memory.append(f"| {title} | {size} | {rr['later'] / 1e6:.1f} | " + " | ".join(cells) + " |")
    why = [f"{what}: {reason}" for what, reason in reasons.items()]
    return "\n".join([*lines, "", *why, "", *memory])


def spread(ratios: list[float]) -> str:
    """The median, and the quartiles."""
    low, middle, high = quartiles(ratios)
    digits = 2 if middle < 10 else 0
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def extra(peak: dict[str, int], rr: dict[str, int]) -> str:
    """Megabytes over reshuffling in a later epoch, and in the first one where that is much more."""
    later, first = ((peak[when] - rr[when]) / 1e6 for when in ("later", "first"))
    return f"{later:.1f}" if first < 1.2 * later + 1 else f"{later:.1f} (first {first:.0f})"


LAYERS = {"cifar10": "LeNet, CIFAR-10", "mnist": "MLP, MNIST", "gpt": "character GPT"}


def layers_chart(records: list[Record], path: Path) -> None:
    """Loss against price: seconds and losses relative to random reshuffling with the same seed."""
    figure, axes = grid_figure(11, 4, columns=len(LAYERS))
    for panel, (task, title) in zip(axes.flat, LAYERS.items(), strict=True):
        mine = [record for record in records if record["task"] == task]
        for kind, position, marker in (("GraB", 2, "o"), ("herding", 1, "s"), ("stratified", 3, "D")):
            look = style(position)
            for arm in dict.fromkeys(record["arm"] for record in mine if record["arm"].startswith(kind)):
                if "k =" in arm or "rounds" in arm:  # in the table
                    continue
                place = price_of(mine, arm), 100 * (statistics.mean(relative(mine, arm, "test loss")) - 1)
                error = 100 * statistics.stdev(relative(mine, arm, "test loss"))
                name = arm.removeprefix(f"{kind}, ").removeprefix("last, ").removesuffix(" epoch")
                label = {"GraB": "GraB, pairs", "herding": "herding, sketch=1024"}.get(kind, "stratified by class")
                known = panel.get_legend_handles_labels()[1]
                panel.errorbar(
                    *place, yerr=error, marker=marker, color=look.color, label="" if label in known else label
                )
                side = 6 if name in ("last", "last block", "all") else -12
                panel.annotate(name, place, (5, side), textcoords="offset points", fontsize=7, color=look.color)
        panel.axhline(0, color="black", linewidth=1)
        panel.set(title=title, xlabel="processor time / RR's")
        panel.margins(x=0.22)
        finish(panel)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, **LEGEND)
    axes.flat[0].set_ylabel("test loss relative to RR's, %")
    save(figure, path)


def relative(records: list[Record], arm: str, measure: str) -> list[float]:
    """By seed: the value over that of random reshuffling."""
    base = {record["seed"]: record[measure] for record in records if record["arm"] == "rr"}
    return [
        record[measure] / base[record["seed"]] for record in records if record["arm"] == arm and record["seed"] in base
    ]


def price_of(records: list[Record], arm: str) -> float:
    """Processor time over that of random reshuffling."""
    return next(record["price"] for record in records if record["arm"] == arm) or float("nan")


def layers_table(records: list[Record]) -> str:
    """Means over seeds; p of a paired t test of the test loss against random reshuffling."""
    lines = ["| task | order by | seeds | train loss | test loss | p | herding objective | time |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for task in dict.fromkeys(record["task"] for record in records):
        mine = [record for record in records if record["task"] == task]
        base = {record["seed"]: record["test loss"] for record in mine if record["arm"] == "rr"}
        for arm in dict.fromkeys(record["arm"] for record in mine):
            of = [record for record in mine if record["arm"] == arm]
            found = compare({record["seed"]: record["test loss"] for record in of}, base)
            p = "-" if found.p is None else f"{found.p:.2g}"
            measures = ("train loss", "test loss", "objective")
            means = {name: statistics.mean(record[name] for record in of) for name in measures}
            lines.append(
                f"| {task} | {arm} | {len(of)} | {means['train loss']:.4f} | {means['test loss']:.4f} | {p} | "
                f"{means['objective']:.2f} | {price_of(mine, arm):.2f} |"
            )
    return "\n".join(lines)
