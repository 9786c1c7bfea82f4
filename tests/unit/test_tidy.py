"""The rules of the tree, held by tests. Each rule has a twin that shows it can fail."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = {"kvtier.connectors": "connectors", "kvtier.storage_backends": "storage_backends"}
MODULE_LINES = 400
FUNCTION_LINES = 70

# The floors, lowest first. A module imports its own floor and those below.
FLOORS = [
    "errors checks units clock deadline events metrics seams cost cut gpus",
    "identity",
    "codecs",
    "memory",
    "policies",
    "tiers",
    "device",
    "catalog",
    "copyplan copier transfer retention prefix",
    "asking flow config opening desk plans depot local adviser recorder",
    "daemon",
    "upkeep cache __init__",
    "connectors",
    "engine planning bench testing cli __main__",
]
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
GROUND = FLOORS[0].split()
# These see less than their floor would let them.
SEES_ONLY = {
    "storage_backends": [
        *("storage_backends", "tiers.store", "tiers.stock", "tiers.survey", "tiers.collection"),
        *("identity.record", "identity.headers"),
        *GROUND,
    ],
    "connectors": [
        *("connectors", "config", "cache", "prefix", "copyplan", "transfer", "copier"),
        *("identity", "device", "daemon.address", "daemon.worker"),
        *GROUND,
    ],
    "engine": ["engine", "connectors.base", "identity.geometry", *GROUND],
}
FORBIDDEN_NOUNS = {"manager", "helper", "util"}
CODE_IN_DATA_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
CODE_IN_DATA_CALLS = {"eval", "exec", "__import__", "torch.load"}
# A path of somebody's machine says nothing to anybody else.
PRIVATE_PATH = re.compile(r"(?<![\w.~>}-])/(?:home|root|Users|tmp)/[\w.-]")


# --------------------------------------------------------------------------------- what there is


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """Yield (path in the checkout, text) of the Python files, each once: links are not followed."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT)
            if not any((ROOT / parent).is_symlink() for parent in inside.parents):
                yield str(inside), path.read_text(encoding="utf-8")


def library() -> Iterator[tuple[str, str]]:
    """Yield (module name, text) of everything that is installed."""
    for path, text in sources("kvtier", *LINKED.values()):
        parts = list(Path(path).with_suffix("").parts)
        if parts[0] != "kvtier":
            parts.insert(0, "kvtier")
        yield ".".join(parts), text


def everything() -> Iterator[tuple[str, str]]:
    """Yield every Python file of the checkout."""
    yield from sources("kvtier", *LINKED.values(), "tests", "examples", "benchmarks")


def broken(rule: Callable[[str, str], list[str]], files: Iterator[tuple[str, str]]) -> str:
    """Return what `rule` finds in `files`, one finding a line."""
    return "\n".join(finding for name, text in files for finding in rule(name, text))


