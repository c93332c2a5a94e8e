"""The README's table of what is supported, refused or falls back, each row with the test that shows it.

    python -m tests.support        writes the table into README.md

What is refused is read from the launchers' own list, `mcore.arguments.LIMITS`, with its reason.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from megatron_augtree.mcore.arguments import LIMITS

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- written by python -m tests.support -->", "<!-- end -->"

#: What works -> tests (file::function).
SUPPORTED: dict[str, list[str]] = {
    "modes `augtree`, `ring`, `ring-reuse`, `ring-reuse-per-response`, `gather-reuse`; stock without a mode": [
        "tests/numerics/test_parity.py::test_every_program",
        "tests/mcore/test_launcher.py::test_every_mode_trains_as_stock_megatron_does"],
    "tensor parallelism (also with fewer KV groups than ranks), sequence parallelism": [
        "tests/distributed/test_matrix.py::test_parity", "tests/distributed/test_parallel.py::test_case"],
    "recompute: selective, full (uniform, block), attention kept, mixed by layer": [
        "tests/distributed/test_matrix.py::test_parity",
        "tests/numerics/test_recompute.py::test_the_same_bits_and_no_attention_twice_where_it_is_kept"],
    "overlapped gradient reduction and parameter gather, any number of passes, idle ranks": [
        "tests/distributed/test_parallel.py::test_case"],
    "frozen parameters: embedding, all but the top layer, all but one projection": [
        "tests/distributed/test_matrix.py::test_parity"],
}
#: What runs un-shared instead, where that was asked for.
FALLS_BACK: dict[str, list[str]] = {}
REFUSED_BY = ["tests/mcore/test_arguments.py::test_arguments_are_refused",
              "tests/mcore/test_arguments.py::test_configs_are_refused"]


def table() -> str:
    """The table as Markdown."""
    lines = ["| | | test |", "|---|---|---|"]
    for what, tests in SUPPORTED.items():
        lines.append(f"| supported | {what} | {', '.join(map(_link, tests))} |")
    for what, tests in FALLS_BACK.items():
        lines.append(f"| falls back to stock, counted | {what} | {', '.join(map(_link, tests))} |")
    reasons: dict[str, list[str]] = {}
    for limit in LIMITS:
        reasons.setdefault(limit.rule, []).append(f"`{limit.flag}`")
    for rule, flags in reasons.items():
        lines.append(f"| refused | {', '.join(flags)}: {rule} | {', '.join(map(_link, REFUSED_BY))} |")
    return "\n".join(lines)


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name}`]({path})"


def missing() -> list[str]:
    """Tests that the table names and that are not there."""
    named = {test for tests in (*SUPPORTED.values(), *FALLS_BACK.values(), REFUSED_BY) for test in tests}
    return sorted(test for test in named if not _defined(test))


def _defined(test: str) -> bool:
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def rewritten(readme: str) -> str:
    """A README with the table between its marks."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(pattern.findall(readme)) == 1, f"the README has no single part from {BEGIN!r} to {END!r}"
    return pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rewritten(path.read_text()))
    print("\n".join(missing()) or "README.md written; every named test is there")
