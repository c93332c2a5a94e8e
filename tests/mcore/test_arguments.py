"""Flags are made from AugTreeConfig; what AugTree does not compute exactly is refused by name."""

import argparse
import dataclasses

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_augtree.config import MODES, AugTreeConfig, AugTreeError, UnsupportedError
from megatron_augtree.mcore.arguments import (
    LIMITS,
    add_augtree_arguments,
    add_model_arguments,
    augtree_config,
    check_config,
    check_supported,
)
from megatron_augtree.mcore.build import tensor_parallel_size

SHAPE = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--vocab-size", "64"]


def parse(text: str = "", **kwargs) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    add_augtree_arguments(parser, **kwargs)
    return parser.parse_args([*SHAPE, *text.split()])


def config(**kwargs) -> TransformerConfig:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0,
             "hidden_dropout": 0.0}
    return TransformerConfig(**{**shape, **kwargs})


def test_augtree_flags_are_frozen():
    parser = argparse.ArgumentParser()
    add_augtree_arguments(parser)
    assert [action.option_strings[0] for action in parser._actions[1:]] == [
        "--context-parallel-mode", "--context-parallel-size", "--augtree-force", "--augtree-plan",
        "--augtree-memory-budget-gib", "--augtree-recompute", "--augtree-min-shared-rows",
        "--augtree-keep-attention", "--augtree-kernel", "--augtree-cluster",
        "--augtree-logit-chunk-mib", "--augtree-trace-dir", "--augtree-guard-steps", "--augtree-lock-step"]
    assert all(action.help for action in parser._actions)
    parser.format_help()


def test_every_field_arrives():
    values = {"mode": "augtree", "degree": 2, "force": "waves=2", "plan_path": "plan.json",
              "memory_budget_gib": 1.5, "recompute": "flags", "min_shared_rows": 3, "keep_attention": -1,
              "kernel": "reference",
              "cluster": "h100", "logit_chunk_mib": 8, "trace_dir": "traces", "guard_steps": 5,
              "lock_step": True}
    assert set(values) == {field.name for field in dataclasses.fields(AugTreeConfig)}
    args = parse("--context-parallel-mode augtree --context-parallel-size 2 --augtree-force waves=2 "
                 "--augtree-plan plan.json --augtree-memory-budget-gib 1.5 --augtree-recompute flags "
                 "--augtree-min-shared-rows 3 "
                 "--augtree-kernel reference --augtree-cluster h100 --augtree-logit-chunk-mib 8 "
                 "--augtree-trace-dir traces --augtree-keep-attention -1 --augtree-guard-steps 5 "
                 "--augtree-lock-step")
    assert augtree_config(args) == AugTreeConfig(**values)


@pytest.mark.parametrize("mode", MODES)
def test_modes_with_defaults(mode):
    assert augtree_config(parse(f"--context-parallel-mode {mode}")) == AugTreeConfig(mode=mode)


def test_without_a_mode_the_run_is_stock_and_says_what_would_do_nothing():
    assert augtree_config(parse("--context-parallel-size 2")) is None
    with pytest.raises(AugTreeError, match="--augtree-force waves=2") as error:
        augtree_config(parse("--augtree-force waves=2"))
    assert "--context-parallel-mode" in error.value.remedy


def test_unknown_names_are_refused_before_anything_starts():
    for text, told in (("--augtree-kernel cpu_flush", "--augtree-kernel cpu_flush"),
                       ("--augtree-cluster b300", "--augtree-cluster b300"),
                       ("--augtree-force degree=x", "degree=x")):
        with pytest.raises(AugTreeError, match=told) as error:
            augtree_config(parse(f"--context-parallel-mode augtree {text}"))
        assert error.value.rule and error.value.remedy


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "augtree"])
def test_a_peer_cannot_be_forced(mode):
    with pytest.raises(AugTreeError, match=f"--augtree-force waves=2, --context-parallel-mode {mode}"):
        augtree_config(parse(f"--context-parallel-mode {mode} --augtree-force waves=2"))


