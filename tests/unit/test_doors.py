"""`__all__` stands only where an underscore does not say it; a twin shows that this can fail."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kvtier", "connectors", "storage_backends", "benchmarks", "examples")


def says_twice(path: str, text: str) -> bool:
    """Say whether a module lists names that are all its own: no door, and it passes none on."""
    if "__all__" not in text or path.endswith("__init__.py") or "/testing/broken_" in path:
        return False
    nodes = list(ast.walk(ast.parse(text)))
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    passed = {alias.asname or alias.name for node in imports for alias in node.names}
    lists = [
        ast.literal_eval(node.value)
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__all__"
    ]
    return any(not passed & set(names) for names in lists)


def test_a_modules_names_are_listed_only_where_it_passes_some_on():
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    found = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    assert len(found) > 300
    assert [path for path, text in sorted(found.items()) if says_twice(path, text)] == []


def test_the_rule_can_fail():
    text = "from a import b\n__all__ = ['c']\nc = 1\n"
    assert says_twice("m.py", text)
    assert not says_twice("m.py", text.replace("'c'", "'b', 'c'"))
    assert not says_twice("m/__init__.py", text)
