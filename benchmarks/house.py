"""How large and how tangled the code is: ``python -m benchmarks house``.

Private crossings are accesses to an underscore attribute of anything but ``self``, ``cls`` and ``super()``. Import
cycles are counted between modules, with imports inside functions. Calls of a step are Python function calls in the
package (comprehensions and compiled kernels do not count) of one ``order.step()`` of a two-layer MLP.
"""

from __future__ import annotations

import ast
import collections
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[1]
ALLOWED = ("_parameters", "_version", "_backward_hooks", "_reset_state", "_exit", "_replace")  # see tests/test_house.py
STEP = """
import collections, sys, torch
from torch import nn
from ordain import GraB
for centering in ("mean", "pair"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    order = GraB(model, 640, centering=centering)
    indices = iter(order.sampler)
    calls = collections.Counter()
    def note(frame, event, _):
        code = frame.f_code
        ours = "ordain" in code.co_filename and "kernel" not in code.co_filename
        if event == "call" and ours and code.co_name[0] != "<":
            calls[code.co_filename] += 1
    for step in range(5):
        for _ in range(64):
            next(indices)
        nn.functional.cross_entropy(model(torch.randn(64, 20)), torch.randint(5, (64,))).backward()
        sys.setprofile(note if step == 4 else None)
        order.step()
        sys.setprofile(None)
    print(sum(calls.values()), len(calls))
"""


def lines(files: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files)


def code_lines(files: list[Path]) -> int:
    """The same without blank lines, comments and docstrings."""
    count = 0
    for path in files:
        text = path.read_text()
        alone = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
        strings = [node for node in alone if isinstance(getattr(node.value, "value", None), str)]
        docs = {number for node in strings for number in range(node.lineno, (node.end_lineno or 0) + 1)}
        told = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
        count += sum(bool(line) and line[0] != "#" and number not in docs for number, line in told)
    return count


def crossings(path: Path) -> int:
    count = 0
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value)
            own = owner in ("self", "cls", "super()") or "torch" in owner.split(".") or node.attr in ALLOWED
            count += not own
    return count


def imports(path: Path, name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ordain"):
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def cycles(src: Path) -> int:
    """Strongly connected groups of more than one module (packages' ``__init__`` aside)."""
    names = {
        ".".join(path.relative_to(src.parent).with_suffix("").parts): path
        for path in src.rglob("*.py")
        if path.name != "__init__.py"
    }
    edges = {name: {one for one in imports(path, name) if one in names} for name, path in names.items()}
    reached = {name: _reachable(name, edges) for name in names}
    groups = {frozenset(b for b in reached[a] if a in reached[b]) for a in names}
    return sum(len(group) > 1 for group in groups)


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found, todo = set[str](), [start]
    while todo:
        for other in edges[todo.pop()] - found:
            found.add(other)
            todo.append(other)
    return found


def longest_chain(core: list[Path]) -> int:
    """Of inheritance among the classes that are, or inherit from, ``Order``."""
    bases: dict[str, list[str]] = {}
    for path in core:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).split("[")[0] for base in node.bases]

    def depth(name: str) -> int:
        if name == "Order":
            return 1
        return max((depth(base) + 1 for base in bases.get(name, []) if depth(base)), default=0)

    return max(depth(name) for name in bases)


def run() -> dict[str, float]:
    root = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE
    src = root / "src" / "ordain"
    study = list((src / "study").rglob("*.py"))
    core = [path for path in src.rglob("*.py") if path not in set(study)]
    tests = list((root / "tests").rglob("*.py"))
    tracked = subprocess.run(["git", "ls-files", "results"], cwd=root, capture_output=True, text=True, check=True)  # noqa: S607
    repeated = collections.Counter(path.name for path in src.rglob("*.py") if path.name != "__init__.py")
    results: dict[str, float] = {
        "lines of the core": lines(core),
        "lines of the study": lines(study),
        "lines of tests": lines(tests),
        "lines of code in the core": code_lines(core),
        "lines of code in the study": code_lines(study),
        "longest chain of orders": longest_chain(core),
        "private crossings in src": sum(crossings(path) for path in (*core, *study)),
        "private crossings in tests": sum(crossings(path) for path in tests),
        "import cycles in the core": cycles(src),
        "module names used twice": sum(count > 1 for count in repeated.values()),
        "files under results": len(tracked.stdout.splitlines()),
    }
    environment = {"PYTHONPATH": str(root / "src"), "PATH": "/usr/bin:/bin"}
    said = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    for centering, line in zip(("mean", "pair"), said.stdout.splitlines(), strict=True):
        results[f"calls of a step, {centering}"], results[f"files of a step, {centering}"] = map(int, line.split())
    for name, value in results.items():
        print(f"  {name}: {value:,.0f}")
    return results
