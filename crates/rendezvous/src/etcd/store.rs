//! The keys of a run in etcd, and what is stored under them.

use std::sync::Arc;

use super::authenticator::{Authenticator, ValueError};
use super::kv::{Entry, Kv, Range};
use crate::format::FormatError;
use crate::session::SessionError;
use crate::{FORMAT_VERSION, RendezvousError, RunState};

/// The keys of a run.
#[derive(Clone, Debug)]
pub struct Keys {
    run: String,
}

impl Keys {
    pub fn new(run: &str) -> Keys {
        Keys {
            run: run.to_owned(),
        }
    }

    pub fn agents(&self) -> String {
        format!("trainyard/{}/agents/", self.run)
    }

    pub fn agent(&self, node: &str) -> String {
        self.agents() + node
    }

    pub fn leader(&self) -> String {
        format!("trainyard/{}/leader", self.run)
    }

    pub fn record(&self) -> String {
        format!("trainyard/{}/record", self.run)
    }

    pub fn rejection(&self, node: &str) -> String {
        format!("trainyard/{}/rejections/{node}", self.run)
    }
}

/// What the leader and the other agents of a run need to access its keys.
#[derive(Clone)]
pub struct Store {
    pub kv: Arc<dyn Kv>,
    pub authenticator: Authenticator,
    pub keys: Keys,
    pub run: String,
}

impl Store {
    /// The run state and the revision of its key; a new run state and 0 if there is none yet.
    pub async fn run_state(&self) -> Result<(RunState, i64), SessionError> {
        let (found, _) = self.kv.get(Range::Key(self.keys.record())).await?;
        match found.first() {
            Some(entry) => Ok((self.decode_run_state(entry)?, entry.mod_revision)),
            None => Ok((RunState::new(&self.run), 0)),
        }
    }

    /// Decodes the run state. Only an authentic value of another format version is fatal: everything else may be the
    /// work of a client without the secret, and may be replaced.
    pub fn decode_run_state(&self, entry: &Entry) -> Result<RunState, SessionError> {
        let decoded = self.authenticator.verify(&entry.key, &entry.value);
        decoded.map_err(|error| match error {
            ValueError::Format(FormatError::Version { found }) => {
                SessionError::Fatal(RendezvousError::FormatVersion {
                    what: format!("the etcd key {}", entry.key),
                    run: self.run.clone(),
                    found,
                    supported: FORMAT_VERSION,
                })
            }
            error => SessionError::Disconnected(format!("{}: {error}", entry.key)),
        })
    }
}
