//! On two ranks the program computes the same as on one, replicated and sharded.

use std::process::Command;

#[test]
fn two_ranks_equal_one() {
    for degrees in [
        ["--parallelism.data_parallel_replicate_degree", "2"].as_slice(),
        &[
            "--parallelism.data_parallel_replicate_degree=1",
            "--parallelism.data_parallel_shard_degree=2",
        ],
    ] {
        let status = Command::new(env!("CARGO_BIN_EXE_{{name}}"))
            .args(["verify", "config.toml", "--nproc", "2"])
            .args(degrees)
            .status();
        assert!(status.is_ok_and(|status| status.success()), "{degrees:?}");
    }
}
