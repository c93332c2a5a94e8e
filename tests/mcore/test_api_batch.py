"""Batches in the trainer's tensors, and the layouts of outputs."""

import math

import numpy as np
import pytest
import torch

from megatron_augtree.config import InputError, UnsupportedError
from megatron_augtree.data.groups import Group, Response
from megatron_augtree.mcore.api.batch import (
    Batch,
    check_batch,
    decode,
    encode,
    group_numbers,
    sequences_of,
)
from megatron_augtree.mcore.api.outputs import Columns, make_outputs
from megatron_augtree.planning.tree import from_sequences

TOKENS = [[5, 6, 7, 8, 9], [5, 6, 7, 1], [3], [2, 4]]
LOSS = [[0, 1, 0, 1], [0, 0, 1], [], [0]]


def _batch(**fields) -> Batch:
    masks = fields.pop("loss_mask", LOSS)
    masks = [torch.tensor(m, dtype=torch.bool) for m in masks]
    return Batch([torch.tensor(t) for t in TOKENS], masks, **fields)


def test_four_ways_to_give_the_same_samples():
    want = check_batch(_batch(), 10)
    flat = torch.tensor(sum(TOKENS, []))
    offsets = torch.tensor([0, 5, 9, 10, 12])
    mask = torch.tensor(sum([[0, *m] for m in LOSS], []), dtype=torch.bool)
    jagged = Batch.from_jagged(flat, offsets, mask)
    ids, marks = torch.zeros((4, 7), dtype=torch.long), torch.zeros((4, 7), dtype=torch.bool)
    starts = torch.tensor([2, 0, 6, 3])
    for row, mark, start, t, m in zip(ids, marks, starts, TOKENS, LOSS):
        row[start : start + len(t)] = torch.tensor(t)
        mark[start + 1 : start + len(t)] = torch.tensor(m).bool()
    lengths = torch.tensor([5, 4, 1, 2])
    padded = Batch.from_padded(ids, lengths, marks, starts=starts)
    shifted = Batch.from_padded(ids, lengths, marks[:, 1:], starts=starts)
    assert ids.shape[1] != marks[:, 1:].shape[1]
    tails = [torch.tensor(m[-2:], dtype=torch.bool) for m in ([0, 1], LOSS[1][1:], [], LOSS[3])]
    tails[0] = torch.tensor(LOSS[0], dtype=torch.bool)
    responses = Batch.from_responses(_batch().tokens, tails)
    for batch in (jagged, padded, shifted, responses):
        assert [_plain(s) for s in check_batch(batch, 10)] == [_plain(s) for s in want]


def test_groups_of_a_file():
    group = Group("a", (5, 6), (Response((7, 8), (True, False)), Response((1,), (True,), salt=(4,))), (2, 3))
    first, second = check_batch(Batch.from_groups([group]), 10)
    assert (first.tokens.tolist(), first.computed.tolist()) == ([5, 6, 7, 8], [False, True, False])
    assert (first.salt[:, 0].tolist(), second.salt[:, 0].tolist()) == ([2, 3, 0, 0], [2, 3, 4])
    assert first.group == second.group


def _plain(sample):
    return (sample.tokens.tolist(), sample.held.tolist(), sample.computed.tolist(), sample.temperature)


def test_rows_that_are_held_and_rows_that_are_computed():
    first, second, third, fourth = check_batch(_batch(), 10)
    assert first.rows.tolist() == [1, 2, 3] and first.kept.tolist() == [0, 2]
    assert second.rows.tolist() == [2] and not len(third.rows) and not len(fourth.rows)
    marks = [torch.tensor(m) for m in ([1, 1, 0, 1], [0, 0, 1], [], [1])]
    first, _, _, fourth = check_batch(_batch(score_mask=marks), 10)
    assert first.rows.tolist() == [0, 1, 3] and first.kept.tolist() == [0, 1, 2]
    assert fourth.kept.tolist() == [0], "what is asked for is computed, with a loss or without"


