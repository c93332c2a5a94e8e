"""Imports go down only. The rules are read from syntax trees, so an import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_augtree"
NAME = PACKAGE.name

#: Layer -> what it may import beside itself and the standard library: layers, modules of layers, packages.
ALLOWED = {
    "": {"config"},
    "config": set(),
    "planning": {"config", "numpy", "_core"},  # the core only in native.py: a test below
    "attention": {"config", "torch", "transformer_engine"},
    "runtime": {"config", "planning", "attention", "torch", "numpy"},
    "rl": {"config", "runtime.logprob", "torch", "numpy"},
    "data": {"config"},
    "mcore": {
        "config",
        "planning",
        "attention",
        "runtime",
        "rl",
        "data",
        "torch",
        "numpy",
        "megatron",
        "safetensors",
        "tqdm",
        "gguf",
        "tokenizers",
    },
    "tools": None,  # anything
    "launch": {"config", "mcore"},
    "__main__": {"tools"},
}


def imported(source: str) -> list[str]:
    """Full names of what a module imports; relative imports and dynamic ones with a literal name included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                names.append(str(node.args[0].value))
    return names


def layer_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).parts
    if len(parts) > 1:
        return parts[0]
    return "" if path.name == "__init__.py" else path.stem


def violations(package: Path) -> list[str]:
    """``file: what it imports`` for each import that the table forbids."""
    found = []
    for path in sorted(package.rglob("*.py")):
        layer = layer_of(path, package)
        allowed = ALLOWED[layer]
        if allowed is None:
            continue
        for name in imported(path.read_text()):
            if not _permitted(name, layer, allowed):
                found.append(f"{path.relative_to(package)}: {name}")
    return found


def _permitted(name: str, layer: str, allowed: set[str]) -> bool:
    if name.startswith("."):
        return False  # absolute imports only: they name the layer
    top, _, rest = name.partition(".")
    if top == NAME:
        return any(rest == a or rest.startswith(a + ".") for a in {layer, *allowed} if a)
    if layer == "attention" and name.startswith("torch.distributed"):
        return False
    return top in sys.stdlib_module_names or top in allowed


def test_imports_go_down_only():
    assert violations(PACKAGE) == []


def test_only_native_imports_the_core():
    found = {path.stem for path in PACKAGE.rglob("*.py") if f"{NAME}._core" in imported(path.read_text())}
    assert found == {"native"}


def test_every_folder_has_a_rule():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert folders == set(ALLOWED) - {"", "config", "launch", "__main__"}
    assert {p.stem for p in PACKAGE.glob("*.py")} == {"__init__", "__main__", "config", "launch"}


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("planning/x.py", "import torch"),
        ("planning/x.py", "def f():\n    from megatron_augtree.runtime import layout"),
        ("planning/x.py", "from megatron_augtree.data.groups import Group"),
        ("planning/x.py", "import importlib\nimportlib.import_module('torch')"),
        ("attention/kernels/x.py", "import torch.distributed as dist"),
        ("attention/x.py", "from torch import distributed"),
        ("attention/x.py", "from megatron_augtree.planning.plan import Plan"),
        ("runtime/x.py", "from megatron_augtree.mcore import cpu"),
        ("runtime/x.py", "import megatron.core"),
        ("rl/x.py", "from megatron_augtree.runtime.engine import Engine"),
        ("rl/x.py", "from megatron_augtree.planning.tree import Forest"),
        ("data/x.py", "import numpy"),
        ("data/x.py", "from megatron_augtree.planning.tree import Forest"),
        ("mcore/x.py", "from megatron_augtree.tools import cli"),
        ("mcore/x.py", "from megatron_augtree import launch"),
        ("launch.py", "import torch"),
        ("launch.py", "from megatron_augtree.runtime import engine"),
        ("config.py", "import numpy"),
        ("__init__.py", "from megatron_augtree.planning.plan import Plan"),
        ("mcore/x.py", "from . import cpu"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line)
    assert [text.split(":")[0] for text in violations(tmp_path)] == [file]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("planning/x.py", "import numpy as np\nfrom megatron_augtree.planning.tree import Forest"),
        ("rl/x.py", "from megatron_augtree.runtime.logprob import entropy"),
        (
            "mcore/x.py",
            "from megatron.core import parallel_state\nfrom megatron_augtree.data.groups import Group",
        ),
        ("tools/x.py", "from megatron_augtree.mcore import cpu\nimport matplotlib"),
    ],
)
def test_a_permitted_import_passes(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert violations(tmp_path) == []


def test_planning_and_the_package_load_without_torch_and_megatron():
    """What the syntax trees cannot see: what is really loaded, in a fresh process."""
    pure = [NAME, f"{NAME}.config"]
    for folder in ("planning", "data"):
        pure += [
            ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts)
            for p in (PACKAGE / folder).glob("*.py")
            if p.stem != "__init__"
        ]
    assert len(pure) > 15
    script = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise AssertionError(name + " is imported")
sys.meta_path.insert(0, Refuse())
for name in {pure!r}:
    importlib.import_module(name)
import {NAME}
assert all(hasattr({NAME}, name) for name in {NAME}.__all__ if ".mcore." not in {NAME}._WHERE.get(name, ""))
assert not {{"torch", "megatron"}} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_unknown_public_name_is_an_attribute_error():
    import megatron_augtree

    assert megatron_augtree.AugTreeConfig().mode == "augtree"
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = megatron_augtree.Nothing
