"""The table of field faults in README.md stays true: every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent
NAMED = re.compile(r"`((?:\w+/)+\w+\.py)(?:::(\w+))?`")


def rows(text: str) -> dict[str, list[str]]:
    """Return the cells of each row of the table, by its number."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        number, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if re.fullmatch(r"H\d\d", number):
            assert number not in found, f"{number} has two rows"
            found[number] = cells
    return found


@cache
def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def wrong(text: str) -> list[str]:
    """Return what is wrong with a table."""
    table = rows(text)
    found = [f"H{n:02} has no row" for n in range(1, 26) if f"H{n:02}" not in table]
    for number, (kind, tests, _later) in table.items():
        named = NAMED.findall(tests)
        if not kind or not named or len(named) != tests.count("`") // 2:
            found.append(f"{number} needs a kind, and tests by their names")
        for file, function in named:
            path = TESTS / file
            if not path.is_file() or not path.name.startswith("test_"):
                found.append(f"{number}: there is no {file}")
            elif function and function not in functions(path):
                found.append(f"{number}: there is no {function} in {file}")
    files = sorted(path.name for path in HERE.glob("test_h*.py"))
    return found + [f"{name} is in no row" for name in files if f"`faults/{name}" not in text]


def test_the_table_names_tests_that_exist():
    assert wrong((HERE / "README.md").read_text(encoding="utf-8")) == []


def test_the_rule_can_fail():
    text = (HERE / "README.md").read_text(encoding="utf-8")
    assert wrong(text.replace("| H07 |", "| X07 |")) == ["H07 has no row"]
    assert wrong(text.replace("::test_a_cut_digest_is_refused", "::test_gone"))
    assert wrong(text.replace("`faults/test_h06_arithmetic.py`", "`faults/test_h06_gone.py`"))
    assert wrong(text.replace("`unit/test_lease.py", "`unit/conftest.py"))
