//! The suite that every backend must pass.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use trainyard_rendezvous::{
    Backend, Decision, Epoch, Policy, Rejection, RendezvousError, Report, RunOutcome,
};

use super::agent::{Agent, join, policy};

/// Creates backends for the suite.
#[async_trait]
pub trait BackendFactory {
    /// A backend for a run that no agent has joined.
    async fn open(&self, run: &str) -> Arc<dyn Backend>;
}

pub async fn every_backend(factory: &dyn BackendFactory) {
    a_world_forms(&*factory.open("forms").await).await;
    a_standby_node_takes_the_rank_of_a_crashed_one(&*factory.open("dies").await).await;
    the_run_continues_with_fewer_nodes_when_one_leaves(&*factory.open("leaves").await).await;
    the_run_fails_after_the_maximum_number_of_restarts(&*factory.open("fails").await).await;
    a_late_agent_learns_that_the_run_succeeded(&*factory.open("succeeds").await).await;
    a_name_is_free_again_after_a_crash(&*factory.open("returns").await).await;
    the_run_continues_without_a_node_that_cannot_stop_its_workers(&*factory.open("stuck").await)
        .await;
    a_stalled_agent_does_not_rejoin(&*factory.open("stalls").await).await;
    a_different_policy_is_rejected(&*factory.open("differs").await).await;
}

async fn start(backend: &dyn Backend, run: &str, nodes: &[&str], policy: &Policy) -> Vec<Agent> {
    let starts = nodes
        .iter()
        .map(|node| Agent::start(backend, join(run, node, policy)));
    let agents = futures_util::future::join_all(starts).await;
    agents
        .into_iter()
        .map(|agent| agent.expect("the agent can join"))
        .collect()
}

async fn a_world_forms(backend: &dyn Backend) {
    let agents = start(backend, "forms", &["a", "b", "c"], &policy(3, 3)).await;
    let mut ranks = Vec::new();
    for agent in &agents {
        let assignment = agent.assignment_after(Epoch(0)).await;
        assert_eq!(
            (
                assignment.epoch,
                assignment.num_nodes,
                assignment.world_size
            ),
            (Epoch(1), 3, 6)
        );
        assert_eq!(assignment.first_rank, 2 * assignment.node_rank);
        assert_eq!(
            assignment.hosts_store,
            assignment.store.host == format!("{}.test", agent.node)
        );
        ranks.push(assignment.node_rank);
    }
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2]);
}

async fn a_standby_node_takes_the_rank_of_a_crashed_one(backend: &dyn Backend) {
    let policy = policy(2, 2);
    let mut agents = start(backend, "dies", &["a", "b"], &policy).await;
    let spare = start(backend, "dies", &["spare"], &policy).await.remove(0);
    let before = [
        agents[0].assignment_after(Epoch(0)).await,
        agents[1].assignment_after(Epoch(0)).await,
    ];
    spare
        .wait_for("standby", |decision| {
            matches!(decision, Decision::Standby { .. })
        })
        .await;
    agents.remove(0).kill();
    let survivor = agents[0].assignment_after(Epoch(1)).await;
    assert_eq!(
        survivor.node_rank, before[1].node_rank,
        "a survivor keeps its rank"
    );
    assert!(survivor.hosts_store, "a survivor hosts the store");
    let assignment = spare.assignment_after(Epoch(1)).await;
    assert_eq!(
        (assignment.epoch, assignment.node_rank),
        (survivor.epoch, before[0].node_rank)
    );
    assert_eq!(assignment.restarts, 0, "a lost node costs no restart");
}

async fn the_run_continues_with_fewer_nodes_when_one_leaves(backend: &dyn Backend) {
    let mut agents = start(backend, "leaves", &["a", "b", "c"], &policy(2, 3)).await;
    for agent in &agents {
        agent.assignment_after(Epoch(0)).await;
    }
    agents.remove(2).leave().await;
    for agent in &agents {
        let assignment = agent.assignment_after(Epoch(1)).await;
        assert_eq!((assignment.epoch, assignment.num_nodes), (Epoch(2), 2));
    }
}

