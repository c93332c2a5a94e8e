"""docs/cost_model.md: its pass by hand, run as it stands, gives the figures beside it and the code's."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_augtree.config import AugTreeConfig
from megatron_augtree.planning.cluster import GIB, Cluster, preset
from megatron_augtree.planning.cost import PassPrice, Prices
from megatron_augtree.planning.demand import Pair
from megatron_augtree.planning.loads import PassLoads, RankLoad
from megatron_augtree.planning.plan import Event
from megatron_augtree.planning.planner import configured, pairs_per_row
from megatron_augtree.planning.recipe import Recipe, plan_of
from megatron_augtree.planning.tree import from_lengths
from megatron_augtree.tools.models import model_shape

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cost_model.md"


@pytest.fixture(scope="module")
def block() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


@pytest.fixture(scope="module")
def by_hand(block) -> dict[str, int]:
    """The page's variables."""
    names: dict = {}
    exec(block, names)
    return names


@pytest.fixture(scope="module")
def by_code() -> dict[str, int]:
    """The same quantities as the planner prices them."""
    model, cluster = configured(model_shape("qwen2.5-7b"), AugTreeConfig(cluster="h100")), preset("h100")
    prices = Prices(model, cluster)
    shape = from_lengths(8192, [512] * 16)
    recipe = Recipe(0, "fused", 0, 16, (0,), tuple(range(1, 17)), pieces=2, node_ranks=cluster.node_ranks)
    plan = plan_of(
        [recipe],
        [Event("forward", 0), Event("backward", 0)],
        mode="augtree",
        shape=shape,
        world=16,
        pairs_per_row=pairs_per_row(model, cluster),
    )
    loads = PassLoads(shape, plan.passes[0], [], cluster.node_ranks)
    load, *others = loads.ranks
    assert all(other == load for other in others), "one rank no longer stands for all"
    price = PassPrice(prices, loads, provides=False)
    line, demand, everything = price.lines[0], price.demand(), Pair(model.layers, 0)
    forward, backward = price.time(everything)
    pair = demand.fit(6 * GIB)
    moved = [prices.traffic(load, backward=b, keep=True) for b in (False, True)]
    wire, wire_back = (
        prices.link.ns(w.near) + prices.nic.ns(w.far) + load.messages * cluster.message_ns for w in moved
    )
    masked = prices.masked_pairs(load)
    tiles, first = prices.tiles_ns(load, load.pairs + masked), prices.attention.ns(load.early)
    tiles_back, first_back = tiles * 250 // 100, first * 250 // 100
    layer, exposed = prices.layer_ns(load, loads, backward=False)
    layer_back, exposed_back = prices.layer_ns(load, loads, backward=True)
    sizes = ("linear_flops", "pair_flops", "vocab_flops", "kv_bytes", "attended_bytes", "saved_bytes")
    counts = ("rows", "pairs", "early", "merged", "messages")
    return {
        **{name: getattr(model, name) for name in sizes},
        **{name: getattr(load, name) for name in counts},
        "masked": masked, "calls": load.tiles, "far": load.kv_far_in, "near": load.kv_in - load.kv_far_in,
        "stages": loads.stages, "linear": prices.linear.ns(load.rows + cluster.gemm_half_rows),
        "beside": prices.beside.ns(load.rows), "tiles": tiles, "merge": prices.merging.ns(load.merged),
        "wire": wire, "first": first, "exposed": exposed, "layer": layer, "wire_back": wire_back,
        "first_back": first_back, "tiles_back": tiles_back, "later_back": (tiles_back - first_back) // 2,
        "exposed_back": exposed_back, "layer_back": layer_back, "vocabulary": line.vocabulary,
        "forward": forward, "backward": backward, "backward_again": price.time(Pair(0, 0))[1],
        "received": prices.received_bytes(load), "fixed": demand.fixed, "whole": demand.whole,
        "attention": demand.attention, "chunk": 3 * model.logit_rows * model.vocab * model.accum_bytes,
        "work": demand.work, "work_again": demand.work_again, "peak": price.peak(everything),
        "kept_layers": pair.whole, "kept_attention": pair.attention,
    }  # fmt: skip


def printed(block: str) -> dict[str, int]:
    """Variable -> the figure that the page gives behind it."""
    found = {}
    for line in block.splitlines():
        code, _, comment = line.partition("  # ")
        figures = re.match(r"\d[\d,]*\d|\d", comment.strip())
        if "=" in code and figures:
            names = [name.strip() for name in code.split(" = ")[0].split(",")]
            values = comment.split(": ")[0].split(", ") if len(names) > 1 else [figures[0]]
            found |= {name: int(value.replace(",", "")) for name, value in zip(names, values)}
    return found


def test_every_figure_is_the_codes(block, by_hand, by_code):
    figures = printed(block)
    assert figures.keys() == by_code.keys()
    for name, figure in figures.items():
        assert figure == by_code[name], name
        # The page divides exactly, the code by rates of 40 bits: a nanosecond in each of 28 layers.
        assert by_hand[name] == pytest.approx(figure, abs=60 if figure > 10**7 else 3), name


def test_the_page_names_what_there_is():
    """Every constant of the machine that enters a price, and every count of a rank."""
    text = PAGE.read_text()
    constants = {field.name for field in fields(Cluster)} - {"name", "memory_bytes"}
    counts = {name.replace("_far", "") for name in RankLoad._fields}
    assert not [name for name in constants | counts if name not in text]
