"""Clocks of a block: when its ranks, its links and its network cards are free.

A message takes the sending side of its source's link or card and the receiving side of its target's, for its
latency and its bytes. Sides serve one message after the other, so those that share one wait for each other.
`simulate_pass.py` plays a pass with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_augtree.planning.cost import Prices, Rate
from megatron_augtree.planning.schedule import Payload, Transfer


@dataclass(frozen=True)
class Wiring:
    """Where the ranks of a block are.

    Attributes:
        node: [block rank] its node.
        card: [block rank] its network card, counted over all nodes of the block.
        near, far: nanoseconds of a byte on a rank's link, and on a card.
        message_ns: of a message, beside its bytes.
    """

    node: tuple[int, ...]
    card: tuple[int, ...]
    near: Rate
    far: Rate
    message_ns: int

    @staticmethod
    def of(block: Sequence[int], prices: Prices, cards: int) -> Wiring:
        """The wiring of a block of pool ranks.

        Args:
            block: its ranks.
            prices: model and machine.
            cards: network cards of a node, which its ranks share evenly; 0 is one a rank.
        """
        c = prices.cluster
        cards = cards or c.node_ranks
        places = [(r // c.node_ranks, r % c.node_ranks * cards // c.node_ranks) for r in block]
        nodes = {number: i for i, number in enumerate(dict.fromkeys(node for node, _ in places))}
        used = {place: i for i, place in enumerate(dict.fromkeys(places))}
        # A rank's share of the node's cards is a constant; all cards together carry all shares.
        far = prices.nic if cards == c.node_ranks else Rate.of(1, c.nic_bytes_s * c.node_ranks // cards)
        node = tuple(nodes[number] for number, _ in places)
        return Wiring(node, tuple(used[place] for place in places), prices.link, far, c.message_ns)


class Messages:
    """The messages of a stage, ready to be sent.

    Messages are in levels: those of one level share no side of a link or card, and each one's predecessors on
    its sides are in earlier levels. So a level is played at once, and the order on every side is kept.

    Args:
        transfers: of the stage; all of one rank to another are one message.
        wiring: of the block.
        sizes: payload -> bytes of a row.
    """

    def __init__(self, transfers: Sequence[Transfer], wiring: Wiring, sizes: dict[Payload, int]) -> None:
        world = len(wiring.node)
        size: dict[tuple[int, int], int] = {}
        for t in transfers:
            size[t.src, t.dst] = size.get((t.src, t.dst), 0) + t.source.count * sizes[t.payload]
        rows, level = [], {}
        for src, dst in sorted(size, key=_distance(wiring.node)):
            near = wiring.node[src] == wiring.node[dst]
            out = src if near else 2 * world + wiring.card[src]
            into = world + dst if near else 3 * world + wiring.card[dst]
            lasts = (wiring.near if near else wiring.far).ns(size[src, dst]) + wiring.message_ns
            turn = max(level.get(out, -1), level.get(into, -1)) + 1
            level[out] = level[into] = turn
            rows.append((turn, src, dst, out, into, lasts))
        rows.sort()
        turns, self.src, self.dst, self.out, self.into, self.lasts = np.array(rows, np.int64).T.copy()
        edges = np.searchsorted(turns, np.arange(turns[-1] + 2)).tolist()
        self._levels = [
            (slice(a, b), self.out[a:b], self.into[a:b], self.lasts[a:b]) for a, b in zip(edges, edges[1:])
        ]
        self.takes_part = np.zeros(world, bool)
        self.takes_part[self.src] = self.takes_part[self.dst] = True

    def join(self, labels: np.ndarray) -> None:
        """Give all times that depend on each other through these messages one label.

        Args:
            labels: [6 world] of a `Clock`'s times; changed.
        """
        world = len(self.takes_part)
        parts = self.src, self.dst, world + self.out, world + self.into
        while True:
            least = np.minimum.reduce([labels[part] for part in parts])
            if all(np.array_equal(labels[part], least) for part in parts):
                return
            for part in parts:
                np.minimum.at(labels, part, least)

    def serve(self, posted: np.ndarray, sides: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Send all messages.

        Args:
            posted: [rank] when it came to the stage.
            sides: [4 world] when each side of a link or card is free; changed.

        Returns:
            [rank] when its last message is done, and when its last message was posted by both ends.
        """
        ready = np.maximum(posted[self.src], posted[self.dst])
        end = np.empty_like(ready)
        for where, out, into, lasts in self._levels:
            ends = np.maximum(np.maximum(sides[out], sides[into]), ready[where]) + lasts
            sides[out] = sides[into] = end[where] = ends
        done, both = posted.copy(), posted.copy()
        for ranks in (self.src, self.dst):
            np.maximum.at(done, ranks, end)
            np.maximum.at(both, ranks, ready)
        return done, both


