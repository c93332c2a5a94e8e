"""What a rank gives to the API: its samples, in the trainer's own tensors.

A `Sample` is the same on the CPU, checked, with what follows from it (which rows are computed, and which the
outputs hold). Samples travel between ranks as bytes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_augtree.config import InputError, UnsupportedError
from megatron_augtree.data.groups import Group
from megatron_augtree.planning.tree import TokenSequence


@dataclass(frozen=True)
class Batch:
    """A rank's samples, perhaps none; the same on tensor-parallel peers (and CP peers for ``scope="cp"``).

    A sample of T tokens has T - 1 rows; row t has input token t and target token t + 1.

    Attributes:
        tokens: of every sample [T] ids, unpadded, T >= 1.
        loss_mask: of every sample [T - 1] bool; entry t belongs to target token t + 1.
        score_mask: of every sample [T - 1] bool, the rows that outputs hold, `loss_mask` included; all of
            them are computed. None: the rows from the first True of `loss_mask` on, of which those that
            `loss_mask` leaves out are not computed, and are 0.
        salt: of every sample [T] or [T, k] int64, or None: rows are shared only where tokens *and* salts
            agree (image hash, routes, adapter). A sample without salt has salt 0.
        group: of every sample a key, the same over the pool for the samples of one prompt (the framework's
            uid); a hint for the planner, never trusted for equality.
        temperature: logits are divided by it; one for all, or one a sample.
    """

    tokens: Sequence[Tensor]
    loss_mask: Sequence[Tensor]
    score_mask: Sequence[Tensor] | None = None
    salt: Sequence[Tensor] | None = None
    group: Sequence[Hashable] | None = None
    temperature: Sequence[float] | float = 1.0

    @staticmethod
    def empty() -> Batch:
        """No samples: a rank without any takes part in every call with it."""
        return Batch([], [])

    @staticmethod
    def from_jagged(values: Tensor, offsets: Tensor, mask: Tensor, **fields) -> Batch:
        """Samples that lie one after the other.

        Args:
            values: [N] ids.
            offsets: [n + 1] int; sample i has tokens ``offsets[i]`` to ``offsets[i + 1]``.
            mask: [N] bool, True where the *token* carries a loss; a sample's first token has no row.
            fields: further fields of `Batch`.
        """
        cuts = offsets.tolist()
        spans = list(zip(cuts, cuts[1:]))
        return Batch([values[a:b] for a, b in spans], [mask[a + 1 : b].bool() for a, b in spans], **fields)

    @staticmethod
    def from_responses(tokens: Sequence[Tensor], masks: Sequence[Tensor], **fields) -> Batch:
        """Samples with a mask over their responses.

        Args:
            tokens: of every sample [T] prompt and response; the prompt has at least one token.
            masks: of every sample [R] bool, True where the response token carries a loss.
            fields: further fields of `Batch`.
        """
        return Batch(
            tokens,
            [torch.nn.functional.pad(m.bool(), (len(t) - 1 - len(m), 0)) for t, m in zip(tokens, masks)],
            **fields,
        )

    @staticmethod
    def from_padded(
        ids: Tensor, lengths: Tensor, mask: Tensor, *, starts: Tensor | None = None, **fields
    ) -> Batch:
        """Padded samples.

        Args:
            ids: [B, S].
            lengths: [B] tokens of each sample, without padding.
            mask: [B, S] bool, True where the *token* carries a loss; or [B, S - 1], entry t for token t + 1.
            starts: [B] where each sample begins (left padding); None: all at 0.
            fields: further fields of `Batch`.
        """
        if mask.shape[1] == ids.shape[1]:
            mask = mask[:, 1:]
        begins = [0] * len(ids) if starts is None else starts.tolist()
        spans = [(a, a + n) for a, n in zip(begins, lengths.tolist())]
        return Batch(
            [row[a:b] for row, (a, b) in zip(ids, spans)],
            [row[a : b - 1].bool() for row, (a, b) in zip(mask, spans)],
            **fields,
        )

    @staticmethod
    def from_groups(groups: Sequence[Group], **fields) -> Batch:
        """The responses of groups of a file, group by group; the group's name is the key.

        Args:
            groups: of ``data.groups.read_groups``.
            fields: further fields of `Batch`.
        """
        tokens, masks, salts, keys = [], [], [], []
        for group in groups:
            for response in group.responses:
                tokens.append(torch.tensor([*group.prompt, *response.tokens]))
                prompt = [False] * (len(group.prompt) - 1)
                masks.append(torch.tensor([*prompt, *response.loss_mask], dtype=torch.bool))
                prompt_salt = group.prompt_salt or (0,) * len(group.prompt)
                salts.append(torch.tensor([*prompt_salt, *(response.salt or (0,) * len(response.tokens))]))
                keys.append(group.name)
        return Batch(tokens, masks, salt=salts, group=keys, **fields)


@dataclass(frozen=True)
class Sample:
    """One checked sample.

    Attributes:
        tokens: [T] int64.
        held: [T - 1] bool, rows that outputs hold.
        computed: [T - 1] bool, those of them that are computed; the others are 0.
        salt: [T, k] int64.
        group: number that stands for the group's key; samples without one have different ones.
        temperature: of its scored rows.
    """

    tokens: np.ndarray
    held: np.ndarray
    computed: np.ndarray
    salt: np.ndarray
    group: int
    temperature: float

    @property
    def rows(self) -> np.ndarray:
        """[R] row numbers that outputs hold."""
        return np.flatnonzero(self.held)

    @property
    def kept(self) -> np.ndarray:
        """[C] which of `rows` are computed."""
        return np.flatnonzero(self.computed[self.held])


def check_batch(batch: Batch, vocab_size: int) -> list[Sample]:
    """The samples of a batch, on the CPU.

    Raises:
        InputError: fields that do not fit together, ids outside the vocabulary, temperatures out of range.
        UnsupportedError: the last token is asked to be fed.
    """
    count = len(batch.tokens)
    fields = {
        "loss_mask": batch.loss_mask,
        "score_mask": batch.score_mask,
        "salt": batch.salt,
        "group": batch.group,
    }
    if not isinstance(batch.temperature, (int, float)):
        fields["temperature"] = batch.temperature
    for name, values in fields.items():
        if values is not None and len(values) != count:
            raise _unfit(f"{count} samples, {name} of {len(values)}", "every field has one entry a sample")
    samples = [_sample(batch, i, vocab_size) for i in range(count)]
    widths = {s.salt.shape[1] for s in samples}
    if len(widths) > 1:
        raise _unfit(f"salts of {sorted(widths)} columns", "all salts of a batch have the same columns")
    return samples


def _sample(batch: Batch, i: int, vocab_size: int) -> Sample:
    tokens = _integers(batch.tokens[i], "tokens", i)
    if tokens.ndim != 1 or not len(tokens) or tokens.min() < 0 or tokens.max() >= vocab_size:
        raise _unfit(
            f"sample {i}: tokens {list(tokens.shape)}",
            f"tokens is [T], T >= 1, with ids from 0 to {vocab_size - 1}",
        )
    rows = len(tokens) - 1
    loss = _mask(batch.loss_mask[i], "loss_mask", i, rows)
    if batch.score_mask is None:
        held, computed = np.logical_or.accumulate(loss), loss
    else:
        held = computed = _mask(batch.score_mask[i], "score_mask", i, rows)
        if (loss & ~held).any():
            raise _unfit(
                f"sample {i}: {int((loss & ~held).sum())} rows of loss_mask are not in score_mask",
                "a row that carries a loss is scored",
            )
    salt = np.zeros((rows + 1, 0), np.int64)
    if batch.salt is not None:
        salt = _integers(batch.salt[i], "salts", i).reshape(len(batch.salt[i]), -1)
        if len(salt) != rows + 1:
            raise _unfit(f"sample {i}: {rows + 1} tokens, {len(salt)} salts", "a salt has one entry a token")
    temperature = batch.temperature
    temperature = float(temperature if isinstance(temperature, (int, float)) else temperature[i])
    if not 0 < temperature < math.inf:
        raise _unfit(f"sample {i}: temperature {temperature}", "a temperature is positive and finite")
    return Sample(tokens, held, computed, salt, _key(batch, i), temperature)


def _array(values: Tensor, dtype: type) -> np.ndarray:
    return torch.as_tensor(values).detach().cpu().numpy().astype(dtype)


def _integers(values: Tensor, name: str, i: int) -> np.ndarray:
    """Whole numbers; cut to them, different salts or ids would be the same one."""
    given = torch.as_tensor(values).detach().cpu()
    if given.is_floating_point() and bool((given != given.round()).any()):
        raise _unfit(f"sample {i}: {name} of {given.dtype} with fractions", f"{name} are whole numbers")
    return _array(given, np.int64)


def _mask(values: Tensor, name: str, i: int, rows: int) -> np.ndarray:
    mask = _array(values, bool)
    if mask.shape == (rows + 1,):
        raise UnsupportedError(
            "the last token of a sample is not fed",
            values=f"sample {i}: {name} [{rows + 1}] for {rows + 1} tokens",
            rule="entry t of a mask belongs to target token t + 1, so there are T - 1; reward models and the "
            "capture of hidden states need the last token fed, which no row does",
            remedy="leave out the entry of the first token; run reward models without AugTree",
        )
    if mask.shape != (rows,):
        raise _unfit(f"sample {i}: {name} {list(mask.shape)} for {rows + 1} tokens", "a mask is [T - 1]")
    return mask


def _key(batch: Batch, i: int) -> int:
    """Where no key is given: the negative of a number that no other sample of this rank has."""
    if batch.group is None or batch.group[i] is None:
        return -1 - i
    key = batch.group[i]
    # A number or text of numpy or torch is the one of Python; their repr differs.
    key = key.item() if hasattr(key, "item") else key
    # Not hash(): Python seeds it anew in every process.
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")


def _unfit(values: str, rule: str) -> InputError:
    return InputError(
        "a batch does not fit together",
        values=values,
        rule=rule,
        remedy="see megatron_augtree.mcore.api.Batch",
    )


def encode(samples: Sequence[Sample]) -> bytes:
    """Samples as bytes, without their tensors' overhead."""
    lengths = np.asarray([len(s.tokens) for s in samples], np.int64)
    width = samples[0].salt.shape[1] if samples else 0
    head = np.asarray([len(samples), width], np.int64)
    groups = np.asarray([s.group for s in samples], np.int64)
    heat = np.asarray([s.temperature for s in samples], np.float64)
    body = [
        np.concatenate([np.zeros(0, kind), *arrays])
        for kind, arrays in (
            (np.int64, [s.salt.reshape(-1) for s in samples]),
            (np.int32, [s.tokens.astype(np.int32) for s in samples]),
            (np.uint8, [(s.held + 2 * s.computed).astype(np.uint8) for s in samples]),
        )
    ]
    kinds = (np.int64, np.int32, np.uint8)
    return b"".join(
        array.astype(kind).tobytes()
        for array, kind in zip(
            (head, lengths, groups, heat, *body), (np.int64, np.int64, np.int64, np.float64, *kinds)
        )
    )


