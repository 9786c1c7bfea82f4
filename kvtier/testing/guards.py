"""Every guard of the catalog, found in its source, each of which can be taken away.

Nothing is executed that is not the catalog's own: its modules are parsed, and for the time that
a guard is away its function has the code that the tree without it compiles to. So whoever has
imported or kept that function, runs it without the guard as well.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import kvtier.catalog
from kvtier.testing.operators import Edit, edits

_NAME_DIGITS: Final = 4
_GUARD_COLUMNS: Final = 200


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard less. name: function, operator and a digest of the guard's text, without lines.

    guard: what is done to it, and its text.
    """

    name: str
    guard: str
    _tree: ast.Module
    _function: FunctionType
    _edit: Edit

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Run what is inside without the guard."""
        whole = self._function.__code__
        self._function.__code__ = self._without()
        try:
            yield
        finally:
            self._function.__code__ = whole

    def _without(self) -> CodeType:
        whole = self._function.__code__
        with self._edit.made():
            ast.fix_missing_locations(self._tree)
            module = compile(self._tree, whole.co_filename, "exec", dont_inherit=True)
        place = (whole.co_qualname, whole.co_firstlineno)
        (code,) = (one for one in _codes(module) if (one.co_qualname, one.co_firstlineno) == place)
        return code


@cache
def guards() -> dict[str, Guard]:
    """Return all guards of ``kvtier.catalog``, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(kvtier.catalog.__path__))
    modules = (importlib.import_module(f"kvtier.catalog.{name}") for name in names)
    return {guard.name: guard for module in modules for guard in guards_of(module)}


def guards_of(
    module: ModuleType, found: Callable[[ast.AST], Iterable[Edit]] = edits
) -> Iterator[Guard]:
    """Yield the guards of all functions and methods of a module, in the order of its text.

    found: finds them in the tree of a function.
    """
    tree = ast.parse(Path(inspect.getfile(module)).read_text(encoding="utf-8"))
    short = module.__name__.rpartition(".")[2]
    for qualname, node, function in _functions(tree.body, module, ""):
        seen: dict[str, int] = {}
        for edit in found(node):
            what = f"{edit.operator}: {edit.guard}"
            seen[what] = seen.get(what, 0) + 1
            again = f" ({seen[what]})" if seen[what] > 1 else ""
            digest = hashlib.sha256(f"{what}{again}".encode()).hexdigest()[:_NAME_DIGITS]
            name = f"{short}.{qualname}:{edit.operator}-{digest}"
            yield Guard(name, f"{what}{again}"[:_GUARD_COLUMNS], tree, function, edit)


def _functions(
    body: Iterable[ast.stmt], owner: Any, prefix: str
) -> Iterator[tuple[str, ast.AST, FunctionType]]:
    """Yield the functions that an owner defines: name, tree, and the function itself."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            inner = getattr(owner, node.name)
            yield from _functions(node.body, inner, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = _function(inspect.getattr_static(owner, node.name))
            yield f"{prefix}{node.name}", node, function


def _function(attribute: Any) -> FunctionType:
    """Return the function behind a property, a class method, or a decorator that wraps it."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    elif isinstance(attribute, cached_property):
        attribute = attribute.func
    function = inspect.unwrap(getattr(attribute, "__func__", attribute))
    if not isinstance(function, FunctionType):
        raise TypeError(f"{attribute!r} is no function")
    return function


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
