"""What tests of recompute play: a small model under any recompute flags, and programs of every kind."""

from __future__ import annotations

import functools

import torch

from tests.distributed.matrix import LLAMA
from tests.numerics import fixtures as f

WORLD, LAYERS = 4, 4
PROGRAMS = {
    "fused": f.augtree(lane_degree=8),
    "re-fetching": f.augtree(lane_degree=8, keep=False),
    "waves": f.augtree(phase="phased", waves=2, chunks=2),
    "move_q": f.augtree(phase="phased", waves=2, primitive="move_q"),
}


@functools.cache
def model(flags: str) -> torch.nn.Module:
    return f.build_model(f.parse(f"{LLAMA} {flags}"), augtree=True)
