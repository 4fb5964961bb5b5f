//! The programs as people use them: verify, dry-run, run, train.

mod dry_run;
mod killed;
mod limits;
mod train;
mod verify;

use std::process::{Command, ExitCode};

use libtest_mimic::{Failed, Trial};
use trainyard_conformance::in_turn;
use trainyard_conformance::programs::{find, repository};

type Test = fn() -> Result<(), Failed>;

fn main() -> ExitCode {
    let tests: [(&str, Test); 20] = [
        ("verify_passes", verify::verify_passes),
        (
            "verify_notices_an_unreduced_gradient",
            verify::verify_notices,
        ),
        ("verify_shrinks_a_70b_config", verify::verify_shrinks),
        (
            "verify_passes_for_every_stage_of_sharding",
            verify::verify_sharded,
        ),
        (
            "verify_passes_for_shared_layers_and_sequences",
            verify::verify_layers,
        ),
        (
            "a_70b_model_is_dry_run_on_this_machine",
            dry_run::dry_run_70b,
        ),
        (
            "a_70b_model_sharded_is_dry_run_too",
            dry_run::dry_run_70b_sharded,
        ),
        (
            "a_405b_model_with_shared_layers_is_dry_run_too",
            dry_run::dry_run_405b,
        ),
        (
            "every_stage_of_a_405b_pipeline_is_dry_run",
            dry_run::dry_run_405b_pipeline,
        ),
        (
            "a_dry_run_predicts_the_measured_peak",
            dry_run::dry_run_predicts,
        ),
        (
            "four_ranks_train_sequences_that_one_cannot_hold",
            limits::long_context,
        ),
        (
            "too_big_for_ddp_trains_sharded_and_offloaded",
            limits::too_big_for_one,
        ),
        ("training_learns", train::training_learns),
        ("the_cnn_trains_too", train::cnn_trains),
        ("the_memory_of_a_step_is_drawn", train::memory_is_drawn),
        ("a_resumed_run_goes_on_to_the_bit", train::resume),
        (
            "a_checkpoint_fits_another_number_of_ranks",
            train::resume_elsewhere,
        ),
        (
            "a_sharded_checkpoint_fits_any_other_mesh",
            train::resume_sharded,
        ),
        (
            "a_last_state_that_cannot_be_saved_is_an_error",
            train::lost_end,
        ),
        (
            "a_killed_rank_is_named_and_the_others_end",
            killed::killed_rank,
        ),
    ];
    in_turn(
        tests
            .into_iter()
            .map(|(name, test)| Trial::test(name, test))
            .collect(),
    )
}

fn trainyard(line: &str) -> Result<Command, Failed> {
    let mut command = Command::new(find("trainyard")?);
    command
        .args(line.split_whitespace())
        .current_dir(repository("."));
    Ok(command)
}
