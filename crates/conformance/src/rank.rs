//! What a case sees of the world it runs in.
//!
//! A case joins a [`World`] of its own, so that one it has broken is not the next one's. What ranks
//! compare goes through a store beside it, not through the collectives that are being tested.

use std::cell::{Cell, RefCell};
use std::net::TcpListener;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use trainyard_config::Config;
use trainyard_mesh::{Axis, Mesh};
use trainyard_torch::{Backend, Rendezvous, Result, Store, TorchError, World};
use trainyard_trace::Ledger;

/// How long a case may take on the slowest rank before the others give up on it.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long to wait for a note before looking whether it will come at all.
const GLANCE: Duration = Duration::from_millis(500);

/// How long a collective waits for a peer unless the case says otherwise.
const TIMEOUT: Duration = Duration::from_secs(30);

/// One rank of a suite.
pub struct Rank {
    rank: usize,
    size: usize,
    address: String,
    store: Store,
    /// Counts meetings, which all ranks of a case hold in the same order.
    meeting: Cell<u64>,
    case: Cell<usize>,
    worlds: RefCell<Vec<Rc<World>>>,
    told: RefCell<Vec<String>>,
}

impl Rank {
    /// Meets the other ranks of this program, as the launcher's environment says.
    pub(crate) fn from_env() -> Result<Rank> {
        let at = Rendezvous::from_env(PATIENCE)?;
        let store = match at.rank {
            0 => Store::serve(&at.master_addr, at.master_port, PATIENCE)?,
            _ => Store::connect(&at.master_addr, at.master_port, PATIENCE)?,
        };
        Ok(Rank {
            rank: at.rank,
            size: at.world_size,
            address: at.master_addr,
            store,
            meeting: Cell::new(0),
            case: Cell::new(0),
            worlds: RefCell::default(),
            told: RefCell::default(),
        })
    }

    /// Which rank this is.
    pub fn index(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// A new world in which all ranks are replicas.
    pub fn world(&self) -> Result<Rc<World>> {
        self.world_with(Ledger::new(self.rank))
    }

    /// The same, written in a ledger of the case's own.
    pub fn world_with(&self, ledger: Ledger) -> Result<Rc<World>> {
        let mesh = Mesh::new(&[(Axis::DpReplicate, self.size)])?;
        self.join(mesh, ledger, TIMEOUT)
    }

    /// A new world of the mesh a config describes.
    pub fn join_config(&self, config: &Config) -> Result<Rc<World>> {
        let mesh = config
            .mesh(self.size)
            .map_err(|e| TorchError::Invalid(e.to_string()))?;
        self.join(mesh, Ledger::new(self.rank), TIMEOUT)
    }

    /// A new world of any mesh. It lives until every rank has ended the case, or this one has failed.
    pub fn join(&self, mesh: Mesh, ledger: Ledger, timeout: Duration) -> Result<Rc<World>> {
        let port = self.agree_on_a_port()?;
        let at = Rendezvous {
            rank: self.rank,
            world_size: self.size,
            master_addr: self.address.clone(),
            master_port: port,
            agent_store: None,
            timeout,
        };
        // The store is reached at once or never; only the case's own waiting is to be short.
        let world = Rc::new(World::join(mesh, Backend::Gloo, &at, ledger)?);
        self.worlds.borrow_mut().push(Rc::clone(&world));
        Ok(world)
    }

    /// A new world of the first ranks alone, as many as the mesh has; none for the others. All must ask.
    pub fn join_first(&self, mesh: Mesh) -> Result<Option<Rc<World>>> {
        let port = self.agree_on_a_port()?;
        if self.rank >= mesh.world_size() {
            return Ok(None);
        }
        let at = Rendezvous {
            rank: self.rank,
            world_size: mesh.world_size(),
            master_addr: self.address.clone(),
            master_port: port,
            agent_store: None,
            timeout: TIMEOUT,
        };
        let world = Rc::new(World::join(
            mesh,
            Backend::Gloo,
            &at,
            Ledger::new(self.rank),
        )?);
        self.worlds.borrow_mut().push(Rc::clone(&world));
        Ok(Some(world))
    }

    /// Something a case has measured: the first rank's words stand below the case in the test's output.
    pub fn tell(&self, words: impl Into<String>) {
        self.told.borrow_mut().push(words.into());
    }

    /// What was told since the last time.
    pub(crate) fn told(&self) -> Vec<String> {
        self.told.take()
    }

    /// Returns when every rank has come here.
    pub fn meet(&self) -> Result<()> {
        self.everyone(&()).map(drop)
    }

    /// Every rank's value, by rank.
    pub fn everyone<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let meeting = self.next_meeting();
        let text = serde_json::to_vec(value).map_err(unreadable)?;
        self.store.set(&format!("{meeting}/{}", self.rank), &text)?;
        (0..self.size)
            .map(|rank| {
                let text = self.note(&format!("{meeting}/{rank}"))?;
                serde_json::from_slice(&text).map_err(unreadable)
            })
            .collect()
    }

    /// A note of another rank, unless some rank has failed and will write none.
    fn note(&self, key: &str) -> Result<Vec<u8>> {
        let started = Instant::now();
        loop {
            match self.store.get_within(key, GLANCE) {
                Ok(text) => return Ok(text),
                Err(_) if self.store.has(&self.failed())? => {
                    return Err(TorchError::Other("another rank failed before".to_owned()));
                }
                Err(error) if started.elapsed() > PATIENCE => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// Set when a rank has failed the present case.
    fn failed(&self) -> String {
        format!("case {} failed", self.case.get())
    }

    /// A port that is free now; rank 0 binds it in a moment.
    fn agree_on_a_port(&self) -> Result<u16> {
        let key = self.next_meeting();
        if self.rank == 0 {
            let free = TcpListener::bind((self.address.as_str(), 0))
                .and_then(|listener| listener.local_addr())
                .map_err(|e| TorchError::Other(format!("no free port: {e}")))?;
            let text = serde_json::to_vec(&free.port()).map_err(unreadable)?;
            self.store.set(&key, &text)?;
        }
        serde_json::from_slice(&self.note(&key)?).map_err(unreadable)
    }

    fn next_meeting(&self) -> String {
        self.meeting.set(self.meeting.get() + 1);
        format!("case {} meeting {}", self.case.get(), self.meeting.get())
    }

    pub(crate) fn begin_case(&self, case: usize) {
        self.case.set(case);
        self.meeting.set(0);
    }

    /// Leaves the worlds of a case: at once after a failure, so that nobody waits for this rank, and
    /// otherwise together with all others, so that nobody sees a peer go that is only quicker.
    pub(crate) fn end_case(&self, failed: bool) -> Result<()> {
        if failed {
            self.store.set(&self.failed(), b"")?;
            self.worlds.take();
        }
        let all_left = format!("case {} left", self.case.get());
        let num_left = self.store.add(&format!("{all_left} by"), 1)?;
        if num_left == self.size as i64 {
            self.store.set(&all_left, b"")?;
        }
        // Also what keeps rank 0, which serves the store, from ending before the others.
        let waited = self.store.wait(&all_left, PATIENCE);
        self.worlds.take();
        waited
    }
}

fn unreadable(error: serde_json::Error) -> TorchError {
    TorchError::Other(format!("a note between ranks: {error}"))
}
