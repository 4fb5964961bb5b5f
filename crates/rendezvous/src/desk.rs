//! A server's half of the conversation, without anything that sends.

use std::time::Duration;

use crate::{
    Action, Advert, Answer, Event, Leases, Letter, Reason, Record, Refusal, Say, State, step,
};

/// Answers letters, and keeps the state in between.
#[derive(Debug)]
pub struct Desk {
    /// Only without one inside [`Desk::step`].
    state: Option<State>,
}

/// What comes of a letter, or of time.
#[derive(Debug)]
pub struct Reply {
    /// The record changed: make it durable, then tell everybody who attends.
    pub publish: bool,
    /// To whoever wrote, after that.
    pub answer: Option<Answer>,
    /// Whoever wrote does not know the newest decision: [`Desk::tell`] it, too.
    pub tell: Option<Advert>,
    /// Why things are as they are.
    pub reason: Reason,
}

impl Desk {
    /// Goes on from the newest record.
    pub fn resume(record: Record, now: Duration) -> Desk {
        Desk {
            state: Some(State::resume(record, Leases::Counted, now)),
        }
    }

    /// Takes a letter.
    pub fn receive(&mut self, letter: Letter, now: Duration) -> Reply {
        let number = letter.number;
        let (joins, known) = match &letter.say {
            Say::Join(join) => (Some(join.advert.clone()), None),
            Say::Heartbeat { known } => (None, *known),
            _ => (None, Some(u64::MAX)),
        };
        let node = letter.node.clone();
        let mut reply = self.step(letter.into_event(), number, now);
        // An agent without a lease is told too: it may be in a world it never heard of.
        let refused = match &reply.answer {
            Some(Answer::Refused { refusal, .. }) => !matches!(refusal, Refusal::NoLease { .. }),
            _ => false,
        };
        let advert = joins.or_else(|| self.state().agent(&node).cloned());
        reply.tell = advert.filter(|_| !refused && known < Some(self.record().version));
        reply
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Duration) -> Reply {
        self.step(Event::Tick, 0, now)
    }

    /// What an agent is to be told.
    pub fn tell(&self, agent: &Advert) -> Answer {
        let record = self.record();
        Answer::Told {
            version: record.version,
            decision: record.decision_for(agent),
        }
    }

    /// When to [`Desk::tick`] next, if nothing comes before.
    pub fn wake_at(&self) -> Option<Duration> {
        self.state().wake_at()
    }

    /// The newest record.
    pub fn record(&self) -> &Record {
        self.state().record()
    }

    /// Whether an agent is there.
    pub fn attends(&self, agent: &Advert) -> bool {
        self.state()
            .agent(&agent.node)
            .is_some_and(|known| known.is(agent))
    }

    /// Who is there.
    pub fn attending(&self) -> impl Iterator<Item = &Advert> {
        self.state().attending()
    }

    fn step(&mut self, event: Event, number: u64, now: Duration) -> Reply {
        let mut reply = Reply {
            publish: false,
            answer: None,
            tell: None,
            reason: Reason::TooFew { have: 0, need: 0 },
        };
        let Some(state) = self.state.take() else {
            return reply;
        };
        let step = step(state, event, now);
        let version = step.state.record().version;
        (self.state, reply.reason) = (Some(step.state), step.reason);
        for action in step.actions {
            match action {
                Action::Publish => reply.publish = true,
                Action::Accept => reply.answer = Some(Answer::Heard { number, version }),
                Action::Refuse(refusal) => reply.answer = Some(Answer::Refused { number, refusal }),
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