async fn the_run_fails_after_the_maximum_number_of_restarts(backend: &dyn Backend) {
    let mut policy = policy(2, 2);
    policy.max_restarts = 1;
    let agents = start(backend, "fails", &["a", "b"], &policy).await;
    let failed = || Report::Failed {
        message: "rank 1 exited with code 7".into(),
        is_final: false,
    };
    let first = agents[0].assignment_after(Epoch(0)).await;
    agents[1].assignment_after(Epoch(0)).await;
    agents[1].report(first.epoch, failed()).await;
    let again = agents[0].assignment_after(first.epoch).await;
    assert_eq!((again.restarts, again.node_rank), (1, first.node_rank));
    agents[1].assignment_after(first.epoch).await;
    agents[0].report(again.epoch, failed()).await;
    for agent in &agents {
        let Decision::Close(RunOutcome::Failed {
            node,
            message,
            restarts,
        }) = agent.closed().await
        else {
            panic!("the run must fail, because no restart was left");
        };
        assert_eq!((node.as_str(), restarts), ("a", 1));
        assert!(message.contains("code 7"));
    }
}

async fn a_late_agent_learns_that_the_run_succeeded(backend: &dyn Backend) {
    let policy = policy(2, 2);
    let agents = start(backend, "succeeds", &["a", "b"], &policy).await;
    for agent in &agents {
        let assignment = agent.assignment_after(Epoch(0)).await;
        agent.report(assignment.epoch, Report::Succeeded).await;
    }
    for agent in &agents {
        assert_eq!(agent.closed().await, Decision::Close(RunOutcome::Succeeded));
    }
    let late = Agent::start(backend, join("succeeds", "late", &policy))
        .await
        .expect("the agent gets the outcome of the run");
    assert_eq!(late.closed().await, Decision::Close(RunOutcome::Succeeded));
}

async fn the_run_continues_without_a_node_that_cannot_stop_its_workers(backend: &dyn Backend) {
    let mut policy = policy(1, 2);
    policy.stop_timeout = Duration::from_secs(1);
    policy.join_timeout = Duration::from_secs(60);
    policy.max_restarts = 1;
    let (free, stuck) = tokio::join!(
        Agent::start(backend, join("stuck", "free", &policy)),
        Agent::start_stuck(backend, join("stuck", "stuck", &policy)),
    );
    let (free, stuck) = (
        free.expect("the agent can join"),
        stuck.expect("the agent can join"),
    );
    let first = free.assignment_after(Epoch(0)).await;
    stuck.assignment_after(Epoch(0)).await;
    assert_eq!(first.num_nodes, 2);
    let message = "rank 0 exited with code 7".into();
    free.report(
        first.epoch,
        Report::Failed {
            message,
            is_final: false,
        },
    )
    .await;
    assert_eq!(free.assignment_after(first.epoch).await.num_nodes, 1);
}

async fn a_stalled_agent_does_not_rejoin(backend: &dyn Backend) {
    let policy = policy(1, 2);
    let agents = start(backend, "stalls", &["a", "b"], &policy).await;
    for agent in &agents {
        agent.assignment_after(Epoch(0)).await;
    }
    agents[1].stall();
    let alone = agents[0].assignment_after(Epoch(1)).await;
    assert_eq!(alone.num_nodes, 1);
    // Long enough to rejoin and to invalidate the new world.
    tokio::time::sleep(8 * policy.lease).await;
    assert_eq!(agents[0].now(), Decision::Run(alone));
}

async fn a_name_is_free_again_after_a_crash(backend: &dyn Backend) {
    let policy = policy(1, 1);
    let mut agents = start(backend, "returns", &["a"], &policy).await;
    let first = agents[0].assignment_after(Epoch(0)).await;
    agents.remove(0).kill();
    let again = start(backend, "returns", &["a"], &policy).await.remove(0);
    assert!(
        again.assignment_after(Epoch(0)).await.epoch > first.epoch,
        "an epoch is never used twice"
    );
}

async fn a_different_policy_is_rejected(backend: &dyn Backend) {
    let agents = start(backend, "differs", &["a"], &policy(1, 2)).await;
    agents[0].assignment_after(Epoch(0)).await;
    let rejected = Agent::start(backend, join("differs", "b", &policy(1, 3))).await;
    match rejected.err() {
        Some(RendezvousError::Rejected(Rejection::PolicyMismatch { difference, .. })) => {
            assert_eq!(difference, "nnodes 1:3, not 1:2");
        }
        other => panic!("{other:?}"),
    }
    assert!(
        matches!(agents[0].now(), Decision::Run(_)),
        "the other agent is not affected"
    );
}
