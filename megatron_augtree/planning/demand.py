"""What a pass wants of memory and what it saves, for every recompute pair; the best pair in closed form.

`cost.PassPrice` gives these figures of a pass; `csrc/prices.cpp` has the same.
"""

from __future__ import annotations

from typing import NamedTuple

#: Copies to the host are chosen as if each took a sixteenth more: where they fill the link to the last byte,
#: a link that is slower than expected is felt at once. It costs 0.03 % where the speed is right; where plans
#: are made for half or twice the speed, their mean loss is 1.3 instead of 2.3 % (`regret` in
#: scripts/planner_quality.py).
HOST_SPARE = 16


class Pair(NamedTuple):
    """Recompute of a pass.

    Attributes:
        whole: layers that keep everything.
        attention: of the others, those that keep what attention gave.
    """

    whole: int
    attention: int


class Copied(NamedTuple):
    """What passes compute whose memory is copied to the host and back, and these copies, nanoseconds.

    Attributes:
        layers: of the model.
        forward, backward: with the pair (0, 0), copies aside.
        saved, saved_attention: less backward for each layer of either kind.
        fixed: copies one way with the pair (0, 0); `whole`, `attention`: more for each layer of either kind.
    """

    layers: int
    forward: int
    backward: int
    saved: int
    saved_attention: int
    fixed: int
    whole: int
    attention: int

    def beside(self, other: Copied) -> Copied:
        """Of two passes."""
        return Copied(self.layers, *[a + b for a, b in zip(self[1:], other[1:])])

    def best(self) -> Pair:
        """The pair of the shortest time, if copies took a little longer (`HOST_SPARE`): either way they hide
        behind what is computed, or show.

        For each number of whole layers the time is convex and piecewise linear in the attention layers, so
        its least lies at an end, or where the copies outgrow the forward or the backward. Ties go to more
        whole layers.
        """
        best, least = Pair(self.layers, 0), None
        fixed, of_whole, each = (ns + ns // HOST_SPARE for ns in (self.fixed, self.whole, self.attention))
        for whole in range(self.layers, -1, -1):
            rest, copies = self.layers - whole, fixed + whole * of_whole
            back = self.backward - whole * self.saved
            ahead = (self.forward - copies) // max(each, 1)
            behind = (back - copies) // max(each + self.saved_attention, 1)
            for found in (0, rest, ahead, behind):
                attention = min(max(found, 0), rest)
                moved = copies + attention * each
                time = max(self.forward, moved) + max(back - attention * self.saved_attention, moved)
                if least is None or time < least:
                    best, least = Pair(whole, attention), time
        return best


class Demand(NamedTuple):
    """Memory and savings of a pass, or of some passes, as a function of the recompute pair.

    Attributes:
        layers: of the model.
        fixed: bytes kept with the pair (0, 0); `whole`, `attention`: more for each layer of either kind.
        work, work_again: bytes beside what is kept, without and with recomputed layers.
        saved, saved_attention: nanoseconds saved by each layer of either kind.
    """

    layers: int
    fixed: int
    whole: int
    attention: int
    work: int
    work_again: int
    saved: int
    saved_attention: int

    def together(self, other: Demand) -> Demand:
        """Of two passes that are alive at the same time."""
        return Demand(
            self.layers,
            self.fixed + other.fixed,
            self.whole + other.whole,
            self.attention + other.attention,
            max(self.work, other.work),
            max(self.work_again, other.work_again),
            self.saved + other.saved,
            self.saved_attention + other.saved_attention,
        )

    def in_turn(self, other: Demand) -> Demand:
        """Of two passes of which one ends before the other begins."""
        return Demand(*[max(a, b) for a, b in zip(self, other)])

    def beside(self, bytes_: int) -> Demand:
        """While these are kept, another pass needs so many bytes at its peak."""
        return self._replace(work=max(self.work, bytes_), work_again=max(self.work_again, bytes_))

    def kept(self, pair: Pair) -> int:
        return self.fixed + pair.whole * self.whole + pair.attention * self.attention

    def peak(self, pair: Pair) -> int:
        return self.kept(pair) + (self.work if pair.whole == self.layers else self.work_again)

    def fit(self, room: int) -> Pair | None:
        """The pair that saves most time within `room` bytes, or None where none fits: a closed form in the
        number of attention layers for every number of whole ones. Ties go to more whole layers."""
        best, gain = None, -1
        for whole in range(self.layers, -1, -1):
            left = room - self.peak(Pair(whole, 0))
            if left < 0:
                continue
            rest = self.layers - whole
            attention = min(rest, left // self.attention) if self.attention else rest
            saved = whole * self.saved + attention * self.saved_attention
            if saved > gain:
                best, gain = Pair(whole, attention), saved
        return best
