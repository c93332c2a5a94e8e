"""AugTree: a context-parallel mode for Megatron that computes a shared prompt once.

Importing this package imports neither torch nor megatron; the public names below load on first use.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

_WHERE = {
    "AugTreeConfig": "megatron_augtree.config",
    "AugTreeError": "megatron_augtree.config",
    "UnsupportedError": "megatron_augtree.config",
    "InfeasiblePlanError": "megatron_augtree.config",
    "InputError": "megatron_augtree.config",
    "shared_cost": "megatron_augtree.planning.shared_cost",
    **dict.fromkeys(
        ("Batch", "Handle", "Outputs", "StepOutput", "StepPlan", "forward", "forward_backward",
         "forward_logprobs", "microbatches", "num_microbatches", "plan", "prepare_model"),
        "megatron_augtree.mcore.api",
    ),
}
__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
