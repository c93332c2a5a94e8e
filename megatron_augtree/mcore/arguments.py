"""Command-line flags, and the one list of what AugTree refuses.

Model flags have Megatron's names. AugTree's flags are made from the fields of ``AugTreeConfig``, so a field
added there is a flag here. ``LIMITS`` is read two ways: ``check_supported`` on parsed arguments, and
``check_config`` on a built ``TransformerConfig``, because RL frameworks hand over configurations.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_augtree.attention.kernels import KERNEL_NAMES
from megatron_augtree.config import MODES, AugTreeConfig, AugTreeError, UnsupportedError
from megatron_augtree.planning.cluster import cluster_of

DTYPES = ("float64", "float32", "bfloat16")

#: Fields of ``AugTreeConfig`` whose flag is not ``--augtree-<field>``.
_FLAGS = {"mode": "--context-parallel-mode", "degree": "--context-parallel-size",
          "plan_path": "--augtree-plan"}


@dataclass(frozen=True)
class Limit:
    """One setting and the values that are computed exactly.

    Attributes:
        flag: as the user writes it; its argument's name follows from it.
        field: attribute of ``TransformerConfig``, or of the model; empty where there is none.
        allowed: the values that pass; an absent attribute passes.
        rule: why the others do not.
        remedy: what to do.
    """

    flag: str
    field: str
    allowed: tuple
    rule: str
    remedy: str

    @property
    def argument(self) -> str:
        """Name of the parsed argument."""
        return self.flag.lstrip("-").replace("-", "_")


_ONE_STAGE = "the ranks of a pool hold all layers: they are data- and context-parallel ranks"
_ONE_MASK = ("one random mask on a shared prompt row would serve all branches, where the un-shared run draws "
             "one for every branch")
_PLAIN = "attention is plain causal softmax attention over a row's ancestors"
_ROPE = ("rows of many branches stand at one position: it is one number a row, and enters by rotary "
         "embedding or not at all")
_FP8 = "scaling factors would see a shared prompt once"
_OFF = (None, False)
_LEAVE = "leave it out"

LIMITS: tuple[Limit, ...] = (
    Limit("--pipeline-model-parallel-size", "pipeline_model_parallel_size", (1,), _ONE_STAGE, "set it to 1"),
    Limit("--virtual-pipeline-model-parallel-size", "virtual_pipeline_model_parallel_size", (None, 1),
          _ONE_STAGE, _LEAVE),
    Limit("--expert-model-parallel-size", "expert_model_parallel_size", (1,), _ONE_STAGE, "set it to 1"),
    Limit("--num-experts", "num_moe_experts", (None,),
          "routing statistics would count a shared prompt once, the un-shared run counts it every time",
          "use a dense model"),
    Limit("--distribute-saved-activations", "distribute_saved_activations", _OFF,
          "rows are cut over tensor-parallel ranks by --sequence-parallel only", "use --sequence-parallel"),
    Limit("--attention-dropout", "attention_dropout", (0, None), _ONE_MASK, "set it to 0"),
    Limit("--hidden-dropout", "hidden_dropout", (0, None), _ONE_MASK, "set it to 0"),
    Limit("--position-embedding-type", "position_embedding_type", ("rope", "yarn", "none"), _ROPE,
          "use rope, yarn or none"),
    Limit("--window-size", "window_size", (None,), _PLAIN, _LEAVE),
    Limit("--softmax-type", "softmax_type", ("vanilla", None), _PLAIN, "use --softmax-type vanilla"),
    Limit("--attn-logit-softcapping", "attn_logit_softcapping", (None, 0), _PLAIN, _LEAVE),
    Limit("--qk-clip", "qk_clip", _OFF, "tiles keep no largest score", _LEAVE),
    Limit("--log-max-attention-logit", "log_max_attention_logit", _OFF, "tiles keep no largest score",
          _LEAVE),
    Limit("--multi-latent-attention", "multi_latent_attention", _OFF,
          "keys and values come from a latent and are rotated by sequence, not by row", _LEAVE),
    Limit("--experimental-attention-variant", "experimental_attention_variant", (None,), _PLAIN, _LEAVE),
    Limit("--mtp-num-layers", "mtp_num_layers", (None, 0),
          "predicting further tokens would run across the boundary of a branch", _LEAVE),
    Limit("--fp8", "fp8", _OFF, _FP8, "use --dtype"),
    Limit("--fp8-dot-product-attention", "fp8_dot_product_attention", _OFF, _FP8, _LEAVE),
    Limit("--fp8-multi-head-attention", "fp8_multi_head_attention", _OFF, _FP8, _LEAVE),
    Limit("--fp4", "fp4", _OFF, _FP8, "use --dtype"),
    Limit("--use-kitchen-attention", "use_kitchen_attention", _OFF, _PLAIN, _LEAVE),
    Limit("--use-mup", "use_mup", _OFF,
          "the output layer returns log-probs, and MuP scales logits behind it", _LEAVE),
    Limit("--enable-cuda-graph", "enable_cuda_graph", _OFF, "every pass has its own program", _LEAVE),
    Limit("--external-cuda-graph", "external_cuda_graph", _OFF, "every pass has its own program", _LEAVE),
    Limit("--cuda-graph-impl", "cuda_graph_impl", ("none", None), "every pass has its own program",
          "use --cuda-graph-impl none"),
    Limit("--fused-single-qkv-rope", "fused_single_qkv_rope", _OFF,
          "the fused kernel refuses packed parameters", _LEAVE),
    Limit("--cpu-offloading", "cpu_offloading", _OFF, "keys and values are still being sent", _LEAVE),
    Limit("--fine-grained-activation-offloading", "fine_grained_activation_offloading", _OFF,
          "keys and values are still being sent", _LEAVE),
    Limit("--heterogeneous-layers-config-path", "heterogeneous_block_specs", _OFF,
          "plans are priced for layers of one shape", _LEAVE),
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model's flags, by Megatron's names; what is refused can still be written, and is named."""
    group = parser.add_argument_group("model")
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--vocab-size"):
        group.add_argument(flag, type=int, required=True)
    for flag, default in (("--ffn-hidden-size", None), ("--kv-channels", None), ("--num-query-groups", 1),
                          ("--max-position-embeddings", 4096), ("--rotary-base", 10000),
                          ("--rotary-seq-len-interpolation-factor", None),
                          ("--yarn-original-max-position-embeddings", 4096)):
        group.add_argument(flag, type=int, default=default)
    for flag, default in (("--norm-epsilon", 1e-5), ("--init-method-std", 0.02), ("--rotary-percent", 1.0),
                          ("--rope-scaling-factor", 8.0), ("--rotary-scaling-factor", 1.0),
                          ("--mscale", 1.0), ("--mscale-all-dim", 0.0),
                          ("--softmax-scale", None), ("--attention-dropout", 0.0), ("--hidden-dropout", 0.0),
                          ("--attn-logit-softcapping", None)):
        group.add_argument(flag, type=float, default=default)
    for flag in ("--group-query-attention", "--swiglu", "--disable-bias-linear", "--add-qkv-bias",
                 "--qk-layernorm", "--untie-embeddings-and-output-weights", "--rotary-interleaved",
                 "--use-rope-scaling"):
        group.add_argument(flag, action="store_true")
    group.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    group.add_argument("--position-embedding-type", default="rope", help="rope, yarn or none")
    group.add_argument("--dtype", choices=DTYPES, default="float32")
    group = parser.add_argument_group("parallelism and memory")
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size",
                 "--expert-model-parallel-size"):
        group.add_argument(flag, type=int, default=1)
    for flag in ("--use-distributed-optimizer", "--sequence-parallel", "--overlap-grad-reduce",
                 "--overlap-param-gather"):
        group.add_argument(flag, action="store_true")
    group.add_argument("--ddp-bucket-size", type=int, default=None,
                       help="parameters that are reduced together; default Megatron's")
    group.add_argument("--recompute-granularity", choices=("full", "selective"), default=None)
    group.add_argument("--recompute-method", choices=("uniform", "block"), default=None)
    group.add_argument("--recompute-num-layers", type=int, default=None)
    group = parser.add_argument_group("known to Megatron, refused by AugTree")
    group.add_argument("--window-size", default=None, metavar="LEFT,RIGHT")
    group.add_argument("--softmax-type", default="vanilla")
    group.add_argument("--fp8", default=None)
    group.add_argument("--cuda-graph-impl", default="none")
    for flag in ("--num-experts", "--mtp-num-layers", "--virtual-pipeline-model-parallel-size"):
        group.add_argument(flag, type=int, default=None)
    for flag in ("--multi-latent-attention", "--qk-clip", "--enable-cuda-graph"):
        group.add_argument(flag, action="store_true")