@pytest.mark.parametrize("fields, text", [
    ({"loss_mask": LOSS[:3]}, "4 samples, loss_mask of 3"),
    ({"loss_mask": [[1], *LOSS[1:]]}, "sample 0: loss_mask [1] for 5 tokens"),
    ({"score_mask": [torch.zeros(n, dtype=torch.bool) for n in (4, 3, 0, 1)]}, "not in score_mask"),
    ({"salt": [torch.zeros(n) for n in (5, 4, 1, 3)]}, "2 tokens, 3 salts"),
    ({"salt": [torch.zeros(5), torch.zeros(4, 2), torch.zeros(1), torch.zeros(2)]},
     "salts of [1, 2] columns"),
    ({"salt": [torch.full((n,), 0.5) for n in (5, 4, 1, 2)]}, "salts of torch.float32 with fractions"),
    ({"temperature": [1.0, 0.5, 0.0, 1.0]}, "sample 2: temperature 0.0"),
    ({"temperature": math.inf}, "temperature inf"),
    ({"group": ["a"]}, "group of 1"),
])
def test_what_does_not_fit_is_said(fields, text):
    with pytest.raises(InputError) as error:
        check_batch(_batch(**fields), 10)
    assert text in str(error.value)


@pytest.mark.parametrize("tokens", [[], [5, 10], [-1, 2], [[1, 2]]])
def test_ids_are_of_the_vocabulary(tokens):
    with pytest.raises(InputError, match="ids from 0 to 9"):
        check_batch(Batch([torch.tensor(tokens)], [torch.zeros(max(len(tokens) - 1, 0))]), 10)


def test_reward_models_are_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="reward models"):
        check_batch(_batch(loss_mask=[[*m, 1] for m in LOSS]), 10)


def test_samples_travel_unchanged():
    salts = [torch.arange(2 * len(t)).reshape(-1, 2) for t in TOKENS]
    for fields in ({}, {"salt": salts, "temperature": [0.5, 1.0, 1 / 3, 2.0], "group": ["a", "a", None, 7]}):
        samples = check_batch(_batch(**fields), 10)
        for sample, again in zip(samples, decode(encode(samples)), strict=True):
            assert _plain(sample) == _plain(again) and sample.group == again.group
            assert np.array_equal(sample.salt, again.salt)
    assert decode(encode([])) == []


def test_keys_mean_the_same_everywhere_and_no_key_stands_alone():
    here = check_batch(_batch(group=["a", "b", None, None]), 10)
    there = check_batch(_batch(group=["b", None, "c", "a"]), 10)
    numbers = group_numbers([*here, *there], [0] * 4 + [1] * 4)
    assert numbers == [0, 1, 2, 3, 1, 4, 5, 0]


def test_a_key_of_numpy_or_torch_is_that_of_python():
    for key in (7, "a"):
        given = [key, np.array([key])[0], key if key == "a" else torch.tensor(key), np.array(key)]
        assert len({s.group for s in check_batch(_batch(group=given), 10)}) == 1


def test_ids_with_fractions_are_none():
    with pytest.raises(InputError, match="tokens of torch.float32 with fractions"):
        check_batch(Batch([torch.tensor([1.0, 2.5])], [torch.tensor([True])]), 10)


def test_temperatures_part_scored_rows_only():
    same = [torch.tensor([1, 2, 3, 4, 5, 6])] * 3
    masks = [torch.tensor([0, 0, 0, 1, 1]).bool()] * 3
    shared = from_sequences(sequences_of(check_batch(Batch(same, masks), 10)))
    mixed = check_batch(Batch(same, masks, temperature=[1.0, 0.5, 1.0]), 10)
    parted = from_sequences(sequences_of(mixed))
    assert (shared.shape.rows, parted.shape.rows) == ((5,), (3, 2, 2))
    assert parted.paths[0] == parted.paths[2] != parted.paths[1]
    salted = check_batch(Batch(same, masks, salt=[torch.tensor([0, 0, s, 0, 0, 0]) for s in (0, 0, 9)]), 10)
    # Row 1 ends in the token whose salt differs, and all later rows see it.
    assert from_sequences(sequences_of(salted)).shape.rows == (1, 4, 4)