def decode(data: bytes) -> list[Sample]:
    """The inverse of `encode`."""
    place = 0

    def read(kind: type, count: int) -> np.ndarray:
        nonlocal place
        found = np.frombuffer(data, kind, int(count), place)
        place += found.nbytes
        return found

    count, width = (int(x) for x in read(np.int64, 2))
    lengths, groups, heat = read(np.int64, count), read(np.int64, count), read(np.float64, count)
    salts = read(np.int64, lengths.sum() * width).reshape(lengths.sum(), width)
    tokens, flags = read(np.int32, lengths.sum()), read(np.uint8, (lengths - 1).sum())
    samples, at = [], 0
    for i, length in enumerate(int(x) for x in lengths):
        flag = flags[at - i : at - i + length - 1]
        samples.append(
            Sample(
                tokens[at : at + length].astype(np.int64),
                (flag & 1).astype(bool),
                (flag & 2).astype(bool),
                salts[at : at + length],
                int(groups[i]),
                float(heat[i]),
            )
        )
        at += length
    return samples


def sequences_of(samples: Sequence[Sample]) -> list[TokenSequence]:
    """Samples of the whole pool as the tree sees them.

    Temperatures divide the logits of scored rows, so where they differ they salt these rows, and only these:
    prompts are shared all the same.
    """
    width = max((s.salt.shape[1] for s in samples), default=0)
    mixed = len({s.temperature for s in samples}) > 1
    found = []
    for s in samples:
        salt = np.zeros((len(s.tokens), width + mixed), np.int64)
        salt[:, : s.salt.shape[1]] = s.salt
        if mixed:
            # Row t ends in token t + 1: that token's salt decides who shares it.
            salt[1:, -1] = np.where(s.computed, np.float64(s.temperature).view(np.int64), 0)
        found.append(TokenSequence(s.tokens, s.computed, salt if width + mixed else None))
    return found


def group_numbers(samples: Sequence[Sample], givers: Sequence[int]) -> list[int]:
    """[sample] number of its group, counted in order of appearance."""
    known: dict[object, int] = {}
    # A sample without a key stands alone; two ranks may have given the same negative number.
    return [
        known.setdefault(s.group if s.group >= 0 else (giver, s.group), len(known))
        for s, giver in zip(samples, givers)
    ]
