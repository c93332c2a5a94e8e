"""Machines: presets, calibration files, and what a plan's digest sees of them."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_augtree.config import AugTreeConfig, AugTreeError, InputError
from megatron_augtree.planning.cluster import (
    LIMIT,
    MAY_BE_0,
    PRESETS,
    Cluster,
    cluster_from,
    cluster_of,
    document,
    load,
    preset,
)
from megatron_augtree.planning.model import ModelShape
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.planner import make_plan
from megatron_augtree.planning.tree import from_lengths

CONSTANTS = [field.name for field in fields(Cluster) if field.name not in ("name", "overlap")]
MODEL = ModelShape(4, 256, 1024, 4096, 4, 4, 64, 64)


def clusters() -> st.SearchStrategy[Cluster]:
    integers = {
        name: st.integers(0 if name in MAY_BE_0 else 1, LIMIT - 1) | st.just(LIMIT - 1) for name in CONSTANTS
    }
    names = st.text(min_size=1, max_size=20).filter(str.isprintable)
    return st.builds(Cluster, name=names, overlap=st.booleans(), **integers)


def written(path, cluster: Cluster, **measured) -> str:
    path.write_text(json.dumps(document(cluster, measured)))
    return str(path)


def plan_on(machine: str) -> Plan:
    config = AugTreeConfig(cluster=machine, memory_budget_gib=1e6)
    return make_plan(from_lengths(300, [40, 90, 20]), MODEL, 2, config, tree_groups=[0])


# Presets.


def test_presets():
    assert set(PRESETS) == {"cpu", "a100", "h100", "h200", "b200", "paper"}
    assert all(cluster.name == name for name, cluster in PRESETS.items())
    digests = {cluster.digest() for cluster in PRESETS.values()}
    assert len(digests) == len(PRESETS) and preset("h100").digest() in digests
    assert replace(preset("cpu"), tile_ns=1).digest() not in digests
    with pytest.raises(AugTreeError, match="--augtree-cluster h300") as caught:
        preset("h300")
    assert all(name in caught.value.rule for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_the_rules_of_files(name):
    assert cluster_from(document(PRESETS[name], {}), "preset") == PRESETS[name]


def test_each_generation_is_no_slower_than_the_one_before():
    rates = ("gemm_flops", "attention_flops", "row_bytes_s", "link_bytes_s", "nic_bytes_s", "memory_bytes")
    for older, newer in zip(("a100", "h100", "h200"), ("h100", "h200", "b200")):
        assert all(getattr(PRESETS[older], rate) <= getattr(PRESETS[newer], rate) for rate in rates)


# Files.


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cluster=clusters())
def test_what_is_written_is_read(tmp_path, cluster):
    path = written(tmp_path / "machine.json", cluster, how="drawn", curves={"stage": [[1, 2.5]]})
    assert load(path) == cluster


@pytest.mark.parametrize("name", [*CONSTANTS, "overlap"])
def test_the_digest_covers_every_constant(name):
    cluster = preset("h100")
    value = getattr(cluster, name)
    assert (
        replace(cluster, **{name: not value if name == "overlap" else value + 1}).digest() != cluster.digest()
    )


def test_the_digest_covers_nothing_else(tmp_path):
    cluster = replace(preset("h100"), name="another name")
    assert cluster.digest() == preset("h100").digest()
    first = written(tmp_path / "a.json", cluster, date="yesterday")
    second = written(tmp_path / "b.json", cluster, date="today", residual=0.3)
    assert load(first).digest() == load(second).digest() == cluster.digest()


def refused(path, rule: str = "") -> InputError:
    with pytest.raises(InputError) as caught:
        load(path)
    error = caught.value
    assert str(path) in error.values and error.what and error.rule and error.remedy
    str(error).encode()  # whatever is in the file, the message can be printed
    assert rule in error.rule
    return error


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe\x00",
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'{"version": ' + b"9" * 10_000 + b"}",
        b" " * ((1 << 20) + 1),
    ],
    ids=("empty", "cut", "text", "not UTF-8", "a key twice", "deep", "a long number", "a long file"),
)
def test_what_is_no_json_is_refused(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    refused(path)


def test_what_cannot_be_opened_is_refused(tmp_path):
    assert "No such file" in refused(tmp_path / "none.json").values
    refused(tmp_path)
    with pytest.raises(InputError, match="null byte"):
        load("machine\0.json")


@pytest.mark.parametrize(
    "content", [[], 3, None, "x", {}, {"format": "other"}, {"format": ["augtree-cluster"]}]
)
def test_other_json_is_refused(tmp_path, content):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(content))
    refused(path, "augtree-cluster")


@pytest.mark.parametrize("version", [0, 2, True, 1.0, "1", None, [1], {}, 10**30])
def test_other_versions_are_refused(tmp_path, version):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({**document(preset("cpu"), {}), "version": version}))
    assert "version" in refused(path, "version 1").values


WRONG = st.one_of(
    st.integers(max_value=-1),
    st.integers(min_value=LIMIT),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(name=st.sampled_from(CONSTANTS), value=WRONG)
@example(name="tile_ns", value=1.0)
@example(name="gemm_flops", value=0)
def test_constants_out_of_range_are_refused(tmp_path, name, value):
    data = document(preset("cpu"), {})
    data["cluster"][name] = value
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    assert name in refused(path, "2^62").values


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", ""), ("name", 3), ("name", "a\nb"), ("name", "\ud800"), ("overlap", 1), ("overlap", None)],
)
def test_words_out_of_range_are_refused(tmp_path, name, value):
    data = document(preset("cpu"), {})
    data["cluster"][name] = value
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    assert name in refused(path).values


@pytest.mark.parametrize("name", asdict(preset("cpu")))
def test_a_missing_or_misspelt_constant_is_named(tmp_path, name):
    data = document(preset("cpu"), {})
    value = data["cluster"].pop(name)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(data))
    assert f"missing {name}" in refused(path).values
    for unknown in (f"{name}_x", "\ud800"):
        path.write_text(json.dumps({**data, "cluster": {**data["cluster"], name: value, unknown: value}}))
        assert f"unknown {unknown if unknown.isprintable() else ascii(unknown)}" in refused(path).values


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cluster=json_values, version=st.just(1) | json_values)
def test_any_json_is_refused_in_words(tmp_path, cluster, version):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"format": "augtree-cluster", "version": version, "cluster": cluster}))
    refused(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(cut=st.integers(0, 700), noise=st.binary(min_size=1, max_size=3))
def test_damaged_bytes_are_refused_or_harmless(tmp_path, cut, noise):
    """Bytes in the middle of a file replaced: it is refused, or read with constants in range."""
    whole = json.dumps(document(preset("cpu"), {"how": "damaged"})).encode()
    path = tmp_path / "machine.json"
    path.write_bytes(whole[:cut] + noise + whole[cut + len(noise) :])
    try:
        found = load(path)
    except InputError:
        return
    assert cluster_from(document(found, {}), "again") == found


# What names a machine.


def test_names_and_paths(tmp_path, monkeypatch):
    cluster = replace(preset("h100"), name="ours", tile_ns=123)
    path = written(tmp_path / "machine.json", cluster)
    assert cluster_of("h100") is preset("h100")
    assert cluster_of(path) == cluster
    written(tmp_path / "machine", cluster)
    monkeypatch.chdir(tmp_path)
    assert cluster_of("./machine") == cluster == cluster_of("machine.json")
    for name in ("machine", "", "h100.", "H100"):
        with pytest.raises(AugTreeError, match="unknown cluster"):
            cluster_of(name)
    with pytest.raises(InputError, match="nowhere"):
        cluster_of("nowhere/h100")


def test_a_file_is_read_once(tmp_path):
    """All plans of a run are priced for one machine."""
    path = written(tmp_path / "machine.json", preset("h100"))
    first = cluster_of(path)
    written(tmp_path / "machine.json", preset("a100"))
    assert cluster_of(path) is first and load(path) == preset("a100")


def test_a_plans_digest_changes_with_the_file(tmp_path):
    same = written(tmp_path / "same.json", replace(preset("h100"), name="a copy"))
    other = written(tmp_path / "other.json", replace(preset("h100"), pass_ns=preset("h100").pass_ns + 1))
    plan = plan_on("h100")
    assert plan_on(same).digest() == plan.digest() != plan_on(other).digest()
    assert plan_on(other).seconds > plan.seconds


def test_a_machine_without_fixed_costs_is_priced(tmp_path):
    free = replace(preset("h100"), **dict.fromkeys(MAY_BE_0, 0))
    plan = plan_on(written(tmp_path / "free.json", free))
    assert 0 < plan.seconds < plan_on("h100").seconds
