//! The environment of a rank: torchrun's variables, so that programs written for torchrun run unchanged.

use std::ffi::OsString;

use crate::{Job, openmp};

/// The epoch of an elastic run to which a worker belongs. Every new world has a new epoch.
const EPOCH: &str = "TRAINYARD_EPOCH";
/// The world size of an elastic run with its maximum number of nodes.
pub const MAX_WORLD_SIZE: &str = "TRAINYARD_MAX_WORLD_SIZE";
/// The world size of an elastic run with its minimum number of nodes.
pub const MIN_WORLD_SIZE: &str = "TRAINYARD_MIN_WORLD_SIZE";

/// The address of this node in an elastic run, at which other nodes reach its workers. `MASTER_ADDR` does not tell it:
/// that is the loopback address of the node's own agent.
pub const NODE_ADDR: &str = "TRAINYARD_NODE_ADDR";

/// The address of the store at which the ranks of a job find each other.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Master {
    /// `MASTER_ADDR`.
    pub addr: String,
    /// `MASTER_PORT`.
    pub port: u16,
}

/// The variables that a local rank gets in addition to those of the launcher. `is_set` tests whether the launcher has
/// a variable, because values that the user has set are not overwritten.
pub fn environment(
    job: &Job,
    local_rank: usize,
    master: &Master,
    is_set: impl Fn(&str) -> bool,
) -> Vec<(OsString, OsString)> {
    let rank = job.rank_of(local_rank).to_string();
    let local_rank = if job.virtual_local_rank {
        "0".to_owned()
    } else {
        (job.first_local_rank + local_rank).to_string()
    };
    let world_size = job.world_size().to_string();
    let nproc = job.nproc.to_string();
    let (node, num_nodes) = (job.node_rank.to_string(), job.num_nodes.to_string());
    let restarts = job.restart_count.to_string();
    let max_restarts = job.max_restarts.to_string();
    let port = master.port.to_string();
    let epoch = job.epoch.map(|epoch| epoch.to_string());
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
        // Without an agent, rank 0 serves the store itself.
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
    ];
    if !is_set("TORCH_NCCL_ASYNC_ERROR_HANDLING") {
        variables.push(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"));
    }
    // Ranks that share a node would oversubscribe its cores.
    if job.nproc > 1 && !is_set("OMP_NUM_THREADS") {
        variables.push(("OMP_NUM_THREADS", "1"));
    }
    variables.extend(openmp::environment(&is_set));
    variables.extend(epoch.as_deref().map(|epoch| (EPOCH, epoch)));
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
    fn all_variables_of_torchrun_are_set() {
        let mut job = Job::new("train.py", 4);
        job.run_id = "job7".into();
        let expected = [
            ("GOMP_SPINCOUNT", "1000"),
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
    fn threads_are_limited_only_if_ranks_share_a_node() {
        let alone = variables(&Job::new("p", 1), 0, &[]);
        assert!(!alone.contains_key("OMP_NUM_THREADS"));
        let chosen = variables(&Job::new("p", 2), 0, &["OMP_NUM_THREADS"]);
        assert!(!chosen.contains_key("OMP_NUM_THREADS"));
    }

    #[test]
    fn ranks_of_nodes_are_consecutive() {
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
    fn nodes_may_have_different_numbers_of_ranks() {
        let mut job = Job::new("p", 2);
        (job.num_nodes, job.node_rank) = (2, 1);
        job.ranks = Some(crate::RankRange {
            first: 8,
            world_size: 10,
        });
        let variables = variables(&job, 1, &[]);
        assert_eq!(variables["RANK"], "9");
        assert_eq!(variables["WORLD_SIZE"], "10");
        assert_eq!(variables["LOCAL_WORLD_SIZE"], "2");
    }

    #[test]
    fn variables_of_the_job_take_precedence() {
        let job = Job::new("p", 2).env("OMP_NUM_THREADS", "8");
        assert_eq!(variables(&job, 0, &[])["OMP_NUM_THREADS"], "8");
    }

    proptest! {
        #[test]
        fn environments_of_ranks_differ_in_the_rank_only(nproc in 2usize..300, a in 0usize..300, b in 0usize..300) {
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
