"""Which tests cover which case: inputs on which other context-parallel and RL training stacks went wrong.

A case is the input and the right answer, in a line; its tests stand beside it. A test checks that they exist.
"""

from __future__ import annotations

_LOSSES = "unit/test_loss_cases.py"
_ADVANTAGES = "unit/test_advantages.py"
_ARGUMENTS = "mcore/test_arguments.py"
_BINDING = "mcore/test_binding.py"
_BINDING_LIMITS = "mcore/test_binding_limits.py"
_MODELS = "mcore/test_models.py"
_MODEL_LIMITS = "mcore/test_models_limits.py"
_UPDATES = "numerics/test_cases.py"
_LAYOUTS = "numerics/test_case_layouts.py"
_MERGE = "numerics/test_merge.py"
_MUTATIONS = "numerics/test_mutations.py"
_PROCESSES = "distributed/test_processes.py"
_WORKER = "distributed/worker.py"
_API_WORKER = "distributed/api_worker.py"
_MATRIX = "distributed/test_matrix.py"
_PARALLEL = "distributed/parallel_worker.py"
_RECOMPUTE = "numerics/test_recompute.py"

#: Cases that this version refuses or does not reach, and why; refusals name their test.
LATER: dict[int, str] = {
    45: "mixture of experts: refused",
    46: "replayed routes: experts are refused; salts keep rows apart",
    47: "multi-token prediction: refused",
}