def _distance(node: Sequence[int]) -> Callable[[tuple[int, int]], tuple[int, int, int]]:
    """In what order messages leave: to one's own node first, to the next rank first."""
    nodes = max(node) + 1
    first = [node.index(n) for n in range(nodes)]
    count = [node.count(n) for n in range(nodes)]

    def of(pair: tuple[int, int]) -> tuple[int, int, int]:
        src, dst = pair
        here, there = node[src], node[dst]
        return (there - here) % nodes, (dst - first[there] - src + first[here]) % count[there], dst

    return of


class Step(NamedTuple):
    """A stage of a program.

    Attributes:
        messages: what travels, or None.
        tiles: [rank] ns of its tiles and of merging their results.
        after: [rank] ns once messages have landed: the stage's fixed cost, and merging what came.
    """

    messages: Messages | None
    tiles: np.ndarray
    after: np.ndarray


class Attention(NamedTuple):
    """The attention of a layer.

    Attributes:
        steps: its stages.
        ahead: what is sent a layer ahead, or None; posted behind the messages of stage `last_post`, landed
            before stage `first_use`.
    """

    steps: tuple[Step, ...]
    ahead: Messages | None = None
    last_post: int = 0
    first_use: int = 0

    @property
    def messages(self) -> list[Messages]:
        """All that travels."""
        return [m for m in (self.ahead, *(step.messages for step in self.steps)) if m is not None]


def _joined(world: int, attentions: Sequence[Attention]) -> np.ndarray:
    """[6 world] a label for each of a `Clock`'s times: `now`, `sides`, `landed`.

    Times with one label depend on each other in a layer with these attentions; a label is the number of one
    of them. What no message uses keeps its own number.
    """
    labels = np.arange(6 * world)
    for attention in attentions:
        for messages in attention.messages:
            messages.join(labels)
    if any(attention.ahead is not None for attention in attentions):
        labels[5 * world :] = labels[:world]
    return labels


class Clock:
    """When the ranks of a block and the sides of their links are free.

    Args:
        world: ranks of the block.
        overlap: transfers travel while tiles are computed.

    Attributes:
        now: [rank] ns.
        sides: [4 world] ns: sending and receiving sides of links, then of cards.
        landed: [rank] when what was sent a layer ahead has landed.
        busy, exposed: [rank] ns so far, see `Played`.
    """

    def __init__(self, world: int, overlap: bool) -> None:
        self.overlap = overlap
        self.state = np.zeros(8 * world, np.int64)
        parts = np.split(self.state, np.array((1, 5, 6, 7)) * world)
        self.now, self.sides, self.landed, self.busy, self.exposed = parts

    def compute(self, lasts: np.ndarray) -> None:
        """Every rank computes for a while."""
        self.now += lasts
        self.busy += lasts

    def wait(self, until: np.ndarray) -> None:
        """No rank goes on before its copies are done."""
        self.exposed += np.maximum(until - self.now, 0)
        np.maximum(self.now, until, out=self.now)

    def meet(self, who: np.ndarray) -> None:
        """All wait for some ranks."""
        if who.any():
            np.maximum(self.now, self.now[who].max(), out=self.now)

    def attend(self, attention: Attention) -> None:
        """The attention of a layer."""
        posts = []
        for index, (messages, tiles, after) in enumerate(attention.steps):
            if attention.ahead is not None and index == attention.first_use:
                self.wait(self.landed)
            posts.append(self.now.copy())
            landing = messages.serve(posts[-1], self.sides) if messages is not None else None
            if landing is not None and not self.overlap:
                self._land(*landing)
            self.compute(tiles)
            if landing is not None and self.overlap:
                self._land(*landing)
            self.compute(after)
        if attention.ahead is not None:
            self.send_ahead(attention.ahead, posts[attention.last_post])

    def send_ahead(self, ahead: Messages, posted: np.ndarray) -> None:
        """What the next layer fetches leaves."""
        self.landed[:] = ahead.serve(posted.copy(), self.sides)[0]

    def repeat(self, times: int, layer: Callable[[], None], *attentions: Attention) -> None:
        """Play equal layers: one by one, until one moves times that depend on each other by one number.

        Args:
            times: how many.
            layer: plays one.
            attentions: what travels in one.
        """
        labels = _joined(len(self.now), attentions) if times > 1 else np.zeros(0, np.int64)
        held = len(labels)
        for played in range(times):
            before = self.state.copy()
            layer()
            moved = self.state - before
            if np.array_equal(moved[:held], moved[labels]):
                self.state += moved * (times - played - 1)
                return

    def _land(self, done: np.ndarray, both: np.ndarray) -> None:
        self.exposed += np.maximum(done - np.maximum(self.now, both), 0)
        np.maximum(self.now, done, out=self.now)
