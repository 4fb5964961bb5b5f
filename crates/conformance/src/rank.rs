//! The interface of a case to the other ranks of its world.
//!
//! Every case joins its own [`World`], so that a broken one does not affect the next case. Ranks exchange values for
//! comparison through a separate store, and not through the collectives under test.

use std::cell::{Cell, RefCell};
use std::net::TcpListener;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tch::Device;
use trainyard_config::Config;
use trainyard_mesh::{Axis, Mesh};
use trainyard_torch::{Backend, Rendezvous, Result, Store, TorchError, World, require_gpu};
use trainyard_trace::Ledger;

use crate::suite::Transport;

/// Timeout of a case on the slowest rank.
const CASE_TIMEOUT: Duration = Duration::from_secs(120);

/// How often a rank that waits for a value checks whether another rank has failed.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Default timeout of a collective.
const COLLECTIVE_TIMEOUT: Duration = Duration::from_secs(30);

/// The device of this rank: a GPU if this node has one or `TRAINYARD_GPU_LIBRARY` names a library that simulates
/// them, so the same suites run on every device.
pub fn device() -> Device {
    Backend::auto().local_device()
}

/// One rank of a suite.
pub struct Rank {
    rank: usize,
    size: usize,
    transport: Cell<Transport>,
    address: String,
    store: Store,
    /// Counts exchanges, which all ranks of a case execute in the same order.
    num_exchanges: Cell<u64>,
    case: Cell<usize>,
    worlds: RefCell<Vec<Rc<World>>>,
    notes: RefCell<Vec<String>>,
}

impl Rank {
    /// Connects to the other ranks as described by the launcher's environment.
    pub(crate) fn from_env(transport: Transport) -> Result<Rank> {
        let at = Rendezvous::from_env(CASE_TIMEOUT)?;
        if device().is_cuda() {
            // Before a case runs anything on the CPU: libtorch looks for GPUs once.
            require_gpu(at.rank)?;
        }
        let store = match at.rank {
            0 => Store::serve(&at.master_addr, at.master_port, CASE_TIMEOUT)?,
            _ => Store::connect(&at.master_addr, at.master_port, CASE_TIMEOUT)?,
        };
        Ok(Rank {
            rank: at.rank,
            size: at.world_size,
            transport: Cell::new(transport),
            address: at.master_addr,
            store,
            num_exchanges: Cell::new(0),
            case: Cell::new(0),
            worlds: RefCell::default(),
            notes: RefCell::default(),
        })
    }

    /// The number of this rank.
    pub fn index(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// A new world in which all ranks are data-parallel replicas.
    pub fn world(&self) -> Result<Rc<World>> {
        self.world_with(Ledger::new(self.rank))
    }

    /// The same with ranks that send over the network, as those of several nodes do.
    pub fn world_over_network(&self) -> Result<Rc<World>> {
        let usual = self.transport.replace(Transport::Network);
        let world = self.world();
        self.transport.set(usual);
        world
    }

    /// The same with the given ledger.
    pub fn world_with(&self, ledger: Ledger) -> Result<Rc<World>> {
        let mesh = Mesh::new(&[(Axis::DpReplicate, self.size)])?;
        self.join(mesh, ledger, COLLECTIVE_TIMEOUT)
    }

    /// A new world with the mesh of a config.
    pub fn join_config(&self, config: &Config) -> Result<Rc<World>> {
        let mesh = config
            .mesh(self.size)
            .map_err(|e| TorchError::Invalid(e.to_string()))?;
        self.join(mesh, Ledger::new(self.rank), COLLECTIVE_TIMEOUT)
    }

    /// A new world with the given mesh. It lives until all ranks have finished the case, or this rank has failed.
    pub fn join(&self, mesh: Mesh, ledger: Ledger, timeout: Duration) -> Result<Rc<World>> {
        let port = self.agree_on_port()?;
        self.join_at(port, self.size, mesh, ledger, timeout)
    }

    /// A new world of the first ranks, as many as the mesh has; `None` on the others. All ranks must call this.
    pub fn join_subset(&self, mesh: Mesh) -> Result<Option<Rc<World>>> {
        let port = self.agree_on_port()?;
        if self.rank >= mesh.world_size() {
            return Ok(None);
        }
        let (size, ledger) = (mesh.world_size(), Ledger::new(self.rank));
        let world = self.join_at(port, size, mesh, ledger, COLLECTIVE_TIMEOUT)?;
        Ok(Some(world))
    }

    fn join_at(
        &self,
        master_port: u16,
        world_size: usize,
        mesh: Mesh,
        ledger: Ledger,
        timeout: Duration,
    ) -> Result<Rc<World>> {
        let at = Rendezvous {
            rank: self.rank,
            world_size,
            master_addr: self.address.clone(),
            master_port,
            agent_store: None,
            node_addr: None,
            timeout,
        };
        let world = World::join(mesh, Backend::auto(), &at, ledger)?;
        let world = Rc::new(match self.transport.get() {
            Transport::Usual => world,
            Transport::Network => world.without_shared_memory(),
        });
        self.worlds.borrow_mut().push(Rc::clone(&world));
        Ok(world)
    }

    /// Records a measurement. The test prints the notes of rank 0 below the case.
    pub fn note(&self, note: impl Into<String>) {
        self.notes.borrow_mut().push(note.into());
    }

    /// Whether the ranks are on GPUs, where a property of Gloo cannot be tested. The reason is noted.
    pub fn skips_on_gpu(&self, reason: &str) -> bool {
        let skips = device().is_cuda();
        if skips {
            self.note(format!("skipped on GPUs: {reason}"));
        }
        skips
    }

    /// Takes the notes of the current case.
    pub(crate) fn take_notes(&self) -> Vec<String> {
        self.notes.take()
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&()).map(drop)
    }

