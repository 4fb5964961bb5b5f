//! What every backend must do.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use trainyard_rendezvous::{
    Backend, Close, Decision, Epoch, Policy, Refusal, RendezvousError, Report,
};

use crate::agent::{Agent, join, policy};

/// Where runs can be held.
#[async_trait]
pub trait Venue {
    /// A way to a run that nobody has joined.
    async fn open(&self, run: &str) -> Arc<dyn Backend>;
}

pub async fn every_backend(venue: &dyn Venue) {
    a_world_forms(&*venue.open("forms").await).await;
    a_parked_agent_takes_the_place_of_a_dead_one(&*venue.open("dies").await).await;
    a_smaller_world_goes_on_when_one_leaves(&*venue.open("leaves").await).await;
    restarts_are_counted_and_run_out(&*venue.open("fails").await).await;
    a_run_that_succeeded_is_over(&*venue.open("succeeds").await).await;
    a_name_is_free_when_its_holder_is_dead(&*venue.open("returns").await).await;
    nobody_waits_for_workers_that_cannot_be_stopped(&*venue.open("stuck").await).await;
    who_hangs_does_not_come_back(&*venue.open("hangs").await).await;
    who_asks_for_something_else_is_told(&*venue.open("differs").await).await;
}

async fn start(backend: &dyn Backend, run: &str, nodes: &[&str], policy: &Policy) -> Vec<Agent> {
    let starts = nodes
        .iter()
        .map(|node| Agent::start(backend, join(run, node, policy)));
    let agents = futures_util::future::join_all(starts).await;
    agents
        .into_iter()
        .map(|agent| agent.expect("it may join"))
        .collect()
}

async fn a_world_forms(backend: &dyn Backend) {
    let agents = start(backend, "forms", &["a", "b", "c"], &policy(3, 3)).await;
    let mut ranks = Vec::new();
    for agent in &agents {
        let place = agent.place_after(Epoch(0)).await;
        assert_eq!(
            (place.epoch, place.num_nodes, place.world_size),
            (Epoch(1), 3, 6)
        );
        assert_eq!(place.first_rank, 2 * place.node_rank);
        assert_eq!(
            place.holds_store,
            place.store.host == format!("{}.test", agent.node)
        );
        ranks.push(place.node_rank);
    }
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1, 2]);
}

async fn a_parked_agent_takes_the_place_of_a_dead_one(backend: &dyn Backend) {
    let policy = policy(2, 2);
    let mut agents = start(backend, "dies", &["a", "b"], &policy).await;
    let spare = start(backend, "dies", &["spare"], &policy).await.remove(0);
    let before = [
        agents[0].place_after(Epoch(0)).await,
        agents[1].place_after(Epoch(0)).await,
    ];
    spare
        .wait_for("parking", |decision| {
            matches!(decision, Decision::Park { .. })
        })
        .await;
    agents.remove(0).kill();
    let survivor = agents[0].place_after(Epoch(1)).await;
    assert_eq!(
        survivor.node_rank, before[1].node_rank,
        "a survivor keeps its rank"
    );
    assert!(survivor.holds_store, "the store is on a survivor");
    let place = spare.place_after(Epoch(1)).await;
    assert_eq!(
        (place.epoch, place.node_rank),
        (survivor.epoch, before[0].node_rank)
    );
    assert_eq!(place.restarts, 0, "a lost node costs no restart");
}

async fn a_smaller_world_goes_on_when_one_leaves(backend: &dyn Backend) {
    let mut agents = start(backend, "leaves", &["a", "b", "c"], &policy(2, 3)).await;
    for agent in &agents {
        agent.place_after(Epoch(0)).await;
    }
    agents.remove(2).leave().await;
    for agent in &agents {
        let place = agent.place_after(Epoch(1)).await;
        assert_eq!((place.epoch, place.num_nodes), (Epoch(2), 2));
    }
}

