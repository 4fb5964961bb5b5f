//! The server's side of the protocol, without I/O.

use std::time::Duration;

use crate::{
    Action, Event, LeaseClock, NodeInfo, Reason, Rejection, Request, RequestKind, Response,
    RunState, State, step,
};

/// The state machine of a server: answers requests and keeps the state of the run.
#[derive(Debug)]
pub struct Coordinator {
    /// `None` only inside [`Coordinator::step`].
    state: Option<State>,
}

/// The result of a request, or of time that passed.
#[derive(Debug)]
pub struct Reply {
    /// The run state changed: make it durable, then send every member its decision.
    pub publish: bool,
    /// The response to the sender, to be sent after that.
    pub response: Option<Response>,
    /// The sender does not know the newest decision: send it [`Coordinator::decision_for`], too.
    pub decision_for: Option<NodeInfo>,
    /// Why the run is in its current phase.
    pub reason: Reason,
}

impl Coordinator {
    /// Resumes a run from its newest state.
    pub fn resume(run_state: RunState, now: Duration) -> Coordinator {
        Coordinator {
            state: Some(State::resume(run_state, LeaseClock::Local, now)),
        }
    }

    /// Handles a request.
    pub fn handle(&mut self, request: Request, now: Duration) -> Reply {
        let id = request.id;
        let (joining, known) = match &request.kind {
            RequestKind::Join(join) => (Some(join.node_info.clone()), None),
            RequestKind::Heartbeat { known } => (None, *known),
            _ => (None, Some(u64::MAX)),
        };
        let node = request.node.clone();
        let mut reply = self.step(request.into_event(), id, now);
        // An agent without a lease gets its decision, too: it may be in a world that it never learned of.
        let is_rejected = match &reply.response {
            Some(Response::Rejected { rejection, .. }) => {
                !matches!(rejection, Rejection::NoLease { .. })
            }
            _ => false,
        };
        let sender = joining.or_else(|| self.state().member(&node).cloned());
        reply.decision_for =
            sender.filter(|_| !is_rejected && known < Some(self.run_state().version));
        reply
    }

    /// Handles the passage of time.
    pub fn tick(&mut self, now: Duration) -> Reply {
        self.step(Event::Tick, 0, now)
    }

    /// The message that carries the newest decision for an agent.
    pub fn decision_for(&self, agent: &NodeInfo) -> Response {
        let run_state = self.run_state();
        Response::Decision {
            version: run_state.version,
            decision: run_state.decision_for(agent),
        }
    }

    /// When to call [`Coordinator::tick`] if no request arrives before.
    pub fn wake_at(&self) -> Option<Duration> {
        self.state().wake_at()
    }

    /// The newest state of the run.
    pub fn run_state(&self) -> &RunState {
        self.state().run_state()
    }

    /// Whether an agent holds a lease.
    pub fn is_member(&self, agent: &NodeInfo) -> bool {
        self.state()
            .member(&agent.node)
            .is_some_and(|known| known.is(agent))
    }

    /// The agents that hold a lease.
    pub fn members(&self) -> impl Iterator<Item = &NodeInfo> {
        self.state().members()
    }

    fn step(&mut self, event: Event, id: u64, now: Duration) -> Reply {
        let mut reply = Reply {
            publish: false,
            response: None,
            decision_for: None,
            reason: Reason::TooFewNodes { have: 0, need: 0 },
        };
        let Some(state) = self.state.take() else {
            return reply;
        };
        let step = step(state, event, now);
        let version = step.state.run_state().version;
        (self.state, reply.reason) = (Some(step.state), step.reason);
        for action in step.actions {
            match action {
                Action::Publish => reply.publish = true,
                Action::Accept => reply.response = Some(Response::Ack { id, version }),
                Action::Reject(rejection) => {
                    reply.response = Some(Response::Rejected { id, rejection })
                }
            }
        }
        reply
    }

    fn state(&self) -> &State {
        match &self.state {
            Some(state) => state,
            None => unreachable!("a step does not panic, and puts the state back"),
        }
    }
}
