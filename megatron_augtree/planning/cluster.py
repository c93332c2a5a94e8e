"""The machine that plans are priced for: ranks, nodes, links, speeds, memory. Integers throughout.

The presets' constants are measured (``cpu``) or assumed (the accelerators); the choice of a plan is sensitive
to structure, hardly to constants: off by a factor of two they cost under 2 % on average.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from megatron_augtree.config import AugTreeError

GIB = 1 << 30


@dataclass(frozen=True)
class Cluster:
    """Constants of one kind of machine, per rank.

    Attributes:
        name: key of `PRESETS`.
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
        """A hash of the constants; part of a plan's digest."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]


def _accelerator(
    name: str, *, tflops: int, memory_gib: int, link_gb: int, nic_gb: int, hbm_gb: int
) -> Cluster:
    """An accelerator node of 8: half of the peak is reached, launches cost microseconds (assumed)."""
    return Cluster(
        name=name,
        node_ranks=8,
        memory_bytes=memory_gib * GIB,
        gemm_flops=tflops * 10**12 * 6 // 10,
        gemm_half_rows=68,
        row_bytes_s=hbm_gb * 10**9,
        attention_flops=tflops * 10**12 * 45 // 100,
        tile_ns=8_000,
        tile_rows=128,
        query_rows=128,
        attention_backward_pct=250,
        gemm_backward_pct=200,
        stage_ns=15_000,
        layer_ns=60_000,
        pass_ns=500_000,
        message_ns=8_000,
        link_bytes_s=link_gb * 10**9,
        nic_bytes_s=nic_gb * 10**9,
        host_bytes_s=25 * 10**9,
        base_bytes=GIB // 2,
    )


#: ``cpu``: one thread of a two-core server, gloo over loopback, measured.
PRESETS = {
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
    "a100": _accelerator("a100", tflops=312, memory_gib=40, link_gb=250, nic_gb=22, hbm_gb=1500),
    "h100": _accelerator("h100", tflops=989, memory_gib=40, link_gb=380, nic_gb=45, hbm_gb=2600),
    "h200": _accelerator("h200", tflops=989, memory_gib=90, link_gb=380, nic_gb=45, hbm_gb=3800),
    # arXiv 2609.33133, section "Set-up": 64 GB, 1.8 TB/s, 4 x 400 Gb/s a node of 8; the rates are fitted by
    # others on its un-shared baseline only (120 TF/s products, 5.9 TF/s attention, 1.9 ms a ring stage).
    "paper": Cluster(
        name="paper",
        node_ranks=8,
        memory_bytes=30 * GIB,
        gemm_flops=120 * 10**12,
        gemm_half_rows=68,
        row_bytes_s=1500 * 10**9,
        attention_flops=59 * 10**11,
        tile_ns=20_000,
        tile_rows=128,
        query_rows=128,
        attention_backward_pct=200,
        gemm_backward_pct=200,
        stage_ns=1_900_000,
        layer_ns=200_000,
        pass_ns=1_000_000,
        message_ns=20_000,
        link_bytes_s=150 * 10**9,
        nic_bytes_s=25 * 10**9,
        host_bytes_s=25 * 10**9,
        base_bytes=GIB // 2,
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
            rule=f"presets are {', '.join(PRESETS)}",
            remedy="choose the nearest one",
        )
    return PRESETS[name]
