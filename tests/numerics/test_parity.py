"""Every mode, primitive, phase, lane and copy against the un-shared run, all ranks in one process.

fp64: loss, log-probs, every parameter's gradient, the parameters after an SGD and after an Adam step: 1e-10.
"""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_augtree.config import MODES, AugTreeConfig, InfeasiblePlanError, parse_force
from megatron_augtree.mcore.sampler import model_shape, plan_step
from megatron_augtree.planning.schedule import promise, reverse
from megatron_augtree.runtime.transport import LocalTransport
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

WORLDS = (1, 2, 3, 4, 5, 8)
BAR = 1e-10


@pytest.mark.parametrize("data", f.DATA)
def test_the_fixture_is_peaked_and_alive(lab, data):
    """Mean of the largest probability at least 0.3 over rows that see 4 keys or more; no zero gradient."""
    largest = []

    def measure(module, inputs, named):
        q, k = inputs[0], inputs[1]
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        scores = torch.einsum("tbhd,sbhd->bhts", q, k) / q.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        largest.append(scores.masked_fill(future, -torch.inf).softmax(-1).amax(-1)[..., 3:].flatten())

    hooks = [layer.self_attention.core_attention.register_forward_pre_hook(measure, with_kwargs=True)
             for layer in lab.stock.decoder.layers]
    groups = f.DATA[data]()
    f.oracle(lab.stock, groups, "nll")
    for hook in hooks:
        hook.remove()
    assert len(largest) == 2 * sum(any(r.loss_mask) for g in groups for r in g.responses)
    assert float(torch.cat(largest).mean()) >= 0.3
    assert all(float(grad.abs().max()) > 1e-3 for grad in lab.data(data)[1].grads.values())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("data", f.DATA)
def test_every_program_equals_the_unshared_run(lab, data, world):
    groups, want = lab.data(data)
    failed = {}
    for program in f.PROGRAMS:
        found = lab.compare(groups, want, f.batch_of(groups, program, world))
        if not f.worst(found) < BAR:
            failed[str(program)] = found
    assert not failed


def test_the_matrix_reaches_what_it_names(lab):
    """The matrix is not one plan many times: payloads, kinds, copies, idle ranks, mixed lanes."""
    seen, kinds, copies, idle, mixed = set(), set(), 0, 0, 0
    for data in f.DATA:
        groups, _ = lab.data(data)
        for program in f.PROGRAMS:
            plan = f.batch_of(groups, program, 4).plan
            for p in plan.passes:
                kinds.add((p.kind, p.primitive))
                for made in (plan.program(p.id), reverse(plan.program(p.id), keep=p.keep)):
                    seen |= {t.payload.name for stage in made.stages for t in stage.transfers}
                holders = [sum(any(s.node == n for s in spans) for spans in p.placement)
                           for n in p.nodes if not plan.shape.children[n]]
                mixed += len(set(holders)) > 1
            held = [n for job in plan.jobs for n in {n for q in job for n in plan.passes[q].nodes}]
            copies += len(held) > len(set(held))
            idle += any(plan.rows_of_rank(rank) == 0 for rank in range(4))
    assert seen == {"KV", "Q", "PARTIAL", "DKV", "DQ", "DPARTIAL", "DPARTIAL_Q"}
    moves = {"gather_kv", "move_kv", "move_q", "ring", "local"}
    assert {m for kind, m in kinds if kind == "replay"} == moves
    assert {m for kind, m in kinds if kind == "fused"} == moves - {"move_q"}
    assert {kind for kind, _ in kinds} == {"fused", "prefill", "chunk", "replay"}
    assert copies and idle and mixed


FORCED = ["", "degree=1", "degree=2,lane_degree=2", "copies=2", "degree=4,copies=2,lane_degree=1",
          "primitive=move_kv,phase=fused", "phase=phased", "phase=phased,waves=3,primitive=move_q",
          "chunks=3,waves=2,primitive=move_kv", "phase=phased,chunks=2,degree=2"]


@pytest.mark.parametrize("kind", ["nll", "grpo"])
@pytest.mark.parametrize("data", f.DATA)
def test_what_the_planner_chooses_and_is_forced_to(lab, data, kind):
    groups, want = lab.data(data, kind)
    model, failed = model_shape(lab.tree.config, f.VOCAB), {}
    shape = f.forest_of(groups, "augtree")[0].shape
    leaves = sum(not children for children in shape.children)

    def possible(text: str) -> bool:
        """Phases need a spine; each wave and each copy needs a leaf."""
        wanted = parse_force(text)
        phased = wanted.get("phase") == "phased" or "waves" in wanted
        return leaves >= max(wanted.get("waves", 1), wanted.get("copies", 1)) and (
            any(shape.children) or not phased)

    for world in (1, 4, 6):
        runs = [(mode, "") for mode in MODES if mode != "augtree"]
        for mode, force in runs + [("augtree", text) for text in FORCED if world == 4 or not text]:
            config = AugTreeConfig(mode=mode, force=force, min_shared_rows=4)
            if not possible(force):
                with pytest.raises(InfeasiblePlanError, match="forced plan"):
                    plan_step(groups, model, world, config)
                continue
            found = lab.compare(groups, want, plan_step(groups, model, world, config), kind)
            if not f.worst(found) < BAR:
                failed[world, mode, force] = found
    assert not failed


