"""Choices, and the recipes that follow from them.

A choice says how one job (some trees, or a part of one, on one block) is played: fused, or prefill (chunks)
and replay waves; how its leaves lie; what travels; what is kept. `job_recipes` makes its passes. `build`
makes a whole plan of one choice: the pool cut into equal blocks, trees given to them longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_augtree.planning.assign import assign
from megatron_augtree.planning.lanes import node_costs
from megatron_augtree.planning.plan import Event, Plan, counted
from megatron_augtree.planning.recipe import Recipe, plan_of
from megatron_augtree.planning.tree import ForestShape


@dataclass(frozen=True)
class Choice:
    """How a job is played.

    Attributes:
        degree: ranks of a block, of the ranks that hold one prompt copy.
        copies: parts that a tree is cut into, a prompt copy each.
        phase: ``fused`` or ``phased``.
        chunks, waves: passes of the spine and of the leaves (phased).
        primitive, pieces, node_ranks, prefetch: how queries meet keys held elsewhere (of the waves, where
            phased); see `plan.Pass`.
        lane_degree: ranks of a lane; never more than `degree`.
        wide: longest leaves that are cut over the whole block.
        together: trees of a block share passes, or follow each other.
        keep: received keys and values are kept.
        keep_layers, keep_attention: recompute of a fused pass, or of prefill and chunks; see `plan.Pass`.
        wave_layers, wave_attention: of the waves.
        offload: what prefill and chunks keep rests in host memory.
    """

    degree: int
    copies: int = 1
    phase: str = "fused"
    chunks: int = 1
    waves: int = 1
    primitive: str = "gather_kv"
    pieces: int = 1
    node_ranks: int = 0
    prefetch: bool = False
    lane_degree: int = 1
    wide: int = 0
    together: bool = True
    keep: bool = True
    keep_layers: int = -1
    keep_attention: int = 0
    wave_layers: int = -1
    wave_attention: int = 0
    offload: bool = False

    def __str__(self) -> str:
        parts = [f"degree {self.degree}"]
        parts += [f"{self.copies} copies"] if self.copies > 1 else []
        parts += [
            self.phase
            if self.phase == "fused"
            else f"phased ({counted(self.chunks, 'chunk')}, {counted(self.waves, 'wave')})"
        ]
        if self.degree > 1:
            parts += [self.primitive + (f" in {self.pieces}" if self.primitive == "gather_kv" else "")]
            parts += ["node by node"] if self.node_ranks else []
            parts += ["prefetched"] if self.prefetch else []
            parts += [f"lanes of {self.lane_degree}" + (f", {self.wide} wide" if self.wide else "")]
        parts += [_recompute("", self.keep_layers, self.keep_attention)]
        parts += [_recompute("waves ", self.wave_layers, self.wave_attention)]
        parts += ["offloaded" if self.offload else "", "" if self.together else "trees in turn"]
        return ", ".join(part for part in parts if part)


def _recompute(what: str, whole: int, attention: int) -> str:
    return "" if whole < 0 else f"{what}keep {counted(whole, 'layer')} + {counted(attention, 'attention')}"


def cut_pool(world: int, degree: int) -> list[tuple[int, ...]]:
    """Aligned blocks of `degree` ranks; what is left is cut into powers of two."""
    blocks, start = [], 0
    while start < world:
        left = world - start
        size = degree if left >= degree else 1 << (left.bit_length() - 1)
        blocks.append(tuple(range(start, start + size)))
        start += size
    return blocks


def split_inner(shape: ForestShape, nodes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(inner nodes, leaves) of a job's nodes: a node is inner where a child of it is in the job."""
    parents = set(map(shape.parents.__getitem__, nodes))
    return tuple([n for n in nodes if n in parents]), tuple([n for n in nodes if n not in parents])