#: case -> (what is right, [file::test]).
CASES: dict[int, tuple[str, list[str]]] = {
    1: ("first log-probs of branches; the last prompt token's embedding gradient; no other prompt loss",
        [f"{_UPDATES}::test_case_1_first_tokens_and_the_last_prompt_token"]),
    2: ("branches' gradients add; lanes change nothing",
        [f"{_UPDATES}::test_case_2_gradients_of_branches_add_and_lanes_change_nothing",
         f"{_LOSSES}::test_case_2_gradients_of_branches_add_at_a_shared_row"]),
    3: ("recompute in chunks of one and two layers; only layer 0's keys and values trained",
        [f"{_MATRIX}::test_parity",
         f"{_RECOMPUTE}::test_the_same_bits_and_no_attention_twice_where_it_is_kept"]),
    4: ("duplicates count twice, the empty response adds nothing",
        [f"{_UPDATES}::test_case_4_duplicates_nested_and_empty",
         f"{_LOSSES}::test_case_4_duplicates_count_twice_and_the_empty_response_adds_nothing"]),
    5: ("fewer responses than lanes, tiny prompts, masked groups: no hang",
        [f"{_UPDATES}::test_case_5_few_groups_few_rows_and_a_masked_group", f"{_PROCESSES}::test_case"]),
    6: ("old log-probs of any plan give ratio 1; three steps follow the oracle",
        [f"{_UPDATES}::test_case_6_old_logprobs_of_any_plan_give_ratio_1",
         f"{_UPDATES}::test_case_6_three_steps_follow_the_oracle"]),
    8: ("positions; interleaved and partial rotary, YaRN beyond the original length; a shifted branch shows",
        [f"{_LAYOUTS}::test_case_8_positions", f"{_LAYOUTS}::test_case_8_40_42_43_models",
         f"{_MUTATIONS}::test_one_branchs_positions_are_shifted_by_one",
         f"{_MODELS}::test_models_equal_the_unshared_run",
         f"{_MODELS}::test_case_8_shifting_one_branch_by_one_shows"]),
    9: ("partials of very different scales, upstream gradient not ones",
        [f"{_MERGE}::test_scaled_pieces_equal_dense_autograd",
         f"{_LAYOUTS}::test_case_9_shards_of_different_scales_land_on_their_owners"]),
    10: ("merging where one or both sides saw nothing", [
        f"{_MERGE}::test_every_order_and_grouping", f"{_MERGE}::test_backward_in_every_order_and_grouping"]),
    11: ("overlap and distributed optimizer on and off, steps of unequal numbers of groups, idle ranks",
         [f"{_WORKER}::steps", f"{_WORKER}::adam", f"{_PARALLEL}::overlap"]),
    13: ("one valid token; uneven counts", [
        f"{_UPDATES}::test_case_13_one_valid_token_on_any_number_of_ranks",
        f"{_UPDATES}::test_case_13_18_19_weights_by_hand_over_layouts",
        f"{_LOSSES}::test_case_13_one_valid_token_in_the_whole_batch"]),
    14: ("loss callbacks of two values; three are an error", [
        f"{_LOSSES}::test_case_14_a_loss_returns_two_values_and_the_share_needs_no_count_to_be_rescaled",
        f"{_WORKER}::broken_loss"]),
    15: ("metrics equal the oracle in every layout", [
        f"{_UPDATES}::test_case_15_37_metrics_entropy_kl_and_temperature",
        f"{_LOSSES}::test_case_15_37_loss_and_every_metric_equal_the_oracle", f"{_WORKER}::parity"]),
    16: ("ranks that own no scored row",
         [f"{_UPDATES}::test_case_16_25_ranks_without_a_scored_row_and_tiny_batches"]),
    18: ("token mean over micro-batches and ranks", [
        f"{_LOSSES}::test_case_18_two_tokens_of_loss_1_and_eight_of_loss_0",
        f"{_MUTATIONS}::test_denominators_are_local"]),
    19: ("aggregations do not depend on ranks and micro-batches", [
        f"{_UPDATES}::test_case_13_18_19_weights_by_hand_over_layouts",
        f"{_LOSSES}::test_case_19_any_partition_into_calls_gives_the_same_loss_gradients_and_metrics"]),
    20: ("targets under zigzag", [f"{_LAYOUTS}::test_case_20_targets_are_the_sequences_own_next_tokens"]),
    21: ("replicas with unequal numbers of groups, and none", [f"{_WORKER}::steps", f"{_API_WORKER}::tier2"]),
    23: ("whitening over all ranks", [f"{_ADVANTAGES}::test_case_23_whitening_over_all_ranks"]),
    24: ("every residue of lengths, twice", [f"{_UPDATES}::test_case_24_every_residue_of_lengths_twice"]),
    25: ("tiny batches", [f"{_UPDATES}::test_case_16_25_ranks_without_a_scored_row_and_tiny_batches"]),
    29: ("a pack's masks and batched positions are refused; plain batches take stock's",
         [f"{_BINDING_LIMITS}::test_wrong_packs_are_refused",
          f"{_BINDING_LIMITS}::test_case_29_plain_batches_take_the_masks_and_positions_that_stock_takes"]),
    30: ("learned positions are refused", [f"{_ARGUMENTS}::test_arguments_are_refused",
                                           f"{_ARGUMENTS}::test_positions_are_read_from_the_model"]),
    32: ("masked garbage changes nothing; large valid differences stay finite", [
        f"{_LOSSES}::test_case_32_masked_values_change_no_bit",
        f"{_LOSSES}::test_case_32_a_valid_difference_of_100_is_finite_and_points_the_right_way"]),
    34: ("equal rewards keep KL; a step without a valid token", [
        f"{_LOSSES}::test_case_34_equal_rewards_keep_the_gradient_of_kl",
        f"{_UPDATES}::test_case_34_a_step_without_a_valid_token_under_weight_decay"]),
    35: ("group advantages", [
        f"{_ADVANTAGES}::test_case_35_population_deviation_is_the_default_and_sample_is_a_choice",
        f"{_ADVANTAGES}::test_case_35_singletons_and_equal_rewards_give_exactly_zero",
        f"{_ADVANTAGES}::test_case_35_interleaved_ids"]),
    37: ("clipping, dual clip, temperature", [
        f"{_LOSSES}::test_case_37_clip_by_hand",
        f"{_UPDATES}::test_case_15_37_metrics_entropy_kl_and_temperature"]),
    39: ("entropy and targets in every slice of the vocabulary: TP 1's gradients",
         [f"{_PARALLEL}::entropy", f"{_PARALLEL}::vocabulary"]),
    40: ("a trainable replicated layer before the split: the embedding, on all ranks",
         [f"{_LAYOUTS}::test_case_8_40_42_43_models", f"{_WORKER}::parity"]),
    42: ("attention options: as the oracle, or refused", [
        f"{_LAYOUTS}::test_case_8_40_42_43_models", f"{_MODELS}::test_models_equal_the_unshared_run",
        f"{_MODEL_LIMITS}::test_each_limit_is_refused_with_flag_value_rule_and_remedy",
        f"{_BINDING_LIMITS}::test_other_attention_and_other_models_are_refused"]),
    43: ("heads, head dims, more ranks than KV heads, unequal widths", [
        f"{_LAYOUTS}::test_case_8_40_42_43_models", f"{_MODELS}::test_models_equal_the_unshared_run"]),
    44: ("dropout is refused",
         [f"{_ARGUMENTS}::test_dropout_is_refused_with_its_reason_and_all_flags_at_once"]),
    45: ("experts", [f"{_ARGUMENTS}::test_arguments_are_refused"]),
    46: ("routes", [f"{_ARGUMENTS}::test_arguments_are_refused"]),
    47: ("multi-token prediction", [f"{_ARGUMENTS}::test_arguments_are_refused"]),
    48: ("the clipping norm under TP 2 is TP 1's", [f"{_PARALLEL}::clip_norm", f"{_MATRIX}::test_parity"]),
    51: ("recompute beside idle ranks: messages match", [f"{_MATRIX}::test_parity"]),
    52: ("never silently plain", [
        f"{_ARGUMENTS}::test_without_a_mode_the_run_is_stock_and_says_what_would_do_nothing",
        f"{_ARGUMENTS}::test_bad_mode_names_choices_and_closest",
        f"{_BINDING_LIMITS}::test_a_spec_alone_is_not_enough",
        f"{_LAYOUTS}::test_case_52_53_what_cannot_be_planned_says_so_before_anything_runs"]),
    53: ("errors before any collective, with values and remedy", [
        f"{_LAYOUTS}::test_case_52_53_what_cannot_be_planned_says_so_before_anything_runs",
        f"{_WORKER}::other_data", f"{_WORKER}::other_plan", f"{_ARGUMENTS}::test_arguments_are_refused"]),
    54: ("the budget holds; an impossible item is named", [
        f"{_LAYOUTS}::test_case_54_the_memory_budget_holds_and_an_impossible_one_names_the_item"]),
    55: ("only scored rows reach the vocabulary", [
        f"{_LAYOUTS}::test_case_55_only_scored_rows_reach_the_vocabulary",
        f"{_BINDING}::test_only_scored_rows_are_projected_and_chunks_change_nothing"]),
    56: ("forward-only between accumulation passes",
         [f"{_UPDATES}::test_case_56_60_forward_only_between_two_accumulation_passes",
          f"{_API_WORKER}::accumulation"]),
    59: ("cross attention, batches and attention that is not causal are refused",
         [f"{_BINDING_LIMITS}::test_attention_refuses_what_the_tree_cannot_express",
          f"{_MODELS}::test_case_59_attention_that_is_not_causal_is_refused"]),
    60: ("evaluation, inference mode, no reference at beta 0", [
        f"{_UPDATES}::test_case_56_60_forward_only_between_two_accumulation_passes",
        f"{_LOSSES}::test_case_60_beta_0_needs_no_reference_and_no_gradient_mode"]),
}
