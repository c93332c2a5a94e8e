"""The README's table of what is supported, refused or falls back, each row with the test that shows it.

    python -m tests.support        writes the table into README.md

What is refused is read from the launchers' own list, `mcore.arguments.LIMITS`, with its reason.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from megatron_augtree.mcore.arguments import LIMITS

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- written by python -m tests.support -->", "<!-- end -->"

PARITY = "tests/numerics/test_parity.py::test_every_program_equals_the_unshared_run"
RECOMPUTED = "tests/numerics/test_recompute.py::test_the_same_bits_and_no_attention_twice_where_it_is_kept"
MATRIX = "tests/distributed/test_matrix.py::test_parity"
#: What works -> tests (file::function).
SUPPORTED: dict[str, list[str]] = {
    "all modes (see above); stock without one": [
        PARITY, "tests/numerics/test_peers.py::test_every_choice_equals_the_unshared_run",
        "tests/mcore/test_launcher.py::test_every_mode_trains_as_stock_megatron_does"],
    "fused and phased plans, `gather_kv`, `move_kv`, `move_q`, prompt copies, whole, wide and mixed lanes": [
        PARITY, "tests/unit/test_by_price.py::test_chosen_by_price"],
    "trees of several levels, losses on shared turns, identical, nested and empty responses, salts": [
        PARITY, "tests/mcore/test_api.py::test_salts_keep_rows_apart"],
    "tensor parallelism (also with fewer KV groups than ranks), sequence parallelism": [
        MATRIX, "tests/distributed/test_parallel.py::test_case"],
    "recompute: selective, full (uniform, block), attention kept, mixed by layer": [
        MATRIX, RECOMPUTED],
    "a recompute setting for each pass, prompt keys a layer ahead, dormant prompts in host memory": [
        MATRIX, "tests/numerics/test_pass_recompute.py::test_the_same_bits_and_what_is_said_runs_again",
        "tests/numerics/test_prefetch.py::test_random_plans_equal_the_unshared_run",
        "tests/numerics/test_offload.py::test_the_same_bits",
        "tests/mcore/test_recompute_api.py::test_micro_batches_of_a_trainers_own"],
    "DDP with overlapped reduction and parameter gather, Adam, distributed optimizer, clipping": [
        MATRIX, "tests/distributed/test_parallel.py::test_case",
        "tests/distributed/test_processes.py::test_case"],
    "frozen parameters: adapters only, top layers only, frozen embedding": [
        MATRIX, "tests/mcore/test_api.py::test_frozen_parameters"],
    "`GPTModel` of megatron-core 0.16.1 and 0.19.2: GQA, QK norm, biases, SwiGLU, tied embeddings": [
        "tests/mcore/test_binding.py::test_tree_equals_unshared"],
    "partial and interleaved rotary, YaRN, llama-3 scaling, no rotary; unequal key and value widths": [
        "tests/mcore/test_models.py::test_models_equal_the_unshared_run"],
    "hybrid models of attention and MLP layers": [
        "tests/mcore/test_models.py::test_hybrid_models_are_bound_by_their_attention_layers"],
    "the API from any trainer: each rank gives its own samples, `like=`, heads, entropy, shadow runs": [
        "tests/distributed/test_api.py::test_case",
        "tests/mcore/test_api_conformance.py::test_gradients_equal_the_trainers_own"],
    "unmodified `pretrain_gpt.py` of Megatron-LM 0.16.1 and 0.19.0 (where `MEGATRON_LM_PATH` is set)": [
        "tests/mcore/test_pretrain_gpt.py::test_ten_steps_on_two_ranks_equal_our_launchers",
        "tests/mcore/test_pretrain_gpt.py::test_without_a_mode_nothing_changes"],
    "a measured guard: plans that are slower than ring give way to it; traces of planned beside measured": [
        "tests/mcore/test_guard.py::test_numbers_are_those_of_an_unguarded_run",
        "tests/mcore/test_guard.py::test_real_ranks_decide_alike_and_say_it_once",
        "tests/mcore/test_launcher.py::test_tensorboard_and_trace"],
    "checkpoints, also `torch_dist`, that go on in other modes and on other ranks": [
        "tests/mcore/test_dist_checkpoints.py::test_the_next_step_is_that_of_the_run_that_saved",
        "tests/mcore/test_checkpoints.py::test_resumes_on_other_ranks_and_in_another_mode"],
    "a team's GRPO loop: filtering, SFT mix, mini-epochs, KL, TP 2 x 2, resume, shadow checks": [
        "tests/mcore/test_grpo_team.py::test_the_reward_curve_is_the_stock_runs",
        "tests/mcore/test_grpo_team.py::test_an_interrupted_run_continues_with_the_same_bits"],
    "SmolLM2-135M from its GGUF file": ["tests/mcore/test_pretrained.py::test_shared_prompt"],
    "GRPO, Dr. GRPO, DAPO, GSPO, dual clip, KL k1/k2/k3, entropy, temperature; four aggregations": [
        "tests/unit/test_losses.py::test_gradients_equal_finite_differences_of_the_oracle"],
    "fp64, fp32, bf16": [
        PARITY, "tests/numerics/test_parity.py::test_fp32_within_1e_5",
        "tests/numerics/test_parity.py::test_bf16_errs_at_most_twice_as_much_as_unshared_bf16"],
    "memory budgets, forced plans, plans from a file": [
        "tests/unit/test_planner.py::test_the_budget_is_never_exceeded",
        "tests/unit/test_planner.py::test_what_is_forced_is_done"],
}
#: What was written for GPUs and runs here against stand-ins.
UNRUN: dict[str, list[str]] = {
    "kernels `cuda_flash` (torch's varlen flash) and `te_fused` (Transformer Engine 2.9 to 2.20)": [
        "tests/numerics/test_cuda_flash.py::test_every_segment_gets_its_own_numbers",
        "tests/numerics/test_te_fused.py::test_each_release_is_given_what_it_has"],
    "streams and double buffering under NCCL": [
        "tests/distributed/test_streams.py::test_everything_waits_for_what_it_needs"],
}
#: What runs un-shared instead, where that was asked for.
FALLS_BACK: dict[str, list[str]] = {
    "whatever is refused below, under `prepare_model(fallback=True)`; every plan counts it with its reason": [
        "tests/distributed/test_api.py::test_case"],
    "inputs that are no pack of ours (SFT mixes, evaluation, generation) run through the stock modules": [
        "tests/mcore/test_binding.py::test_plain_batches_train_through_a_bound_model"],
}
MORE_REFUSED: dict[str, list[str]] = {
    "recurrent and linear-attention layers: a prompt is shared as keys and values": [
        "tests/mcore/test_models.py::test_recurrent_layers_are_refused_by_number",
        "tests/mcore/test_models.py::test_linear_attention_is_refused_by_name"],
    "several model chunks, pools of different weights, groups or settings": [
        "tests/distributed/test_processes.py::test_case"],
}
REFUSED_BY = ["tests/mcore/test_arguments.py::test_arguments_are_refused",
              "tests/mcore/test_arguments.py::test_configs_are_refused"]


def table() -> str:
    """The table as Markdown."""
    lines = ["| | | test |", "|---|---|---|"]
    for verdict, rows in (("supported", SUPPORTED), ("written, no GPU has run it yet", UNRUN),
                          ("falls back to stock", FALLS_BACK), ("refused", MORE_REFUSED)):
        lines += [f"| {verdict} | {what} | {', '.join(map(_link, tests))} |" for what, tests in rows.items()]
    reasons: dict[str, list[str]] = {}
    for limit in LIMITS:
        reasons.setdefault(limit.rule, []).append(f"`{limit.flag}`")
    for rule, flags in reasons.items():
        lines.append(f"| refused | {', '.join(flags)}: {rule} | {', '.join(map(_link, REFUSED_BY))} |")
    return "\n".join(lines)


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name}`]({path})"


def missing() -> list[str]:
    """Tests that the table names and that are not there."""
    tables = (SUPPORTED, UNRUN, FALLS_BACK, MORE_REFUSED, {"": REFUSED_BY})
    named = {test for table in tables for tests in table.values() for test in tests}
    return sorted(test for test in named if not _defined(test))


def _defined(test: str) -> bool:
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file():
        return False
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def rewritten(readme: str) -> str:
    """A README with the table between its marks."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert len(pattern.findall(readme)) == 1, f"the README has no single part from {BEGIN!r} to {END!r}"
    return pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rewritten(path.read_text()))
    print("\n".join(missing()) or "README.md written; every named test is there")