def add_augtree_arguments(parser: argparse.ArgumentParser, *, more_modes: Sequence[str] = ()) -> None:
    """Adds one flag for every field of ``AugTreeConfig``.

    Args:
        parser: a launcher's parser.
        more_modes: words that the launcher itself takes for ``--context-parallel-mode``.
    """
    group = parser.add_argument_group("AugTree")
    helps = _field_helps()
    modes = (*MODES, *more_modes)

    def mode(text: str) -> str:
        if text not in modes:
            raise argparse.ArgumentTypeError(str(_mode_error(text, modes)))
        return text

    theirs = {action.dest for action in parser._actions}  # Megatron's own has --context-parallel-size
    for field in dataclasses.fields(AugTreeConfig):
        if _dest(field.name) in theirs:
            continue
        kind = {"type": mode if field.name == "mode" else type(field.default)}
        if isinstance(field.default, bool):
            kind = {"action": "store_true"}
        # Without a mode the run is stock Megatron: AugTree is never switched on by a default.
        default = None if field.name == "mode" else field.default
        group.add_argument(augtree_flag(field.name), default=default, dest=_dest(field.name), **kind,
                           help=helps.get(field.name, "").replace("%", "%%"))


def augtree_flag(field: str) -> str:
    """The flag of a field of ``AugTreeConfig``."""
    return _FLAGS.get(field, "--augtree-" + field.replace("_", "-"))


