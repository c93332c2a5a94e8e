"""Two ranks over throttled links: bits of a step, and times of transfers. Rank 0 writes what it found.

    torchrun --nproc-per-node 2 tests/distributed/throttle_worker.py OUT_FILE
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_augtree.attention.kernels import get_kernel
from megatron_augtree.planning.candidates import Choice, build
from megatron_augtree.planning.schedule import HOME, Payload, Stage, Transfer, rows
from megatron_augtree.runtime.engine import Engine
from megatron_augtree.runtime.messages import FieldSpec
from megatron_augtree.runtime.throttle import ThrottledTransport
from megatron_augtree.runtime.transport import DistTransport
from megatron_augtree.runtime.tree_attention import tree_attention
from tests.distributed.test_throttle import BITS_RATE, CHOICES, RATE, ROWS, WIDTH, group


def bits(choice: dict, transport: DistTransport) -> tuple[str, int, float]:
    """(hash of all numbers of a step, bytes that this rank sent, seconds)."""
    forest = group()
    plan = build(Choice(degree=2, **choice), forest.shape, 2, 10)
    table = torch.randn(64, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)

    def model(local, context):
        x = table[local.inputs]
        for layer in range(2):
            q = x.view(-1, 4, 8)
            k, v = (q[:, :2] * 0.5).contiguous(), (q[:, 2:] * 2.0).contiguous()
            x = x + tree_attention(q, k, v, context, layer, 0.3).reshape(x.shape)
        return x[local.scored].sum(-1, keepdim=True)

    before = sum(transport.traffic[transport.rank].bytes.values())
    engine = Engine(plan, forest, model, transport, get_kernel("cpu_flash", "cpu"))
    dist.barrier()
    start = time.monotonic()
    result = engine.play(lambda values: (values.values.sum(), {}), collect=True)
    took = time.monotonic() - start
    numbers = [table.grad, torch.as_tensor(result.loss)]
    digest = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in numbers)).hexdigest()
    return digest, sum(transport.traffic[transport.rank].bytes.values()) - before, took


def transfers(transport: DistTransport, senders: tuple[int, ...], work: float, posts: int) -> dict:
    """Seconds, and seconds of the processor, of some stages that are under way at once.

    Args:
        transport: the links.
        senders: ranks that send `ROWS` rows to the other.
        work: seconds between posting and landing.
        posts: stages.
    """
    spec = FieldSpec({"k": (1, WIDTH), "v": (1, WIDTH)}, {"k": torch.float32, "v": torch.float32})
    source, sink = rows(HOME, [(0, ROWS)]), rows("in", [(0, ROWS)])
    moved = [Transfer(Payload.KV, r, 1 - r, source, sink) for r in senders]
    stage, me = Stage(tuple(moved), ((), ())), transport.rank

    def buffer(value: float) -> dict:
        return {name: torch.full((ROWS, 1, WIDTH), value) for name in ("k", "v")}

    held = {me: {HOME: buffer(me + 1.0), "in": buffer(0.0)}}
    dist.barrier()
    start, used = time.monotonic(), time.process_time()
    posted = [transport.post((0, 1), stage, held, spec, ahead=True) for _ in range(posts)]
    time.sleep(work)
    for x in posted:
        transport.land(x)
    found = {"seconds": time.monotonic() - start, "busy": time.process_time() - used}
    arrived = float(held[me]["in"]["k"].mean())
    assert arrived == (2 - me if 1 - me in senders else 0), arrived
    return found


def main() -> None:
    """All cases; every one runs on both ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    free, bare = DistTransport(), {name: bits(choice, DistTransport()) for name, choice in CHOICES.items()}
    slow = {name: bits(choice, ThrottledTransport(BITS_RATE)) for name, choice in CHOICES.items()}
    cases: dict[str, Callable[[], dict]] = {
        "one way": lambda: transfers(ThrottledTransport(RATE), (0,), 0.0, 1),
        "both ways": lambda: transfers(ThrottledTransport(RATE), (0, 1), 0.0, 1),
        "two under way": lambda: transfers(ThrottledTransport(RATE), (0, 1), 0.0, 2),
        "behind work": lambda: transfers(ThrottledTransport(RATE), (0, 1), 0.2, 1),
        "twice the rate": lambda: transfers(ThrottledTransport(2 * RATE), (0, 1), 0.0, 1),
        "free": lambda: transfers(free, (0, 1), 0.0, 1),
    }
    timed = {name: run() for name, run in cases.items()}
    found = {"bits": {name: [bare[name], slow[name]] for name in CHOICES}, "times": timed}
    everyones: list[dict] = [{}, {}]
    dist.all_gather_object(everyones, found)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(everyones))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
