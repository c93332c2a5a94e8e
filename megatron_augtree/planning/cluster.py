"""The machine that plans are priced for: ranks, nodes, links, speeds, memory. Integers throughout.

A machine is a preset or a file that ``calibrate`` wrote (`load`); `docs/calibration.md` says how each
constant is measured. The choice of a plan is sensitive to structure, hardly to constants: off by a factor of
two they cost under 2 % on average.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NoReturn

from megatron_augtree.config import AugTreeError, InputError

GIB = 1 << 30

FORMAT, VERSION = "augtree-cluster", 1

#: Constants are below it, so that sums of a few fit into 64 bits.
LIMIT = 1 << 62

#: No calibration file is longer, bytes.
_LONGEST_FILE = 1 << 20


@dataclass(frozen=True)
class Cluster:
    """Constants of one kind of machine, per rank.

    Attributes:
        name: of the preset, or what the file calls its machine.
        node_ranks: ranks of a node.
        memory_bytes: memory for activations, above the model and its optimizer.
        gemm_flops: operations a second of a large matrix product.
        gemm_half_rows: rows at which a matrix product runs at half speed.
        row_bytes_s: memory traffic of element-wise work, bytes a second.
        attention_flops: operations a second of a large attention tile.
        tile_ns: fixed cost of a tile, forward.
        tile_rows: keys that a kernel takes at once; on a causal tile's diagonal half of them are masked.
        query_rows: query rows below which a tile costs what so many cost: a kernel's blocks run half empty.
        attention_backward_pct, gemm_backward_pct: backward time, per cent of the forward's.
        stage_ns: fixed cost of a stage with transfers.
        layer_ns: fixed cost of a layer's forward in a pass.
        pass_ns: fixed cost of a pass outside its layers.
        message_ns: latency of a message.
        link_bytes_s, nic_bytes_s: bytes a second a rank sends inside a node and across nodes.
        host_bytes_s: bytes a second between device and host memory, a rank; 0 where they are the same.
        base_bytes: memory of a step whatever its rows: gradients on the wire, library scratch, fragments.
        overlap: transfers travel while tiles are computed.
    """

    name: str
    node_ranks: int
    memory_bytes: int
    gemm_flops: int
    gemm_half_rows: int
    row_bytes_s: int
    attention_flops: int
    tile_ns: int
    tile_rows: int
    query_rows: int
    attention_backward_pct: int
    gemm_backward_pct: int
    stage_ns: int
    layer_ns: int
    pass_ns: int
    message_ns: int
    link_bytes_s: int
    nic_bytes_s: int
    host_bytes_s: int
    base_bytes: int
    overlap: bool = True

    def digest(self) -> str:
        """A hash of the constants, not of the name; part of a plan's digest."""
        constants = {name: value for name, value in asdict(self).items() if name != "name"}
        return hashlib.sha256(json.dumps(constants, sort_keys=True).encode()).hexdigest()[:12]


#: Constants that may be 0: a cost or a half-size that was too small to be seen, or host memory that is the
#: device's own. Every other one is divided by, or is a number of something.
MAY_BE_0 = frozenset(
    "gemm_half_rows tile_ns stage_ns layer_ns pass_ns message_ns host_bytes_s base_bytes".split()
)

#: Device memory taken by weights, gradients and optimizer, before activations (assumed).
_MODEL_GIB = 40


def _accelerator(
    name: str,
    *,
    tflops: int,
    attention_pct: int,
    memory_gib: int,
    hbm_gb_s: int,
    link_gb_s: int,
    nic_gb_s: int,
    pcie_gb_s: int,
) -> Cluster:
    """A node of 8 accelerators: peaks from data sheets, the share of a peak that is reached assumed.

    Args:
        name: of the preset.
        tflops: peak of dense bf16 matrix products, 10^12 operations a second.
        attention_pct: share of it that a large attention tile reaches, forward.
        memory_gib: of the device.
        hbm_gb_s, link_gb_s, nic_gb_s, pcie_gb_s: peaks of device memory and, in one direction, of the links
            inside a node, of a rank's network card and of the path to the host; 10^9 bytes a second.
    """
    return Cluster(
        name=name,
        node_ranks=8,
        memory_bytes=(memory_gib - _MODEL_GIB) * GIB,
        gemm_flops=tflops * 10**12 * 60 // 100,  # 60 % reached: assumed
        gemm_half_rows=68,  # assumed
        row_bytes_s=hbm_gb_s * 10**9 * 80 // 100,  # 80 % reached: assumed
        attention_flops=tflops * 10**12 * attention_pct // 100,
        tile_ns=8_000,  # a launch and a merge: assumed
        tile_rows=128,  # keys of a flash kernel's block: assumed
        query_rows=128,  # queries of a flash kernel's block: assumed
        attention_backward_pct=250,  # 5 products for 2, at the same rate: arithmetic
        gemm_backward_pct=200,  # 2 products for 1: arithmetic
        stage_ns=15_000,  # assumed
        layer_ns=60_000,  # some 15 launches: assumed
        pass_ns=500_000,  # assumed
        message_ns=8_000,  # assumed
        link_bytes_s=link_gb_s * 10**9 * 85 // 100,  # 85 % reached: assumed
        nic_bytes_s=nic_gb_s * 10**9 * 90 // 100,  # 90 % reached: assumed
        host_bytes_s=pcie_gb_s * 10**9 * 80 // 100,  # 80 % reached, nobody else on the path: assumed
        base_bytes=GIB // 2,  # assumed
    )


