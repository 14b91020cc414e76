"""How the house is built: no object touches another's private attributes, and chains of inheritance are short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ordain import orders

ROOT = Path(__file__).parents[1]

# Names of torch's (and the standard library's) own that have no public counterpart; and where each is needed.
ALLOWED = {
    "_parameters": "a module's parameters by name, without the checks of getattr",
    "_version": "tells whether a tensor was changed in place",
    "_backward_hooks": "a tensor's: whether a user's hook changes its gradient",
    "_reset_state": "Accelerate's: without it a process has no second accelerator with other options",
}
PUBLIC = ("_replace", "_exit")  # a named tuple's method and os's function: documented, in spite of their names


def crossings(path: Path) -> Iterator[str]:
    """Attributes with a leading underscore of anything but ``self``, ``cls`` and ``super()``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        owner = node.value
        own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        own |= isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"
        if not own and node.attr not in (*ALLOWED, *PUBLIC) and "torch" not in ast.unparse(owner).split("."):
            yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"


def test_no_object_touches_another_s_private_attributes() -> None:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert len(files) > 150
    assert [one for path in files for one in crossings(path)] == []


def test_the_check_sees_a_crossing(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("other._a = self._b + super()._c + cls._d + x.y._e()\n")
    found = [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert len(found) == 6
    assert [one.split()[-1] for one in _crossings_of(path, tmp_path)] == ["other._a", "x.y._e"]


def _crossings_of(path: Path, root: Path) -> list[str]:
    global ROOT
    before, ROOT = ROOT, root
    try:
        return sorted(crossings(path))
    finally:
        ROOT = before


def test_no_chain_of_orders_is_longer_than_two() -> None:
    kinds = [getattr(orders, name) for name in orders.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, orders.Order)]
    assert len(kinds) == 10
    for kind in kinds:
        assert len([one for one in kind.__mro__ if one is not object]) <= 2, kind
