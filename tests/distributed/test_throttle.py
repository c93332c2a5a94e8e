"""Throttled links: the same bits, at the rate that was asked for, without keeping a core busy."""

from __future__ import annotations

import json

import pytest

from megatron_augtree.config import UnsupportedError
from megatron_augtree.planning.tree import from_groups
from megatron_augtree.runtime import throttle
from megatron_augtree.runtime.throttle import Link, ThrottledTransport
from tests.distributed.launching import launch

#: Keys and values of a stage: 1 MB, at 4 MB/s a quarter of a second.
ROWS, WIDTH, RATE = 1000, 125, 4_000_000
ALONE = ROWS * 2 * WIDTH * 4 / RATE
#: Of the step whose bits are compared.
BITS_RATE = 400_000
CHOICES = {
    "gather": {"keep": False},
    "gather in 2": {"pieces": 2, "lane_degree": 2},
    "ring": {"primitive": "ring", "keep": False, "lane_degree": 2},
    "phased": {"phase": "phased", "waves": 2, "chunks": 2, "keep": False, "wide": 1},
    "phased move_q": {"phase": "phased", "waves": 2, "primitive": "move_q"},
}


def group():
    """A group of five responses on a prompt of 17 tokens."""
    responses = [[20 + i, *range(30, 34 + 3 * i)] for i in range(5)]
    return from_groups([(range(17), [(tokens, [True] * len(tokens)) for tokens in responses])])


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What both ranks found."""
    path = tmp_path_factory.mktemp("throttle") / "found.json"
    output = launch("throttle_worker.py", 2, path)
    assert path.is_file(), output
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", CHOICES)
def test_bits_stay(found, name):
    """Loss and gradients of both ranks, and every byte that was sent."""
    for rank in found:
        (bits, sent, _), (slow_bits, slow_sent, seconds) = rank["bits"][name]
        assert (slow_bits, slow_sent) == (bits, sent) and sent > 0
        assert seconds >= sent / BITS_RATE, "a rank cannot send faster than its link"


@pytest.mark.parametrize("name, expected", [
    ("one way", ALONE),
    ("both ways", ALONE),  # a link has two directions
    ("two under way", 2 * ALONE),  # which carry one message after the other
    ("behind work", ALONE),  # 0.2 s of it pass while the rank does something else
    ("twice the rate", ALONE / 2),
])  # fmt: skip
def test_a_transfer_lasts_as_long_as_its_bytes(found, name, expected):
    """Ranks leave a barrier at slightly different times; a busy machine wakes them late."""
    times = [rank["times"][name]["seconds"] for rank in found]
    assert 0.98 * expected <= max(times) <= 1.25 * expected + 0.1, times


def test_waiting_keeps_no_core_busy(found):
    for rank in found:
        assert rank["times"]["two under way"]["busy"] < 0.2 * 2 * ALONE


def test_the_machine_itself_is_faster(found):
    """Otherwise times above would not be the throttle's."""
    assert all(rank["times"]["free"]["seconds"] < ALONE / 2 for rank in found)


def test_an_idle_link_saves_nothing_up():
    link = Link(byte_s=0.5)
    assert link.carry(10.0, 4) == (10.0, 12.0)
    assert link.carry(11.0, 2) == (12.0, 13.0), "it waits for its turn"
    assert link.carry(50.0, 4) == (50.0, 52.0), "as slow as ever after a rest"
    assert Link(0.5, message_s=2.0).carry(0.0, 2, 3) == (0.0, 7.0)


def test_gpus_are_refused_in_four_parts(monkeypatch):
    monkeypatch.setattr(throttle.dist, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl")
    with pytest.raises(UnsupportedError) as told:
        ThrottledTransport(1)
    assert all((told.value.what, told.value.values, told.value.rule, told.value.remedy))
