"""Runs a conformance trainer with and without AugTree, and counts its lines of glue."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron_augtree.mcore import cpu
from tests.mcore.conformance import bridge_style, plain_loop, rollouts, slime_style, verl_style
from tests.numerics import fixtures as f

TRAINERS = {"slime": slime_style, "verl": verl_style, "bridge": bridge_style}


def compare(name: str, lab: f.Lab) -> dict[str, float]:
    """Errors of AugTree's run against the same trainer's stock run, in one process or a pool's rank."""
    everything = rollouts.data(lab)
    if name == "plain":
        return _plain(lab, everything)
    found = {True: [], False: []}
    for use_augtree in found:
        with cpu.cpu_shims():
            trainer = TRAINERS[name].Trainer(f.build_model(lab.args, augtree=False), use_augtree)
            # Overlapped reduction records in the first step what it does in the second.
            for given in [everything, *([everything[:1]] if name == "slime" else []), everything]:
                trainer.step(given)
                parameters = trainer.model.module.named_parameters()
                found[use_augtree].append({key: p.main_grad.detach().clone() for key, p in parameters})
    assert all(float(g.abs().max()) > 0 for grads in found[False] for g in grads.values())
    if name == "bridge":
        # Megatron divides by the token count as a factor in fp32; AugTree, playing the step, does not.
        tokens = sum(int(r.mask.sum()) for r in everything)
        exact = 1 / tokens / float(1 / torch.tensor(tokens))
        assert abs(exact - 1) < 1e-7
        found[False] = [{key: g * exact for key, g in grads.items()} for grads in found[False]]
    return {f"step {i}": f.err(*pair) for i, pair in enumerate(zip(found[True], found[False]))}


def _plain(lab: f.Lab, everything: list) -> dict[str, float]:
    """Losses and weights of three steps against an un-shared loop in one process."""
    rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    world = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    model = f.build_model(lab.args, augtree=False)
    batches = [everything, everything[:3], everything[2:]]
    losses = plain_loop.train(model, batches.__getitem__, 3, 0.05, rank, world)
    plain = f.build_model(lab.args, augtree=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    wanted = []
    for batch in batches:
        tokens = sum(int(r.mask.sum()) for r in batch)
        optimizer.zero_grad()
        with cpu.cpu_shims():
            loss = sum((rollouts.policy_loss(rollouts.stock_logprobs(plain, r), r) * r.mask).sum()
                       for r in batch) / tokens
        loss.backward()
        optimizer.step()
        wanted.append(float(loss))
    return {"losses": max(abs(a - b) / abs(b) for a, b in zip(losses, wanted)),
            "weights": f.err(dict(model.named_parameters()), dict(plain.named_parameters()))}


def glue_lines() -> dict[str, int]:
    """Trainer -> its lines that are there for AugTree; of the plain loop, all of its lines."""
    counts = {name: sum(line.rstrip().endswith("# AugTree") for line in _lines(module))
              for name, module in TRAINERS.items()}
    lines = _lines(plain_loop)
    body = lines[next(i for i, line in enumerate(lines) if line.startswith("def train")) :]
    return {**counts, "plain": sum(bool(line.strip()) for line in body)}


def _lines(module) -> list[str]:
    return Path(module.__file__).read_text().splitlines()
