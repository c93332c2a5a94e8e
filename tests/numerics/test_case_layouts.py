"""Cases that went wrong in other stacks: layouts, attention variants, planning; see tests/cases.py."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.config import AugTreeConfig, InfeasiblePlanError, InputError
from megatron_augtree.mcore import schedule as schedule_module
from megatron_augtree.mcore.sampler import GroupSampler, model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule
from megatron_augtree.planning.cluster import preset
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.layout import locate, rows_of
from megatron_augtree.runtime.prompt_state import PromptState
from megatron_augtree.runtime.transport import LocalTransport
from megatron_augtree.runtime.tree_attention import tree_attention
from tests.cases import CASES, LATER
from tests.numerics import fixtures as f

pytestmark = pytest.mark.usefixtures("megatron")

BAR = 1e-10
PHASED = f.augtree(phase="phased", waves=2, chunks=2)
MOVED = f.augtree(phase="phased", waves=2, primitive="move_q")


def test_case_8_positions(lab):
    """cu [0, 4, 8] on two ranks: rank 0 has rows 0, 3, 4, 7. All branches start where the prompt ends."""
    groups = [f.group((i,), f.tokens(i, 4)) for i in (1, 2)]
    batch = f.batch_of(groups, f.Program("ring"), 2)
    rows = [rows_of(batch.forest.shape, p.placement[0]) for p in batch.plan.passes]
    assert np.concatenate(rows).tolist() == [0, 3, 4, 7]
    assert batch.forest.positions[np.concatenate(rows)].tolist() == [0, 3, 0, 3]
    batch = f.batch_of(f.ragged(), f.augtree(), 2)
    assert [int(batch.forest.positions[locate_row(batch, s)]) for s in range(4)] == [10] * 4
    assert [batch.plan.shape.starts[path[-1]] for path in batch.forest.paths] == [10] * 4


def locate_row(batch, sequence):
    """Row of a response's first token."""
    row = batch.forest.row_of(sequence, 11)
    assert len(locate(batch.plan, batch.forest, sequence, 11)) == 1
    return row


VARIANTS = {
    "case 8 interleaved rotary": "--rotary-interleaved --rotary-base 500",
    "case 42 softmax scale": "--softmax-scale 0.9",
    "case 42 QK norm": "--qk-layernorm",
    "case 42 attention bias": "--add-qkv-bias",
    "case 43 one KV head": "--num-query-groups 1",
    "case 43 heads 4/4": "--num-query-groups 4",
    "case 43 head dim 4": "--kv-channels 4",
    "case 40 tied embedding, biases, LayerNorm": "",
}