async fn restarts_are_counted_and_run_out(backend: &dyn Backend) {
    let mut policy = policy(2, 2);
    policy.max_restarts = 1;
    let agents = start(backend, "fails", &["a", "b"], &policy).await;
    let failed = || Report::Failed {
        message: "rank 1 exited with code 7".into(),
    };
    let first = agents[0].place_after(Epoch(0)).await;
    agents[1].place_after(Epoch(0)).await;
    agents[1].report(first.epoch, failed()).await;
    let again = agents[0].place_after(first.epoch).await;
    assert_eq!((again.restarts, again.node_rank), (1, first.node_rank));
    agents[1].place_after(first.epoch).await;
    agents[0].report(again.epoch, failed()).await;
    for agent in &agents {
        let Decision::Close(Close::Failed {
            node,
            message,
            restarts,
        }) = agent.closed().await
        else {
            panic!("no restart was left");
        };
        assert_eq!((node.as_str(), restarts), ("a", 1));
        assert!(message.contains("code 7"));
    }
}

async fn a_run_that_succeeded_is_over(backend: &dyn Backend) {
    let policy = policy(2, 2);
    let agents = start(backend, "succeeds", &["a", "b"], &policy).await;
    for agent in &agents {
        let place = agent.place_after(Epoch(0)).await;
        agent.report(place.epoch, Report::Succeeded).await;
    }
    for agent in &agents {
        assert_eq!(agent.closed().await, Decision::Close(Close::Succeeded));
    }
    let late = Agent::start(backend, join("succeeds", "late", &policy))
        .await
        .expect("it is told");
    assert_eq!(late.closed().await, Decision::Close(Close::Succeeded));
}

async fn nobody_waits_for_workers_that_cannot_be_stopped(backend: &dyn Backend) {
    let mut policy = policy(1, 2);
    policy.stop_within = Duration::from_secs(1);
    policy.join_timeout = Duration::from_secs(60);
    policy.max_restarts = 1;
    let (free, stuck) = tokio::join!(
        Agent::start(backend, join("stuck", "free", &policy)),
        Agent::stuck(backend, join("stuck", "stuck", &policy)),
    );
    let (free, stuck) = (free.expect("it may join"), stuck.expect("it may join"));
    let first = free.place_after(Epoch(0)).await;
    stuck.place_after(Epoch(0)).await;
    assert_eq!(first.num_nodes, 2);
    let message = "rank 0 exited with code 7".into();
    free.report(first.epoch, Report::Failed { message }).await;
    assert_eq!(free.place_after(first.epoch).await.num_nodes, 1);
}

async fn who_hangs_does_not_come_back(backend: &dyn Backend) {
    let policy = policy(1, 2);
    let agents = start(backend, "hangs", &["a", "b"], &policy).await;
    for agent in &agents {
        agent.place_after(Epoch(0)).await;
    }
    agents[1].hang();
    let alone = agents[0].place_after(Epoch(1)).await;
    assert_eq!(alone.num_nodes, 1);
    // Long enough to have come back and to have broken the next world.
    tokio::time::sleep(8 * policy.lease).await;
    assert_eq!(agents[0].now(), Decision::Run(alone));
}

async fn a_name_is_free_when_its_holder_is_dead(backend: &dyn Backend) {
    let policy = policy(1, 1);
    let mut agents = start(backend, "returns", &["a"], &policy).await;
    let first = agents[0].place_after(Epoch(0)).await;
    agents.remove(0).kill();
    let again = start(backend, "returns", &["a"], &policy).await.remove(0);
    assert!(
        again.place_after(Epoch(0)).await.epoch > first.epoch,
        "an epoch is never used twice"
    );
}

async fn who_asks_for_something_else_is_told(backend: &dyn Backend) {
    let agents = start(backend, "differs", &["a"], &policy(1, 2)).await;
    agents[0].place_after(Epoch(0)).await;
    let refused = Agent::start(backend, join("differs", "b", &policy(1, 3))).await;
    match refused.err() {
        Some(RendezvousError::Refused(Refusal::OtherPolicy { differs, .. })) => {
            assert_eq!(differs, "nnodes 1:3, not 1:2");
        }
        other => panic!("{other:?}"),
    }
    assert!(
        matches!(agents[0].now(), Decision::Run(_)),
        "nobody else is harmed"
    );
}