def test_bad_mode_names_choices_and_closest(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--context-parallel-mode augtre")
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert "did you mean augtree?" in told
    assert all(mode in told for mode in MODES)
    args = parse()
    args.context_parallel_mode = "augtre"  # set from Python, past the parser
    with pytest.raises(AugTreeError, match="did you mean augtree"):
        augtree_config(args)
    with pytest.raises(SystemExit):
        parse("--context-parallel-mode unshared")
    assert parse("--context-parallel-mode unshared", more_modes=["unshared"]).context_parallel_mode


def test_bad_values_end_with_a_message(capsys):
    for text in ("--dtype float16", "--num-layers two", "--augtree-memory-budget-gib much",
                 "--normalization Norm"):
        with pytest.raises(SystemExit) as stop:
            parse(text)
        assert stop.value.code == 2
        assert text.split()[0] in capsys.readouterr().err
    with pytest.raises(AugTreeError, match="--augtree-min-shared-rows 0"):
        augtree_config(parse("--context-parallel-mode ring --augtree-min-shared-rows 0"))


def test_defaults_are_supported():
    check_supported(parse())
    check_config(config())


REFUSED = [
    "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2",
    "--virtual-pipeline-model-parallel-size 2", "--num-experts 4", "--attention-dropout 0.1",
    "--hidden-dropout 0.1", "--position-embedding-type learned_absolute",
    "--position-embedding-type relative", "--position-embedding-type mrope",
    "--position-embedding-type alibi",
    "--window-size 128,0", "--softmax-type learnable", "--softmax-type off-by-one",
    "--attn-logit-softcapping 50", "--multi-latent-attention", "--mtp-num-layers 1", "--fp8 hybrid",
    "--enable-cuda-graph", "--cuda-graph-impl local", "--qk-clip",
]


@pytest.mark.parametrize("text", REFUSED)
def test_arguments_are_refused(text):
    flag, _, value = text.partition(" ")
    with pytest.raises(UnsupportedError) as error:
        check_supported(parse(text))
    assert flag in error.value.values
    assert value.partition(",")[0] in error.value.values
    assert error.value.rule
    assert error.value.remedy.startswith(f"{flag}: ")


def test_dropout_is_refused_with_its_reason_and_all_flags_at_once():
    with pytest.raises(UnsupportedError) as error:
        check_supported(parse("--attention-dropout 0.1 --hidden-dropout 0.2 --fp8 hybrid"))
    assert error.value.values == "--attention-dropout 0.1; --hidden-dropout 0.2; --fp8 hybrid"
    assert error.value.rule.count("one random mask on a shared prompt row would serve all branches") == 1
    assert "--hidden-dropout: set it to 0" in error.value.remedy


REFUSED_FIELDS = {
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "window_size": (8, 0), "softmax_type": "learnable",
    "distribute_saved_activations": True, "num_moe_experts": 2, "mtp_num_layers": 1, "qk_clip": True,
    "log_max_attention_logit": True, "fused_single_qkv_rope": True,
    "heterogeneous_block_specs": True, "fp8": "hybrid", "fp4": "e2m1", "enable_cuda_graph": True,
    "external_cuda_graph": True, "cuda_graph_impl": "local",
    "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2, "experimental_attention_variant": "dsa",
    "cpu_offloading": True, "fine_grained_activation_offloading": True, "attn_logit_softcapping": 50.0,
    "position_embedding_type": "mrope",
    "fp8_dot_product_attention": True, "fp8_multi_head_attention": True, "use_kitchen_attention": True,
    "use_mup": True, "multi_latent_attention": True,
}


def test_every_limit_has_a_config_case():
    assert {limit.field for limit in LIMITS} == set(REFUSED_FIELDS)


@pytest.mark.parametrize(("field", "value"), REFUSED_FIELDS.items())
def test_configs_are_refused(field, value):
    built = config()
    setattr(built, field, value)  # after construction: megatron-core refuses some of them without a GPU
    with pytest.raises(UnsupportedError, match=f"{field} = "):
        check_config(built)


def test_latent_attention_and_default_dropout_are_refused():
    with pytest.raises(UnsupportedError, match="multi_latent_attention"):
        check_config(MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2))
    with pytest.raises(UnsupportedError, match="hidden_dropout = 0.1"):
        check_config(TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2))


def test_positions_are_read_from_the_model():
    model = torch.nn.Module()
    model.position_embedding_type = "learned_absolute"
    with pytest.raises(UnsupportedError, match="position_embedding_type = 'learned_absolute'"):
        check_config(config(), model=model)


@pytest.mark.parametrize("softmax_in_fp32", [False, True])
def test_softmax_precision_is_not_limited(softmax_in_fp32):
    check_config(config(attention_softmax_in_fp32=softmax_in_fp32))


@pytest.mark.parametrize("flags, text", [
    ("--tensor-model-parallel-size 0", "it is at least 1"),
    ("--tensor-model-parallel-size -2", "it is at least 1"),
    ("--tensor-model-parallel-size 3", "the ranks are a multiple of it; every rank holds as many heads"),
    ("--tensor-model-parallel-size 2 --vocab-size 63", "every rank holds as much of the vocabulary"),
    ("--sequence-parallel", "sequence parallelism cuts rows"),
])
def test_tensor_parallel_sizes_that_fit_nothing(flags, text):
    parser = argparse.ArgumentParser()
    add_model_arguments(parser)
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64"
    with pytest.raises(UnsupportedError, match=text):
        tensor_parallel_size(parser.parse_args(f"{sizes} {flags}".split()), 4)
