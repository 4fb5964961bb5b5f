//! The state machine of the agent: which actions follow from an event.
//!
//! Nothing here waits, starts processes or sends signals. An agent has workers of at most one epoch. Whatever the
//! rendezvous decides meanwhile, the agent first stops the old workers and reports that, and only then proceeds.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use trainyard_rendezvous::{Decision, Epoch, RankAssignment, RendezvousError, Report, RunOutcome};

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The rendezvous made a new decision.
    Decided(Decision),
    /// The agent cannot reach the run any more.
    Disconnected(RendezvousError),
    /// A worker failed; others may still run.
    WorkerFailed {
        /// Which rank failed and how, and its last lines.
        message: String,
        /// Whether a restart would not help.
        is_final: bool,
    },
    /// All workers have exited.
    WorkersExited,
    /// The agent did not start workers, because their rank assignment was obsolete by then.
    StartSkipped,
    /// The agent received a signal.
    Signal(Signal),
    /// Time has passed.
    Tick,
}

/// Something that the agent must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start workers with these ranks.
    Start(RankAssignment),
    /// Send a signal to all workers.
    Signal(Signal),
    /// Send SIGTERM to all workers because their world is broken: they have nothing to finish.
    Abort,
    /// Report the state of the workers of an epoch. Before [`Report::Stopped`] the agent clears the store: no worker
    /// of the next world can have connected by then.
    Report(Epoch, Report),
    /// Leave the run.
    Leave,
    /// Exit.
    Exit(AgentExit),
}

/// Why an agent exits.
#[derive(Clone, Debug, PartialEq)]
pub enum AgentExit {
    /// The run ended.
    RunEnded(RunOutcome),
    /// A signal interrupted the agent.
    Interrupted(Signal),
    /// The agent cannot reach the run.
    Disconnected(RendezvousError),
}

/// The time that workers have between SIGTERM and SIGKILL.
#[derive(Clone, Copy, Debug)]
pub struct GracePeriods {
    /// When the agent leaves the run: enough time to save a checkpoint.
    pub leave: Duration,
    /// When the world is broken: workers may block in a collective with a rank that is gone.
    pub abort: Duration,
}

/// The state of an agent.
#[derive(Clone, Debug)]
pub struct State {
    grace: GracePeriods,
    workers: WorkersState,
    goal: Goal,
    /// The newest epoch for which the agent reported that its workers have stopped.
    stopped: Epoch,
    /// The newest epoch in which the agent started workers.
    started: Epoch,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum WorkersState {
    None,
    Running(Epoch),
    /// The workers have been signaled; at this time the agent kills the remaining ones. `None`: it already has.
    Stopping(Epoch, Option<Instant>),
}

/// What the agent does once it has no workers.
#[derive(Clone, Debug, PartialEq)]
enum Goal {
    Idle,
    Run(RankAssignment),
    /// Report that the workers have stopped.
    Stop(Epoch),
    Exit(AgentExit),
}

impl State {
    /// An agent without workers and without a decision.
    pub fn new(grace: GracePeriods) -> State {
        State {
            grace,
            workers: WorkersState::None,
            goal: Goal::Idle,
            stopped: Epoch(0),
            started: Epoch(0),
        }
    }

    /// The actions that follow from an event, in this order.
    pub fn on_event(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = match event {
            Event::Decided(decision) => self.on_decision(decision, now),
            Event::Disconnected(error) => {
                let exit = AgentExit::Disconnected(error);
                self.set_goal(Goal::Exit(exit), Duration::ZERO, now)
            }
            Event::WorkerFailed { message, is_final } => {
                self.on_failure(Report::Failed { message, is_final }, now)
            }
            Event::WorkersExited => self.on_exited(),
            Event::StartSkipped => {
                self.workers = WorkersState::None;
                Vec::new()
            }
            Event::Signal(signal) => self.on_signal(signal, now),
            Event::Tick => self.kill_if_due(now),
        };
        if self.workers == WorkersState::None {
            actions.extend(self.pursue_goal());
        }
        actions
    }

    /// When the agent must act even if no event happens.
    pub fn deadline(&self) -> Option<Instant> {
        match self.workers {
            WorkersState::Stopping(_, kill_at) => kill_at,
            WorkersState::None | WorkersState::Running(_) => None,
        }
    }