def imported(module: str, text: str) -> Iterator[str]:
    """Yield what kvtier modules `module` imports, wherever in it, relative imports resolved."""
    package = module.split(".")[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_ours(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            if is_ours(origin):
                yield from (f"{origin}.{alias.name}" for alias in node.names)


def is_ours(module: str) -> bool:
    return module.partition(".")[0] == "kvtier"


# ---------------------------------------------------------------------------------------- sizes


def long_module(name: str, text: str) -> list[str]:
    lines = text.count("\n")
    return [f"{name}: {lines} lines, {MODULE_LINES} allowed"] if lines > MODULE_LINES else []


def long_functions(name: str, text: str) -> list[str]:
    return [
        f"{name}: {node.name} has {lines} lines, {FUNCTION_LINES} allowed"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES
    ]


def test_no_module_is_too_long():
    assert not broken(long_module, everything())


def test_no_function_is_too_long():
    assert not broken(long_functions, everything())


def test_the_size_rules_can_fail():
    body = "    pass\n" * FUNCTION_LINES
    assert long_module("m", "\n" * (MODULE_LINES + 1))
    assert not long_module("m", "\n" * MODULE_LINES)
    assert long_functions("m", f"class A:\n  async def f():\n{body}")
    assert not long_functions("m", f"def f():\n{body}".removesuffix("    pass\n"))


# --------------------------------------------------------------------------------------- floors


def upward_imports(module: str, text: str) -> list[str]:
    """Find the imports that lead upward, or out of what the module's package may see."""
    unit = module.split(".")[1]
    found = []
    for target in imported(module, text):
        parts = target.split(".")[1:] or ["__init__"]
        if parts[0] not in FLOOR and parts[0] not in LINKED.values():
            parts = ["__init__"]  # a name of kvtier's own face
        if not allowed(unit, parts):
            found.append(f"{module} may not import {target}")
    return found


def allowed(unit: str, target: list[str]) -> bool:
    if unit in SEES_ONLY:
        name = ".".join(target)
        return any(f"{name}.".startswith(f"{seen}.") for seen in SEES_ONLY[unit])
    if target[0] == "storage_backends":  # by entry point only: a built-in store is a plug-in
        return unit == "testing"
    return FLOOR[target[0]] <= FLOOR.get(unit, -1)  # no floor yet: the test above says so


def test_every_module_has_its_floor():
    units = {module.split(".")[1] for module, _ in library()}
    assert units - FLOOR.keys() - SEES_ONLY.keys() == set()


def test_imports_go_down_only():
    assert not broken(upward_imports, library())


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kvtier.errors", "from kvtier.identity.keys import chain"),
        ("kvtier.errors", "from kvtier import identity"),
        ("kvtier.errors", "from . import identity"),
        ("kvtier.tiers.tier", "from ..catalog.index import Index"),
        ("kvtier.tiers.tier", "def f():\n    import kvtier.cache"),
        ("kvtier.tiers.tier", "from kvtier import open"),
        ("kvtier.cache", "from kvtier.engine import Engine"),
        ("kvtier.cache", "from kvtier.storage_backends.memory import MemoryStore"),
        ("kvtier.storage_backends.s3", "from kvtier.tiers.tier import Tier"),
        ("kvtier.storage_backends.s3", "from kvtier.tiers import tier"),
        ("kvtier.connectors.vllm", "from kvtier.catalog.lease import Lease"),
        ("kvtier.engine.engine", "import kvtier.connectors.reference"),
    ],
)
def test_the_floor_rule_can_fail(module, text):
    assert upward_imports(module, text)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("kvtier.catalog.fetch", "from kvtier.tiers.tier import Tier\nfrom .index import Index"),
        ("kvtier.storage_backends.s3", "from kvtier.tiers.store import Store"),
        ("kvtier.storage_backends.s3", "from kvtier.tiers import store\nimport kvtier.errors"),
        ("kvtier.engine.engine", "from kvtier.connectors.base import Connector"),
        ("kvtier.cli.main", "from kvtier import open\nfrom kvtier.bench.runner import run"),
    ],
)
def test_the_floor_rule_lets_pass_what_goes_down(module, text):
    assert not upward_imports(module, text)


# ------------------------------------------------------------------------------ no code in data


def code_in_data(name: str, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.Call):
            roots = {ast.unparse(node.func)} & CODE_IN_DATA_CALLS
            roots |= {k.arg for k in node.keywords if k.arg == "allow_pickle"}
        else:
            continue
        found += sorted(roots & (CODE_IN_DATA_MODULES | CODE_IN_DATA_CALLS | {"allow_pickle"}))
    return [f"{name}: {what}" for what in found]


def test_nothing_executes_what_it_reads():
    shipped = sources("kvtier", *LINKED.values(), "examples", "benchmarks")
    assert not broken(code_in_data, shipped)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(path)",
        "eval(text)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_the_code_in_data_rule_can_fail(text):
    assert code_in_data("m", text)
    assert not code_in_data("m", "model.eval()\nimport json")


# ---------------------------------------------------------------------------------------- names


