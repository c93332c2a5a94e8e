"""What a launcher does around its work: one voice for all ranks, and an end for all when one fails.

A message is printed once. So ranks vote: what a user can get wrong is found before the first step, inside
:func:`agree`, which gathers the failures, lets rank 0 print them, and ends every rank with code 2. Later a
rank speaks for itself; the others see its closed connections within seconds, say that a peer was lost, and
end with code 1. A rank that is still computing then is ended by the launcher's SIGTERM, and says so too.

Exchanges also have a timeout (`add_timeout_argument`), for what no closed connection tells: a rank that
hangs, or a machine that is gone. It is long, since it cannot tell a hanging rank from one that computes.
Joining, and the votes before :func:`start`, have one of their own: ranks start at different times.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron_augtree.config import AugTreeError
from megatron_augtree.data.groups import Group, fold, parse_range, read_groups, truncate
from megatron_augtree.mcore import build

T = TypeVar("T")

USER_ERROR, LOST_PEER, INTERRUPTED = 2, 1, 130
#: Ranks start at different times on a busy machine.
_JOIN_TIMEOUT = timedelta(minutes=10)

#: A year; much beyond it, timeouts in nanoseconds overflow.
_LONGEST_MINUTES = 525_600

_ended = threading.Event()


def env_rank() -> int:
    """This process's rank under torchrun, 0 without it."""
    return int(os.environ.get("RANK", 0))


def env_world() -> int:
    """Processes of this run: torchrun's, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


class RankParser(argparse.ArgumentParser):
    """A parser whose errors can be voted on; ``--help`` is printed by rank 0. Flags are written in full."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        # A flag's own check may have said what to do.
        raise AugTreeError(f"{self.prog}: error: {message}", remedy="" if "\n" in message else "see --help")

    def _print_message(self, message: str, file=None) -> None:
        if env_rank() == 0:
            super()._print_message(message, file)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which groups, and from which weights."""
    group = parser.add_argument_group("data and weights")
    group.add_argument("--data", required=True, metavar="FILE", help="group file")
    group.add_argument("--groups", default=":", metavar="A:B",
                       help="groups A to B-1, counted from 0; default all")
    group.add_argument("--max-prompt-tokens", type=int, default=None,
                       help="keep the first tokens of every prompt")
    group.add_argument("--max-response-tokens", type=int, default=None, help="the same for responses")
    group.add_argument("--seed", type=int, default=1234, help="of the weights and random states")
    group.add_argument("--load", default=None, metavar="W.safetensors",
                       help="weights: tensors by megatron-core's names, or a dump of replay.py, of which "
                       "param1/<name> is taken, or param0/<name> where there is none")
    add_timeout_argument(group)


def add_timeout_argument(parser: argparse._ActionsContainer) -> None:
    """Adds ``--distributed-timeout-minutes``."""
    parser.add_argument(
        "--distributed-timeout-minutes", type=_minutes, default=10.0,
        help="an exchange fails when a rank has not entered it for so long: choose more than the longest "
        "time that one rank computes while others wait. It is for ranks that hang; one that ended is noticed "
        "within seconds, by its closed connections")


def _minutes(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < _LONGEST_MINUTES:  # NaN fails too
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0 and below {_LONGEST_MINUTES}")
    return found


def read_data(args: argparse.Namespace) -> list[Group]:
    """The groups that the flags name, cut to the limits; ids are as in the file.

    Raises:
        InputError: file, range or limit cannot be used.
    """
    start, stop = parse_range(args.groups)
    return truncate(read_groups(args.data, start, stop), args.max_prompt_tokens, args.max_response_tokens)


def folded_data(args: argparse.Namespace) -> list[Group]:
    """:func:`read_data` with every id taken ``% vocab_size``."""
    return fold(read_data(args), args.vocab_size)


def start(args: argparse.Namespace) -> None:
    """Threads, process groups, parallel state and random states of a run whose arguments are agreed.

    From here on the default group, which votes made, has the timeout of Megatron's groups.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # ranks share the cores; and sums keep their order
    build.initialize(args, seed=args.seed, timeout_s=60 * args.distributed_timeout_minutes)
    _set_pg_timeout(timedelta(minutes=args.distributed_timeout_minutes))


def agree(work: Callable[[], T]) -> T:
    """The result of `work`, unless it failed on any rank: then all ranks end, with one message.

    Args:
        work: exchanges nothing, or fails on all ranks alike.

    Raises:
        SystemExit: code 2, on every rank, where `work` raised an ``AugTreeError`` on any.
    """
    result, failure = None, ""
    try:
        result = work()
    except AugTreeError as error:
        failure = str(error)
    failures = _everyones(failure)
    if any(failures):
        if env_rank() == 0:
            for text in dict.fromkeys(filter(None, failures)):
                ranks = [rank for rank, found in enumerate(failures) if found == text]
                _say(text if len(ranks) == len(failures) else f"ranks {ranks}: {text}")
        _everyones("printed")  # a rank that ended earlier would have the launcher end rank 0 before it prints
        _ended.set()
        raise SystemExit(USER_ERROR)
    return result


def agree_on_rank_0(work: Callable[[], object]) -> None:
    """:func:`agree` on what rank 0 does for all, such as writing a file; the others wait for it."""
    agree(lambda: work() if env_rank() == 0 else None)


def _everyones(text: str) -> list[str]:
    if not dist.is_initialized():
        if env_world() == 1:
            return [text]
        dist.init_process_group("gloo", timeout=_JOIN_TIMEOUT)
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def run(main: Callable[[], None]) -> None:
    """Runs a launcher's main function and ends the process: 0, 2 for what a user can cause, otherwise 1."""
    alone = env_world() == 1
    if not alone:
        _watch_for_stop()
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except AugTreeError as error:
        _say(str(error) if alone else f"rank {env_rank()}: {error}")
        code = USER_ERROR
    except KeyboardInterrupt:
        # Not an Exception: without this a rank would wait at exit for peers that are ending too.
        _say(f"rank {env_rank()}: interrupted")
        code = INTERRUPTED
    except Exception as error:
        code = LOST_PEER
        if is_lost_peer(error):
            _say(f"rank {env_rank()}: {_lost(_reason(error))}")
        else:
            traceback.print_exc()
    _ended.set()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0 or alone:
        build.destroy()
        sys.exit(code)
    os._exit(code)  # tearing down a process group whose peers are gone may wait for them


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of torch says that another rank ended or does not answer."""
    return isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and "/gloo/" in str(error)


def _lost(reason: str) -> AugTreeError:
    return AugTreeError("a peer was lost", values=reason,
                        rule="a step needs every rank of the pool; where one ends, all end",
                        remedy="look for another rank's first message; a rank that was killed leaves none "
                        "(out of memory?)")


def _reason(error: BaseException) -> str:
    """The part of a backend's message that says what happened; its file and its advice are left out."""
    return re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[0]).partition(" This is typically")[0]


def _watch_for_stop() -> None:
    """A thread that ends this process on SIGTERM with a message.

    A handler of Python's would wait for the main thread, which may be inside an exchange that never ends.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        signal.sigwait({signal.SIGTERM})
        if not _ended.is_set():
            _say(f"rank {env_rank()}: {_lost('stopped by the launcher (SIGTERM)')}")
        os._exit(LOST_PEER)

    threading.Thread(target=wait, name="watch-for-stop", daemon=True).start()


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # whole lines, also when several ranks speak at once
