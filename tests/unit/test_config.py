"""Settings: the defaults are frozen, out-of-range values and forced plans are refused with all four parts."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict

import pytest

from megatron_augtree.config import (
    FORCE_KEYS,
    MODES,
    AugTreeConfig,
    AugTreeError,
    InfeasiblePlanError,
    InputError,
    UnsupportedError,
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


@pytest.mark.parametrize("mode", ("augtre", "", "Ring", "unshared"))
def test_an_unknown_mode_names_flag_value_and_choices(mode):
    with pytest.raises(AugTreeError) as caught:
        AugTreeConfig(mode=mode)
    assert f"--context-parallel-mode {mode}" in str(caught.value)
    assert all(name in caught.value.rule for name in MODES) and caught.value.remedy


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
    with pytest.raises(AugTreeError, match=text):
        AugTreeConfig(**{field: value})


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
    "text",
    [
        "degree",
        "degree=",
        "degree=0",
        "degree=-1",
        "degree=two",
        "degree=1.5",
        "degree=\N{SUPERSCRIPT TWO}",
        "waves=" + "9" * 5000,
        "degree=2,degree=4",
        "width=2",
        "primitive=ring",
        "phase=both",
        "=2",
        "degree:2",
    ],
)
def test_a_force_that_cannot_be_read(text):
    with pytest.raises(AugTreeError) as caught:
        parse_force(text)
    assert repr(text) in caught.value.values and all(key in caught.value.rule for key in FORCE_KEYS)


def test_an_error_has_four_parts():
    error = InputError("what", values="v", rule="r", remedy="m")
    assert str(error) == "what\n  values: v\n  rule: r\n  remedy: m"
    assert (error.what, error.values, error.rule, error.remedy) == ("what", "v", "r", "m")
    assert str(AugTreeError("alone")) == "alone"
    assert all(issubclass(kind, AugTreeError) for kind in (UnsupportedError, InfeasiblePlanError, InputError))
