"""What real processes run through the public API: plain data, so that launcher and worker agree on it.

A case is a dictionary: ``name``, ``do`` (a function of ``api_worker.py``) and that function's arguments.
"""

from __future__ import annotations

#: How the samples of a step are dealt to ranks.
DEALS = ("in turn", "all to the last", "groups", "uneven")
PLANS = {
    "planned": {},
    "degree 1": {"force": "degree=1"},
    "whole pool": {"force": "degree=2,primitive=move_kv"},
    "two copies": {"force": "degree=2,copies=2"},
    "waves": {"force": "phase=phased,waves=2"},
    "chunks and waves by move_q": {"force": "degree=2,phase=phased,chunks=2,waves=3,primitive=move_q"},
    "waves on single ranks": {"force": "degree=1,phase=phased,waves=2"},
    "ring": {"mode": "ring"},
    "gather-reuse": {"mode": "gather-reuse"},
}
DATA = ("ragged", "several", "merged", "three_levels", "inner_losses", "one_prompt_token", "one_valid_token")
CONFORMANCE = ("slime", "verl", "bridge", "plain")


def _data(plan: str, place: int) -> str:
    """A data set; a forced plan needs a shared prompt."""
    found = DATA[place % len(DATA)]
    return "ragged" if found == "one_prompt_token" and "force" in PLANS[plan] else found


def _tier2(plan: str, deal: str, data: str, **more) -> dict:
    words = [plan, deal, data, *[f"{key}={value}" for key, value in more.items()]]
    return {
        "do": "tier2",
        "name": "tier 2: " + ", ".join(words),
        "plan": plan,
        "deal": deal,
        "data": data,
        **more,
    }


def _tier1(plan: str, deal: str, data: str) -> dict:
    return {
        "do": "tier1",
        "name": f"tier 1: {plan}, {deal}, {data}",
        "plan": plan,
        "deal": deal,
        "data": data,
    }


def _sample(world: int) -> list[dict]:
    """Every plan with two data sets and two ways of dealing, which wander with the world."""
    cases = []
    for i, plan in enumerate(PLANS):
        for turn in range(2):
            deal = DEALS[(i + turn + world) % len(DEALS)]
            cases.append(_tier2(plan, deal, _data(plan, i + 3 * turn + world)))
    fused = [name for name, fields in PLANS.items() if "phased" not in fields.get("force", "")]
    cases += [
        _tier1(plan, DEALS[(i + world) % len(DEALS)], _data(plan, 2 * i + world))
        for i, plan in enumerate(fused)
    ]
    return cases


_COMMON = [
    _tier2("planned", "in turn", "several", scaling="averaged"),
    _tier2("planned", "in turn", "several", scaling="fp16"),
    _tier2("waves", "uneven", "several", scaling="overlap"),
    _tier2("planned", "all to the last", "several", scaling="sharded"),
    {"do": "common_samples", "name": "scope=cp: one rank of the block evaluates each sample"},
    {"do": "accumulation", "name": "two calls and stock micro-batches between them"},
    {"do": "gathered", "name": "overlapped gather of parameters"},
    {"do": "like", "name": "old, reference and current log-probs to the bit"},
    {"do": "data", "name": "take and put"},
    {"do": "group_loss", "name": "a loss over groups, and groups that are apart"},
    {"do": "errors", "name": "errors of one rank are raised on all"},
    {"do": "strangers", "name": "a call of one rank alone is an error on all"},
    {"do": "nobody", "name": "no samples anywhere, and samples without a valid token"},
    {"do": "shadow", "name": "a shadow run changes no bit"},
    {"do": "fallback", "name": "a model that AugTree refuses runs stock"},
]


def _tensor_parallel(sequence_parallel: bool, plan: str) -> dict:
    return {
        "do": "tensor_parallel",
        "name": f"TP 2{' + SP' * sequence_parallel}, {plan}",
        "sequence_parallel": sequence_parallel,
        "plan": plan,
    }


CASES: dict[int, list[dict]] = {
    2: [
        *_sample(2),
        *_COMMON,
        *[{"do": "conformance", "name": f"conformance: {name}", "trainer": name} for name in CONFORMANCE],
    ],
    3: [*_sample(3), *_COMMON],
    4: [
        _tensor_parallel(False, "two copies"),
        _tensor_parallel(True, "waves"),
        _tensor_parallel(True, "planned"),
    ],
}
