//! An agent as small as can be: it keeps its lease and does what it is told, without workers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use trainyard_rendezvous::{
    Address, Advert, Backend, Decision, Epoch, Join, Place, Policy, RendezvousError, Report, Seat,
    Seen,
};

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

pub fn policy(min: u32, max: u32) -> Policy {
    let mut policy = Policy::new(min, max);
    policy.lease = Duration::from_secs(2);
    policy.last_call = Duration::from_millis(500);
    policy.regather = Duration::from_millis(300);
    policy.join_timeout = Duration::from_secs(20);
    policy
}

pub fn join(run: &str, node: &str, policy: &Policy) -> Join {
    let advert = Advert {
        node: node.into(),
        instance: u64::from(rand()),
        num_workers: 2,
        capabilities: BTreeSet::new(),
        node_rank: None,
        store: Address {
            host: format!("{node}.test"),
            port: 29500,
        },
    };
    Join {
        run: run.into(),
        policy: policy.clone(),
        advert,
        seen: Seen::default(),
        said: None,
    }
}

fn rand() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as u32
}

pub struct Agent {
    pub node: String,
    seat: Arc<dyn Seat>,
    decision: watch::Receiver<Decision>,
    task: JoinHandle<()>,
}

impl Agent {
    pub async fn start(backend: &dyn Backend, join: Join) -> Result<Agent, RendezvousError> {
        Agent::started(backend, join, true).await
    }

    /// One whose workers cannot be stopped: it never says that they were.
    pub async fn stuck(backend: &dyn Backend, join: Join) -> Result<Agent, RendezvousError> {
        Agent::started(backend, join, false).await
    }

    async fn started(
        backend: &dyn Backend,
        join: Join,
        stops: bool,
    ) -> Result<Agent, RendezvousError> {
        let (node, beat) = (join.advert.node.clone(), join.policy.heartbeat());
        let seat = backend.join(join).await?;
        let (shown, decision) = watch::channel(seat.decision());
        let task = tokio::spawn(follow(Arc::clone(&seat), beat, stops, shown));
        Ok(Agent {
            node,
            seat,
            decision,
            task,
        })
    }

    pub async fn wait_for(&self, what: &str, wanted: impl Fn(&Decision) -> bool) -> Decision {
        let mut decision = self.decision.clone();
        let waited = tokio::time::timeout(PATIENCE, decision.wait_for(wanted)).await;
        match waited {
            Ok(Ok(decision)) => decision.clone(),
            _ => panic!(
                "{} waits for {what} and has {:?}",
                self.node,
                *self.decision.borrow()
            ),
        }
    }

    /// Waits for a place in a world after `epoch`.
    pub async fn place_after(&self, epoch: Epoch) -> Place {
        let newer =
            |decision: &Decision| matches!(decision, Decision::Run(place) if place.epoch > epoch);
        match self.wait_for("a place", newer).await {
            Decision::Run(place) => place,
            _ => unreachable!("it was waited for"),
        }
    }

    pub async fn closed(&self) -> Decision {
        self.wait_for("the end", |decision| matches!(decision, Decision::Close(_)))
            .await
    }

    pub fn now(&self) -> Decision {
        self.decision.borrow().clone()
    }

    pub async fn report(&self, epoch: Epoch, report: Report) {
        self.seat.report(epoch, report).await;
    }

    /// Its loop stands still: it asks for nothing any more, but is there.
    pub fn hang(&self) {
        self.task.abort();
    }

    /// Waits until there is no way to the run any more.
    pub async fn is_cut(&mut self) -> bool {
        tokio::time::timeout(PATIENCE, &mut self.task).await.is_ok()
    }

    /// Vanishes.
    pub fn kill(self) {}

    pub async fn leave(self) {
        self.task.abort();
        self.seat.leave().await;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn follow(seat: Arc<dyn Seat>, beat: Duration, stops: bool, shown: watch::Sender<Decision>) {
    let mut beats = tokio::time::interval(beat);
    loop {
        tokio::select! {
            _ = beats.tick() => seat.heartbeat().await,
            next = seat.next() => {
                let Ok(decision) = next else {
                    return;
                };
                if let Decision::Wait { epoch, .. } | Decision::Lapsed { epoch } = &decision
                    && *epoch > Epoch(0)
                    && stops
                {
                    seat.report(*epoch, Report::Stopped).await;
                }
                shown.send_replace(decision);
            }
        }
    }
}