@pytest.mark.parametrize("kernel", ["cpu_flash", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_case_8_40_42_43_models(megatron, variant, kernel):
    """Eight ranks are more than there are KV heads; both kernels."""
    text = f.MODEL
    if "case 40" in variant:
        text = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64"
        text += " --init-method-std 0.15"
    lab = f.Lab(f"{text} {VARIANTS[variant]}")
    assert get_kernel(kernel, "cpu").name == kernel
    groups, want = lab.data("three_levels")
    for world in (2, 8):
        for program in (f.augtree(lane_degree=8), MOVED):
            schedule = AugTreeSchedule(AugTreeConfig(kernel=kernel), transport=LocalTransport(world))
            found = lab.compare(groups, want, f.batch_of(groups, program, world), schedule=schedule)
            assert f.worst(found) < BAR, (world, str(program), found)


@pytest.mark.parametrize("program", [f.augtree(), f.augtree(lane_degree=8, keep=False), PHASED, MOVED,
                                     f.Program("ring-reuse")], ids=str)
def test_case_9_shards_of_different_scales_land_on_their_owners(lab, program):
    """Keys and values of the four ranks x1, x3, x10, x0.1; dQ, dK, dV as dense, on the rows' owners."""
    batch = f.batch_of(f.three_levels(), program, 4)
    plan, forest, transport = batch.plan, batch.forest, LocalTransport(4)
    engine = Engine(plan, forest, None, transport, get_kernel("auto", "cpu"))
    total, draw = forest.shape.total_rows, torch.Generator().manual_seed(0)
    q, k, v, up = (torch.randn((total, heads, 8), generator=draw, dtype=torch.float64)
                   for heads in (4, 2, 2, 4))
    for p in plan.passes:
        for scale, spans in zip((1, 3, 10, 0.1), p.placement):
            k[rows_of(forest.shape, spans)] *= scale
            v[rows_of(forest.shape, spans)] *= scale
    dense = [x.clone().requires_grad_() for x in (q, k, v)]
    node = np.repeat(np.arange(len(forest.shape.rows)), forest.shape.rows)
    mask = torch.tensor([[a == b and i >= j or b in forest.shape.ancestors[a] for j, b in enumerate(node)]
                         for i, a in enumerate(node)])
    wide = [dense[0], *(x.repeat_interleave(2, 1) for x in dense[1:])]
    scores = torch.einsum("thd,shd->hts", wide[0], wide[1]) * 0.3
    want = torch.einsum("hts,shd->thd", scores.masked_fill(~mask, -torch.inf).softmax(-1), wide[2])
    (want * up).sum().backward()
    states = {pass_id: PromptState() for pass_id in plan.provides}
    played, got = {}, [torch.zeros_like(x) for x in (q, k, v)]
    for action, pass_id in plan.events:
        p = plan.passes[pass_id]
        rows = np.concatenate([rows_of(forest.shape, spans) for spans in p.placement])
        if action == "forward":
            local = [x[rows].requires_grad_() for x in (q, k, v)]
            out = tree_attention(*local, engine.context(p, states), 0, 0.3)
            assert f.err({"": out}, {"": want[rows]}) < 1e-12
            played[pass_id] = local, out
        else:
            local, out = played.pop(pass_id)
            out.backward(up[rows])
            for whole, part in zip(got, local):
                whole[rows] += part.grad
    for found, x in zip(got, dense):
        assert f.err({"": found}, {"": x.grad}) < 1e-12


def test_case_20_targets_are_the_sequences_own_next_tokens(lab):
    """Tokens 0..7 and 10..17, zigzag on two ranks; the last token is never fed, nothing crosses over."""
    groups = [f.group((start,), tuple(range(start + 1, start + 8))) for start in (0, 10)]
    for program in (f.Program("ring"), f.augtree(lane_degree=2)):
        batch = f.batch_of(groups, program, 2)
        assert (batch.forest.targets == batch.forest.inputs + 1).all()
        assert sorted(batch.forest.inputs.tolist()) == [*range(7), *range(10, 17)]
        assert [batch.plan.rows_of_rank(rank) for rank in range(2)] == [6, 8]


def test_case_52_53_what_cannot_be_planned_says_so_before_anything_runs(lab):
    groups, model = f.ragged(), model_shape(lab.tree.config, f.VOCAB)
    for force, values in (("degree=8", "4 ranks"), ("copies=3", "4 ranks"), ("primitive=local", "local"),
                          ("lane_degree=3", "lane_degree=3"), ("phase=fused,waves=2", "waves=2")):
        with pytest.raises(InfeasiblePlanError) as error:
            plan_step(groups, model, 4, AugTreeConfig(force=force))
        assert values in error.value.values and error.value.rule and error.value.remedy
    with pytest.raises(InfeasiblePlanError, match="--context-parallel-size 3"):
        plan_step(groups, model, 4, AugTreeConfig(mode="ring", degree=3))
    with pytest.raises(InputError, match="nothing to train on"):
        GroupSampler(0, 1)
    batch = plan_step(groups, model, 4, AugTreeConfig(degree=1))
    assert all(len(p.block) == 1 for p in batch.plan.passes)


def test_case_54_the_memory_budget_holds_and_an_impossible_one_names_the_item(lab):
    model, groups = model_shape(lab.tree.config, f.VOCAB), [f.group(f.tokens(1, 600), *[
        (i, *f.tokens(i, 399)) for i in range(6)])]
    free = plan_step(groups, model, 2, AugTreeConfig()).plan
    seen = set()
    for share in (0.9, 0.7, 0.5):
        base = preset("cpu").base_bytes  # a step's own, whatever its rows
        budget = base + (free.peak_bytes - base) * share
        plan = plan_step(groups, model, 2, AugTreeConfig(memory_budget_gib=budget / 2**30)).plan
        assert plan.peak_bytes <= budget
        seen.add(plan.note)
    assert free.note not in seen
    with pytest.raises(InfeasiblePlanError, match="the longest sequence has 999 rows"):
        plan_step(groups, model, 2, AugTreeConfig(memory_budget_gib=1e-5))


def test_case_55_only_scored_rows_reach_the_vocabulary(monkeypatch, megatron):
    lab = f.Lab(f.MODEL.replace("--vocab-size 64", "--vocab-size 4096"))
    groups = [f.group(f.tokens(i, 2048), *[(j, *f.tokens(9 * i + j, 7)) for j in range(2)]) for i in (1, 2)]
    seen, plain = [], schedule_module.row_values

    def counted(logits, *rest, **named):
        seen.append(tuple(logits.shape))
        return plain(logits, *rest, **named)

    monkeypatch.setattr(schedule_module, "row_values", counted)
    f.play(lab.tree, f.batch_of(groups, f.augtree(), 2), "nll")
    assert sum(rows for rows, _ in seen) == 2 * 2 * 8 and {width for _, width in seen} == {4096}


def test_every_case_has_tests_that_exist():
    folder, missing = Path(__file__).parents[1], []
    for number, (_, names) in CASES.items():
        for name in names:
            file, _, test = name.partition("::")
            if f"def {test}(" not in (folder / file).read_text():
                missing.append((number, name))
    assert not missing and set(LATER) < set(CASES)
