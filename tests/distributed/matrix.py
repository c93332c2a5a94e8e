"""The parity matrix: everything that can be combined, so that every pair of values meets in some case.

    python -m tests.distributed.matrix        prints the list

A case is a dictionary of the factors below. Pairs are chosen by allpairspy; every world size has its share.
"""

from __future__ import annotations

from allpairspy import AllPairs

LLAMA = ("--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
         "--num-query-groups 2 --ffn-hidden-size 64 --vocab-size 64 --swiglu --normalization RMSNorm "
         "--disable-bias-linear --untie-embeddings-and-output-weights --init-method-std 0.15")
#: One KV group: fewer than tensor-parallel ranks. Biases, QK norm, tied embeddings.
MQA = ("--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
       "--num-query-groups 1 --ffn-hidden-size 64 --vocab-size 64 --add-qkv-bias --qk-layernorm "
       "--init-method-std 0.15")
MODELS = {"llama": LLAMA, "mqa": MQA}

PLANS = {
    "ring": {"mode": "ring"},
    "gather-reuse": {"mode": "gather-reuse"},
    "fused": {},
    "fused re-fetching": {"lane_degree": 8, "primitive": "move_kv", "keep": False},
    "fused, degree 1": {"degree": 1},
    "waves": {"phase": "phased", "waves": 2, "chunks": 1},
    "chunks and waves re-fetching": {"phase": "phased", "waves": 2, "chunks": 2, "keep": False},
    "waves by move_q": {"phase": "phased", "waves": 2, "chunks": 2, "primitive": "move_q"},
    # Chunks and waves with a recompute pair of their own each, whatever the model's flags say.
    "waves prefetched, recompute by pass": {"phase": "phased", "waves": 2, "chunks": 2, "prefetch": True,
                                            "keep_layers": 1, "keep_attention": 1, "wave_layers": 3},
}


def _full(method: str, layers: int) -> str:
    return f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}"


#: Flags, and how many recomputed layers keep their attention's output (-1: all).
RECOMPUTE = {
    "none": ("", 0),
    "selective": ("--recompute-granularity selective", 0),
    "selective, 2 keep attention": ("--recompute-granularity selective", 2),
    "full uniform 1": (_full("uniform", 1), 0),
    "full uniform 2": (_full("uniform", 2), 0),
    "full uniform 2, all keep attention": (_full("uniform", 2), -1),
    "full block 1": (_full("block", 1), 0),
    "full block 2, all keep attention": (_full("block", 2), -1),
    "full block 3, 1 keeps attention": (_full("block", 3), 1),
}
_TOP = ("output_layer.", "decoder.final_layernorm.")
#: What is not trained, by the beginnings of parameters' names.
FROZEN = {
    "nothing": lambda name: False,
    "embedding": lambda name: name.startswith("embedding."),
    "all but the top layer": lambda name: not ("layers.3." in name or name.startswith(_TOP)),
    "all but layer 0's keys and values": lambda name: "layers.0.self_attention.linear_qkv" not in name,
}

FACTORS = {
    "world": [2, 4, 8],
    "layout": ["TP 1", "TP 2", "TP 2 + SP"],
    "model": list(MODELS),
    "recompute": list(RECOMPUTE),
    "plan": list(PLANS),
    "overlap": [False, True],
    "sharded": [False, True],
    "frozen": list(FROZEN),
    "data": ["ragged", "several", "merged", "three_levels", "inner_losses", "one_prompt_token"],
}


def cases() -> list[dict]:
    """Every case, in order."""
    return [dict(zip(FACTORS, row)) for row in AllPairs(list(FACTORS.values()))]


def name_of(case: dict) -> str:
    """A case in a line."""
    parts = [case["layout"], case["model"], case["plan"], case["data"], f"recompute {case['recompute']}"]
    parts += ["overlap"] * case["overlap"] + ["distributed optimizer"] * case["sharded"]
    if case["frozen"] != "nothing":
        parts.append(f"frozen: {case['frozen']}")
    return f"{case['world']} ranks: " + ", ".join(parts)


if __name__ == "__main__":
    print("\n".join(map(name_of, cases())))
