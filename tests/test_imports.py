"""What importing costs and touches, and that the layers know only what lies below them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import guarddcp
from guarddcp import errors

ROOT = Path(guarddcp.__file__).parent

LAYERS = ("cli", "dcp", "storage", "container", "codecs", "certificate", "kernels", "numerics")
"""From the top down. A layer may import those below it."""

BASE = ("errors", "config", "report", "version")
"""Modules that every layer may import; they import only each other."""

WATCH = """
import json, socket, sys, threading
def refuse(*args, **kwargs):
    raise AssertionError("a network connection")
socket.socket.connect = refuse
{statement}
torch = sys.modules.get("torch")
print(json.dumps({{
    "modules": sorted(sys.modules),
    "threads": threading.active_count(),
    "cuda": bool(torch and torch.cuda.is_initialized()),
}}))
"""


def imported(statement: str) -> tuple[set[str], dict[str, object]]:
    """Names of the modules that a fresh interpreter holds after ``statement``, and what else it did."""
    environment = os.environ | {"PYTHONPATH": str(ROOT.parent)}
    command = [sys.executable, "-c", WATCH.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return set(found["modules"]), found


def test_the_package_alone_loads_nothing_heavy() -> None:
    modules, found = imported("import guarddcp; from guarddcp import Guard, GuardError, Report, __version__")
    assert not modules & {"torch", "numba", "numpy", "fsspec", "zstandard"}
    assert found["threads"] == 1
    assert not found["cuda"]


def test_the_whole_api_compiles_nothing_and_starts_no_accelerator() -> None:
    modules, found = imported("from guarddcp import *; GuardedWriter('memory://x'); GuardedReader('memory://x')")
    assert "torch.distributed.checkpoint" in modules
    assert not [name for name in modules if name.partition(".")[0] in ("numba", "llvmlite", "transformers", "s3fs")]
    assert not found["cuda"]


def test_certificates_need_neither_dcp_nor_numba() -> None:
    modules, _ = imported("from guarddcp import Adam; Adam(betas=(0.9, 0.99), eps=0.0)")
    assert "torch.distributed.checkpoint" not in modules
    assert "numba" not in modules


def test_every_public_name_is_there() -> None:
    assert sorted(guarddcp.__all__) == list(dir(guarddcp))
    for name in guarddcp.__all__:
        assert getattr(guarddcp, name) is not None
    assert set(errors.__all__) < set(guarddcp.__all__)
    promised = {"Guard", "GuardedWriter", "GuardedReader", "verify", "inspect_checkpoint", "Adam"}
    assert promised < set(guarddcp.__all__)
    with pytest.raises(AttributeError, match="module 'guarddcp' has no attribute 'nonsense'"):
        guarddcp.nonsense  # noqa: B018


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: line {node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    relative = path.relative_to(ROOT)
    if len(relative.parts) == 1 and relative.stem not in BASE:
        return  # __init__ and __main__ lead into the package from outside
    here = relative.parts[0].removesuffix(".py")
    allowed = set(BASE) if here in BASE else {*BASE, *LAYERS[LAYERS.index(here) :]}
    if here == "cli":
        allowed |= set(guarddcp.__all__)  # as any user's program
    for line, name in imports(path):
        package, _, rest = name.partition(".")
        if package == "guarddcp":
            assert rest.partition(".")[0] in allowed, f"{relative}: line {line} imports {name}"


@pytest.mark.parametrize("layer", LAYERS[2:])
def test_only_the_upper_layers_know_torch_distributed(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        assert not [name for _, name in imports(path) if name.startswith("torch.distributed")], path


@pytest.mark.parametrize("layer", ["numerics", "kernels", "certificate", "codecs"])
def test_arithmetic_knows_no_torch_at_all(layer: str) -> None:
    for path in (ROOT / layer).rglob("*.py"):
        assert not [name for _, name in imports(path) if name.partition(".")[0] == "torch"], path


def test_type_information_and_format_documents_are_packaged() -> None:
    assert (ROOT / "py.typed").exists()
    patterns = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    assert {"py.typed", "*.md"} <= set(patterns)
    assert {"FORMAT.md", "NOTES.md"} <= {path.name for path in ROOT.rglob("*.md")}