PRESETS = {
    # One thread of a two-core server, gloo over loopback: measured, an update's passes and micro-benchmarks.
    "cpu": Cluster(
        name="cpu",
        node_ranks=64,
        memory_bytes=6 * GIB,
        gemm_flops=88 * 10**9,
        gemm_half_rows=6,
        row_bytes_s=12 * 10**9,
        attention_flops=68 * 10**9,
        tile_ns=40_000,
        tile_rows=400,
        query_rows=1,
        attention_backward_pct=265,
        gemm_backward_pct=200,
        stage_ns=250_000,
        layer_ns=600_000,
        pass_ns=3_000_000,
        message_ns=250_000,
        link_bytes_s=900 * 10**6,
        nic_bytes_s=900 * 10**6,
        host_bytes_s=0,
        base_bytes=40 << 20,
    ),
    # NVIDIA A100 80GB data sheet (SXM): 312 TFLOP/s dense bf16, 80 GB, 2,039 GB/s, NVLink 600 GB/s both ways,
    # PCIe 4 64 GB/s both ways. DGX A100 data sheet: 8 ConnectX-6 of 200 Gb/s for 8 GPUs. Attention:
    # FlashAttention-2 (arXiv 2307.08691) reports 50 to 73 % of the peak; 55 % assumed.
    "a100": _accelerator(
        "a100",
        tflops=312,
        attention_pct=55,
        memory_gib=80,
        hbm_gb_s=2039,
        link_gb_s=300,
        nic_gb_s=25,
        pcie_gb_s=32,
    ),
    # NVIDIA H100 data sheet (SXM): 1,979 TFLOP/s bf16 with sparsity, half of it dense; 80 GB, 3.35 TB/s,
    # NVLink 900 GB/s both ways, PCIe 5 128 GB/s both ways. DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s for
    # 8 GPUs. Attention: FlashAttention-3 (arXiv 2407.08608) reports 35 % of the peak for FlashAttention-2 and
    # up to 75 % for its own; 45 % assumed.
    "h100": _accelerator(
        "h100",
        tflops=989,
        attention_pct=45,
        memory_gib=80,
        hbm_gb_s=3350,
        link_gb_s=450,
        nic_gb_s=50,
        pcie_gb_s=64,
    ),
    # NVIDIA H200 data sheet (SXM): the rates of H100, 141 GB (131 GiB), 4.8 TB/s. DGX H200 data sheet: 8
    # ConnectX-7 of 400 Gb/s for 8 GPUs. Attention as on H100: assumed.
    "h200": _accelerator(
        "h200",
        tflops=989,
        attention_pct=45,
        memory_gib=131,
        hbm_gb_s=4800,
        link_gb_s=450,
        nic_gb_s=50,
        pcie_gb_s=64,
    ),
    # NVIDIA HGX B200: 36 PFLOP/s bf16 with sparsity for 8 GPUs, half of it dense; NVLink 1.8 TB/s a GPU both
    # ways. DGX B200 data sheet: 1,440 GB (180 GB, 167 GiB a GPU) and 64 TB/s for 8 GPUs, ConnectX-7 of 400
    # Gb/s a GPU, PCIe 5. Attention as on H100: assumed.
    "b200": _accelerator(
        "b200",
        tflops=2250,
        attention_pct=45,
        memory_gib=167,
        hbm_gb_s=8000,
        link_gb_s=900,
        nic_gb_s=50,
        pcie_gb_s=64,
    ),
    # The accelerator of arXiv 2609.33133. Its section "Set-up": nodes of 8, 64 GB (59 GiB) and 1.8 TB/s each,
    # 4 cards of 400 Gb/s a node. Attention and stages are fitted on the times that it prints for its
    # un-shared baseline, and on nothing else; the rest is assumed.
    "paper": Cluster(
        name="paper",
        node_ranks=8,
        memory_bytes=30 * GIB,  # half of the device: assumed
        gemm_flops=120 * 10**12,  # assumed: the fit does not determine it
        gemm_half_rows=68,  # assumed
        row_bytes_s=1800 * 10**9 * 80 // 100,  # "Set-up"; 80 % reached: assumed
        attention_flops=59 * 10**11,  # fitted
        tile_ns=20_000,  # assumed
        tile_rows=128,  # assumed
        query_rows=128,  # assumed
        attention_backward_pct=200,  # assumed
        gemm_backward_pct=200,  # 2 products for 1: arithmetic
        stage_ns=1_900_000,  # fitted: a ring stage
        layer_ns=200_000,  # assumed
        pass_ns=1_000_000,  # assumed
        message_ns=20_000,  # assumed
        link_bytes_s=150 * 10**9,  # assumed
        nic_bytes_s=25 * 10**9,  # "Set-up": 4 x 400 Gb/s shared by 8 ranks
        host_bytes_s=25 * 10**9,  # assumed
        base_bytes=GIB // 2,  # assumed
    ),
}


