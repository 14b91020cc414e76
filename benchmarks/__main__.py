"""``make bench``: run every benchmark, print its table, and fail where a threshold is missed."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks.timing import machine

HERE = Path(__file__).parent
# Run only when named: minutes, gigabytes, many processes, or packages of others.
LONG = ("soak", "ranks", "fast_paths", "growth", "peers", "breakdown")


def main() -> int:
    thresholds = json.loads((HERE / "thresholds.json").read_text())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"which to run: {', '.join(thresholds)} (all but {', '.join(LONG)} by default)"
    )
    names = parser.parse_args().names or [name for name in thresholds if name not in LONG]
    print(machine())
    missed = []
    for name in names:
        results = importlib.import_module(f"benchmarks.{name}").run()
        for row, limits in thresholds[name].items():
            value = results[row]
            good = limits.get("least", 0.0) <= value <= limits.get("most", float("inf"))
            wanted = ", ".join(f"at {word} {limit:g}" for word, limit in limits.items())
            print(f"  {'ok    ' if good else 'MISSED'} {name}/{row}: {value:.2f} ({wanted})")
            missed += [] if good else [f"{name}/{row}"]
    if missed:
        print("missed:", ", ".join(missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