def forbidden_nouns(name: str, text: str) -> list[str]:
    names = {Path(part).stem for part in name.split("/")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return [f"{name}: {found}" for found in sorted(names) if words(found) & FORBIDDEN_NOUNS]


def words(identifier: str) -> set[str]:
    return {word.lower().removesuffix("s") for word in re.findall(r"[A-Z]?[a-z]+", identifier)}


def test_no_name_says_nothing():
    assert not broken(forbidden_nouns, everything())


def test_the_noun_rule_can_fail():
    assert forbidden_nouns("kvtier/utils.py", "")
    assert forbidden_nouns("m.py", "class BlockManager: ...")
    assert forbidden_nouns("m.py", "def f(io_helper): ...")
    assert not forbidden_nouns("m.py", "class Lease:\n    def managed(self): self.utility = 1")


def private_paths(name: str, text: str) -> list[str]:
    lines = enumerate(text.splitlines(), 1)
    return [
        f"{name}:{number}: {line.strip()[:80]}"
        for number, line in lines
        if PRIVATE_PATH.search(line) or str(ROOT) in line
    ]


def texts() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of what git holds or would hold."""
    listing = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"],
        check=False,
        capture_output=True,
        text=True,
    )
    if listing.returncode:
        pytest.skip("git absent, or no git checkout")
    for name in sorted(set(listing.stdout.split("\0")) - {""}):
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_no_file_names_a_path_of_one_machine():
    assert not broken(private_paths, texts())


def test_the_private_path_rule_can_fail():
    for folder in ("home", "root", "Users", "tmp"):
        assert private_paths("m", f"see /{folder}/" + "someone")
    assert private_paths("m", f"cd {ROOT}")
    assert not private_paths("m", "lmdb:/var/lib/kv and build/tmp/x and ~/tmp/x")


# ------------------------------------------------------------------------------------- packages


def listed_packages() -> set[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return set(tomllib.load(file)["tool"]["setuptools"]["packages"])


def packages_of(modules: Iterator[str]) -> set[str]:
    """Return the packages that hold `modules`, whether or not they have an __init__."""
    return {module.rpartition(".")[0] for module in modules}


def test_the_package_list_equals_the_tree():
    assert listed_packages() == packages_of(module for module, _ in library())


def test_every_package_has_an_init():
    modules = {module for module, _ in library()}
    assert {f"{package}.__init__" for package in listed_packages()} <= modules


def test_the_package_rule_can_fail():
    unlisted = iter(["kvtier.cache", "kvtier.new.thing"])
    assert packages_of(unlisted) - listed_packages() == {"kvtier.new"}


def bad_links(root: Path) -> list[str]:
    found = []
    for folder in LINKED.values():
        link = root / "kvtier" / folder
        if not link.is_symlink() or str(link.readlink()) != f"../{folder}":
            found.append(f"kvtier/{folder} is not a link to ../{folder}")
    return found


def test_the_links_point_right():
    assert not bad_links(ROOT)


def test_the_link_rule_can_fail(tmp_path):
    (tmp_path / "kvtier" / "connectors").mkdir(parents=True)
    (tmp_path / "kvtier" / "storage_backends").symlink_to("../elsewhere")
    assert len(bad_links(tmp_path)) == len(LINKED)


# ------------------------------------------------------------------------------------ the import

LOOK = """
import threading
{statement}
import sys
heavy = sorted({{"torch", "cupy", "gguf", "tokenizers"}} & set(sys.modules))
threads = [thread.name for thread in threading.enumerate()[1:]]
print(heavy + threads)
"""


def side_effects(statement: str) -> str:
    """Return what `statement` loads or starts that a bare import must not."""
    look = [sys.executable, "-c", LOOK.format(statement=statement)]
    run = subprocess.run(look, check=True, capture_output=True, text=True, cwd=ROOT)
    return run.stdout.strip()


def test_importing_kvtier_loads_no_torch_and_starts_no_thread():
    assert side_effects("import kvtier") == "[]"


def test_the_import_rule_can_fail():
    start = "threading.Thread(target=threading.Event().wait, name='t', daemon=True).start()"
    assert side_effects(start) == "['t']"
    fake = "import sys; sys.modules['torch'] = sys"
    assert side_effects(fake) == "['torch']"
