"""Log-probs of responses under SmolLM2-135M, the prompts computed once.

    torchrun --standalone --nproc-per-node 2 -m examples.smollm2.logprobs
    torchrun --standalone --nproc-per-node 2 -m examples.smollm2.logprobs --data groups.jsonl --dtype bfloat16

Without ``--data`` it answers a question of its own, rightly and wrongly. A file holds groups of text
(``megatron_augtree/data/groups.py``); what is a chat is written out, as PROMPT below is.
"""

from __future__ import annotations

import megatron_augtree.mcore.quiet  # noqa: F401, before megatron-core is imported

# isort: split
import argparse
import sys
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor

from megatron_augtree.config import InputError
from megatron_augtree.data.groups import Group, Response, read_groups
from megatron_augtree.mcore import launch
from megatron_augtree.mcore.arguments import DTYPES, add_augtree_arguments, augtree_config
from megatron_augtree.mcore.launch import RankParser, agree
from megatron_augtree.mcore.pretrained import BytePairTokenizer, build_pretrained, load_smollm2
from megatron_augtree.mcore.sampler import StepBatch, model_shape, plan_step
from megatron_augtree.mcore.schedule import AugTreeSchedule, forward_step
from megatron_augtree.mcore.update import pool_size

PROMPT = ("<|im_start|>user\nWhat is the capital of France? Answer in one word.<|im_end|>\n"
          "<|im_start|>assistant\n")
RESPONSES = ("Paris.", "Paris", "London.", "Banana.")


def parse() -> argparse.Namespace:
    """The flags; the model's come from its file."""
    parser = RankParser(prog="logprobs.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="", metavar="FILE", help="group file of texts")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1234)
    launch.add_timeout_argument(parser)
    add_augtree_arguments(parser)
    parser.set_defaults(context_parallel_mode="augtree")
    return parser.parse_args()


def groups_of(data: str, tokenizer: BytePairTokenizer) -> list[Group]:
    """The file's groups, or the question above."""
    if data:
        return read_groups(data, tokenizer=tokenizer)
    answers = [(*tokenizer.encode(text), tokenizer.end_of_text) for text in RESPONSES]
    responses = tuple(Response(tokens, (True,) * len(tokens)) for tokens in answers)
    return [Group("capital", tokenizer.encode(PROMPT), responses)]


def lines(groups: list[Group], values: Tensor, tokenizer: BytePairTokenizer) -> Iterator[str]:
    """A table of all responses.

    Args:
        groups: what was computed.
        values: ``[N]`` log-probs of all tokens that carry a loss, by group, response, token.
    """
    counts = [sum(response.loss_mask) for group in groups for response in group.responses]
    found = iter(values.split(counts))
    for group in groups:
        yield f"{group.name}: {len(group.prompt)} prompt tokens"
        for response in group.responses:
            logprobs = next(found)
            mean = float(logprobs.mean()) if len(logprobs) else 0.0
            yield (f"  log-prob {float(logprobs.sum()):9.3f}, {mean:7.3f} a token of {len(logprobs):3d}: "
                   f"{tokenizer.decode(response.tokens)!r}")


def main() -> None:
    """Loads, plans, computes and prints."""
    args = agree(parse)
    model_settings = {"dtype": args.dtype, "tensor_model_parallel_size": args.tensor_model_parallel_size}
    smollm2 = agree(lambda: load_smollm2(**model_settings))
    vars(smollm2.args).update(seed=args.seed, distributed_timeout_minutes=args.distributed_timeout_minutes)
    groups = agree(lambda: groups_of(args.data, smollm2.tokenizer))
    if not any(any(response.loss_mask) for group in groups for response in group.responses):
        raise InputError("there is nothing to compute", values=f"--data {args.data}",
                         rule="a token of a response carries a loss", remedy="give responses")
    launch.start(smollm2.args)
    config = augtree_config(args)
    model = build_pretrained(smollm2, augtree=True, logit_chunk_mib=config.logit_chunk_mib)
    shape = model_shape(model.config, model.vocab_size)
    batch: StepBatch = agree(lambda: plan_step(groups, shape, pool_size(), config))
    schedule = AugTreeSchedule(config)
    schedule(forward_step_func=forward_step, data_iterator=iter([batch]), model=model, forward_only=True,
             collect=True)
    if dist.get_rank() == 0:
        rows = sum(map(batch.plan.rows_of_rank, range(batch.plan.world)))
        sys.stdout.write(f"{batch.plan.note}; {rows} rows of {batch.unshared_rows}\n")
        for line in lines(groups, schedule.last.values[:, 0], smollm2.tokenizer):
            sys.stdout.write(line + "\n")


if __name__ == "__main__":
    launch.run(main)