def copies_of(
    shape: ForestShape, nodes: Sequence[int], copies: int, pairs_per_row: int
) -> list[tuple[int, ...]]:
    """Parts of a tree of about even cost: subtrees that hang below its root, with all nodes above them.

    A subtree that costs more than a part's share is dealt as its children's subtrees instead, and so on down
    to leaves; its node is then computed in every part that holds some of them. So few nodes as possible are
    computed more than once. Of a prompt and its responses every part has its share of the responses.

    Args:
        shape: the forest.
        nodes: of the tree, ascending; or of several trees.
        copies: parts; there are fewer where there are fewer leaves.
        pairs_per_row: see `lanes.row_cost`.
    """
    _, leaves = split_inner(shape, nodes)
    copies = min(copies, len(leaves))
    if copies < 2:
        return [tuple(nodes)]
    own = dict(zip(nodes, node_costs(shape, nodes, pairs_per_row)))
    whole, below = dict(own), {n: [] for n in nodes}
    for node in reversed(nodes):
        parent = shape.parents[node]
        if parent in own:
            below[parent].append(node)
            whole[parent] += whole[node]
    tops = sorted(unit for n in nodes if shape.parents[n] not in own for unit in below[n] or [n])
    units = _cut_subtrees(tops, below, whole, copies)
    weights = [whole[unit] for unit in units]
    if units == tops:
        where = assign(weights, [0] * copies)
    else:
        above = [shape.ancestors[unit] & own.keys() for unit in units]
        where = _with_nodes_above(weights, above, own, copies)
    part = dict(zip(units, where))
    parts: list[set[int]] = [set() for _ in range(copies)]
    for node in nodes:
        if node not in part and shape.parents[node] in part:
            part[node] = part[shape.parents[node]]
        if node in part:
            parts[part[node]] |= {node, *shape.ancestors[node]}
    return [tuple(sorted(held)) for held in parts if held]


def _cut_subtrees(
    tops: Sequence[int], below: dict[int, list[int]], whole: dict[int, int], parts: int
) -> list[int]:
    """Roots of the subtrees that are dealt to parts, ascending: at least as many, of at most a share each
    where they are no leaves.

    Args:
        tops: roots of the subtrees at first.
        below: [node] its children.
        whole: [node] cost of its subtree.
        parts: at most as many as there are leaves.
    """
    share = sum(whole[top] for top in tops) // parts
    units, left = [], list(tops)
    while left:
        unit = left.pop()
        if below[unit] and whole[unit] > share:
            left += below[unit]
        else:
            units.append(unit)
    while len(units) < parts:
        unit = max((u for u in units if below[u]), key=lambda u: (whole[u], -u))
        units.remove(unit)
        units += below[unit]
    return sorted(units)


def _with_nodes_above(
    weights: Sequence[int], above: Sequence[set[int]], own: dict[int, int], parts: int
) -> list[int]:
    """[item] -> part: heaviest first, to the part that then costs least with the nodes above its items."""
    loads, where = [0] * parts, [0] * len(weights)
    held: list[set[int]] = [set() for _ in range(parts)]
    for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        costs = [load + sum(own[n] for n in above[item] - has) for load, has in zip(loads, held)]
        target = costs.index(min(costs))
        where[item] = target
        loads[target] = costs[target] + weights[item]
        held[target] |= above[item]
    return where


def waves_of(
    shape: ForestShape, leaves: Sequence[int], waves: int, pairs_per_row: int
) -> list[tuple[int, ...]]:
    """Leaves dealt to at most `waves` waves of even cost."""
    waves = min(waves, len(leaves))
    dealt: list[list[int]] = [[] for _ in range(waves)]
    for leaf, wave in zip(leaves, assign(node_costs(shape, leaves, pairs_per_row), [0] * waves)):
        dealt[wave].append(leaf)
    return [tuple(wave) for wave in dealt if wave]


