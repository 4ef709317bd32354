# ruff: noqa: E501 - a sentence and its test stand on one line
"""Every promise that README and docs make under a name of its own (`- **Name** …`), and the test that runs it.

Commands are run by `test_docs.py`. A promise that is new needs a line here; one that is gone must leave it.
"""

import re

import pytest

from tests.commands import ROOT

#: By page and name: `folder/file::test` of each test that would fail if it were not so.
PROMISES = {
    "docs/tensor_meshes.md": {
        "4 and 8 ranks": "planner/test_tp_mesh.py::test_few_ranks_send_more_on_a_grid_and_many_less",
        "16 ranks and more in one domain of fast links, few tokens for each copy of the model": (
            "planner/test_tp_mesh.py::test_a_grid_of_64_ranks_is_faster_for_405b_in_one_domain"
        ),
        "Many tokens per rank": "planner/test_tp_mesh.py::test_many_tokens_are_for_less_tp",
        "Over nodes": "planner/test_tp_mesh.py::test_over_nodes_a_grid_gains_little",
    },
    "README.md": {
        "GPUs": "processes/test_gpu_parts.py::test_part_without_a_gpu",
        "Compilation": "processes/test_compile.py::test_what_cannot_be_compiled_is_refused_by_name",
        "Models": "processes/test_doctor.py::test_refusals_are_those_of_parallelize",
        "Trainer": "reliability/test_refusals.py::test_refused_on_every_rank_before_any_step",
        "Optimizers": "parity/test_optimizers.py::test_ranks_without_a_row_and_optimizers_that_need_all",
        "Adapters": "parity/test_lora.py::test_refused_by_name",
        "TRL": "parity/test_trl_generating.py::test_what_cannot_hold_is_refused",
        "A loss of the script's own": "parity/test_scripts_losses.py::test_same_numbers_as_one_process",
        "Modules around a model": "parity/test_wrapping.py::test_a_pipeline_is_refused",
        "Under `pp`": "parity/test_pipeline.py::test_generation",
    },
    "docs/data_parallel.md": {
        "Losses per token": "parity/test_variants.py::test_rows_of_unequal_length",
        "Heads that ignore the count": "parity/test_counts.py::test_same_numbers_as_one_process",
        "Losses that are sums": "parity/test_model_losses.py::test_ctc_of_unlike_lengths",
        "Detection and segmentation": "parity/test_model_losses.py::test_boxes_are_those_of_all_data_ranks",
        "Images, films and sounds that only some data ranks have": "parity/test_shared_towers.py::test_same_numbers_as_one_process",
        "Losses that compare all examples of a batch": "parity/test_paired_losses.py::test_same_numbers_as_one_process",
        "BatchNorm": "parity/test_model_losses.py::test_batch_norm_takes_the_mean_over_all_data_ranks",
        "A script's own loss": "parity/test_counts.py::test_same_numbers_as_one_process",
        "A loop of one's own": "parity/test_accelerate_loop.py::test_same_numbers_as_one_process",
        "The last batch": "parity/test_variants.py::test_last_batch_leaves_a_data_rank_one_row_or_none",
        "Rows joined to one": "parity/test_counts.py::test_same_numbers_as_one_process",
        "Iterable data sets": "parity/test_variants.py::test_iterable_dataset",
        "Rows of like length": "parity/test_variants.py::test_settings_together",
        "Gradients of 16 bits": "parity/test_half_sums.py::test_data_ranks",
    },
    "docs/idioms.md": {
        "Losses that compare rows": "parity/test_sentence_transformers.py::test_as_in_one_process",
        "Losses with weights of their own": "parity/test_sentence_transformers.py::test_weights_of_a_loss_are_refused",
        "Ragged batches": "parity/test_sentence_transformers.py::test_as_in_one_process",
        "Folders": "parity/test_sentence_transformers.py::test_as_in_one_process",
    },
    "docs/lora.md": {
        "Data ranks": "parity/test_lora.py::test_only_adapters_are_reduced",
        "Pipeline": "parity/test_lora_grid.py::test_same_seed_same_adapters",
        "Dropout": "parity/test_lora.py::test_dropout_masks",
        "`modules_to_save`": "parity/test_lora.py::test_modules_trained_whole",
        "DoRA": "parity/test_lora.py::test_dora",
        "PiSSA and OLoRA": "parity/test_lora.py::test_starts_from_the_base",
    },
    "docs/reference/models.md": {
        "tp": "parity/test_families.py::test_more_families",
        "sp": "parity/test_families.py::test_without_sequence_parallelism",
        "pp": "parity/test_families.py::test_more_families_in_a_pipeline",
    },
    "docs/recipes.md": {
        "Yours win.": "unit/test_recipe_cli.py::test_what_the_user_gives_wins",
        "Only what the script takes.": "unit/test_recipe_cli.py::test_a_script_of_ones_own",
        "Without a script": "processes/test_recipe_cli.py::test_a_new_users_path",
        "Several machines": "unit/test_recipe_cli.py::test_run_refuses_in_one_line",
        "`planner`": "planner/test_recipes.py::test_all_fit_by_the_planner_and_say_so",
        "`dry_run`": "planner/test_recipes.py::test_runs_dry",
        "`measured`": "planner/test_recipes.py::test_what_is_there",
    },
    "docs/saving.md": {
        "Optimizers of 8 or 4 bits": "parity/test_eight_bit.py::test_resumes",
        "From plain Trainer": "parity/test_resume.py::test_from_every_layout_to_every_layout",
        "To one process, or DDP": "parity/test_resume.py::test_the_runner_without_a_layout",
        "Streams": "parity/test_resume.py::test_a_stream_goes_on_at_the_next_row",
        "SIGTERM": "reliability/test_stopping.py::test_sigterm_saves_and_ends",
        "`torchrun --max-restarts=3`": "reliability/test_restarts.py::test_two_lost_ranks_change_nothing",
        "What fails beside the training": "reliability/test_beside.py::test_a_worker_of_the_data_loader",
    },
    "docs/trl.md": {
        "Ragged last batches.": "parity/test_trl.py::test_sft",
        "Evaluation": "parity/test_trl_generating.py::test_grpo",
        "Evaluation.": "parity/test_trl.py::test_dpo",
        "KTO": "parity/test_trl.py::test_kto",
        "Packing under `pp`.": "parity/test_trl.py::test_sft",
        "The head under `tp`.": "processes/test_log_probs.py::test_as_over_the_whole_vocabulary",
        "Reference log-probabilities": "parity/test_trl.py::test_dpo",
        "The ranks of one model": "parity/test_trl_generating.py::test_real_draws",
        "Stages": "parity/test_trl_generating.py::test_rloo",
        "Data ranks": "parity/test_trl_generating.py::test_data_ranks_draw_apart",
        "A generation batch": "parity/test_trl_generating.py::test_grpo",
        "Means over tokens": "parity/test_trl_generating.py::test_grpo",
    },
}
#: The same of sentences that have no name.
SENTENCES = {
    "README.md": {
        "With no spec nothing of Transformers or Accelerate changes.": "processes/test_runner.py::test_without_a_spec_nothing_is_patched",
        "Two different specs at once are an error that names both.": "reliability/test_refusals.py::test_a_second_spec_names_both_sources",
        "what is saved is an ordinary Hub folder.": "parity/test_variants.py::test_plain_transformers_loads_the_saved_folder",
        "a killed, stopped or restarted run loses nothing that was saved": "reliability/test_killed_saves.py::test_killed",
        "nodes may be lost and join": "reliability/test_elastic.py::test_as_undisturbed",
        "All ranks write in parallel.": "unit/test_writers.py::test_all_ranks_write_about_as_much",
        "others are refused after Trainer's first step": "parity/test_optimizers.py::test_states_that_no_checkpoint_holds_are_refused_before_the_first_is_due",
        "offloading](docs/zero.md#offloading) refuses some more": "parity/test_offload.py::test_an_optimizer_that_reads_rows_is_refused",
        "It reads the config alone, starts no processes": "unit/test_doctor.py::test_the_model_is_not_changed",
        "says what would fit if nothing does": "planner/test_search.py::test_nothing_fits",
    },
    "docs/experts.md": {
        "so it is that of one process with the whole batch": "parity/test_experts.py::test_balance_over_all_rows",
    },
    "docs/pipeline.md": {
        "every name stays the Hub's name": "processes/test_doctor.py::test_parameters_and_stages_are_those_of_parallelize",
        "simulates the first seven and takes the smallest bubble": "parity/test_pipeline.py::test_auto_takes_the_smallest_bubble_with_the_memory_of_1f1b",
        "A tied embedding lives on the first and on the last stage": "parity/test_pipeline.py::test_tied_embedding",
        "Later steps must make the same calls": "parity/test_pipeline.py::test_what_is_said_of_a_loss",
    },
    "docs/tensor_parallel.md": {
        "each attention and each MLP costs one sum forward and one backward: a test counts them.": "parity/test_tensor_parallel.py::test_one_collective_per_region_and_direction",
        "any vocabulary can be cut": "parity/test_tensor_parallel.py::test_vocabulary_and_length_that_tp_does_not_divide",
        "a recomputed layer finds its masks again": "processes/test_dropout.py::test_recomputed_layers_drop_what_they_dropped",
        "so accumulation counts nothing twice": "parity/test_tensor_parallel.py::test_fewer_kv_heads_than_ranks_with_norms",
    },
    "docs/saving.md": {
        "each keeps its slice: it starts as in one process.": "parity/test_new_heads.py::test_a_missing_head",
        "The numbers are those of one process, and random numbers": "parity/test_calls_of_rank_0.py::test_main_process_alone",
        "weights that rank 0 alone has changed before": "parity/test_calls_of_rank_0.py::test_weights_that_rank_0_has_changed_alone",
        "so a crash leaves the previous ones.": "reliability/test_killed_saves.py::test_what_they_have_left_is_whole",
        "What one rank cannot write stops the others": "reliability/test_full_disk.py::test_a_full_disk",
        "a path that is damaged is refused.": "reliability/test_damage.py::test_damage",
        "An error of the writer is raised there.": "parity/test_async_save.py::test_an_error_of_the_writer_surfaces",
        "mean what they do in one process.": "parity/test_resume.py::test_limits_and_the_best_model_as_in_one_process",
    },
    "docs/data_parallel.md": {
        "ranks 0 and 1 read the same sequences": "parity/test_processes.py::test_indices_are_of_data_ranks_and_the_main_process_is_one",
        "with a line that says what to shard by": "parity/test_processes.py::test_ranks_of_one_model_that_read_different_rows",
        "the losses agree with one process to 1e-6": "parity/test_trainer.py::test_same_numbers_as_one_process",
    },
    "docs/lora.md": {
        "It loads with `PeftModel.from_pretrained` in one process": "parity/test_lora.py::test_folder_loads_in_plain_peft",
        "change the parts that ranks store": "parity/test_lora.py::test_merging",
    },
}
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
BOUND = [
    (page, words, test)
    for table in (PROMISES, SENTENCES)
    for page, promises in table.items()
    for words, test in promises.items()
]


@pytest.mark.parametrize("page", PAGES)
def test_named_promises_have_tests(page):
    """And nothing here is said no more."""
    named = re.findall(r"^- \*\*(.+?)\*\*", (ROOT / page).read_text(), re.MULTILINE)
    assert sorted(PROMISES.get(page, {})) == sorted(named)


@pytest.mark.parametrize(("page", "words", "test"), BOUND, ids=[f"{page}: {words}" for page, words, _ in BOUND])
def test_the_promise_and_its_test_are_there(page, words, test):
    file, _, function = test.partition("::")
    assert words in " ".join((ROOT / page).read_text().split())
    assert re.search(rf"^def {function}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), test
