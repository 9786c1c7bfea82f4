"""Taking a guard out of a function's source: one change at a time, and all of it comes back."""

from __future__ import annotations

import ast
import textwrap

import pytest

from kvtier.testing.operators import edits


def without(body: str) -> dict[str, set[str]]:
    """Return, by operator, what stands instead of a function's body."""
    text = f"def f():\n{textwrap.indent(textwrap.dedent(body).strip(), '    ')}"
    tree = ast.parse(text)
    whole = ast.unparse(tree)
    found: dict[str, set[str]] = {}
    for edit in edits(tree.body[0]):
        with edit.made():
            ast.fix_missing_locations(tree)
            compile(tree, "f", "exec")
            changed = ast.unparse(tree)
        assert ast.unparse(tree) == whole
        assert changed != whole
        lines = [line.strip() for line in changed.splitlines()[1:] if line]
        found.setdefault(edit.operator, set()).add("; ".join(lines))
    return found


@pytest.mark.parametrize(
    ("body", "operator", "instead"),
    [
        ("if a:\n    return", "never", {"if a and False:; return"}),
        ("if a:\n    return", "always", {"if a or True:; return"}),
        ("while (a := b()):\n    pass", "never", {"while (a := b()) and False:; pass"}),
        ("return a if b else c", "never", {"return a if b and False else c"}),
        ("return [a for a in b if a]", "always", {"return [a for a in b if a or True]"}),
        ("return a == b", "never", {"return a == b and False"}),
        ("return not a", "always", {"return not a or True"}),
        ("return all(a)", "never", {"return all(a) and False"}),
        ("return a and b and c", "without", {"return b and c", "return a and c", "return a and b"}),
        ("if a or b:\n    return", "without", {"if a:; return", "if b:; return"}),
        ("return a < b", "bound", {"return a <= b"}),
        ("return a >= b", "bound", {"return a > b"}),
        ("a.b()\nc", "dropped", {"if False:; a.b(); c", "a.b(); if False:; c"}),
        ("a += 1", "dropped", {"if False:; a += 1"}),
        ("del b[0]", "dropped", {"if False:; del b[0]"}),
        ("a.b = 1", "dropped", {"if False:; a.b = 1"}),
        ("while True:\n    break", "dropped", {"while True:; if False:; break"}),
        ("with a.lock:\n    b()", "unlocked", {"b()"}),
        ("async def g():\n    async with a:\n        b()", "unlocked", {"async def g():; b()"}),
        ("try:\n    a()\nfinally:\n    b()", "unprotected", {"a(); b()"}),
        ("try:\n    a()\nexcept E:\n    b()", "uncaught", {"a()"}),
        ("return max(a, b)", "unclamped", {"return a", "return b"}),
        ("return sorted(a)", "unordered", {"return list(a)"}),
        ("return a[::-1]", "unordered", {"return a"}),
        ("a.wait(b, timeout=1)", "untimed", {"a.wait(b)"}),
    ],
)
def test_a_guard_is_taken_out(body, operator, instead):
    assert without(body)[operator] == instead


@pytest.mark.parametrize(
    "body",
    ["return a", "a = b", '"""Do nothing."""', "return a in b.c[d]", "with a as b:\n    return b"],
)
def test_what_is_no_guard_stays(body):
    assert set(without(body)) <= {"never", "always"}


def test_a_generator_stays_one_without_what_it_yields():
    assert without("yield a")["dropped"] == {"if False:; yield a"}


def test_what_a_condition_does_alone_is_taken_out_once():
    assert set(without("if a:\n    b()")) == {"never", "always"}
    assert "dropped" in without("if a:\n    b()\nelse:\n    c()")