    fn on_decision(&mut self, decision: Decision, now: Instant) -> Vec<Action> {
        let (abort_grace, no_grace) = (self.grace.abort, Duration::ZERO);
        if matches!(self.goal, Goal::Exit(_)) {
            // An agent that is about to exit only waits for its workers; not at all, if another world may form.
            return match decision {
                Decision::LeaseExpired { .. } => self.stop(Action::Abort, no_grace, now),
                _ => Vec::new(),
            };
        }
        match decision {
            Decision::Run(assignment) if assignment.epoch <= self.started.max(self.stopped) => {
                Vec::new()
            }
            // Workers of an older epoch that still run have outlived their world.
            Decision::Run(assignment) => self.set_goal(Goal::Run(assignment), no_grace, now),
            Decision::Wait { epoch, .. } => self.set_goal(Goal::Stop(epoch), abort_grace, now),
            Decision::LeaseExpired { epoch } => self.set_goal(Goal::Stop(epoch), no_grace, now),
            Decision::Standby { .. } => self.set_goal(Goal::Idle, no_grace, now),
            Decision::Close(outcome) => {
                let exit = AgentExit::RunEnded(outcome);
                self.set_goal(Goal::Exit(exit), abort_grace, now)
            }
        }
    }

    /// Sets a goal that requires that no workers are left.
    fn set_goal(&mut self, goal: Goal, grace: Duration, now: Instant) -> Vec<Action> {
        self.goal = goal;
        self.stop(Action::Abort, grace, now)
    }

    fn stop(&mut self, action: Action, grace: Duration, now: Instant) -> Vec<Action> {
        let kill_at = now + grace;
        match self.workers {
            WorkersState::None => Vec::new(),
            // Already signaled: the time of the kill can move forward, but not back.
            WorkersState::Stopping(epoch, due) => {
                self.workers = WorkersState::Stopping(epoch, due.map(|due| due.min(kill_at)));
                self.kill_if_due(now)
            }
            WorkersState::Running(epoch) if grace.is_zero() => {
                self.workers = WorkersState::Stopping(epoch, None);
                vec![Action::Signal(Signal::KILL)]
            }
            WorkersState::Running(epoch) => {
                self.workers = WorkersState::Stopping(epoch, Some(kill_at));
                vec![action]
            }
        }
    }

    fn kill_if_due(&mut self, now: Instant) -> Vec<Action> {
        match self.workers {
            WorkersState::Stopping(epoch, Some(kill_at)) if kill_at <= now => {
                self.workers = WorkersState::Stopping(epoch, None);
                vec![Action::Signal(Signal::KILL)]
            }
            _ => Vec::new(),
        }
    }

    /// Failures of workers that are being stopped do not matter; others must be reported at once.
    fn on_failure(&mut self, report: Report, now: Instant) -> Vec<Action> {
        let WorkersState::Running(epoch) = self.workers else {
            return Vec::new();
        };
        let mut actions = vec![Action::Report(epoch, report)];
        actions.extend(self.stop(Action::Abort, self.grace.abort, now));
        actions
    }

    fn on_exited(&mut self) -> Vec<Action> {
        let before = std::mem::replace(&mut self.workers, WorkersState::None);
        match before {
            WorkersState::Running(epoch) => vec![Action::Report(epoch, Report::Succeeded)],
            WorkersState::Stopping(..) | WorkersState::None => Vec::new(),
        }
    }

    /// Forwards the first signal to the workers. A second one kills them.
    fn on_signal(&mut self, signal: Signal, now: Instant) -> Vec<Action> {
        let grace = match self.goal {
            Goal::Exit(_) => Duration::ZERO,
            _ => self.grace.leave,
        };
        if !matches!(self.goal, Goal::Exit(AgentExit::RunEnded(_))) {
            self.goal = Goal::Exit(AgentExit::Interrupted(signal));
        }
        self.stop(Action::Signal(signal), grace, now)
    }

    /// The actions towards the goal, now that there are no workers.
    fn pursue_goal(&mut self) -> Vec<Action> {
        match self.goal.clone() {
            Goal::Run(assignment) => {
                self.goal = Goal::Idle;
                self.started = assignment.epoch;
                self.workers = WorkersState::Running(assignment.epoch);
                vec![Action::Start(assignment)]
            }
            Goal::Stop(epoch) => {
                self.goal = Goal::Idle;
                let is_new = epoch > self.stopped;
                self.stopped = self.stopped.max(epoch);
                let report = || Action::Report(epoch, Report::Stopped);
                is_new.then(report).into_iter().collect()
            }
            Goal::Exit(exit @ AgentExit::Interrupted(_)) => {
                vec![Action::Leave, Action::Exit(exit)]
            }
            Goal::Exit(exit) => vec![Action::Exit(exit)],
            Goal::Idle => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
