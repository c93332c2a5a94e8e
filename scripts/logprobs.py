"""Forward only: writes log-probs under the given weights into a group file.

    torchrun --nproc-per-node 2 scripts/logprobs.py --data in.jsonl.gz --output out.jsonl.gz \
        --field old_logprobs --load W.safetensors --context-parallel-mode augtree --num-layers 2 ...

The output holds the groups of ``--groups`` with one field added or replaced (tokens that carry no loss get
null); `--max-prompt-tokens` and `--max-response-tokens` cut what is written as well, since log-probs belong
to their context. Groups are computed `--batch-groups` at a time, which bounds memory.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from replay import UNSHARED, add_mode_arguments, check_mode, whole_sequences
from torch import Tensor
from tqdm import tqdm
from unshared import check_memory, unshared_logprobs

from megatron_augtree.config import AugTreeConfig, AugTreeError
from megatron_augtree.data.groups import Group, Response, fold, write_groups
from megatron_augtree.mcore.agreement import compare_ranks
from megatron_augtree.mcore.arguments import augtree_config
from megatron_augtree.mcore.build import build_model
from megatron_augtree.mcore.launch import (
    RankParser,
    add_data_arguments,
    agree,
    agree_on_rank_0,
    read_data,
    run,
    start,
)
from megatron_augtree.mcore.sampler import model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.update import pool_size
from megatron_augtree.mcore.weights import check_output, load_weights

FIELDS = ("old_logprobs", "ref_logprobs")


class Scorer:
    """Log-probs of groups by a mode that plans.

    Args:
        model: with AugTree's attention.
        config: the mode.
    """

    def __init__(self, model: GPTModel, config: AugTreeConfig) -> None:
        self.model, self.config, self.schedule = model, config, AugTreeSchedule(config)
        self.shape = model_shape(model.config, model.vocab_size)

    def __call__(self, groups: Sequence[Group]) -> Tensor:
        """[N] log-probs of the groups' loss-bearing tokens, by group, response, token; the same on all ranks.

        Every rank of the pool calls it with the same groups, ids folded.
        """
        batch = agree(lambda: plan_step(groups, self.shape, pool_size(), self.config))
        agree(lambda: compare_ranks(self.schedule.transport, batch))
        self.schedule(forward_step_func=forward_step, data_iterator=iter([batch]), model=self.model,
                      forward_only=True, collect=True)
        return self.schedule.last.values[:, 0]


def unshared_scores(model: GPTModel, groups: Sequence[Group]) -> Tensor:
    """What `Scorer` returns, by megatron-core's own attention, one sequence at a time."""
    responses = [(group, response, 0.0) for group in groups for response in group.responses]
    with torch.no_grad():
        return torch.cat([torch.zeros(0, dtype=next(model.parameters()).dtype),
                          *unshared_logprobs(model, whole_sequences(responses))]).double()


def with_field(groups: Sequence[Group], field: str, values: Tensor) -> list[Group]:
    """Groups with a field filled from [N] log-probs of their loss-bearing tokens; NaN elsewhere."""
    numbers = iter(values.tolist())

    def filled(response: Response) -> Response:
        column = tuple(next(numbers) if wanted else math.nan for wanted in response.loss_mask)
        return dataclasses.replace(response, **{field: column})

    return [dataclasses.replace(g, responses=tuple(map(filled, g.responses))) for g in groups]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments that fit together.

    Raises:
        AugTreeError: any that do not.
    """
    parser = RankParser(prog="logprobs.py", description=__doc__.partition("\n")[0])
    add_data_arguments(parser)
    parser.add_argument("--output", required=True, metavar="FILE", help="group file; it may be --data itself")
    parser.add_argument("--field", required=True, choices=FIELDS)
    parser.add_argument("--batch-groups", type=int, default=1, help="groups computed together")
    add_mode_arguments(parser)
    args = parser.parse_args(argv)
    check_mode(args)
    if args.batch_groups < 1:
        raise AugTreeError("nothing to do", values=f"--batch-groups {args.batch_groups}",
                           rule="a batch has at least one group", remedy="correct the flag")
    check_output(args.output, "--output")
    return args


def build(args: argparse.Namespace, groups: Sequence[Group]) -> GPTModel:
    """The model with its weights.

    Raises:
        AugTreeError: weights that do not fit, or too little memory.
    """
    alone = args.context_parallel_mode == UNSHARED
    if alone:
        check_memory([len(g.prompt) + len(r.tokens) for g in groups for r in g.responses], args)
    model = build_model(args, augtree=not alone, seed=args.seed, logit_chunk_mib=args.augtree_logit_chunk_mib)
    if args.load:
        load_weights(model, args.load)
    return model


def scorer_of(args: argparse.Namespace, model: GPTModel) -> Callable[[Sequence[Group]], Tensor]:
    """Groups -> [N] log-probs, in the mode that was asked for."""
    if args.context_parallel_mode == UNSHARED:
        return functools.partial(unshared_scores, model)
    return Scorer(model, augtree_config(args))


def main(argv: Sequence[str] | None = None) -> None:
    """Computes the log-probs, and writes the file on rank 0."""
    args = agree(lambda: parse(argv))
    start(args)
    groups = agree(lambda: read_data(args))
    score = scorer_of(args, agree(lambda: build(args, groups)))
    found: list[Group] = []
    with tqdm(total=len(groups), unit="group", leave=False,
              disable=dist.get_rank() > 0 or not sys.stderr.isatty()) as progress:
        for first in range(0, len(groups), args.batch_groups):
            some = groups[first:first + args.batch_groups]
            values = score(fold(some, args.vocab_size))
            found += agree(lambda some=some, values=values: with_field(some, args.field, values))
            progress.update(len(some))
    if isinstance(score, Scorer):
        score.schedule.write_trace()
    agree_on_rank_0(lambda: write_groups(args.output, found))
    if dist.get_rank() == 0:
        tokens = sum(sum(r.loss_mask) for g in found for r in g.responses)
        sys.stdout.write(f"{args.field} of {tokens} tokens in {len(found)} groups; wrote {args.output}\n")


if __name__ == "__main__":
    run(main)