def chunk_rows(shape: ForestShape, inner: Sequence[int], chunks: int) -> list[tuple[int, int]]:
    """At most `chunks` runs (first row, end) of equal rows of the inner nodes, counted through them."""
    total = sum(shape.rows[n] for n in inner)
    chunks = max(1, min(chunks, total))
    return [(total * i // chunks, total * (i + 1) // chunks) for i in range(chunks)]


def job_recipes(
    choice: Choice,
    shape: ForestShape,
    nodes: Sequence[int],
    start: int,
    job: int,
    first: int,
    pairs_per_row: int,
) -> tuple[list[Recipe], list[Event]]:
    """Passes and events of one job.

    Args:
        choice: how it is played; `copies` and `together` are decided before.
        shape: the forest.
        nodes: of the job, ascending.
        start: first rank of its block of `choice.degree` ranks.
        job: its number.
        first: number of its first pass.
        pairs_per_row: see `lanes.row_cost`.
    """
    inner, leaves = split_inner(shape, nodes)
    common = {"job": job, "start": start, "width": choice.degree, "keep": choice.keep}
    lanes = {"lane_degree": _lane(choice, choice.degree), "wide": choice.wide}
    hop = choice.node_ranks if choice.primitive == "gather_kv" else 0
    travel = {"pieces": choice.pieces, "node_ranks": hop}
    spine = {"keep_layers": choice.keep_layers, "keep_attention": choice.keep_attention}
    gather = choice.primitive if choice.primitive != "move_q" else "gather_kv"
    if choice.phase == "fused" or not inner or not leaves:
        recipe = Recipe(
            kind="fused", inner=inner, leaves=leaves, primitive=gather, **common, **lanes, **travel, **spine
        )
        return [recipe], [Event("forward", first), Event("backward", first)]
    recipes, events = [], []
    runs = chunk_rows(shape, inner, choice.chunks)
    kind = "prefill" if len(runs) == 1 else "chunk"
    for index, (lo, hi) in enumerate(runs):
        reads = tuple(range(first, first + index))
        recipes.append(
            Recipe(
                kind=kind, inner=inner, lo=lo, hi=hi, reads=reads, primitive=gather, offload=choice.offload,
                **common, **travel, **spine,
            )
        )  # fmt: skip
        events.append(Event("forward", first + index))
    spines = tuple(range(first, first + len(runs)))
    waves = {**common, **lanes, **travel, "reads": spines, "primitive": choice.primitive}
    waves |= {"keep_layers": choice.wave_layers, "keep_attention": choice.wave_attention}
    for wave in waves_of(shape, leaves, choice.waves, pairs_per_row):
        index = first + len(recipes)
        recipes.append(Recipe(kind="replay", leaves=wave, prefetch=choice.prefetch, **waves))
        events += [Event("forward", index), Event("backward", index)]
    return recipes, [*events, *(Event("backward", index) for index in reversed(spines))]


def _lane(choice: Choice, width: int) -> int:
    lane = min(choice.lane_degree, width)
    return lane if width % lane == 0 else 1


def build(choice: Choice, shape: ForestShape, world: int, pairs_per_row: int) -> Plan:
    """The plan of one choice for all trees: equal blocks, parts given to them longest first.

    Args:
        choice: the decisions.
        shape: the forest.
        world: ranks of the pool.
        pairs_per_row: cost of a row's linear layers in (query, key) pairs, see `lanes.row_cost`.
    """
    blocks = cut_pool(world, choice.degree)
    parts = [
        part
        for tree in shape.trees
        for part in copies_of(shape, tree, choice.copies, pairs_per_row)
    ]
    taken: list[set[int]] = [set() for _ in blocks]
    costs = [sum(node_costs(shape, part, pairs_per_row)) for part in parts]
    for part, where in zip(parts, _to_blocks(costs, blocks, [part[0] for part in parts])):
        taken[where].update(part)
    recipes: list[Recipe] = []
    events: list[Event] = []
    jobs = 0
    for block, nodes in zip(blocks, taken):
        trees = [tuple(sorted(nodes))]
        if not choice.together:
            trees = [tuple(n for n in tree if n in nodes) for tree in shape.trees]
        own = replace(choice, degree=len(block))
        for tree in filter(None, trees):
            made, played = job_recipes(own, shape, tree, block[0], jobs, len(recipes), pairs_per_row)
            recipes += made
            events += played
            jobs += 1
    return plan_of(
        recipes,
        events,
        mode="augtree",
        shape=shape,
        world=world,
        pairs_per_row=pairs_per_row,
        note=str(choice),
    )


def _to_blocks(costs: Sequence[int], blocks: Sequence[tuple[int, ...]], roots: Sequence[int]) -> list[int]:
    """Longest part first, to the block that would finish it first; copies of a tree go to different ones."""
    loads, where = [0] * len(blocks), [0] * len(costs)
    holds: set[tuple[int, int]] = set()
    for part in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        free = [b for b in range(len(blocks)) if (roots[part], b) not in holds] or range(len(blocks))
        target = min(free, key=lambda b: (loads[b] + costs[part] // len(blocks[b]), b))
        where[part] = target
        holds.add((roots[part], target))
        loads[target] += costs[part] // len(blocks[target])
    return where
