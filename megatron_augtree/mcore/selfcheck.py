"""A two-second parity check, for releases of megatron-core that AugTree was never tested with.

A tiny model, bound, computes a small tree on two ranks that one process plays, fused and phased; its
log-probs and every gradient have to equal, in fp64, those of the same model left stock, one sequence after
the other.

    python -m megatron_augtree.mcore.selfcheck

``prepare_model`` starts it in a process of its own where the release is unknown: so it neither needs nor
touches the caller's process groups, device and random state, and has the same outcome on every rank.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import subprocess
import sys
import warnings

from megatron_augtree.config import AugTreeError, UnsupportedError

#: Releases, by major and minor number, that the whole test suite runs with.
TESTED = ((0, 16), (0, 19))
#: Error, relative to a tensor's largest number, that rounding in fp64 stays far below.
BAR = 1e-10
_TIMEOUT_S = 300.0
_MODEL = ("--num-layers 2 --hidden-size 16 --num-attention-heads 4 --group-query-attention "
          "--num-query-groups 2 --vocab-size 32 --init-method-std 0.3 --add-qkv-bias --dtype float64")
_PLANS = ("degree=2,lane_degree=2", "degree=2,phase=phased,waves=2")
_LAUNCHED = re.compile(r"RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*")

_checking = False


@functools.cache
def check_release(version: str) -> None:
    """Warns of an untested release of megatron-core and runs the self-check; once in a process.

    Args:
        version: of megatron-core, ``"0.19.2"``.

    Raises:
        UnsupportedError: under this release a bound model does not compute what the stock model computes.
    """
    number = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if number in TESTED or _checking:
        return
    known = " and ".join(".".join(map(str, release)) for release in TESTED)
    warnings.warn(f"AugTree was tested with megatron-core {known}, this is {version}: "
                  "comparing a small model with stock first")
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHED.fullmatch(name)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "megatron_augtree.mcore.selfcheck"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S)
        failure = ended.stderr.strip()[-2000:] if ended.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no answer in {_TIMEOUT_S} s"
    if failure:
        raise UnsupportedError(
            "AugTree does not agree with this release of megatron-core",
            values=f"megatron-core {version}: {failure}",
            rule=f"under other releases than {known} a bound model has to equal the stock model first",
            remedy="install one of these releases, or leave --context-parallel-mode out",
        )


def run() -> dict[str, float]:
    """Compares, in a process that can build models on the CPU.

    Returns:
        each forced plan with the larger error of its log-probs and gradients.

    Raises:
        AugTreeError: an error that is more than rounding.
    """
    # Here, not above: they import what calls check_release.
    import torch

    from megatron_augtree.config import AugTreeConfig
    from megatron_augtree.data.groups import Group, Response
    from megatron_augtree.mcore import build
    from megatron_augtree.mcore.objective import Objective
    from megatron_augtree.mcore.sampler import model_shape, plan_step
    from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
    from megatron_augtree.runtime.transport import LocalTransport

    args = _arguments()
    answers = [tuple((5 * i + 3 * j + 1) % 32 for j in range(n)) for i, n in enumerate((5, 1, 4))]
    group = Group("self-check", tuple(range(3, 12)), tuple(Response(a, (True,) * len(a)) for a in answers))
    stock, bound = (build.build_model(args, augtree=augtree, seed=1) for augtree in (False, True))
    want = []
    for answer in answers:
        ids = torch.tensor([[*group.prompt, *answer]])
        logits = stock(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None], None)[0, -len(answer):]
        want.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(answer)[:, None])[:, 0])
    want = torch.cat(want)
    (-want.mean()).backward()
    found = {}
    for force in _PLANS:
        config = AugTreeConfig(force=force, min_shared_rows=1)
        batch = plan_step([group], model_shape(stock.config, args.vocab_size), 2, config)
        schedule = AugTreeSchedule(config, transport=LocalTransport(2))
        bound.zero_grad()
        schedule(forward_step_func=functools.partial(forward_step, loss_fn=Objective(batch, "nll")),
                 data_iterator=iter([batch]), model=bound, collect=True)
        pairs = [(schedule.last.values[:, 0], want.detach()),
                 *((p.grad, q.grad) for p, q in zip(bound.parameters(), stock.parameters()))]
        largest = max(float(b.abs().max()) for _, b in pairs)
        found[force] = max(float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * largest)
                           for a, b in pairs)
    # Written so that a NaN fails too.
    if not all(error < BAR for error in found.values()):
        raise AugTreeError(
            "a bound model does not compute what the stock model computes",
            values=", ".join(f"plan {force}: error {error:.1e}" for force, error in found.items()),
            rule=f"log-probs and gradients in fp64 agree to {BAR:.0e}",
            remedy="report it with the version of megatron-core",
        )
    return found


def _arguments() -> argparse.Namespace:
    from megatron_augtree.mcore.arguments import add_model_arguments

    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    return parser.parse_args(_MODEL.split())


def main() -> int:
    """The command; returns its exit status."""
    global _checking
    parser = argparse.ArgumentParser(prog="python -m megatron_augtree.mcore.selfcheck",
                                     description="Compares a small bound model with stock, on the CPU.")
    parser.parse_args()
    import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

    import megatron.core  # isort: skip

    from megatron_augtree.mcore import build

    _checking = True
    build.initialize(_arguments())
    try:
        found = run()
    except AugTreeError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        build.destroy()
        _checking = False
    worst = max(found.values())
    print(f"megatron-core {megatron.core.__version__}: bound and stock agree, largest error {worst:.1e}")
    return 0


if __name__ == "__main__":
    # This module again, under the name by which prepare_model knows it.
    from megatron_augtree.mcore import selfcheck

    sys.exit(selfcheck.main())
