"""Ways to take a guard out of a function's source: each finds its places in the syntax tree."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_BOUNDS: Final[dict[type[ast.cmpop], ast.cmpop]] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
}
_CLAMPS: Final = ("min", "max")
_TRUTHS: Final = ("all", "any", "bool")
_ORDERS: Final = ("reversed", "sorted")


@dataclass(frozen=True, slots=True)
class Edit:
    """One guard less: what stands at one place of a tree instead.

    operator: what is done to the guard; guard: its text. The place is a field of `parent`, or
    with `index` an element of that field, for which any number of nodes may stand.
    """

    operator: str
    guard: str
    parent: ast.AST
    field: str
    index: int | None
    instead: list[ast.AST]

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Have it there for as long as what is inside runs."""
        if self.index is None:
            before = getattr(self.parent, self.field)
            setattr(self.parent, self.field, self.instead[0])
            try:
                yield
            finally:
                setattr(self.parent, self.field, before)
            return
        nodes: list[ast.AST] = getattr(self.parent, self.field)
        whole = list(nodes)
        nodes[self.index : self.index + 1] = self.instead
        try:
            yield
        finally:
            nodes[:] = whole


def edits(function: ast.AST) -> Iterator[Edit]:
    """Yield the ways to take one guard out of a function.

    never, always: a condition is not asked, though whatever it does is done. without: an operand
    of ``and`` or ``or`` is left out. bound: ``<`` becomes ``<=`` and so on. dropped: a statement
    whose value nobody takes, or that ends a block early, or that counts. unlocked: the body of a
    ``with`` alone. unprotected: a ``finally`` only runs after what went well. uncaught: an
    ``except`` less. unclamped: one argument of ``min`` or ``max`` alone. unordered: without
    ``sorted``, ``reversed`` or ``[::-1]``. untimed: without a ``timeout``.
    """
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            nodes = value if isinstance(value, list) else [value]
            for number, node in enumerate(nodes):
                index = number if isinstance(value, list) else None
                if isinstance(node, ast.AST):
                    for operator, guard, instead in _instead(node, parent, field):
                        yield Edit(operator, guard, parent, field, index, instead)


Instead = Iterator[tuple[str, str, list[ast.AST]]]


def _instead(node: ast.AST, parent: ast.AST, field: str) -> Instead:
    if isinstance(node, ast.stmt):
        yield from _statement(node, parent)
    elif isinstance(node, ast.expr):
        if _is_condition(node, parent, field):
            yield from _condition(node)
        yield from _expression(node)


def _is_condition(node: ast.expr, parent: ast.AST, field: str) -> bool:
    """Say whether an expression decides something, and is no part of a larger one that does."""
    if field in ("test", "ifs"):
        return not isinstance(node, ast.Constant)
    inner = isinstance(parent, ast.BoolOp | ast.Compare) or _is_not(parent)
    return not inner and (isinstance(node, ast.Compare) or _is_not(node) or _is_truth(node))


def _is_not(node: ast.AST) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_truth(node: ast.expr) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in _TRUTHS


def _condition(node: ast.expr) -> Instead:
    """Ask, and do not listen: what the asking does, such as a walrus, stays."""
    text = ast.unparse(node)
    yield "never", text, [ast.BoolOp(ast.And(), [node, ast.Constant(value=False)])]
    yield "always", text, [ast.BoolOp(ast.Or(), [node, ast.Constant(value=True)])]


def _expression(node: ast.expr) -> Instead:
    text = ast.unparse(node)
    match node:
        case ast.BoolOp(op=op, values=values):
            for number, operand in enumerate(values):
                rest = values[:number] + values[number + 1 :]
                left = rest[0] if len(rest) == 1 else ast.BoolOp(op, rest)
                yield "without", f"{ast.unparse(operand)} in {text}", [left]
        case ast.Compare(left=left, ops=[op], comparators=comparators) if type(op) in _BOUNDS:
            yield "bound", text, [ast.Compare(left, [_BOUNDS[type(op)]], comparators)]
        case ast.Call(func=ast.Name(id=name), args=[first, second]) if name in _CLAMPS:
            yield "unclamped", f"{ast.unparse(second)} in {text}", [first]
            yield "unclamped", f"{ast.unparse(first)} in {text}", [second]
        case ast.Call(func=ast.Name(id=name), args=[first]) if name in _ORDERS:
            yield "unordered", text, [ast.Call(ast.Name("list", ast.Load()), [first], [])]
        case ast.Call(func=func, args=args, keywords=keywords):
            endless = [one for one in keywords if one.arg != "timeout"]
            if len(endless) < len(keywords):
                yield "untimed", text, [ast.Call(func, args, endless)]
        case ast.Subscript(value=value, slice=ast.Slice(lower=None, upper=None)):
            yield "unordered", text, [value]


def _statement(node: ast.stmt, parent: ast.AST) -> Instead:
    text = ast.unparse(node).partition("\n")[0]
    alone = isinstance(parent, ast.If) and parent.body == [node] and not parent.orelse
    match node:
        case ast.Expr(value=ast.Constant()):  # a docstring
            return
        case ast.Expr() | ast.Return() | ast.Raise() | ast.Break() | ast.Continue() if alone:
            return  # it is the condition's never
        case ast.Expr() | ast.AugAssign() | ast.Delete():
            yield "dropped", text, [_unreached(node)]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not _makes(parent):
            yield "dropped", text, [_unreached(node)]
        case ast.Return() | ast.Raise() | ast.Break() | ast.Continue() if not _ends(parent):
            yield "dropped", text, [_unreached(node)]
        case ast.With() | ast.AsyncWith() if all(not one.optional_vars for one in node.items):
            yield "unlocked", text, list(node.body)
        case ast.Try():
            yield from _try(node)


def _ends(parent: ast.AST) -> bool:
    """Say whether what stands last in a node ends a function anyway."""
    return isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.With)


def _unreached(node: ast.stmt) -> ast.AST:
    """Return a statement that is there and does nothing: a generator stays one."""
    return ast.If(ast.Constant(value=False), [node], [])


def _makes(parent: ast.AST) -> bool:
    return isinstance(parent, ast.FunctionDef) and parent.name == "__init__"


def _try(node: ast.Try) -> Instead:
    if node.finalbody:
        text = f"finally {ast.unparse(node.finalbody[0])}".partition("\n")[0]
        inner = ast.Try(node.body, node.handlers, node.orelse, [])
        body: list[ast.AST] = [inner] if node.handlers else [*node.body, *node.orelse]
        yield "unprotected", text, [*body, *node.finalbody]
    for number, handler in enumerate(node.handlers):
        rest = node.handlers[:number] + node.handlers[number + 1 :]
        text = ast.unparse(handler).partition("\n")[0]
        if rest or node.finalbody:
            yield "uncaught", text, [ast.Try(node.body, rest, node.orelse, node.finalbody)]
        else:
            yield "uncaught", text, [*node.body, *node.orelse]
