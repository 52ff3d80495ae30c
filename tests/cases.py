"""Which tests hold the public bug reports of `shared/cases/cases.json`; what no test holds is in `docs/limits.md`."""

from __future__ import annotations

from types import MappingProxyType

_C = "commands/test_convert.py::"
_R = "commands/test_reported_cases.py::"
_E = "converters/test_exactness.py::"
_P = "model/test_parity.py::"
_READ = "checkpoint/test_reader.py::"
_WRITE = "checkpoint/test_writer.py::"
_SRC = "checkpoint/test_sources.py::"
_CAL = "calibration/test_calibrate.py::"
_TXT = "calibration/test_texts.py::"
_OBS = "calibration/test_observers.py::"
_QNT = "kernels/test_quantized.py::"
_DEC = "kernels/test_decode.py::"
_DSP = "kernels/test_dispatch.py::"
_GEN = "runtime/test_generator.py::"
_CMD = "commands/test_generate.py::"
_EVAL = "commands/test_eval.py::"
_APP = "test_app.py::"

# Case -> tests, as `file::function` below tests/, with blanks between.
CASES = MappingProxyType({
    # Convert
    "CV-02": f"{_P}test_logits_equal_transformers {_E}test_full_rank_native_equals_the_source "
             f"{_C}test_refuses_configurations_in_one_line",
    "CV-04": f"{_R}test_a_rotary_share_that_only_the_architecture_says {_P}test_logits_equal_transformers",
    "CV-06": f"{_C}test_refuses_configurations_in_one_line {_P}test_logits_equal_transformers",
    "CV-07": f"{_P}test_logits_equal_transformers {_E}test_full_rank_native_equals_the_source "
             f"{_C}test_refuses_configurations_in_one_line",
    "CV-08": f"{_E}test_full_rank_native_equals_the_source",
    "CV-09": f"{_C}test_null_and_absent_keys_mean_their_defaults {_C}test_refuses_configurations_in_one_line",
    "CV-10": f"{_E}test_full_rank_native_equals_the_source {_E}test_stock_form_runs_in_transformers",
    "CV-11": f"{_E}test_full_rank_native_equals_the_source {_E}test_half_rank_steps_equal_one_pass_in_every_structure",
    "CV-13": f"{_R}test_a_tied_model_stays_tied {_E}test_stock_form_runs_in_transformers",
    "CV-14": f"{_R}test_a_tied_model_stays_tied {_R}test_a_head_that_contradicts_the_tied_flag_is_kept",
    "CV-15": f"{_WRITE}test_tied_transposed_and_sliced_tensors_are_saved",
    "CV-16": f"{_R}test_stored_frequencies_are_ignored_and_other_strange_tensors_are_not "
             f"{_SRC}test_old_rotary_buffers_are_no_obstacle",
    "CV-17": f"{_SRC}test_quantised_by_config {_SRC}test_quantised_by_tensors",
    "CV-18": f"{_SRC}test_an_adapter_names_its_base",
    "CV-19": f"{_C}test_refuses_configurations_in_one_line {_P}test_logits_equal_transformers "
             f"{_R}test_architectures_say_nothing_that_the_model_type_does_not",
    "CV-20": f"{_P}test_logits_equal_transformers {_R}test_a_window_that_is_switched_off_is_none",
    "CV-21": f"{_C}test_names_the_tensor_that_is_not_finite {_C}test_zero_and_repeated_rows_are_fine "
             f"{_C}test_follows_the_stored_type",
    "CV-22": f"{_R}test_what_float16_cannot_hold_is_named_and_not_written "
             f"{_WRITE}test_values_that_are_not_finite_are_refused_by_name",
    "CV-23": f"{_R}test_the_file_says_what_is_stored {_C}test_follows_the_stored_type",
    "CV-24": f"{_WRITE}test_tensors_leave_memory_as_they_come {_C}test_dry_run_touches_nothing "
             f"{_WRITE}test_too_little_space_is_told_before_the_work",
    "CV-25": f"{_C}test_refuses_flags_with_their_range {_C}test_quality_falls_with_the_rank_and_full_rank_loses_nothing",
    "CV-26": f"{_R}test_a_conversion_that_loses_too_much_says_so",
    "CV-27": f"{_E}test_stock_form_runs_in_transformers {_C}test_the_card_names_transformers_only_where_it_reads_the_form",
    "CV-28": f"{_C}test_writes_a_complete_checkpoint_and_says_what_it_cost "
             "model/test_cache_store.py::test_the_bytes_of_a_token_of_smollm_at_ratio_two",
    # Checkpoint format
    "FM-01": f"{_READ}test_absent_shards_are_all_listed_before_any_work {_READ}test_a_directory_named_like_weights",
    "FM-02": f"{_READ}test_stale_index_is_no_reason_to_guess",
    "FM-03": f"{_READ}test_swapped_shards {_READ}test_shard_lacks_a_tensor {_READ}test_never_in_the_index",
    "FM-04": f"{_READ}test_damaged_file_is_named_with_sizes {_READ}test_unfinished_download_beside",
    "FM-05": f"{_READ}test_flipped_bytes_are_read_as_they_are {_C}test_names_the_tensor_that_is_not_finite",
    "FM-06": f"{_READ}test_consolidated_copy_is_ignored_beside_an_index "
             f"{_READ}test_stray_single_file_beside_an_index_is_ambiguous {_READ}test_safetensors_win_over_bin",
    "FM-07": f"{_READ}test_odd_shard_names_come_from_the_index",
    "FM-08": f"{_READ}test_the_index_decides_between_duplicates {_READ}test_shards_without_index_are_refused",
    "FM-09": f"{_READ}test_metadata_is_optional {_WRITE}test_transformers_and_safetensors_read_it",
    "FM-10": f"{_READ}test_broken_headers",
    "FM-12": f"{_WRITE}test_a_write_that_fails_leaves_nothing "
             f"{_WRITE}test_a_killed_run_leaves_nothing_usable_and_is_cleaned_up {_C}test_a_full_disk_leaves_nothing",
    "FM-13": f"{_SRC}test_companions_are_found {_C}test_output_stands_alone_and_is_the_same_twice",
    "FM-14": f"{_GEN}test_an_id_past_the_table_fails_before_any_kernel {_GEN}test_rows_without_a_token_can_be_generated",
    "FM-16": f"{_CAL}test_an_unquantised_cache_ignores_the_scheme",
    # Calibrate
    "CA-01": f"{_CAL}test_a_layer_that_is_not_watched_stops_the_calibration {_OBS}test_layers_that_missed_tokens_are_listed",
    "CA-02": "checkpoint/test_kv_cache.py::test_a_type_never_calibrated_is_dynamic_and_said_loudly",
    "CA-04": "checkpoint/test_engine_scales.py::test_scales_that_do_not_agree_are_refused",
    "CA-06": f"{_OBS}test_an_outlier_of_any_sample_shows {_OBS}test_each_layer_sees_each_token_once_and_no_padding",
    "CA-07": f"{_CAL}test_fewer_sequences_than_asked_are_counted {_TXT}test_nothing_usable_is_an_error",
    "CA-08": f"{_TXT}test_no_more_is_tokenised_than_asked {_APP}test_failures_are_one_line",
    "CA-09": f"{_TXT}test_every_known_shape_of_a_record {_TXT}test_a_bad_record_is_named_by_its_line "
             f"{_TXT}test_empty_and_short_records_are_counted",
    "CA-10": f"{_TXT}test_bom_crlf_and_blank_last_line_change_nothing",
    "CA-11": f"{_QNT}test_values_beyond_a_static_range_saturate {_QNT}test_half_rounds_to_even {_QNT}test_cpu_and_gpu_agree "
             f"{_CAL}test_values_beyond_a_range_saturate_and_are_counted",
    "CA-12": f"{_QNT}test_fp8_past_448_saturates {_QNT}test_a_latent_that_is_not_finite_is_an_error",
    "CA-13": f"{_QNT}test_zeros_and_tiny_ranges_are_exact_and_finite {_CAL}test_silent_and_tiny_latents_survive_the_whole_way",
    "CA-14": f"{_CAL}test_small_latents_of_a_bfloat16_model_keep_their_scales",
    "CA-15": f"{_OBS}test_an_outlier_of_any_sample_shows {_OBS}test_an_observer_depends_on_neither_order_nor_batches",
    "CA-16": f"{_OBS}test_layers_of_different_ranks_show_their_own_channels_only",
    "CA-17": f"{_CAL}test_one_sequence_is_no_calibration {_CAL}test_one_line_many_times_is_no_trouble",
    "CA-18": f"{_CAL}test_a_huge_key_bias_is_judged_by_what_it_does {_CAL}test_a_channel_that_takes_the_range_is_warned_of",
    "CA-19": "calibration/test_schemes.py::test_rotary_keys_are_cached_as_asked "
             "checkpoint/test_kv_cache.py::test_a_scheme_comes_back_as_it_was_stored",
    "CA-20": f"{_TXT}test_exactly_one_bos model/test_chat_template.py::test_exactly_one_bos",
    # Evaluate
    "EV-02": "evaluation/test_requests.py::test_a_trailing_space_of_the_context_belongs_to_the_continuation",
    "EV-04": "evaluation/test_requests.py::test_one_bos_where_the_model_uses_one",
    "EV-05": "evaluation/test_scoring.py::test_all_tokens_of_a_continuation_must_be_greedy "
             "evaluation/test_report.py::test_tables_name_the_variant_the_models_and_the_verdict",
    "EV-06": "evaluation/test_tasks.py::test_lengths_of_endings_are_characters_and_bytes_apart",
    "EV-07": "evaluation/test_scoring.py::test_scores_are_those_of_each_request_alone",
    "EV-08": "evaluation/test_answers.py::test_each_extraction_is_compared_as_a_number",
    "EV-09": "evaluation/test_requests.py::test_text_ends_before_the_whole_stop_string",
    "EV-11": f"evaluation/test_report.py::test_unknown_numbers_are_null_and_a_broken_candidate_does_not_pass "
             f"{_EVAL}test_one_item_gives_valid_json",
    "EV-12": f"evaluation/test_scoring.py::test_output_that_is_not_finite_ends_the_run "
             f"{_EVAL}test_a_checkpoint_that_gives_nan_is_never_scored",
    "EV-13": "evaluation/test_tasks.py::test_an_unknown_name_is_answered_with_similar_ones "
             "evaluation/test_tasks.py::test_a_folder_or_file_with_a_task_s_name_plays_no_part",
    "EV-14": "evaluation/test_tasks.py::test_without_a_network_the_data_set_is_named",
    # Generate
    "GE-02": f"{_GEN}test_an_empty_prompt_starts_from_bos {_GEN}test_an_empty_prompt_without_bos_fails_alone "
             f"{_CMD}test_an_empty_or_missing_prompt_file",
    "GE-03": f"{_GEN}test_a_long_prompt_fails_alone {_CMD}test_a_prompt_over_the_limit_and_a_cut",
    "GE-04": f"{_GEN}test_the_context_is_used_to_its_last_token_and_no_further "
             "model/test_page_pool.py::test_pages_hold_what_a_contiguous_cache_does",
    "GE-05": f"{_GEN}test_any_end_of_text_ends",
    "GE-06": f"{_GEN}test_the_stream_is_the_whole_decode model/test_tokenizer.py::test_a_stream_never_shows_half_a_character",
    "GE-07": f"{_CMD}test_what_cannot_be_used_is_a_usage_error_that_names_it "
             "runtime/test_sampling.py::test_a_tiny_temperature_is_greedy_and_finite "
             "runtime/test_sampling.py::test_greedy_and_drawn_rows_in_one_batch",
    "GE-08": f"{_CMD}test_what_cannot_be_used_is_a_usage_error_that_names_it {_CMD}test_extreme_values_that_are_allowed",
    "GE-09": f"{_GEN}test_solo_runs_are_equal_and_neighbours_hardly_matter",
    "GE-10": f"{_GEN}test_every_step_equals_a_full_forward",
    # Kernels
    "KN-02": f"{_DEC}test_ranks_are_right_and_repeatable "
             f"{_DSP}test_what_triton_cannot_hold_is_replaced_before_the_first_token",
    "KN-03": f"{_DEC}test_no_head_reads_what_is_anothers_or_another_sequences",
    "KN-04": f"{_DEC}test_rotary_widths_that_fill_no_tile runtime/test_triton.py::test_head_widths_that_are_no_multiples_of_16",
    "KN-05": f"{_DEC}test_splits_without_keys_weigh_nothing {_DEC}test_large_logits_stay_finite",
    "KN-06": f"{_DEC}test_pages_beyond_two_gigabytes_are_found kernels/test_pages.py::test_byte_offsets_are_wider_than_32_bits",
    "KN-07": f"{_DEC}test_fp8_is_taken_apart_where_the_machine_cannot {_DSP}test_triton_by_name_on_a_cpu_is_an_error",
    "KN-08": f"{_DEC}test_the_scale_reaches_the_kernel kernels/test_pages.py::test_aliases_of_a_type_are_one_layout",
    "KN-09": f"{_DEC}test_every_softmax_scale_is_used "
             "kernels/test_aot.py::test_the_scale_of_scores_is_no_constant_of_the_compiled_kernel",
    # Command line
    "CL-01": f"{_APP}test_a_listing_into_a_closed_pipe_ends_quietly",
    "CL-02": f"{_APP}test_help_exits_zero_on_stdout {_APP}test_usage_errors_are_one_line_and_exit_two",
    "CL-03": f"{_R}test_help_with_the_oldest_typer_that_is_allowed {_APP}test_every_command_is_described",
    "CL-04": f"{_APP}test_failures_are_one_line {_SRC}test_path_like_text_never_reaches_the_network",
    "CL-05": f"{_APP}test_secrets_are_never_shown",
    "CL-06": f"{_APP}test_text_prints_in_the_c_locale {_CMD}test_no_locale_breaks_prompt_or_output",
    "CL-07": f"{_SRC}test_path_like_text_never_reaches_the_network {_SRC}test_a_file_in_place_of_a_folder",
    "CL-08": f"{_R}test_every_documented_command_parses {_R}test_all_commands_run_one_after_another_in_one_process",
    "CL-09": f"{_APP}test_control_c_exits_130 {_EVAL}test_an_interrupt_leaves_nothing_that_looks_complete "
             "calibration/test_schemes.py::test_a_stop_while_it_is_written_leaves_a_checkpoint_that_runs",
})  # fmt: skip
