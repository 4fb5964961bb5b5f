//! What a rank is told through its environment: torchrun's variables, so that programs written
//! for torchrun run unchanged.

use std::ffi::OsString;

use crate::Job;

/// Which world of an elastic run a worker belongs to: a number that is used once.
pub const EPOCH: &str = "TRAINYARD_EPOCH";
/// How many ranks an elastic run has when every machine is there.
pub const FULL_WORLD_SIZE: &str = "TRAINYARD_FULL_WORLD_SIZE";
/// How many it has when no more machines may be lost.
pub const LEAST_WORLD_SIZE: &str = "TRAINYARD_LEAST_WORLD_SIZE";

/// Where the ranks of a job meet.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Master {
    /// `MASTER_ADDR`.
    pub addr: String,
    /// `MASTER_PORT`.
    pub port: u16,
}

/// The variables that a local rank gets beside those of the launcher; `is_set` says which the launcher
/// itself has, because a user's own choice is not overwritten.
pub fn environment(
    job: &Job,
    local_rank: usize,
    master: &Master,
    is_set: impl Fn(&str) -> bool,
) -> Vec<(OsString, OsString)> {
    let rank = job.rank_of(local_rank).to_string();
    let local_rank = local_rank.to_string();
    let world_size = job.world_size().to_string();
    let nproc = job.nproc.to_string();
    let (node, num_nodes) = (job.node_rank.to_string(), job.num_nodes.to_string());
    let restarts = job.restart_count.to_string();
    let max_restarts = job.max_restarts.to_string();
    let port = master.port.to_string();
    let mut variables = vec![
        ("RANK", rank.as_str()),
        ("LOCAL_RANK", &local_rank),
        ("ROLE_RANK", &rank),
        ("GROUP_RANK", &node),
        ("WORLD_SIZE", &world_size),
        ("LOCAL_WORLD_SIZE", &nproc),
        ("ROLE_WORLD_SIZE", &world_size),
        ("GROUP_WORLD_SIZE", &num_nodes),
        ("ROLE_NAME", &job.role),
        ("MASTER_ADDR", &master.addr),
        ("MASTER_PORT", &port),
        ("TORCHELASTIC_RESTART_COUNT", &restarts),
        ("TORCHELASTIC_MAX_RESTARTS", &max_restarts),
        ("TORCHELASTIC_RUN_ID", &job.run_id),
        // Rank 0 serves the store itself: there is no agent's store to connect to.
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ];
    if !is_set("TORCH_NCCL_ASYNC_ERROR_HANDLING") {
        variables.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"));
    }
    // N ranks with as many threads as cores each would only get in each other's way.
    if job.nproc > 1 && !is_set("OMP_NUM_THREADS") {
        variables.push(("OMP_NUM_THREADS", "1"));
    }
    variables
        .into_iter()
        .map(|(key, value)| (key.into(), value.into()))
        .chain(job.env.iter().cloned())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn variables(job: &Job, rank: usize, set: &[&str]) -> BTreeMap<String, String> {
        let master = Master {
            addr: job.master_addr.clone(),
            port: 29500,
        };
        environment(job, rank, &master, |name| set.contains(&name))
            .into_iter()
            .map(|(key, value)| (key.into_string().unwrap(), value.into_string().unwrap()))
            .collect()
    }

    #[test]
    fn every_variable_of_torchrun_is_there() {
        let mut job = Job::new("train.py", 4);
        job.run_id = "job7".into();
        let expected = [
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("LOCAL_RANK", "3"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
            ("OMP_NUM_THREADS", "1"),
            ("RANK", "3"),
            ("ROLE_NAME", "default"),
            ("ROLE_RANK", "3"),
            ("ROLE_WORLD_SIZE", "4"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_RUN_ID", "job7"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("WORLD_SIZE", "4"),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(variables(&job, 3, &[]), BTreeMap::from(expected));
    }

    #[test]
    fn threads_are_limited_only_where_ranks_share_the_cores() {
        let alone = variables(&Job::new("p", 1), 0, &[]);
        assert!(!alone.contains_key("OMP_NUM_THREADS"));
        let chosen = variables(&Job::new("p", 2), 0, &["OMP_NUM_THREADS"]);
        assert!(!chosen.contains_key("OMP_NUM_THREADS"));
    }

    #[test]
    fn machines_follow_one_another() {
        let mut job = Job::new("p", 4);
        (job.num_nodes, job.node_rank) = (3, 2);
        (job.max_restarts, job.restart_count) = (5, 1);
        let variables = variables(&job, 1, &[]);
        for (name, value) in [
            ("RANK", "9"),
            ("ROLE_RANK", "9"),
            ("LOCAL_RANK", "1"),
            ("WORLD_SIZE", "12"),
            ("ROLE_WORLD_SIZE", "12"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("GROUP_RANK", "2"),
            ("GROUP_WORLD_SIZE", "3"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
            ("TORCHELASTIC_MAX_RESTARTS", "5"),
        ] {
            assert_eq!(variables[name], value, "{name}");
        }
    }

    #[test]
    fn machines_may_have_more_ranks_than_this_one() {
        let mut job = Job::new("p", 2);
        (job.num_nodes, job.node_rank) = (2, 1);
        job.ranks = Some(crate::Ranks {
            first: 8,
            world_size: 10,
        });
        let variables = variables(&job, 1, &[]);
        assert_eq!(variables["RANK"], "9");
        assert_eq!(variables["WORLD_SIZE"], "10");
        assert_eq!(variables["LOCAL_WORLD_SIZE"], "2");
    }

    #[test]
    fn extra_variables_win() {
        let job = Job::new("p", 2).env("OMP_NUM_THREADS", "8");
        assert_eq!(variables(&job, 0, &[])["OMP_NUM_THREADS"], "8");
    }

    proptest! {
        #[test]
        fn ranks_differ_in_their_rank_only(nproc in 2usize..300, a in 0usize..300, b in 0usize..300) {
            let (a, b) = (a % nproc, b % nproc);
            let job = Job::new("p", nproc);
            let (of_a, mut of_b) = (variables(&job, a, &[]), variables(&job, b, &[]));
            for key in ["RANK", "LOCAL_RANK", "ROLE_RANK"] {
                prop_assert_eq!(of_b.insert(key.into(), a.to_string()), Some(b.to_string()));
            }
            prop_assert_eq!(of_a, of_b);
        }
    }
}
