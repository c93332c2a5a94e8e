"""Arguments -> process group, configuration and ``GPTModel``, for launchers that run on CPU."""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_augtree.config import InputError, UnsupportedError
from megatron_augtree.mcore import cpu
from megatron_augtree.mcore.arguments import check_supported
from megatron_augtree.mcore.layer_spec import augtree_spec, prepare_model
from megatron_augtree.mcore.norms import sequence_parallel_spec

#: Arguments that say where files lie: what is in the files is compared elsewhere.
_PATHS = {"data", "data_path", "load", "save", "dump", "output", "augtree_plan", "augtree_trace_dir",
          "tensorboard_dir"}


def initialize(args: argparse.Namespace, *, seed: int = 1234, timeout_s: float = 600.0) -> None:
    """Installs the CPU shims, joins the gloo process group and sets Megatron's parallel state and seeds.

    Under torchrun the world is torchrun's; otherwise it is this process alone. A process group that exists
    is used as it is.

    Args:
        args: checked by ``check_supported`` before anything is started.
        seed: of Megatron's random-state trackers; the same on all ranks.
        timeout_s: seconds after which a collective that a rank never enters fails.

    Raises:
        InputError: ranks were given different flags.
    """
    check_supported(args)
    check_recompute(args)
    cpu.install()
    cpu.keep_heap()
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group("gloo", timeout=timeout)
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    compare_flags(args)
    if not parallel_state.is_initialized():
        # --context-parallel-size limits plans; Megatron's own groups see the pool as one dp_cp group.
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel_size(args, dist.get_world_size()),
            distributed_timeout_minutes=timeout_s / 60)
    model_parallel_cuda_manual_seed(seed)


def tensor_parallel_size(args: argparse.Namespace, world: int) -> int:
    """Ranks that hold the slices of one model.

    Args:
        args: of ``add_model_arguments``.
        world: all ranks.

    Raises:
        UnsupportedError: the world, the heads, the MLP or the vocabulary cannot be cut so.
    """
    given, width = args.tensor_model_parallel_size, ffn_width(args)
    size = max(given, 1)
    rules = (
        (given == size, "which is no number of ranks", "it is at least 1"),
        (world % size == 0, f"{world} ranks", "the ranks are a multiple of it"),
        (args.num_attention_heads % size == 0, f"--num-attention-heads {args.num_attention_heads}",
         "every rank holds as many heads"),
        (width % size == 0, f"--ffn-hidden-size {width}", "every rank holds as much of the MLP"),
        (args.vocab_size % size == 0, f"--vocab-size {args.vocab_size}",
         "every rank holds as much of the vocabulary"),
        (size > 1 or not args.sequence_parallel, "--sequence-parallel",
         "sequence parallelism cuts rows over tensor-parallel ranks"),
    )
    broken = [(found, rule) for holds, found, rule in rules if not holds]
    if broken:
        raise UnsupportedError(
            "tensor parallelism does not fit",
            values=f"--tensor-model-parallel-size {given}, " + ", ".join(found for found, _ in broken),
            rule="; ".join(rule for _, rule in broken),
            remedy="choose a size that divides all of them (pad the vocabulary if need be), above 1 for "
            "--sequence-parallel",
        )
    return size


def check_recompute(args: argparse.Namespace) -> None:
    """Refuses flags of recompute that do not go together; Megatron would end with an assertion.

    Raises:
        UnsupportedError: full recompute that does not say of what, or its flags without it.
    """
    method, layers = args.recompute_method, args.recompute_num_layers
    full = args.recompute_granularity == "full"
    fits = method is not None and layers is not None and 0 < layers <= args.num_layers and (
        method == "block" or args.num_layers % layers == 0)
    if full and not fits or not full and (method is not None or layers is not None):
        raise UnsupportedError(
            "flags of recompute do not go together",
            values=f"--recompute-granularity {args.recompute_granularity}, --recompute-method {method}, "
            f"--recompute-num-layers {layers}, --num-layers {args.num_layers}",
            rule="full recompute is of chunks of layers (uniform; they divide the layers) or of the first "
            "layers (block); selective recompute takes neither flag",
            remedy="add --recompute-method and --recompute-num-layers, or leave them out",
        )


def ffn_width(args: argparse.Namespace) -> int:
    """Width of the MLP's inner layer: the flag's, or Megatron's default."""
    # A gated MLP has three matrices, kept at two thirds of the width of two.
    default = max(64, int(4 * args.hidden_size * 2 / 3 / 64) * 64) if args.swiglu else 4 * args.hidden_size
    return args.ffn_hidden_size or default


def compare_flags(args: argparse.Namespace) -> None:
    """Fail on every rank where ranks were given different flags; files may lie elsewhere on each machine.

    Raises:
        InputError: names the ranks that differ from rank 0, and the flags.
    """
    mine = {name: repr(value) for name, value in vars(args).items() if name not in _PATHS}
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    names = sorted(set().union(*everyone))
    differ = [name for name in names if len({theirs.get(name) for theirs in everyone}) > 1]
    if differ:
        ranks = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        raise InputError(
            "ranks were given different flags",
            values=f"ranks {ranks} differ from rank 0 in --{', --'.join(differ).replace('_', '-')}",
            rule="every rank of the pool is given the same settings",
            remedy="start all ranks with one command line",
        )


def destroy() -> None:
    """Undoes :func:`initialize`: parallel state, process group and shims."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    cpu.restore()


def build_config(args: argparse.Namespace) -> TransformerConfig:
    """The configuration of the model that the arguments describe.

    Raises:
        UnsupportedError: a setting that AugTree does not compute exactly.
    """
    check_supported(args)
    check_recompute(args)
    dtype = getattr(torch, args.dtype)
    activation = {"activation_func": torch.nn.functional.silu} if args.swiglu else {}
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=ffn_width(args),
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        add_bias_linear=not args.disable_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        rotary_interleaved=args.rotary_interleaved,
        softmax_scale=args.softmax_scale,
        init_method_std=args.init_method_std,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        **activation,
    )
    if args.position_embedding_type == "yarn":
        vars(config).update(_yarn(args))
    return config


def _yarn(args: argparse.Namespace) -> dict[str, float | bool]:
    """What megatron-core reads off a configuration for YaRN, though it has no fields for it."""
    return {"yarn_rotary_scaling_factor": args.rotary_scaling_factor,
            "yarn_original_max_position_embeddings": args.yarn_original_max_position_embeddings,
            "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_mscale": args.mscale,
            "yarn_mscale_all_dim": args.mscale_all_dim, "yarn_correction_range_round_to_int": True}


def build_model(args: argparse.Namespace, *, augtree: bool, seed: int,
                logit_chunk_mib: int = 256) -> GPTModel:
    """A ``GPTModel`` of megatron-core's own modules.

    The weights depend on ``seed`` and the shape only: stock and AugTree models are equal, on every rank, and
    a model of another dtype holds the same fp32 numbers, rounded. The process's random state is left alone.

    Args:
        args: of ``add_model_arguments``.
        augtree: with AugTree's attention, rotary embedding and output layer (``prepare_model``).
        seed: of the weights.
        logit_chunk_mib: see ``prepare_model``.
    """
    config = build_config(args)
    spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    if args.sequence_parallel:
        spec = sequence_parallel_spec(spec, args.num_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTModel(
            config, augtree_spec(spec) if augtree else spec, vocab_size=args.vocab_size,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent, rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling, rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
    model.to(config.params_dtype)  # torch's norms are built in fp32
    if augtree:
        prepare_model(model, logit_chunk_mib=logit_chunk_mib)
    return model
