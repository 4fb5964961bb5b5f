//! The programs as users start them: verify, dry-run, run, train.

mod damaged;
mod dry_run;
mod guard;
mod identity;
mod killed;
mod limits;
mod plan;
mod train;
mod validation;
mod verify;

use std::process::Command;

use libtest_mimic::{Failed, Trial};
use trainyard_conformance::full_only;
use trainyard_conformance::programs::{find, repository};

type Test = fn() -> Result<(), Failed>;

/// One test for each use of a program.
pub fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 38] = [
        ("verify_passes", verify::verify_passes),
        (
            "verify_detects_an_unreduced_gradient",
            verify::verify_notices,
        ),
        ("verify_shrinks_a_70b_config", verify::verify_shrinks),
        ("verify_passes_for_every_zero_stage", verify::verify_sharded),
        ("verify_passes_for_parameter_servers", verify::verify_served),
        (
            "verify_passes_for_tensor_and_context_parallelism",
            verify::verify_layers,
        ),
        ("dry_run_of_a_70b_model", dry_run::dry_run_70b),
        (
            "dry_run_of_a_sharded_70b_model",
            dry_run::dry_run_70b_sharded,
        ),
        (
            "dry_run_of_a_tensor_parallel_405b_model",
            dry_run::dry_run_405b,
        ),
        (
            "dry_run_of_every_stage_of_a_405b_pipeline",
            dry_run::dry_run_405b_pipeline,
        ),
        (
            "a_dry_run_predicts_the_measured_peak",
            dry_run::dry_run_predicts,
        ),
        (
            "any_model_is_planned_by_dry_runs",
            plan::any_model_is_planned_by_dry_runs,
        ),
        (
            "four_ranks_train_sequences_that_do_not_fit_on_one",
            limits::long_context,
        ),
        (
            "a_model_too_large_for_ddp_trains_sharded_and_offloaded",
            limits::too_big_for_one,
        ),
        ("training_learns", train::training_learns),
        ("the_cnn_trains", train::cnn_trains),
        ("the_memory_report_is_written", train::memory_is_drawn),
        ("a_resumed_run_is_bit_identical", train::resume),
        (
            "a_checkpoint_loads_on_another_number_of_ranks",
            train::resume_elsewhere,
        ),
        (
            "a_sharded_checkpoint_loads_on_any_mesh",
            train::resume_sharded,
        ),
        (
            "an_offloaded_job_resumes_and_is_resumed",
            train::resume_offloaded,
        ),
        ("epochs_give_the_number_of_steps", train::epochs),
        (
            "a_dry_run_counts_offloaded_states",
            dry_run::offloaded_states,
        ),
        ("a_failed_final_save_is_an_error", train::lost_end),
        ("a_damaged_checkpoint_is_skipped", damaged::falls_back),
        (
            "a_changed_job_resumes_only_if_allowed",
            identity::changes_need_a_word,
        ),
        ("a_second_job_in_a_folder_is_rejected", identity::two_jobs),
        (
            "ranks_with_different_configs_are_rejected",
            identity::ranks_agree_on_the_job,
        ),
        ("a_step_that_is_not_finite_ends_the_job", guard::stops),
        ("a_step_that_is_not_finite_is_skipped", guard::skips),
        ("a_step_that_is_computed_again_tells_why", guard::reruns),
        (
            "a_step_that_is_not_finite_is_rolled_back",
            guard::rolls_back,
        ),
        ("a_flipped_bit_is_found_and_its_rank_named", guard::drift),
        (
            "replicas_that_differ_are_rolled_back",
            guard::drift_is_rolled_back,
        ),
        ("divergence_ends_the_job", guard::budget_ends_the_job),
        (
            "validation_falls_back_to_the_training_data",
            validation::falls_back_to_training_data,
        ),
        (
            "missing_validation_data_is_found_at_the_start",
            validation::missing_data_is_found_at_the_start,
        ),
        (
            "a_killed_rank_is_named_and_the_others_stop",
            killed::killed_rank,
        ),
    ];
    let full: [(&str, Test); 1] = [(
        "verify_passes_for_several_axes_and_methods",
        verify::verify_all_layers,
    )];
    let trial = |(name, test)| Trial::test(format!("programs::{name}"), test);
    let full = full.into_iter().map(trial).map(full_only);
    tests.into_iter().map(trial).chain(full).collect()
}

fn trainyard(line: &str) -> Result<Command, Failed> {
    let mut command = Command::new(find("trainyard")?);
    command
        .args(line.split_whitespace())
        .current_dir(repository("."));
    Ok(command)
}
