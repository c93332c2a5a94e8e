"""What real processes run: plain data, so that the launcher and its worker agree on it.

A case is a dictionary: ``name`` (unique in its world), ``do`` (a function of ``worker.py``) and that
function's arguments. Modes x phase x primitive x lanes x data as a sample in which every program meets every
data set over the worlds 2, 3 and 4 together, never in all of them.
"""

from __future__ import annotations

from pathlib import Path

#: Real group files lie beside the checkout.
REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
REAL_FILES = ("gsm8k_solutions", "kv_retrieval_75", "tau_airline")

#: As `AugTreeConfig` has it (the planner's way), or a `Choice` (built directly).
PROGRAMS: list[dict] = [
    {"mode": "ring"},
    {"mode": "ring", "degree": 1},
    {"mode": "ring-reuse"},
    {"mode": "ring-reuse-per-response"},
    {"mode": "gather-reuse"},
    {"mode": "augtree"},
    {"mode": "augtree", "force": "degree=1"},
    {"choice": {"lane_degree": 8, "primitive": "move_kv", "keep": False}},
    {"choice": {"wide": 1, "pieces": 2}},
    {"choice": {"degree": -2, "copies": 2}},
    {"choice": {"together": False, "keep": False}},
    {"choice": {"phase": "phased", "waves": 1, "chunks": 1}},
    {"choice": {"phase": "phased", "waves": 3, "chunks": 2, "primitive": "move_kv"}},
    {"choice": {"phase": "phased", "waves": 2, "chunks": 3, "primitive": "move_q"}},
    {"choice": {"phase": "phased", "waves": 2, "primitive": "move_q", "keep": False, "lane_degree": 8}},
    {"choice": {"phase": "phased", "waves": 2, "chunks": 2, "keep": False, "wide": 1}},
    {"mode": "ring-reuse-two-pass"},
    {"mode": "dynamic"},
    {"mode": "dynamic-reuse"},
    {"mode": "dcp-phased"},
    {"mode": "dcp-fused"},
    {"mode": "paper"},
]
#: Waves whose prompt keys travel a layer ahead: alone, in pieces, beside leaves' own keys, node by node.
PREFETCHED: list[dict] = [
    {"choice": {"phase": "phased", "waves": 2, "chunks": 2, "prefetch": True}},
    {"choice": {"phase": "phased", "waves": 3, "pieces": 2, "lane_degree": 8, "prefetch": True,
                "keep_layers": 0, "wave_layers": 1}},
    {"choice": {"phase": "phased", "waves": 2, "wide": 1, "keep": False, "prefetch": True}},
    {"choice": {"phase": "phased", "waves": 2, "lane_degree": 8, "node_ranks": 2, "prefetch": True}},
]
DATA = ("ragged", "three_levels", "several", "merged", "inner_losses", "one_prompt_token", "one_level",
        "one_valid_token")


def _name(program: dict) -> str:
    fields = {**program, **program.get("choice", {})}
    fields.pop("choice", None)
    return " ".join(f"{key}={value}" for key, value in fields.items())


def _parity(program: dict, data: str, kind: str = "grpo") -> dict:
    return {"do": "parity", "name": f"{_name(program)} {data} {kind}", "program": program, "data": data,
            "kind": kind}


def _sample(world: int) -> list[dict]:
    """Each program on two or three data sets; the sets wander with program and world."""
    cases = []
    for index, program in enumerate(PROGRAMS):
        for turn in range(3 if world == 2 else 2):
            place = (index + 3 * (world - 2) + 3 * turn * (world - 1)) % len(DATA)
            cases.append(_parity(program, DATA[place], "nll" if (index + turn) % 4 == 3 else "grpo"))
    return list({case["name"]: case for case in cases}.values())


def _common(world: int) -> list[dict]:
    busy = [5, 7, 10, 13, 14]
    return [
        *[{"do": "delays", "name": f"delays {_name(PROGRAMS[i])}", "program": PROGRAMS[i],
           "data": "three_levels"} for i in busy],
        *[{"do": "streamed", "name": f"streams {_name(PROGRAMS[i])}", "program": PROGRAMS[i],
           "data": "three_levels"} for i in (0, *busy)],
        *[{"do": "prefetched", "name": f"prefetch {_name(program)}", "program": program,
           "data": "three_levels"} for program in PREFETCHED],
        {"do": "other_data", "name": "other data on rank 1"},
        {"do": "other_plan", "name": "another plan on rank 1"},
        {"do": "other_weights", "name": "other weights on rank 1"},
        {"do": "other_flags", "name": "other flags on rank 1"},
        {"do": "broken_loss", "name": "a loss of three values"},
        {"do": "skipped_rank", "name": "mutation: a rank is left out of the gradient reduction"},
        *[{"do": "adam", "name": f"adam, distributed optimizer {on}", "sharded": on} for on in (False, True)],
        {"do": "steps", "name": "steps of 2, 1, 3, 2 and 1 groups"},
    ]


CASES: dict[int, list[dict]] = {world: _sample(world) + _common(world) for world in (2, 3, 4)}
CASES[2] += [{"do": "real", "name": f"real {name} {kind}", "file": name, "kind": kind}
             for name, kind in zip(REAL_FILES, ("grpo", "nll", "grpo"))]
CASES[2] += [{"do": "long", "name": f"untruncated {name}", "file": name} for name in REAL_FILES]
CASES[8] = [_parity(PROGRAMS[i], data) for i, data in (
    (0, "ragged"), (1, "several"), (5, "several"), (7, "one_level"), (9, "three_levels"), (13, "merged"),
    (14, "ragged"))]
CASES[8] += [case for case in _common(8) if case["do"] in ("other_data", "steps")]
