//! The decision: what an agent does about what happened.
//!
//! Nothing here waits, starts or signals. An agent has workers of one epoch or none; whatever it is told
//! meanwhile, it first sees the old ones off, says so, and only then does the new thing.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use trainyard_rendezvous::{Close, Decision, Epoch, Place, RendezvousError, Report};

/// Something that happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// The rendezvous says what to do.
    Told(Decision),
    /// There is no way to the run any more.
    Cut(RendezvousError),
    /// A worker ended badly; others may be left.
    Failed {
        /// Who, how, and its last lines.
        message: String,
    },
    /// No worker is left.
    Ended,
    /// Workers were not started, because the place they were for was gone by then.
    NotStarted,
    /// The agent was sent a signal.
    Signal(Signal),
    /// Time has passed.
    Tick,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Start workers at this place.
    Start(Place),
    /// Signal all workers.
    Tell(Signal),
    /// Tell all workers to end, because their world is broken: there is nothing to finish.
    Dismiss,
    /// Say how the workers of an epoch are. With [`Report::Stopped`], the store is emptied first: nobody
    /// of the next world is there before.
    Report(Epoch, Report),
    /// Give up the place.
    Leave,
    /// End the agent.
    End(Ending),
}

/// How an agent's part is over.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// The run is over.
    Closed(Close),
    /// The agent was asked to go.
    Interrupted(Signal),
    /// There is no way to the run.
    Cut(RendezvousError),
}

/// How long workers have between SIGTERM and SIGKILL.
#[derive(Clone, Copy, Debug)]
pub struct Graces {
    /// When the agent is asked to go: time to save.
    pub leaving: Duration,
    /// When their world is broken: they may hang in a collective with somebody who is gone.
    pub broken: Duration,
}

/// What an agent knows of its workers and of what is wanted of it.
#[derive(Clone, Debug)]
pub struct State {
    graces: Graces,
    workers: Workers,
    wanted: Wanted,
    /// The newest epoch of which it was said that no workers are left.
    stopped: Epoch,
    /// The newest epoch in which workers were started.
    started: Epoch,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Workers {
    None,
    Running(Epoch),
    /// They have been told to end; at this time those that are left are killed.
    Ending(Epoch, Option<Instant>),
}

/// What is to be so when no workers are left.
#[derive(Clone, Debug, PartialEq)]
enum Wanted {
    Nothing,
    Run(Place),
    /// That the others know that none are left.
    Stop(Epoch),
    End(Ending),
}

impl State {
    /// An agent without workers that was told nothing yet.
    pub fn new(graces: Graces) -> State {
        State {
            graces,
            workers: Workers::None,
            wanted: Wanted::Nothing,
            stopped: Epoch(0),
            started: Epoch(0),
        }
    }

    /// What to do about an event, in this order.
    pub fn after(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut actions = match event {
            Event::Told(decision) => self.told(decision, now),
            Event::Cut(error) => self.want(Wanted::End(Ending::Cut(error)), Duration::ZERO, now),
            Event::Failed { message } => self.failed(message, now),
            Event::Ended => self.ended(),
            Event::NotStarted => {
                self.workers = Workers::None;
                Vec::new()
            }
            Event::Signal(signal) => self.signalled(signal, now),
            Event::Tick => self.kill_if_due(now),
        };
        if self.workers == Workers::None {
            actions.extend(self.proceed());
        }
        actions
    }

    /// When something has to be done though nothing happens.
    pub fn wake_at(&self) -> Option<Instant> {
        match self.workers {
            Workers::Ending(_, kill_at) => kill_at,
            Workers::None | Workers::Running(_) => None,
        }
    }