    /// The values of all ranks, by rank.
    pub fn all_gather<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<Vec<T>> {
        let key = self.next_key();
        let text = serde_json::to_vec(value).map_err(decode_error)?;
        self.store.set(&format!("{key}/{}", self.rank), &text)?;
        (0..self.size)
            .map(|rank| {
                let text = self.wait_for(&format!("{key}/{rank}"))?;
                serde_json::from_slice(&text).map_err(decode_error)
            })
            .collect()
    }

    /// Waits for a value of another rank. It is an error if a rank has failed, because the value may never come.
    fn wait_for(&self, key: &str) -> Result<Vec<u8>> {
        let started = Instant::now();
        loop {
            match self.store.get_with_timeout(key, POLL_INTERVAL) {
                Ok(text) => return Ok(text),
                Err(_) if self.store.has(&self.failure_key())? => {
                    return Err(TorchError::Other("another rank has failed".to_owned()));
                }
                Err(error) if started.elapsed() > CASE_TIMEOUT => return Err(error),
                Err(_) => {}
            }
        }
    }

    /// The key that a rank sets when it fails the current case.
    fn failure_key(&self) -> String {
        format!("case {} failed", self.case.get())
    }

    /// A free port, which rank 0 will bind.
    fn agree_on_port(&self) -> Result<u16> {
        let key = self.next_key();
        if self.rank == 0 {
            let free = TcpListener::bind((self.address.as_str(), 0))
                .and_then(|listener| listener.local_addr())
                .map_err(|e| TorchError::Other(format!("no free port: {e}")))?;
            let text = serde_json::to_vec(&free.port()).map_err(decode_error)?;
            self.store.set(&key, &text)?;
        }
        serde_json::from_slice(&self.wait_for(&key)?).map_err(decode_error)
    }

    fn next_key(&self) -> String {
        self.num_exchanges.set(self.num_exchanges.get() + 1);
        format!(
            "case {} exchange {}",
            self.case.get(),
            self.num_exchanges.get()
        )
    }

    pub(crate) fn begin_case(&self, case: usize) {
        self.case.set(case);
        self.num_exchanges.set(0);
    }

    /// Leaves the worlds of a case. After a failure it leaves at once, so that no rank waits for this one. Otherwise all
    /// ranks leave together, so that a faster rank is not mistaken for a lost peer.
    pub(crate) fn end_case(&self, failed: bool) -> Result<()> {
        if failed {
            self.store.set(&self.failure_key(), b"")?;
            self.worlds.take();
        }
        let all_left = format!("case {} left", self.case.get());
        let num_left = self.store.add(&format!("{all_left} by"), 1)?;
        if num_left == self.size as i64 {
            self.store.set(&all_left, b"")?;
        }
        let waited = self.store.wait(&all_left, CASE_TIMEOUT);
        self.worlds.take();
        waited
    }

    /// Leaves the suite. Rank 0 serves the store, so it leaves after the others have got their last answer.
    pub(crate) fn leave(&self) -> Result<()> {
        let key = |rank: usize| format!("rank {rank} left");
        if self.rank > 0 {
            return self.store.set(&key(self.rank), b"");
        }
        (1..self.size).try_for_each(|rank| self.store.wait(&key(rank), CASE_TIMEOUT))
    }
}

fn decode_error(error: serde_json::Error) -> TorchError {
    TorchError::Other(format!("cannot decode a value of another rank: {error}"))
}