# Outputs.

COLUMNS = Columns(("logprobs", "pair", "ids"), ((), (2,), ()), (torch.float64, torch.float64, torch.int64),
                  torch.float64)


def _outputs():
    samples = check_batch(_batch(), 10)
    computed = torch.arange(1, 4)[:, None] * torch.tensor([1.0, 10.0, 100.0, 7.0], dtype=torch.float64)
    return make_outputs(samples, [0, 1, 2, 3], computed.requires_grad_(), COLUMNS), computed


def test_values_of_masked_rows_are_0():
    out, _ = _outputs()
    assert [part.tolist() for part in out.as_list()] == [[1, 0, 2], [3], [], []]
    assert out.values["pair"].tolist() == [[10, 100], [0, 0], [20, 200], [30, 300]]
    assert out.values["ids"].tolist() == [7, 0, 14, 21] and out.values["ids"].dtype == torch.int64
    assert out.offsets.tolist() == [0, 3, 4, 4, 4] and out.rows.tolist() == [1, 2, 3, 2]
    assert out.anchor.requires_grad and float(out.anchor) == 0


def test_layouts_by_brute_force():
    """Every view is the same table, (sample, token that the value is about) -> value."""
    out, _ = _outputs()
    about = {(0, 2): 1, (0, 3): 0, (0, 4): 2, (1, 3): 3}
    for name, pick in (("logprobs", lambda v: v), ("pair", lambda v: [10 * v, 100 * v])):
        zero = pick(0)
        jagged = [[pick(about.get((i, t + 1), 0)) for t in range(len(TOKENS[i]))] for i in range(4)]
        assert [x.tolist() for x in out.jagged_next(name)] == jagged
        size = 7
        after = [[pick(about.get((i, t + 1), 0)) for t in range(size - 1)] for i in range(4)]
        before = [[pick(about.get((i, t), 0)) for t in range(size)] for i in range(4)]
        assert out.padded_next(size, name).tolist() == after
        assert out.padded_prev(size, name).tolist() == before
        for ranks in (1, 2, 3):
            shards = [out.zigzag(r, ranks, name).tolist() for r in range(ranks)]
            for i in range(4):
                padded = jagged[i] + [zero] * (-len(jagged[i]) % (2 * ranks))
                n = len(padded) // (2 * ranks)
                for r in range(ranks):
                    mine, shards[r] = shards[r][: 2 * n], shards[r][2 * n :]
                    last = 2 * ranks - 1 - r
                    assert mine == padded[r * n : (r + 1) * n] + padded[last * n : (last + 1) * n]
            assert not any(shards)
    with pytest.raises(InputError, match="5 tokens, size=4"):
        out.padded_prev(4)


def test_layouts_are_differentiable():
    for view in (lambda o: torch.cat(o.as_list()), lambda o: torch.cat(o.jagged_next()),
                 lambda o: o.padded_next(6), lambda o: o.padded_prev(6), lambda o: o.zigzag(0, 1)):
        out, computed = _outputs()
        values = view(out)
        weight = torch.arange(1, values.numel() + 1, dtype=torch.float64).reshape(values.shape)
        (values * weight).sum().backward()
        places = [float(weight[values == v]) for v in (1, 2, 3)]
        assert computed.grad[:, 0].tolist() == places and not computed.grad[:, 1:].any()


def test_no_samples():
    out = make_outputs([], [], torch.zeros((0, 4), dtype=torch.float64), COLUMNS)
    assert out.as_list() == [] and out.jagged_next() == [] and out.padded_next(3).shape == (0, 2)
    assert out.padded_prev(3, "pair").shape == (0, 3, 2) and out.zigzag(1, 2).shape == (0,)
