//! A minimal agent for tests: it keeps its lease and follows its decisions, without workers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use trainyard_rendezvous::{
    Address, Backend, Decision, Epoch, Join, Membership, NodeInfo, Policy, RankAssignment,
    RendezvousError, Report, Watermark,
};

/// Longer than anything in these tests takes.
const TIMEOUT: Duration = Duration::from_secs(30);

pub fn policy(min: u32, max: u32) -> Policy {
    let mut policy = Policy::new(min, max);
    policy.lease = Duration::from_secs(2);
    policy.last_call_timeout = Duration::from_millis(500);
    policy.rejoin_timeout = Duration::from_millis(300);
    policy.join_timeout = Duration::from_secs(20);
    policy
}

pub fn join(run: &str, node: &str, policy: &Policy) -> Join {
    let node_info = NodeInfo {
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
        node_info,
        watermark: Watermark::default(),
        last_report: None,
    }
}

fn rand() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) as u32
}

pub struct Agent {
    pub node: String,
    membership: Arc<dyn Membership>,
    decision: watch::Receiver<Decision>,
    task: JoinHandle<()>,
}

impl Agent {
    pub async fn start(backend: &dyn Backend, join: Join) -> Result<Agent, RendezvousError> {
        Agent::start_with(backend, join, true).await
    }

    /// Starts an agent whose workers cannot be stopped: it never reports that they were.
    pub async fn start_stuck(backend: &dyn Backend, join: Join) -> Result<Agent, RendezvousError> {
        Agent::start_with(backend, join, false).await
    }

    async fn start_with(
        backend: &dyn Backend,
        join: Join,
        stops: bool,
    ) -> Result<Agent, RendezvousError> {
        let (node, interval) = (join.node_info.node.clone(), join.policy.heartbeat());
        let membership = backend.join(join).await?;
        let (decisions, decision) = watch::channel(membership.decision());
        let task = tokio::spawn(follow(Arc::clone(&membership), interval, stops, decisions));
        Ok(Agent {
            node,
            membership,
            decision,
            task,
        })
    }

    pub async fn wait_for(&self, what: &str, is_wanted: impl Fn(&Decision) -> bool) -> Decision {
        let mut decision = self.decision.clone();
        let waited = tokio::time::timeout(TIMEOUT, decision.wait_for(is_wanted)).await;
        match waited {
            Ok(Ok(decision)) => decision.clone(),
            _ => panic!(
                "{} waits for {what}, but its decision is {:?}",
                self.node,
                *self.decision.borrow()
            ),
        }
    }

    /// Waits for a rank in a world after `epoch`.
    pub async fn assignment_after(&self, epoch: Epoch) -> RankAssignment {
        let is_newer = |decision: &Decision| matches!(decision, Decision::Run(assignment) if assignment.epoch > epoch);
        match self.wait_for("a rank", is_newer).await {
            Decision::Run(assignment) => assignment,
            _ => unreachable!("only such a decision ends the wait"),
        }
    }

    /// Waits for the end of the run.
    pub async fn closed(&self) -> Decision {
        self.wait_for("the end of the run", |decision| {
            matches!(decision, Decision::Close(_))
        })
        .await
    }

    pub fn now(&self) -> Decision {
        self.decision.borrow().clone()
    }

    pub async fn report(&self, epoch: Epoch, report: Report) {
        self.membership.report(epoch, report).await;
    }

    /// Stalls the agent's loop: it sends no heartbeats, but its process lives.
    pub fn stall(&self) {
        self.task.abort();
    }

    /// Waits until the session has ended with an error.
    pub async fn is_cut_off(&mut self) -> bool {
        tokio::time::timeout(TIMEOUT, &mut self.task).await.is_ok()
    }

    /// Ends the agent without a message, as a crash does.
    pub fn kill(self) {}

    pub async fn leave(self) {
        self.task.abort();
        self.membership.leave().await;
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn follow(
    membership: Arc<dyn Membership>,
    interval: Duration,
    stops: bool,
    decisions: watch::Sender<Decision>,
) {
    let mut heartbeats = tokio::time::interval(interval);
    loop {
        tokio::select! {
            _ = heartbeats.tick() => membership.heartbeat().await,
            next = membership.next() => {
                let Ok(decision) = next else {
                    return;
                };
                if let Decision::Wait { epoch, .. } | Decision::LeaseExpired { epoch } = &decision
                    && *epoch > Epoch(0)
                    && stops
                {
                    membership.report(*epoch, Report::Stopped).await;
                }
                decisions.send_replace(decision);
            }
        }
    }
}
