"""docs/reliability.md promises nothing that no test holds."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "reliability.md").read_text()


def test_every_promise_names_a_test_that_exists() -> None:
    files = {file.name for file in TESTS.glob("test_*.py")}
    there = {name for file in files for name in re.findall(r"^def (test_\w+)", (TESTS / file).read_text(), re.M)}
    assert set(re.findall(r"\btest_\w+\.py", TEXT)) <= files
    named = set(re.findall(r"\btest_\w+\b(?!\.py)\*?", TEXT))
    assert {one for one in named if not any(re.fullmatch(one.replace("*", ".*"), name) for name in there)} == set()
    promises = [one for one in re.split(r"\n(?=- |\n)", TEXT) if one.startswith("- ")]
    assert len(promises) > 25
    assert [one for one in promises if not re.search(r"`test_\w+`", one)] == []
