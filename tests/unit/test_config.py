"""Settings: the defaults are frozen, out-of-range values and forced plans are refused with all four parts."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict

import pytest

from megatron_augtree.config import (
    FORCE_KEYS,
    MODES,
    MOST_PASSES,
    AugTreeConfig,
    AugTreeError,
    InfeasiblePlanError,
    InputError,
    UnsupportedError,
    did_you_mean,
    parse_force,
)


def test_defaults_are_frozen():
    assert asdict(AugTreeConfig()) == {
        "mode": "augtree",
        "degree": 0,
        "force": "",
        "plan_path": "",
        "memory_budget_gib": 0.0,
        "recompute": "auto",
        "min_shared_rows": 16,
        "keep_attention": 0,
        "kernel": "auto",
        "cluster": "cpu",
        "logit_chunk_mib": 256,
        "trace_dir": "",
        "guard_steps": 0,
        "lock_step": False,
    }
    with pytest.raises(FrozenInstanceError):
        AugTreeConfig().mode = "ring"


def test_modes_and_keys_are_frozen():
    assert MODES == (
        "ring",
        "ring-reuse",
        "ring-reuse-two-pass",
        "ring-reuse-per-response",
        "gather-reuse",
        "dynamic",
        "dynamic-reuse",
        "dcp-phased",
        "dcp-fused",
        "paper",
        "augtree",
    )
    assert FORCE_KEYS == (
        "degree",
        "lane_degree",
        "copies",
        "primitive",
        "pieces",
        "phase",
        "chunks",
        "waves",
        "keep_layers",
        "keep_attention",
    )
    assert [AugTreeConfig(mode=mode).mode for mode in MODES] == list(MODES)


@pytest.mark.parametrize(
    ("mode", "near"),
    [("augtre", "did you mean augtree? "), ("", ""), ("unshared", ""), ("rong", "did you mean ring? ")],
)
def test_an_unknown_mode_names_flag_value_and_the_nearest(mode, near):
    with pytest.raises(AugTreeError) as caught:
        AugTreeConfig(mode=mode)
    assert f"--context-parallel-mode {mode}" in str(caught.value)
    assert caught.value.rule == f"{near}--help lists all {len(MODES)}" and caught.value.remedy


def test_an_unknown_name_is_told_the_nearest_or_all_of_few():
    assert did_you_mean("dcp", MODES) == "did you mean dcp-phased or dcp-fused? --help lists all 11"
    assert did_you_mean("rong", MODES, "x --help") == "did you mean ring? x --help lists all 11"
    assert did_you_mean("fulll", ("auto", "none", "full")) == "it is one of auto, none, full"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("degree", -1, "--context-parallel-size -1"),
        ("memory_budget_gib", -0.5, "--augtree-memory-budget-gib -0.5"),
        ("memory_budget_gib", float("nan"), "--augtree-memory-budget-gib nan"),
        ("memory_budget_gib", float("inf"), "--augtree-memory-budget-gib inf"),
        ("min_shared_rows", 0, "--augtree-min-shared-rows 0"),
        ("logit_chunk_mib", 0, "--augtree-logit-chunk-mib 0"),
    ],
)
def test_out_of_range(field, value, text):
    with pytest.raises(AugTreeError) as caught:
        AugTreeConfig(**{field: value})
    assert caught.value.values == text and caught.value.rule.startswith("it is ")  # no other setting


def test_force_is_read():
    text = "degree=4, lane_degree=2,copies=1,primitive=move_q,pieces=2,phase=phased,chunks=3,waves=2,"
    text += "keep_layers=0,keep_attention=5"
    assert (
        parse_force(text)
        == AugTreeConfig(force=text).forced()
        == {
            "degree": 4,
            "lane_degree": 2,
            "copies": 1,
            "primitive": "move_q",
            "pieces": 2,
            "phase": "phased",
            "chunks": 3,
            "waves": 2,
            "keep_layers": 0,
            "keep_attention": 5,
        }
    )
    assert parse_force("") == {} and tuple(parse_force(text)) == FORCE_KEYS
    assert [parse_force(f"primitive={p}")["primitive"] for p in ("gather_kv", "move_kv", "move_q", "local")]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("degree", "key=value"),
        ("degree=", "degree is an integer"),
        ("degree=0", "at least 1"),
        ("degree=-1", "degree is an integer"),
        ("degree=two", "degree is an integer"),
        ("degree=1.5", "degree is an integer"),
        ("degree=\N{SUPERSCRIPT TWO}", "degree is an integer"),
        ("keep_layers=-1", "at least 0"),
        ("waves=" + "9" * 5000, "at most nine digits"),
        ("waves=257", "waves is at most 256"),
        ("chunks=4000", "chunks is at most 256"),
        ("degree=2,degree=4", "degree is there twice"),
        ("degre=2", "did you mean degree? --help lists all 10"),
        ("width=2", "'width' is no key: --help lists all 10"),
        ("primitive=ring", "primitive is one of gather_kv, move_kv, move_q, local"),
        ("phase=both", "phase is one of fused, phased"),
        ("=2", "'' is no key"),
        ("degree:2", "key=value"),
    ],
)
def test_a_force_that_cannot_be_read(text, rule):
    with pytest.raises(AugTreeError) as caught:
        parse_force(text)
    assert repr(text) in caught.value.values and rule in caught.value.rule and len(caught.value.rule) < 110


def test_the_most_passes_may_be_forced():
    assert parse_force(f"chunks={MOST_PASSES},waves={MOST_PASSES}") == dict.fromkeys(("chunks", "waves"), 256)
    assert f"chunks and waves are at most {MOST_PASSES}" in " ".join(AugTreeConfig.__doc__.split())


def test_an_error_has_four_parts():
    error = InputError("what", values="v", rule="r", remedy="m")
    assert str(error) == "what\n  values: v\n  rule: r\n  remedy: m"
    assert (error.what, error.values, error.rule, error.remedy) == ("what", "v", "r", "m")
    assert str(AugTreeError("alone")) == "alone"
    assert all(issubclass(kind, AugTreeError) for kind in (UnsupportedError, InfeasiblePlanError, InputError))