def preset(name: str) -> Cluster:
    """A preset by name.

    Raises:
        AugTreeError: there is none of this name.
    """
    if name not in PRESETS:
        raise AugTreeError(
            "unknown cluster",
            values=f"--augtree-cluster {name}",
            rule=f"presets are {', '.join(PRESETS)}; what ends in .json or holds a path separator is a file",
            remedy="choose the nearest preset, or the file that `calibrate` wrote",
        )
    return PRESETS[name]


@functools.cache
def cluster_of(text: str) -> Cluster:
    """What ``--augtree-cluster`` names: a preset, or a calibration file where it looks like a path.

    A file is read once in a process: all plans of a run are priced for one machine, whatever becomes of the
    file meanwhile.

    Raises:
        AugTreeError: no preset of this name, or `InputError`, a file that cannot be used.
    """
    separators = [sep for sep in (os.sep, os.altsep, "/") if sep]
    is_file = text.endswith(".json") or any(sep in text for sep in separators)
    return load(text) if is_file else preset(text)


# Calibration files.


def document(cluster: Cluster, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a calibration file.

    Args:
        cluster: the constants; the digest covers them and nothing else.
        measured: how they were found: machine, versions, date, residuals.
    """
    return {"format": FORMAT, "version": VERSION, "cluster": asdict(cluster), "measured": dict(measured)}


def load(path: str | os.PathLike[str]) -> Cluster:
    """The constants in a calibration file.

    Raises:
        InputError: the file cannot be read, is none of ours or of another version, or constants are missing,
            unknown or out of range.
    """
    return cluster_from(_read(path), str(path))


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, "rb") as file:
            text = file.read(_LONGEST_FILE + 1)
        if len(text) > _LONGEST_FILE:
            raise ValueError(f"longer than {_LONGEST_FILE} bytes")
        return json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        _refuse(path, error.strerror or str(error), "a file that can be read")
    except (ValueError, RecursionError) as error:  # what is no UTF-8 or no JSON is a ValueError too
        _refuse(path, str(error), "a calibration file is one JSON object, each key once")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two values the later one would win in silence."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


def cluster_from(data: Any, path: str) -> Cluster:
    """The constants of a calibration file's content; `path` is named in errors.

    Raises:
        InputError: see `load`.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        _refuse(path, "no calibration file", f'the file says "format": "{FORMAT}"')
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        _refuse(path, f"version {_short(version)}", f"this release reads version {VERSION}")
    constants, names = data.get("cluster"), [field.name for field in fields(Cluster)]
    if not isinstance(constants, dict) or set(constants) != set(names):
        given = set(constants) if isinstance(constants, dict) else set()
        missing, unknown = [n for n in names if n not in given], sorted(given - set(names))
        found = [
            f"{word} {_short(', '.join(which))}"
            for word, which in (("missing", missing), ("unknown", unknown))
            if which
        ]
        _refuse(path, "cluster: " + "; ".join(found), "every constant stands in `cluster`, and nothing else")
    wrong = [f"{name} {_short(constants[name])}" for name in names if not _good(name, constants[name])]
    if wrong:
        _refuse(
            path,
            "cluster: " + ", ".join(wrong),
            "constants are integers below 2^62, above 0 (the cost of something may be 0), `overlap` is true "
            "or false, `name` text that can be printed",
        )
    return Cluster(**constants)


def _good(name: str, value: Any) -> bool:
    if name == "name":
        return isinstance(value, str) and 0 < len(value) <= 200 and value.isprintable()
    if name == "overlap":
        return isinstance(value, bool)
    return type(value) is int and (0 if name in MAY_BE_0 else 1) <= value < LIMIT


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(path: str | os.PathLike[str], found: str, rule: str) -> NoReturn:
    raise InputError(
        "cannot use a calibration file",
        values=f"{path}: {found}",
        rule=rule,
        remedy="write it again: `python -m megatron_augtree.tools.calibrate --out FILE`; or name a preset",
    )