    fn told(&mut self, decision: Decision, now: Instant) -> Vec<Action> {
        let (broken, at_once) = (self.graces.broken, Duration::ZERO);
        if matches!(self.wanted, Wanted::End(_)) {
            // An agent that is about to end only sees its workers off; at once, if another world may come.
            return match decision {
                Decision::Lapsed { .. } => self.stop(Action::Dismiss, at_once, now),
                _ => Vec::new(),
            };
        }
        match decision {
            Decision::Run(place) if place.epoch <= self.started.max(self.stopped) => Vec::new(),
            // Workers of an older epoch that are still there outlived their world.
            Decision::Run(place) => self.want(Wanted::Run(place), at_once, now),
            Decision::Wait { epoch, .. } => self.want(Wanted::Stop(epoch), broken, now),
            Decision::Lapsed { epoch } => self.want(Wanted::Stop(epoch), at_once, now),
            Decision::Park { .. } => self.want(Wanted::Nothing, at_once, now),
            Decision::Close(how) => self.want(Wanted::End(Ending::Closed(how)), broken, now),
        }
    }

    /// Wants something that needs the workers gone.
    fn want(&mut self, wanted: Wanted, grace: Duration, now: Instant) -> Vec<Action> {
        self.wanted = wanted;
        self.stop(Action::Dismiss, grace, now)
    }

    fn stop(&mut self, word: Action, grace: Duration, now: Instant) -> Vec<Action> {
        let kill_at = now + grace;
        match self.workers {
            Workers::None => Vec::new(),
            // Told already; sooner is possible, later is not.
            Workers::Ending(epoch, told) => {
                self.workers = Workers::Ending(epoch, told.map(|told| told.min(kill_at)));
                self.kill_if_due(now)
            }
            Workers::Running(epoch) if grace.is_zero() => {
                self.workers = Workers::Ending(epoch, None);
                vec![Action::Tell(Signal::KILL)]
            }
            Workers::Running(epoch) => {
                self.workers = Workers::Ending(epoch, Some(kill_at));
                vec![word]
            }
        }
    }

    fn kill_if_due(&mut self, now: Instant) -> Vec<Action> {
        match self.workers {
            Workers::Ending(epoch, Some(kill_at)) if kill_at <= now => {
                self.workers = Workers::Ending(epoch, None);
                vec![Action::Tell(Signal::KILL)]
            }
            _ => Vec::new(),
        }
    }

    /// Workers that were told to end may end as they like; otherwise the others must know at once.
    fn failed(&mut self, message: String, now: Instant) -> Vec<Action> {
        let Workers::Running(epoch) = self.workers else {
            return Vec::new();
        };
        let mut actions = vec![Action::Report(epoch, Report::Failed { message })];
        actions.extend(self.stop(Action::Dismiss, self.graces.broken, now));
        actions
    }

    fn ended(&mut self) -> Vec<Action> {
        let before = std::mem::replace(&mut self.workers, Workers::None);
        match before {
            Workers::Running(epoch) => vec![Action::Report(epoch, Report::Succeeded)],
            Workers::Ending(..) | Workers::None => Vec::new(),
        }
    }

    /// The first signal is passed on; whoever asks twice does not want to wait.
    fn signalled(&mut self, signal: Signal, now: Instant) -> Vec<Action> {
        let grace = match self.wanted {
            Wanted::End(_) => Duration::ZERO,
            _ => self.graces.leaving,
        };
        if !matches!(self.wanted, Wanted::End(Ending::Closed(_))) {
            self.wanted = Wanted::End(Ending::Interrupted(signal));
        }
        self.stop(Action::Tell(signal), grace, now)
    }

    /// Does what is wanted, now that there are no workers.
    fn proceed(&mut self) -> Vec<Action> {
        match self.wanted.clone() {
            Wanted::Run(place) => {
                self.wanted = Wanted::Nothing;
                self.started = place.epoch;
                self.workers = Workers::Running(place.epoch);
                vec![Action::Start(place)]
            }
            Wanted::Stop(epoch) => {
                self.wanted = Wanted::Nothing;
                let is_news = epoch > self.stopped;
                self.stopped = self.stopped.max(epoch);
                let report = || Action::Report(epoch, Report::Stopped);
                is_news.then(report).into_iter().collect()
            }
            Wanted::End(ending @ Ending::Interrupted(_)) => {
                vec![Action::Leave, Action::End(ending)]
            }
            Wanted::End(ending) => vec![Action::End(ending)],
            Wanted::Nothing => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests;
