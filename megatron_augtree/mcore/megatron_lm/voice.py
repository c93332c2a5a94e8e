"""One message for all ranks, also where there is no process group yet.

`mcore/launch.py` votes through a process group. A script of Megatron-LM makes its own later, so ranks that
find a mistake before that meet in torchrun's store: where rank 0 says the same, the others keep quiet.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

from megatron_augtree.mcore.launch import env_rank, env_world

#: How long a rank waits for rank 0 to find the same, seconds: ranks start at different times.
PATIENCE_S = 20.0


def say(text: str, patience_s: float = PATIENCE_S) -> None:
    """Prints a message to stderr, unless rank 0 prints the same.

    Args:
        text: the message.
        patience_s: seconds to wait for rank 0.
    """
    store, rank = _store(), env_rank()
    if rank == 0 or store is None:
        _write(text if env_world() == 1 or (rank == 0 and store is not None) else f"rank {rank}: {text}")
        if store is not None:
            store.set("said", text)
        return
    if _said(store, patience_s) != text:
        _write(f"rank {rank}: {text}")


def _said(store: dist.Store, patience_s: float) -> str:
    """What rank 0 said; empty if nothing in time."""
    end = time.monotonic() + patience_s
    try:
        while not store.check(["said"]):  # not wait(): torch warns of every wait that ends
            if time.monotonic() > end:
                return ""
            time.sleep(0.05)
        return store.get("said").decode()
    except dist.DistError:
        return ""  # the launcher is gone


def _store() -> dist.Store | None:
    """torchrun's store; None where there is none that outlives a rank."""
    if env_world() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    server = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(*server, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    except dist.DistError:
        return None  # what is to be said matters more
    return dist.PrefixStore(f"augtree/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _write(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # whole, also when several ranks speak at once