@pytest.mark.parametrize("data", ("ragged", "three_levels", "inner_losses", "several"))
def test_a_tree_over_more_blocks_than_one(lab, data):
    """Parts of a tree on a group of small blocks; inner nodes, and their losses, are in several of them."""
    groups, want = lab.data(data)
    model, failed = model_shape(lab.tree.config, f.VOCAB), {}
    for world, limit, copies in ((8, 2, 4), (4, 1, 4), (8, 2, 2), (6, 3, 2)):
        config = AugTreeConfig(degree=limit, force=f"copies={copies}", min_shared_rows=4)
        batch = plan_step(groups, model, world, config)
        blocks = [{tuple(p.block) for p in batch.plan.passes if root in p.nodes}
                  for root in batch.plan.shape.roots]
        assert max(len(p.block) for p in batch.plan.passes) <= limit
        assert max(map(len, blocks)) == copies
        found = lab.compare(groups, want, batch)
        if not f.worst(found) < BAR:
            failed[world, limit, copies] = found
    assert not failed


@st.composite
def groups_of_few_tokens(draw):
    """Random groups over three token ids: shared turns, duplicates and nesting come by themselves."""
    ids = st.integers(0, 2)
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(ids, min_size=1, max_size=6))
        answers = []
        for answer in draw(st.lists(st.lists(ids, max_size=7), max_size=5)):
            mask = draw(st.lists(st.booleans(), min_size=len(answer), max_size=len(answer)))
            answers.append(f.response(answer, mask))
        groups.append(f.group(prompt, *answers))
    return groups


programs = st.builds(
    lambda phased, chunks, waves, **rest: f.augtree(
        **rest, **({"phase": "phased", "chunks": chunks, "waves": waves} if phased else {})),
    phased=st.booleans(), chunks=st.integers(1, 4), waves=st.integers(1, 4),
    degree=st.sampled_from([0, 0, -2, -3, 1]), copies=st.integers(1, 2),
    primitive=st.sampled_from(["gather_kv", "move_kv", "move_q", "ring"]), pieces=st.integers(1, 4),
    lane_degree=st.sampled_from([1, 2, 8]), wide=st.integers(0, 2), together=st.booleans(),
    keep=st.booleans())


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(groups=groups_of_few_tokens(), program=programs | st.sampled_from(f.BASELINES),
       world=st.sampled_from([1, 2, 3, 4, 6]), seed=st.integers(0, 9))
def test_random_trees(lab, groups, program, world, seed):
    # A group of known good behaviour keeps every parameter's gradient alive.
    alive = f.group(f.tokens(90, 5), f.tokens(91, 6), f.tokens(92, 4))
    groups = f.with_policy(lab.stock, [*groups, alive], seed)
    found = lab.compare(groups, f.oracle(lab.stock, groups), f.batch_of(groups, program, world))
    assert f.worst(found) < BAR, found


#: One of each: multi-hop ring, fused, re-fetch, copies, chunks with waves, moved queries that re-send.
SAMPLE = [f.BASELINES[0], f.augtree(pieces=2), f.augtree(primitive="move_kv", keep=False, lane_degree=8),
          f.augtree(degree=-2, copies=2), f.augtree(phase="phased", waves=2, chunks=3),
          f.augtree(phase="phased", waves=2, chunks=2, primitive="move_q", keep=False)]


