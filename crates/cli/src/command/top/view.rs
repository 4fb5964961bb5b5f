//! What there is to show, from what launchers and ranks leave on this machine and agents tell each other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;
use trainyard_elastic::{Notice, notices};
use trainyard_trace::{Pulse, Sighting, Stage};

/// A job.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JobView {
    /// Its name.
    pub run_id: String,
    /// How many machines it has.
    pub num_nodes: usize,
    /// How many ranks it has on all of them.
    pub world_size: usize,
    /// How often it was started again.
    pub restarts: usize,
    /// How often it may be.
    pub max_restarts: usize,
    /// Its ranks, as far as anything is known of them.
    pub ranks: Vec<RankView>,
    /// What happened before, the last of it last.
    pub faults: Vec<String>,
}

/// A rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankView {
    /// Which.
    pub rank: usize,
    /// The machine it is on.
    pub node: usize,
    /// What its loop is at.
    pub stage: Stage,
    /// The step it is in, or was in last.
    pub step: u64,
    /// The last step there is to be.
    pub num_steps: u64,
    /// The loss that was reported last.
    pub loss: Option<f64>,
    /// Tokens per second.
    pub tokens_per_second: Option<f64>,
    /// The most bytes held so far.
    pub memory_bytes: Option<u64>,
    /// The part of a step in which it does not wait for others.
    pub work_share: Option<f64>,
    /// Where it is: its step and its collective.
    pub whereabouts: String,
}

impl RankView {
    fn new(node: usize, pulse: &Pulse) -> RankView {
        RankView {
            rank: pulse.rank,
            node,
            stage: pulse.stage,
            step: pulse.step,
            num_steps: pulse.num_steps,
            loss: pulse.loss,
            tokens_per_second: pulse.tokens_per_second,
            memory_bytes: pulse.peak_bytes,
            work_share: pulse.work_share,
            whereabouts: pulse.whereabouts(),
        }
    }
}

/// The jobs that have launchers here, or those of one name.
pub fn jobs(run: Option<&str>) -> Vec<JobView> {
    let wanted = |notice: &Notice| run.is_none_or(|run| run == notice.run_id);
    let found = notices().into_iter().filter(|(_, notice)| wanted(notice));
    let found: Vec<(PathBuf, Notice)> = found.collect();
    let here = found
        .iter()
        .map(|(folder, notice)| (notice, here(folder, notice)));
    let elsewhere = found.iter().map(|(_, notice)| (notice, elsewhere(notice)));
    let mut jobs = BTreeMap::new();
    // Agents of one job may be on one machine: what their ranks say themselves goes first.
    for (notice, ranks) in here.chain(elsewhere) {
        add(&mut jobs, notice, ranks);
    }
    jobs.into_values().collect()
}

/// The ranks of this machine, from their pulses.
fn here(folder: &Path, notice: &Notice) -> Vec<RankView> {
    let ranks = notice.first_rank..notice.first_rank + notice.num_ranks;
    let pulses = ranks.filter_map(|rank| Pulse::read(folder, rank));
    pulses
        .map(|pulse| RankView::new(notice.node_rank, &pulse))
        .collect()
}

/// The ranks of other machines, from the store of the job, if it has one.
fn elsewhere(notice: &Notice) -> Vec<RankView> {
    let Some((host, port)) = notice.store.as_ref().filter(|_| notice.num_nodes > 1) else {
        return Vec::new();
    };
    let told = trainyard_agent::told(host, *port, notice.num_nodes).unwrap_or_default();
    let rank = |(node, seen): &(usize, Sighting)| RankView::new(*node, &seen.pulse);
    told.iter().map(rank).collect()
}

/// What tells jobs apart: their names, and their stores, or their launchers if they have no store.
type Key = (String, Option<(String, u16)>, u32);

fn key(notice: &Notice) -> Key {
    let launcher = match notice.store {
        Some(_) => 0,
        None => notice.pid,
    };
    (notice.run_id.clone(), notice.store.clone(), launcher)
}

/// What is known already stays.
fn add(jobs: &mut BTreeMap<Key, JobView>, notice: &Notice, ranks: Vec<RankView>) {
    let job = jobs.entry(key(notice)).or_insert_with(|| JobView {
        run_id: notice.run_id.clone(),
        num_nodes: notice.num_nodes,
        world_size: notice.world_size,
        restarts: notice.restarts,
        max_restarts: notice.max_restarts,
        ranks: Vec::new(),
        faults: Vec::new(),
    });
    job.restarts = job.restarts.max(notice.restarts);
    for fault in &notice.faults {
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
        let pulse = Pulse {
            rank,
            ..Pulse::default()
        };
        RankView::new(node, &pulse)
    }

    #[test]
    fn two_agents_of_a_job_make_one_job() {
        let notice = |node_rank| Notice {
            run_id: "llama7".into(),
            node_rank,
            num_nodes: 2,
            world_size: 2,
            store: Some(("a".into(), 1)),
            faults: vec![format!("fault on {node_rank}")],
            ..Notice::default()
        };
        let mut jobs = BTreeMap::new();
        add(&mut jobs, &notice(1), vec![rank(1, 1), rank(0, 0)]);
        add(&mut jobs, &notice(0), vec![rank(0, 0), rank(1, 1)]);
        assert_eq!(jobs.len(), 1);
        let job = &jobs[&key(&notice(0))];
        let ranks: Vec<usize> = job.ranks.iter().map(|rank| rank.rank).collect();
        assert_eq!(ranks, [0, 1]);
        assert_eq!(job.faults, ["fault on 1", "fault on 0"]);
    }
}
