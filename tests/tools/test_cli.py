"""The command line: what each command answers on a tiny case, its JSON, exit statuses and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from megatron_augtree.config import MODES
from megatron_augtree.data.groups import Group, Response, write_groups
from megatron_augtree.mcore.sampler import plan_step, sequences_of
from megatron_augtree.planning.cluster import GIB, preset
from megatron_augtree.planning.plan import Plan
from megatron_augtree.planning.tree import from_sequences
from megatron_augtree.runtime.layout import locate as locate_in_tensors
from megatron_augtree.tools import cli
from megatron_augtree.tools.cli import choose, doctor, explain, options, where
from megatron_augtree.tools.lengths import step_of_groups
from megatron_augtree.tools.models import model_shape
from tests.tools.calling import MACHINE, ROWS, STEP, UNSHARED, answer, call, refused


def args_of(line: str):
    return cli.parser().parse_args(line.split())


# ---- plan


def test_plan_prints_what_it_chose(capsys):
    text, data = call(capsys, f"plan {STEP}"), answer(capsys, f"plan {STEP}")
    head, why, price, columns, *rows = text.splitlines()
    saved = 1 - data["rows"] / UNSHARED
    assert head == (f"2 groups, 5 responses on 2 ranks (cpu): {data['rows']} rows computed where the "
                    f"un-shared run computes {UNSHARED} ({saved:.1%} saved)")
    assert why == f"augtree: {data['note']}; blocks of {', '.join(map(str, data['degrees']))}"
    assert f"{data['idle_share']:.1%} idle" in price and "planned in" in price
    assert columns.split() == "pass kind ranks rows most on a rank moves reads keeps".split()
    assert [row.split()[0] for row in rows] == [str(p["id"]) for p in data["passes"]]
    assert [row.split()[1] for row in rows] == [p["kind"] for p in data["passes"]]


def test_plan_in_numbers(capsys):
    data = answer(capsys, f"plan {STEP}")
    assert set(data) == {
        "mode", "note", "groups", "sequences", "trees", "rows", "unshared_rows", "rows_saved_share", "ranks",
        "degrees", "predicted_seconds", "peak_bytes", "plan_seconds", "cluster", "pricing", "digest",
        "idle_share", "passes"}  # fmt: skip
    assert (data["groups"], data["sequences"], data["trees"], data["ranks"]) == (2, 5, 2, 2)
    assert data["unshared_rows"] == UNSHARED and ROWS <= data["rows"] < UNSHARED
    assert data["rows"] == sum(sum(p["rows"]) for p in data["passes"])
    assert data["predicted_seconds"] > 0 and data["peak_bytes"] > 0 and 0 <= data["idle_share"] < 1
    assert data["pricing"] == preset("cpu").digest()


def test_the_plan_file_is_what_the_launchers_read(capsys, tmp_path):
    groups = [Group("a", tuple(range(30)), tuple(Response((40 + i, 50), (True, True)) for i in range(3))),
              Group("b", tuple(range(60, 70)), (Response((1, 2), (True, False)), Response((3,), (True,))))]
    data, out = tmp_path / "groups.jsonl.gz", tmp_path / "plan.json"
    write_groups(data, groups)
    found = answer(capsys, f"plan --groups {data} {MACHINE} --force degree=2 --out {out}")
    plan = Plan.from_json(json.loads(out.read_text()))
    plan.check(pairs=True)
    assert plan.digest() == found["digest"]
    config = options.config_of(args_of(f"plan --demo {MACHINE}"))
    step = plan_step(groups, model_shape("smollm2-135m"), 2,
                     type(config)(plan_path=str(out), min_shared_rows=config.min_shared_rows))
    assert step.plan == plan
    assert sorted(tmp_path.iterdir()) == sorted([data, out])  # nothing half-written beside them


def test_the_launchers_choose_the_same_plan(tmp_path):
    groups = [Group("a", tuple(range(30)), tuple(Response((40 + i, 50), (True, True)) for i in range(3)))]
    for mode in ("augtree", "ring", "gather-reuse"):
        config = options.config_of(args_of(f"plan --demo {MACHINE} --mode {mode}"))
        model = model_shape("smollm2-135m", dtype="float32")
        chosen = choose.choose_for(step_of_groups(groups, 16), model, 2, config)
        assert chosen.plan == plan_step(groups, model, 2, config).plan


def test_a_range_of_a_group_file(capsys, tmp_path):
    groups = [Group(str(i), (i, 7, 8), (Response((9, i), (True, True)),)) for i in range(3)]
    write_groups(tmp_path / "g.jsonl", groups)
    data = answer(capsys, f"plan --groups {tmp_path}/g.jsonl --range 1:3 {MACHINE}")
    assert data["groups"] == 2
    assert "--range" in refused(capsys, f"plan --groups {tmp_path}/g.jsonl --range 3:1 {MACHINE}")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_can_be_planned(capsys, mode):
    data = answer(capsys, f"plan {STEP} --mode {mode}")
    assert data["mode"] == mode or mode == "augtree"
    assert (data["rows"] < UNSHARED) == (mode not in ("ring", "dynamic"))


def test_what_is_forced_is_done(capsys):
    data = answer(capsys, f"plan {STEP} --force degree=2,phase=phased,waves=2")
    assert {p["kind"] for p in data["passes"]} == {"prefill", "replay"} and data["degrees"] == [2]


def test_a_tree_of_rollouts_can_be_planned(capsys):
    line = f"plan --preset multi-turn --num-groups 2 {MACHINE} --memory-budget-gib 99"
    data = answer(capsys, f"{line} --force degree=2,phase=fused,lane_degree=2")
    assert (data["groups"], data["sequences"], data["trees"]) == (2, 16, 1)
    assert answer(capsys, f"{line} --mode gather-reuse")["trees"] == 2


# ---- explain


def test_explain_lists_candidates_best_first_and_says_why(capsys):
    text, data = call(capsys, f"explain {STEP} --top 3"), answer(capsys, f"explain {STEP}")
    fitting = [c for c in data["candidates"] if c["fits"]]
    assert fitting[0]["score"] == pytest.approx(1.0) and len(fitting) > 3
    assert [c["seconds"] for c in fitting] == sorted(c["seconds"] for c in fitting)
    assert all(c["score"] == pytest.approx(c["seconds"] / data["predicted_seconds"]) for c in fitting)
    name, note = data["candidates"][0]["name"], data["note"]
    assert data["why"] in text and f"; the fastest is {name}, " in data["why"]
    assert f"\nthe plan is augtree: {note}\n" in data["why"]
    assert re.search(r"against .*ring.*: \d+\.\d\d x the time, .* more: more ", data["why"])
    shown = text[text.index(" candidates\n") :].splitlines()[2:5]
    assert [line.split()[0] for line in shown] == ["1", "2", "3"] and shown[0].endswith("yes")


def test_explain_says_what_the_words_in_names_stand_for(capsys):
    text = call(capsys, f"explain --group 40:6,3x2 {MACHINE} --force degree=2")
    assert "\naugtree's candidates: one tree - the tree on its best block" in text
    assert "augtree's candidates" not in call(capsys, f"explain {STEP} --mode ring")


def test_nothing_to_compute_is_no_table(capsys):
    assert call(capsys, "explain --group 1:0") == "nothing to compute\n"
    text = call(capsys, "plan --group 1:0")
    assert text.splitlines()[1] == "augtree: nothing to compute" and "pass  kind" not in text


def test_the_parts_of_a_steps_time_add_up_and_name_what_costs(capsys):
    parts = answer(capsys, f"explain {STEP} --against all")["seconds_by_part"]
    assert set(parts) == {"the plan", *MODES} - {"augtree"}
    for of_plan in parts.values():
        assert sum(of_plan.values()) == pytest.approx(2 * of_plan["total"])
        assert all(seconds >= -1e-12 for seconds in of_plan.values())
    ring, plan = parts["ring"], parts["the plan"]
    assert ring["computing"] > plan["computing"] and ring["traffic"] > 0
    recomputed = answer(capsys, f"explain {STEP} --recompute full")["seconds_by_part"]["the plan"]
    assert recomputed["recompute"] > 0 == plan["recompute"]


def test_modes_to_compare_with_can_be_chosen(capsys):
    parts = answer(capsys, f"explain {STEP} --against ring,paper")["seconds_by_part"]
    assert list(parts) == ["the plan", "ring", "paper"]
    error = refused(capsys, f"explain {STEP} --against rong,ring")
    assert "--against: invalid choice: 'rong'\n" in error and "did you mean ring? augtree explain" in error
    # of a baseline's own plan, the baseline is no alternative
    data = answer(capsys, f"explain {STEP} --mode ring --against ring,ring-reuse")
    assert list(data["seconds_by_part"]) == ["the plan", "ring-reuse"] and len(data["candidates"]) == 1


def test_peers_that_do_not_fit_are_told_so(capsys):
    tight = f"explain {STEP} --against ring-reuse --memory-budget-gib"
    peak = answer(capsys, f"plan {STEP} --mode ring-reuse")["peak_bytes"] / 2**30
    assert f"against ring-reuse, over the budget with {peak:.2f} GiB: " in answer(
        capsys, f"{tight} {peak * 0.999}")["why"]
    assert "against ring-reuse: " in answer(capsys, f"{tight} {peak * 1.001}")["why"]


def test_one_rank_moves_nothing_and_two_of_one_tree_wait(capsys):
    line = f"--group 40:30 {MACHINE}".replace("--ranks 2", "--ranks 1")
    alone = answer(capsys, f"explain {line}")["seconds_by_part"]["the plan"]
    assert alone["traffic"] == 0 and alone["waiting"] == pytest.approx(0, abs=1e-9)
    config = options.config_of(args_of(f"plan --demo {MACHINE} --force degree=1"))
    step = options.step_of(args_of(f"plan --group 40:30 {MACHINE}"))
    chosen = choose.choose_for(step, model_shape("smollm2-135m"), 2, config)
    idle = explain.parts_of(chosen.plan, chosen.prices)
    assert idle["waiting"] == pytest.approx(idle["computing"])  # one of two ranks has nothing to do


def test_a_tight_budget_is_told(capsys):
    ample = answer(capsys, f"explain {STEP}")
    tight = min(c["peak_bytes"] for c in ample["candidates"]) * 1.001 / GIB
    data = answer(capsys, f"explain {STEP} --memory-budget-gib {tight}")
    assert data["peak_bytes"] <= tight * GIB
    assert data["predicted_seconds"] >= ample["predicted_seconds"]
    assert "no plan fits" in refused(capsys, f"explain {STEP} --memory-budget-gib 0.001")


def test_lock_step_is_planned_explained_and_refused(capsys):
    line = "--group 40:6,3x2 --group 12:5,9 --group 30:20,10 --lock-step " + MACHINE
    data = answer(capsys, f"plan {line}")
    passes = [sum(rank in p["block"] for p in data["passes"]) for rank in range(2)]
    assert passes[0] == passes[1] > 0
    told = answer(capsys, f"explain {line}")
    assert sum(told["seconds_by_part"]["the plan"].values()) == pytest.approx(2 * data["predicted_seconds"])
    assert any(c["name"].startswith("augtree: lock-step, degree") for c in told["candidates"])
    alone = f"plan --group 40:1 --context-parallel-size 1 --lock-step {MACHINE}"
    assert "no plan keeps all ranks in lock-step" in refused(capsys, alone)


# ---- where


def test_where_names_rank_pass_and_row(capsys):
    line = f"where {STEP} --force degree=2 --sequence 3 --token 14"
    text, data = call(capsys, line), answer(capsys, line)
    assert (data["group"], data["response"], data["sequences_sharing"]) == (1, 0, 1)
    assert data["row"] == 2 and data["node_rows"] == 5  # rows of tokens 12 to 16
    assert "token 14 of sequence 3 (group 1, response 0)" in text and "a response of 5 rows" in text
    (place,) = data["places"]
    assert text.splitlines()[-1].split() == [str(place[key]) for key in ("rank", "pass_id", "kind", "index")]


def test_where_lists_prompt_copies(capsys):
    line = f"where --group 40:6,3x2 {MACHINE} --force degree=2,copies=2 --sequence 0 --token 8"
    data = answer(capsys, line)
    assert data["sequences_sharing"] == 3 and sorted(p["rank"] for p in data["places"]) == [0, 1]
    assert "2 prompt copies" in call(capsys, line) and "a shared prompt of 39 rows" in call(capsys, line)


@pytest.mark.parametrize("force", ["degree=2", "degree=2,phase=phased,waves=2", "degree=2,copies=2", ""])
def test_where_agrees_with_the_tensors(force):
    """For every token of every sequence, with what `runtime.layout` finds in the rows' numbers."""
    groups = [Group("a", tuple(range(20)), tuple(Response((40 + i, 50, 51 + i), (True,) * 3)
                                                  for i in range(4)))]  # fmt: skip
    step, (sequences, numbers) = step_of_groups(groups, 1), sequences_of(groups)
    forest = from_sequences(sequences, groups=numbers)
    config = options.config_of(args_of(f"plan --demo {MACHINE} --force {force or 'degree=1'}"))
    chosen = choose.choose_for(step, model_shape("smollm2-135m"), 2, config)
    for sequence, tokens in enumerate(sequences):
        for token in range(1, len(tokens.tokens)):
            found = where.locate(chosen.plan, where.row_of(chosen.trees, sequence, token))
            assert found and [tuple(p) for p in found] == [
                tuple(p) for p in locate_in_tensors(chosen.plan, forest, sequence, token)]


