"""bfloat16: every plan is at most twice as far from the exact values as the un-shared bfloat16 run is.

Exact is the un-shared fp64 run of the same (rounded) weights. So old, reference and current log-probs of
different plans are as good as those that any other trainer would compute.
"""

import pytest
import torch

from tests.numerics import fixtures as f

PROGRAMS = [f.Program("ring"), f.Program("gather-reuse"), f.augtree(), f.augtree(lane_degree=8, keep=False),
            f.augtree(degree=1, copies=2), f.augtree(phase="phased", waves=2, chunks=2),
            f.augtree(phase="phased", waves=2, primitive="move_q")]


@pytest.fixture(scope="module")
def runs(megatron):
    """(groups, exact outcome, un-shared bfloat16 outcome, AugTree's bfloat16 model)."""
    half = f.Lab(dtype="bfloat16")
    exact = f.build_model(f.parse(), augtree=False)
    with torch.no_grad():
        for mine, theirs in zip(exact.parameters(), half.stock.parameters(), strict=True):
            mine.copy_(theirs)
    groups = [*f.several(), *f.ragged()]
    return groups, f.oracle(exact, groups, "nll"), f.oracle(half.stock, groups, "nll"), half.tree


def _distance(got: f.Outcome, exact: f.Outcome) -> dict[str, float]:
    away = got.logprobs.double() - exact.logprobs
    return {"worst log-prob": float(away.abs().max()), "log-probs": float(away.square().mean().sqrt()),
            "gradients": f.err(got.grads, exact.grads)}


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_twice_the_unshared_error_at_most(runs, program):
    groups, exact, plain, model = runs
    allowed = _distance(plain, exact)
    assert min(allowed.values()) > 1e-4, "bfloat16 would have to round"
    found = _distance(f.play(model, f.batch_of(groups, program, 4), "nll"), exact)
    assert all(found[name] <= 2 * allowed[name] for name in allowed), (found, allowed)