@pytest.fixture(scope="module")
def lower(megatron):
    """[dtype] -> a lab in that type, and an fp64 lab of exactly its weights."""

    def make(dtype):
        low, exact = f.Lab(dtype=dtype), f.Lab()
        exact.stock.load_state_dict(
            {k: v.double() if torch.is_tensor(v) else v for k, v in low.stock.state_dict().items()})
        exact.start = {name: p.detach().clone() for name, p in exact.stock.named_parameters()}
        return low, exact

    return {dtype: make(dtype) for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize("data", f.DATA)
def test_fp32_within_1e_5(lower, data):
    low, exact = lower["float32"]
    groups, want = exact.data(data, "nll")
    for program in SAMPLE:
        for world in (1, 2, 4):
            got = f.play(low.tree, f.batch_of(groups, program, world), "nll")
            found = f.errors(got, want, exact.start, ["sgd"])
            assert f.worst(found) < 1e-5, (str(program), world, found)


def test_bf16_errs_at_most_twice_as_much_as_unshared_bf16(lower):
    low, exact = lower["bfloat16"]
    outcomes = {data: exact.data(data, "nll") for data in f.DATA}

    def largest(outcome_of) -> dict[str, float]:
        found = [f.errors(outcome_of(groups), want, exact.start, ["sgd"])
                 for groups, want in outcomes.values()]
        return {name: max(e[name] for e in found) for name in ("logprobs", "gradients", "sgd")}

    own = largest(lambda groups: f.oracle(low.stock, groups, "nll"))
    assert all(1e-4 < value < 0.2 for value in own.values()), own
    for program in SAMPLE:
        for world in (2, 4):
            got = largest(
                lambda groups, p=program, w=world: f.play(low.tree, f.batch_of(groups, p, w), "nll"))
            assert all(got[name] <= 2 * own[name] for name in own), (str(program), world, got, own)


@pytest.mark.parametrize("program", SAMPLE, ids=str)
def test_same_plan_same_bits(lab, program):
    groups, _ = lab.data("three_levels")
    first, second = (f.play(lab.tree, f.batch_of(groups, program, 4)) for _ in range(2))
    assert first.loss == second.loss and torch.equal(first.logprobs, second.logprobs)
    assert all(torch.equal(first.grads[name], second.grads[name]) for name in first.grads)


@pytest.mark.parametrize("program", SAMPLE, ids=str)
def test_permuting_responses_changes_only_rounding(lab, program):
    groups, want = lab.data("merged")
    order = list(range(len(groups[0].responses)))
    random.Random(0).shuffle(order)
    shuffled = [f.group(groups[0].prompt, *[groups[0].responses[i] for i in order])]
    got = f.play(lab.tree, f.batch_of(shuffled, program, 4))
    assert f.err(got.grads, want.grads) < BAR
    assert abs(got.loss - want.loss) < BAR


@pytest.mark.parametrize("program", f.PROGRAMS, ids=str)
def test_bytes_sent_are_the_bytes_promised(lab, program):
    """Counted from the tensors handed over, in every layer, forward and backward, by payload and rank."""
    model, layers = model_shape(lab.tree.config, f.VOCAB), 2
    for data in ("three_levels", "several"):
        groups, _ = lab.data(data)
        batch, transport = f.batch_of(groups, program, 4), LocalTransport(4)
        f.play(lab.tree, batch, transport=transport)
        plan, expected, messages = batch.plan, [{} for _ in range(4)], [0] * 4
        for p in plan.passes:
            for made in (plan.program(p.id), reverse(plan.program(p.id), keep=p.keep)):
                for index, rank in enumerate(p.block):
                    promised = promise(made, index, model)
                    messages[rank] += layers * promised.messages
                    for name, size in promised.bytes.items():
                        expected[rank][name] = expected[rank].get(name, 0) + layers * size
        assert [dict(t.bytes) for t in transport.traffic] == expected
        assert [t.messages for t in transport.traffic] == messages


def test_bytes_of_one_group_by_hand(lab):
    """P = 11 and four whole leaves on two ranks, fp64, 2 KV heads and 4 query heads of 8, 2 layers.

    Fused, each rank gets the 5 spine rows of the other: k and v forward, dk and dv backward, a message each.
    With moved queries every leaf row visits the other rank: q there and dq back; out and lse of the visitors
    back, and dout, delta and lse there again.
    """
    groups, _ = lab.data("ragged")
    transport = LocalTransport(2)
    f.play(lab.tree, f.batch_of(groups, f.augtree(), 2), transport=transport)
    for traffic in transport.traffic:
        assert dict(traffic.bytes) == {"KV": 2 * 5 * 2 * 2 * 8 * 8, "DKV": 2 * 5 * 2 * 2 * 8 * 8}
        assert traffic.messages == 2 * 2
    transport = LocalTransport(2)
    batch = f.batch_of(groups, f.augtree(phase="phased", primitive="move_q"), 2)
    f.play(lab.tree, batch, transport=transport)
    home = [sum(span.hi - span.lo for span in spans) for spans in batch.plan.passes[1].placement]
    assert sum(home) == 18 and min(home) > 0
    for rank, traffic in enumerate(transport.traffic):
        mine, visitors = home[rank], home[1 - rank]
        assert traffic.bytes["Q"] == 2 * mine * 4 * 8 * 8
        assert traffic.bytes["DQ"] == 2 * visitors * 4 * 8 * 8
        assert traffic.bytes["PARTIAL"] == 2 * visitors * 4 * (8 + 1) * 8
        assert traffic.bytes["DPARTIAL"] == 2 * mine * 4 * (8 + 2) * 8