@pytest.mark.parametrize(("more", "part"), [
    ("--sequence 5 --token 3", "there are 5"), ("--sequence 0 --token 0", "token 0 is given"),
    ("--sequence 0 --token 46", "tokens 1 to 45"), ("--sequence -1 --token 3", "not a number"),
    ("--sequence 0", "--token")])  # fmt: skip
def test_where_refuses_what_is_not_there(capsys, more, part):
    assert part in refused(capsys, f"where {STEP} {more}")


# ---- estimate


def test_estimate_counts_rows_and_pairs(capsys):
    text, data = call(capsys, f"estimate --prompt 101 --responses 20x4 {MACHINE}"), answer(
        capsys, f"estimate --prompt 101 --responses 20x4 {MACHINE}")
    assert (data["rows"], data["unshared_rows"]) == (100 + 4 * 20, 4 * 120)
    assert data["linear_ratio"] == pytest.approx(4 * (100 + 20) / (100 + 4 * 20))
    pairs = 100 * 101 // 2 + 4 * (20 * 100 + 20 * 21 // 2)
    assert (data["pairs"], data["unshared_pairs"]) == (pairs, 4 * 120 * 121 // 2)
    least, most = sorted((data["linear_ratio"], data["attention_ratio"]))
    # 80 scored rows meet the vocabulary with and without sharing
    assert 1 < data["compute_ratio"] < most and least > 1
    assert f"at most {data['compute_ratio']:.2f} times as fast" in text
    assert re.search(r"rows \(linear layers\) +180 +480 +2\.67", text)


def test_estimate_says_when_it_is_not_worth_it(capsys):
    assert "little" in call(capsys, f"estimate --prompt 10 --responses 400x4 {MACHINE}")
    one = answer(capsys, f"estimate --prompt 10 --responses 400 {MACHINE}")
    assert one["compute_ratio"] == one["linear_ratio"] == one["attention_ratio"] == 1
    assert answer(capsys, f"estimate --prompt 1 --responses 0 {MACHINE}")["rows"] == 0


def test_estimate_finds_the_smallest_degree(capsys):
    line = "estimate --prompt 4001 --responses 100x4 --model qwen2.5-7b --ranks 6"
    data = answer(capsys, f"{line} --memory-budget-gib 15")
    assert [m["degree"] for m in data["memory"]] == [1, 2, 4, 6]
    for m in data["memory"]:
        assert m["inputs"] < m["attention"] < m["everything"]
    for kept in ("inputs", "attention", "everything"):
        peaks = [m[kept] for m in data["memory"]]
        assert peaks == sorted(peaks, reverse=True)
        fitting = [m["degree"] for m in data["memory"] if m[kept] <= 15 * GIB]
        assert data["smallest_degree"][kept] == (fitting[0] if fitting else None)
    assert data["smallest_degree"]["everything"] in (2, 4, 6) and data["smallest_degree"]["inputs"] == 1
    text = call(capsys, f"{line} --memory-budget-gib 15")
    assert "with full recompute it fits on 1 rank" in text and " fits" in text
    assert "on none of these" in call(capsys, f"{line} --memory-budget-gib 0.6")
    assert set(answer(capsys, f"{line} --memory-budget-gib 1e300")["smallest_degree"].values()) == {1}


def test_memory_of_an_estimate_is_the_planners(capsys):
    """One tree on all ranks, everything kept: what a forced plan is priced at."""
    line = f"--group 40:6,3x2 {MACHINE}"
    (_, data) = answer(capsys, f"estimate {line}")["memory"]
    plan = answer(capsys, f"plan {line} --force degree=2,phase=fused,lane_degree=2 --recompute none")
    assert data["everything"] == plan["peak_bytes"] and data["rows"] == max(plan["passes"][0]["rows"])


# ---- doctor


def test_doctor_finds_this_environment_sound(capsys):
    text, data = call(capsys, "doctor"), answer(capsys, "doctor")
    lines = {line["about"]: line for line in data["lines"]}
    for about in ("python", "numpy", "torch", "megatron-core", "device", "attention kernel", "parity"):
        assert lines[about]["state"] == "ok", lines[about]
    assert {"C++ core", "kernel te_fused", "kernel cuda_flash", "rich"} <= lines.keys()
    assert any(about.startswith("patch") for about in lines)
    (error,) = re.findall(r"difference (\S+) ", lines["parity"]["told"])
    assert text.startswith("ok ")  # columns without names have no line
    assert 0 < float(error) <= 1e-10 and lines["parity"]["told"] in text
    assert data["verdict"] in ("all is well", "something is missing: see what to do")


@pytest.mark.parametrize("broken", ["one leaf's gradients", "a NaN"])
def test_doctor_fails_where_numbers_are_wrong(capsys, monkeypatch, broken):
    from megatron_augtree.runtime import tree_attention

    whole = tree_attention.add_

    def halved(buffer, rows, values):
        whole(buffer, rows, values * (0.5 if broken == "one leaf's gradients" else float("nan")))

    monkeypatch.setattr(tree_attention, "add_", halved)
    data = answer(capsys, "doctor", code=1)
    assert [line["about"] for line in data["lines"] if line["state"] == "wrong"] == ["parity"]
    assert data["verdict"] == "a check failed"


def test_doctor_compares_a_bound_model_where_asked(capsys, monkeypatch):
    commands = []

    def run(command, **how):
        commands.append(command)
        return subprocess.CompletedProcess(command, len(commands) - 1, "bound and stock agree\n", "it broke")

    monkeypatch.setattr(doctor.subprocess, "run", run)
    monkeypatch.setattr(doctor, "_parity", lambda: doctor.Line("parity", "ok", ""))
    good = answer(capsys, "doctor --megatron")
    assert commands[0][1:] == ["-m", "megatron_augtree.mcore.selfcheck"]
    assert good["lines"][-1] == {"about": "bound model", "state": "ok", "told": "bound and stock agree"}
    assert answer(capsys, "doctor --megatron", code=1)["lines"][-1]["told"] == "it broke"


# ---- calibrate


def test_calibrate_hands_over_and_keeps_stdout_for_json(capfd, monkeypatch, tmp_path):
    from megatron_augtree.tools import calibrate

    def measured(out, **how):
        subprocess.run([sys.executable, "-c", "print('a rank says something')"], check=True)
        assert (out, how) == (f"{tmp_path}/m.json", {"ranks": 3, "seconds": 5.0, "device": "cpu"})
        return preset("cpu")

    monkeypatch.setattr(calibrate, "calibrate", measured)
    line = f"calibrate --out {tmp_path}/m.json --ranks 3 --seconds 5 --device cpu"
    assert cli.main([*line.split(), "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["digest"] == preset("cpu").digest()
    assert "a rank says something" in captured.err
    assert cli.main(line.split()) == 0
    text = capfd.readouterr().out
    assert "gemm_flops" in text and f"--cluster {tmp_path}/m.json" in text