def _dest(field: str) -> str:
    return augtree_flag(field).lstrip("-").replace("-", "_")


def _field_helps() -> dict[str, str]:
    """Field name -> its entry in the ``Attributes`` of ``AugTreeConfig``."""
    text = (AugTreeConfig.__doc__ or "").partition("Attributes:")[2]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(entry.replace("``", "").split()) for name, entry in entries}


def _mode_error(mode: Any, modes: Sequence[str]) -> AugTreeError:
    closest = difflib.get_close_matches(str(mode), modes, n=1)
    return AugTreeError(
        "unknown context-parallel mode", values=f"--context-parallel-mode {mode}",
        rule=f"the mode is one of {', '.join(modes)}",
        remedy=f"did you mean {closest[0]}?" if closest else "leave the flag out for stock Megatron",
    )


def augtree_config(args: argparse.Namespace) -> AugTreeConfig | None:
    """The configuration that the arguments ask for; ``None`` where no mode was given (stock Megatron).

    Raises:
        AugTreeError: an unknown mode, kernel or cluster, a value out of range, a forced plan that cannot be
            read, or AugTree's flags without a mode.
    """
    given = {field.name: getattr(args, _dest(field.name), field.default)
             for field in dataclasses.fields(AugTreeConfig)}
    mode = getattr(args, "context_parallel_mode", None)
    if mode is None:
        stray = [f"{augtree_flag(field.name)} {given[field.name]}"
                 for field in dataclasses.fields(AugTreeConfig)
                 if augtree_flag(field.name).startswith("--augtree") and given[field.name] != field.default]
        if stray:
            raise AugTreeError(
                "AugTree flags without a mode", values=", ".join(stray),
                rule="without --context-parallel-mode the run is stock Megatron, and these do nothing",
                remedy=f"add --context-parallel-mode ({', '.join(MODES)}), or remove them",
            )
        return None
    if mode not in MODES:
        raise _mode_error(mode, MODES)
    config = AugTreeConfig(**given)
    config.check_forced()
    cluster_of(config.cluster)
    if config.kernel not in KERNEL_NAMES:
        closest = difflib.get_close_matches(config.kernel, KERNEL_NAMES, n=1)
        raise AugTreeError(
            "unknown attention kernel", values=f"--augtree-kernel {config.kernel}",
            rule=f"the kernel is one of {', '.join(KERNEL_NAMES)}",
            remedy=f"did you mean {closest[0]}?" if closest else "leave the flag out: auto chooses by device",
        )
    return config


def check_supported(args: argparse.Namespace) -> None:
    """Refuses arguments that AugTree does not compute exactly; absent ones pass.

    ``attention_softmax_in_fp32`` is not limited: partial softmaxes are kept in fp32 (fp64 in fp64 runs) in
    any case, as fused kernels do.

    Raises:
        UnsupportedError: names every offending flag with its value, rule and remedy.
    """
    _refuse([(limit, f"{limit.flag} {getattr(args, limit.argument)}") for limit in LIMITS
             if getattr(args, limit.argument, limit.allowed[0]) not in limit.allowed])


def check_config(config: Any, *, model: Any = None) -> None:
    """Refuses a built ``TransformerConfig`` (and model) that AugTree does not compute exactly.

    Args:
        config: megatron-core's configuration; attributes that a release does not have pass.
        model: the ``GPTModel``, which holds what its configuration does not (positions).

    Raises:
        UnsupportedError: names every offending flag with its value, rule and remedy.
    """
    broken = []
    for limit in LIMITS:
        for holder in (config, model):
            value = getattr(holder, limit.field, limit.allowed[0])
            if value not in limit.allowed:
                broken.append((limit, f"{limit.flag} ({limit.field} = {value!r})"))
                break
    _refuse(broken)


def _refuse(broken: list[tuple[Limit, str]]) -> None:
    if broken:
        raise UnsupportedError(
            "AugTree does not compute this exactly",
            values="; ".join(found for _, found in broken),
            rule="; ".join(dict.fromkeys(limit.rule for limit, _ in broken)),
            remedy="; ".join(f"{limit.flag}: {limit.remedy}" for limit, _ in broken),
        )
