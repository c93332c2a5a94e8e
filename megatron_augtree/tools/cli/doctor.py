"""``augtree doctor``: what is installed, what runs here, and whether the numbers are right."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from megatron_augtree.config import NO_CORE, AugTreeError
from megatron_augtree.planning import native
from megatron_augtree.tools.cli import options
from megatron_augtree.tools.cli.output import Answer, Table

HELP = "versions, kernels, patches, and a two-second parity check"
EXAMPLES = """\
  augtree doctor
  augtree doctor --megatron
  augtree doctor --json"""

#: Distribution -> what it is for where it is missing.
_PACKAGES = {
    "numpy": "planning",
    "torch": "running plans: pip install torch",
    "megatron-core": "training: pip install megatron-core",
    "transformer-engine": "the kernel te_fused, on GPUs",
    "flash-attn": "Transformer Engine's choice of kernels, on GPUs",
    "rich": "tables on a terminal: pip install rich",
    "matplotlib": "pictures: pip install matplotlib",
}
_NEEDED = frozenset(("numpy", "torch", "megatron-core"))


@dataclass(frozen=True)
class Line:
    """One thing that was looked at.

    Attributes:
        about: what.
        state: ``ok``, ``missing`` (something does not run without it), ``absent`` (not needed here) or
            ``wrong`` (a check failed).
        told: what was found, or what to do.
    """

    about: str
    state: str
    told: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--megatron", action="store_true",
                        help="also compare a small bound megatron-core model with stock (some seconds)")
    options.add_json(parser)


def run(args: argparse.Namespace) -> Answer:
    """The command."""
    lines = [Line("python", "ok", platform.python_version()), *_versions(), _core(), *_kernels(), *_patches()]
    lines.append(_parity())
    if args.megatron:
        lines.append(_megatron())
    wrong = [line for line in lines if line.state == "wrong"]
    verdict = "all is well" if all(line.state in ("ok", "absent") for line in lines) else (
        "a check failed" if wrong else "something is missing: see what to do")
    data = {"lines": [asdict(line) for line in lines], "verdict": verdict}
    table = Table(("", "", ""), [(line.state, line.about, line.told) for line in lines])
    return Answer(data, [table, verdict], int(bool(wrong)))


def _versions() -> Iterator[Line]:
    for name, purpose in _PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Line(name, "missing" if name in _NEEDED else "absent", f"for {purpose}")
        else:
            yield Line(name, "ok", found)


def _core() -> Line:
    if native.core() is not None:
        return Line("C++ core", "ok", f"version {native.VERSION}")
    return Line("C++ core", "absent", NO_CORE)


def _kernels() -> Iterator[Line]:
    if not _importable("torch"):
        yield Line("attention kernel", "missing", "needs torch")
        return
    import torch

    from megatron_augtree.attention.kernels import choice

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU that torch can use: the CPU"
    yield Line("device", "ok", named)
    chosen = choice.choose_kernel(device)
    yield Line("attention kernel", "ok", f"{chosen.name} (bfloat16, heads of 128)")
    for name in choice.KERNELS:
        told = choice.why_not(name, device, torch.bfloat16, 128)
        if name != chosen.name:
            yield Line(f"kernel {name}", "absent", told or "runs here, and is slower")


def _patches() -> Iterator[Line]:
    if not (_importable("megatron") and _importable("megatron.core")):
        yield Line("patches", "missing", "need megatron-core")
        return
    if not _importable("megatron.training"):
        yield Line("patches", "absent", "Megatron-LM's training loop is not on the path; only its own "
                   "scripts, started by megatron_augtree.launch, need it")
        return
    import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported
    from megatron_augtree.mcore.megatron_lm.patches import REGISTRY

    for row in REGISTRY.report():
        state = "missing" if row.state == "does not fit" else "ok"
        yield Line(f"patch {row.name}", state, f"{row.target}: {row.state}; {row.why}")


def _parity() -> Line:
    about = "parity"
    if not _importable("torch"):
        return Line(about, "missing", "needs torch")
    from megatron_augtree.tools.cli import parity

    try:
        error = parity.worst_error()
    except (AugTreeError, RuntimeError) as failure:
        return Line(about, "wrong", f"{type(failure).__name__}: {' '.join(str(failure).split())}")
    told = f"augtree on 2 ranks against the un-shared run, fp64: largest relative difference {error:.1e} " \
        f"(at most {parity.BAR:.0e})"
    return Line(about, "ok" if error <= parity.BAR else "wrong", told)


def _megatron() -> Line:
    about = "bound model"
    if not (_importable("megatron") and _importable("megatron.core") and _importable("torch")):
        return Line(about, "missing", "needs torch and megatron-core")
    # In a process of its own: it sets up process groups.
    command = [sys.executable, "-m", "megatron_augtree.mcore.selfcheck"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return Line(about, "wrong", " ".join(done.stderr.split())[-400:])
    return Line(about, "ok", done.stdout.strip())


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
