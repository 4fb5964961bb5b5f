//! The jobs to show: collected from the runtime directories on this node and from the heartbeats that agents share.

use std::collections::BTreeMap;

use serde::Serialize;
use trainyard_heartbeat::{Heartbeat, Stage};
use trainyard_launcher::{JobInfo, running_jobs};

use crate::command::job_ranks::{local_heartbeats, remote_ranks};

/// The jobs to show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// The jobs that were asked for.
    pub jobs: Vec<JobView>,
    /// The names of the other jobs on this node.
    pub others: Vec<String>,
}

/// A running job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobView {
    /// Its name (`--rdzv-id`).
    pub run_id: String,
    /// The number of nodes.
    pub num_nodes: usize,
    /// The number of ranks on all nodes.
    pub world_size: usize,
    /// How many times it was restarted.
    pub restarts: usize,
    /// How many restarts are allowed.
    pub max_restarts: usize,
    /// Its ranks, as far as they are known.
    pub ranks: Vec<RankView>,
    /// Reports of earlier failures, oldest first.
    pub faults: Vec<String>,
}

/// A rank of a job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankView {
    /// The global rank.
    pub rank: usize,
    /// The rank of its node.
    pub node: usize,
    /// What its training loop is doing.
    pub stage: Stage,
    /// The current step, or the last one.
    pub step: u64,
    /// The last step of the job.
    pub num_steps: u64,
    /// The last reported loss.
    pub loss: Option<f64>,
    /// Throughput in tokens per second.
    pub tokens_per_second: Option<f64>,
    /// Peak memory in bytes.
    pub memory_bytes: Option<u64>,
    /// The fraction of a step in which it does not wait for other ranks.
    pub busy_fraction: Option<f64>,
    /// Its position: its step and its collective.
    pub position: String,
}

impl RankView {
    fn new(node: usize, heartbeat: &Heartbeat) -> RankView {
        RankView {
            rank: heartbeat.rank,
            node,
            stage: heartbeat.stage,
            step: heartbeat.step,
            num_steps: heartbeat.num_steps,
            loss: heartbeat.loss,
            tokens_per_second: heartbeat.tokens_per_second,
            memory_bytes: heartbeat.peak_bytes,
            busy_fraction: heartbeat.busy_fraction,
            position: heartbeat.describe(),
        }
    }
}

/// The jobs with a launcher on this node, or those with this name.
pub fn snapshot(run: Option<&str>) -> Snapshot {
    let is_wanted = |info: &JobInfo| run.is_none_or(|run| run == info.run_id);
    let (found, others): (Vec<JobInfo>, Vec<JobInfo>) =
        running_jobs().into_iter().partition(is_wanted);
    let mut others: Vec<String> = others.into_iter().map(|info| info.run_id).collect();
    others.dedup();
    let local = found.iter().map(|info| (info, local_ranks(info)));
    let remote = found.iter().map(|info| (info, remote_views(info)));
    let mut jobs = BTreeMap::new();
    // Several agents of a job may be on one node: the heartbeats of their ranks are newer than what agents share.
    for (info, ranks) in local.chain(remote) {
        add(&mut jobs, info, ranks);
    }
    Snapshot {
        jobs: jobs.into_values().collect(),
        others,
    }
}

/// The ranks on this node, from their heartbeats.
fn local_ranks(info: &JobInfo) -> Vec<RankView> {
    let Some((memory, ranks)) = local_heartbeats(info) else {
        return Vec::new();
    };
    let heartbeats = ranks.filter_map(|rank| memory.read(rank));
    heartbeats
        .map(|heartbeat| RankView::new(info.node_rank, &heartbeat))
        .collect()
}

/// The ranks on other nodes, as far as agents share their heartbeats.
fn remote_views(info: &JobInfo) -> Vec<RankView> {
    let ranks = remote_ranks(info).into_iter();
    ranks
        .map(|(node, status)| RankView::new(node, &status.heartbeat))
        .collect()
}

/// What identifies a job: its name, and the store of its agents, or its launcher if it has no agents.
type Key = (String, Option<String>, u32);

fn key(info: &JobInfo) -> Key {
    let launcher = match info.world_store {
        Some(_) => 0,
        None => info.pid,
    };
    (info.run_id.clone(), info.world_store.clone(), launcher)
}

/// Adds what a launcher knows of its job. Ranks that are known already stay as they are.
fn add(jobs: &mut BTreeMap<Key, JobView>, info: &JobInfo, ranks: Vec<RankView>) {
    let job = jobs.entry(key(info)).or_insert_with(|| JobView {
        run_id: info.run_id.clone(),
        num_nodes: info.num_nodes,
        world_size: info.world_size,
        restarts: info.restarts,
        max_restarts: info.max_restarts,
        ranks: Vec::new(),
        faults: Vec::new(),
    });
    job.restarts = job.restarts.max(info.restarts);
    for fault in &info.faults {
        if !job.faults.contains(fault) {
            job.faults.push(fault.clone());
        }
    }
    for rank in ranks {
        if !job.ranks.iter().any(|known| known.rank == rank.rank) {
            job.ranks.push(rank);
        }
    }
    job.ranks.sort_by_key(|rank| rank.rank);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: usize, node: usize) -> RankView {
        let heartbeat = Heartbeat {
            rank,
            ..Heartbeat::default()
        };
        RankView::new(node, &heartbeat)
    }

    #[test]
    fn several_agents_of_a_job_are_merged() {
        let info = |node_rank| JobInfo {
            run_id: "llama7".into(),
            node_rank,
            num_nodes: 2,
            world_size: 2,
            world_store: Some("a:1".into()),
            faults: vec![format!("fault on {node_rank}")],
            ..JobInfo::default()
        };
        let mut jobs = BTreeMap::new();
        add(&mut jobs, &info(1), vec![rank(1, 1), rank(0, 0)]);
        add(&mut jobs, &info(0), vec![rank(0, 0), rank(1, 1)]);
        assert_eq!(jobs.len(), 1);
        let job = &jobs[&key(&info(0))];
        let ranks: Vec<usize> = job.ranks.iter().map(|rank| rank.rank).collect();
        assert_eq!(ranks, [0, 1]);
        assert_eq!(job.faults, ["fault on 1", "fault on 0"]);
    }
}
