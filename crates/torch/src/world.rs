//! The world of all ranks, and the process groups along the axes of its device mesh.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tch::Device;
use trainyard_mesh::{AxisSet, Mesh, MeshError};
use trainyard_trace::Ledger;

use crate::bridge::ffi;
use crate::comm_thread::CommThread;
use crate::device;
use crate::device_clock;
use crate::error::{Result, TorchError};
use crate::gpu_library;
use crate::group::{BackendGroup, Gloo, Group, GroupInfo, Nccl};
use crate::peers::Peers;
use crate::shared_memory::SharedMemory;
use crate::sockets::{Sockets, WireBytes};
use crate::store::{Store, millis};

/// The communication backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// Gloo over TCP, for tensors on CPU.
    Gloo,
    /// NCCL for tensors on GPUs, and Gloo for tensors on CPU. Needs a GPU and the GPU library.
    Nccl,
}

/// What a rank needs to reach the other ranks.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// Global rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Host of the store. If rank 0 serves the store, it listens on this address only.
    pub master_addr: String,
    /// Port of the store.
    pub master_port: u16,
    /// If an agent serves the store: the prefix of all keys of this attempt, because keys of earlier attempts may
    /// still be in the store. If `None`, rank 0 serves the store.
    pub agent_store: Option<String>,
    /// The address at which other ranks reach this process; by default the local address that routes to the store.
    pub node_addr: Option<String>,
    /// The timeout of group creation and of collectives.
    pub timeout: Duration,
}

impl Rendezvous {
    /// Reads the environment variables that `trainyard run` and torchrun set. Without them, the world has one rank.
    pub fn from_env(timeout: Duration) -> Result<Rendezvous> {
        if std::env::var_os("WORLD_SIZE").is_none() {
            return Ok(Rendezvous {
                rank: 0,
                world_size: 1,
                master_addr: "127.0.0.1".to_owned(),
                master_port: 0,
                agent_store: None,
                node_addr: None,
                timeout,
            });
        }
        Ok(Rendezvous {
            rank: number("RANK")?,
            world_size: number("WORLD_SIZE")?,
            master_addr: text("MASTER_ADDR")?,
            master_port: number("MASTER_PORT")?,
            agent_store: attempt(),
            node_addr: std::env::var("TRAINYARD_NODE_ADDR").ok(),
            timeout,
        })
    }

    fn store(&self) -> Result<Store> {
        match (self.rank, &self.agent_store) {
            (0, None) => Store::serve(&self.master_addr, self.master_port, self.timeout),
            _ => Store::connect(&self.master_addr, self.master_port, self.timeout),
        }
    }
}

/// All ranks of a job, seen from this one. Creates process groups on first use.
pub struct World {
    mesh: Mesh,
    rank: usize,
    ledger: Ledger,
    transport: Transport,
    device: Device,
    /// Whether ranks of one node share memory instead of sending over loopback.
    shares_memory: bool,
    /// Whether ranks train on GPUs, or simulate that.
    is_on_gpu: bool,
    /// Groups by name.
    groups: Mutex<HashMap<String, Group>>,
}

/// How collectives reach other ranks.
enum Transport {
    SingleRank,
    Fake,
    Connected {
        store: Store,
        /// The prefix of all keys in the store.
        attempt: String,
        address: String,
        /// The timeout of existing and of future groups.
        timeout: Mutex<Duration>,
    },
}

impl World {
    /// Joins the other ranks. Returns when the store is reachable; groups are created later.
    pub fn join(mesh: Mesh, backend: Backend, at: &Rendezvous, ledger: Ledger) -> Result<World> {
        if mesh.world_size() != at.world_size {
            return Err(TorchError::Invalid(format!(
                "the world size of mesh {mesh} is {}, but {} ranks were started: change the parallel degrees or --nproc-per-node",
                mesh.world_size(),
                at.world_size
            )));
        }
        if backend == Backend::Nccl {
            require_gpu(at.rank)?;
        }
        let device = backend.local_device();
        device::set_current(device)?;
        if ledger.is_recording()
            && let Some(clock) = device_clock::start(device)?
        {
            ledger.set_device_clock(clock);
        }
        let transport = match at.world_size {
            1 => Transport::SingleRank,
            _ => Transport::Connected {
                store: at.store()?,
                attempt: at.agent_store.clone().unwrap_or_default(),
                address: match &at.node_addr {
                    Some(address) => address.clone(),
                    None => own_address(&at.master_addr, at.master_port),
                },
                timeout: Mutex::new(at.timeout),
            },
        };
        let world = Self::with(mesh, at.rank, ledger, transport);
        Ok(World {
            device,
            is_on_gpu: device != Device::Cpu,
            ..world
        })
    }

    /// The same world, whose ranks send everything over the network, even on one node.
    #[must_use]
    pub fn without_shared_memory(self) -> World {
        World {
            shares_memory: false,
            ..self
        }
    }

    /// One rank of a mesh of any size whose collectives are recorded but not sent, for dry runs. It simulates a GPU.
    pub fn fake(mesh: Mesh, rank: usize, ledger: Ledger) -> Result<World> {
        mesh.coordinates(rank)?;
        Ok(Self::with(mesh, rank, ledger, Transport::Fake))
    }

    /// The same fake world, which simulates a GPU, or else a CPU.
    #[must_use]
    pub fn simulating_gpu(self, is_on_gpu: bool) -> World {
        World { is_on_gpu, ..self }
    }

    /// A world of one rank.
    pub fn single_rank(ledger: Ledger) -> Result<World> {
        Ok(Self::with(
            Mesh::new(&[])?,
            0,
            ledger,
            Transport::SingleRank,
        ))
    }

    fn with(mesh: Mesh, rank: usize, ledger: Ledger, transport: Transport) -> World {
        World {
            is_on_gpu: matches!(transport, Transport::Fake),
            mesh,
            rank,
            ledger,
            transport,
            device: Device::Cpu,
            shares_memory: true,
            groups: Mutex::default(),
        }
    }

    /// Whether ranks train on GPUs, or a fake world simulates that. A GPU's allocator keeps released memory, so it costs
    /// nothing to allocate it again; on CPU, new memory costs page faults.
    pub fn is_on_gpu(&self) -> bool {
        self.is_on_gpu
    }

    /// The device on which this rank trains.
    pub fn device(&self) -> Device {
        self.device
    }

    /// A store of all ranks for purposes other than training, over a separate connection, so that waiting in it does
    /// not block other users of the store. `None` if there is one rank.
    pub fn side_store(&self, name: &str) -> Result<Option<Store>> {
        match &self.transport {
            Transport::Connected { store, attempt, .. } => {
                let name = format!("{attempt}{name}");
                Ok(Some(store.reconnect()?.prefixed(&name)?))
            }
            Transport::SingleRank | Transport::Fake => Ok(None),
        }
    }

    /// The mesh of all ranks.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Global rank of this process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.mesh.world_size()
    }

    /// The ledger that records this rank's events.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Whether this is a dry run, which sends nothing.
    pub fn is_fake(&self) -> bool {
        matches!(self.transport, Transport::Fake)
    }

    /// The group of ranks whose mesh coordinates differ from this rank's along `axes` only. The first call creates
    /// the group and waits until all of its ranks call; later calls return the same group.
    pub fn group(&self, axes: impl Into<AxisSet>) -> Result<Group> {
        // Axis sets with the same members share a group.
        let axes = self.mesh.canonical(axes);
        self.get_or_create(axes.to_string(), || self.mesh.group(self.rank, axes))
    }

    /// Splits the group along `axes` into subgroups of `length` consecutive ranks, such as the ranks of one node.
    /// Returns this rank's subgroup, and the group of the ranks with the same index in each subgroup. All ranks of
    /// the group must call this.
    pub fn subgroups(&self, axes: impl Into<AxisSet>, length: usize) -> Result<(Group, Group)> {
        let axes = self.mesh.canonical(axes);
        let members = self.mesh.group(self.rank, axes)?;
        if length == 0 || !members.len().is_multiple_of(length) {
            return Err(TorchError::Invalid(format!(
                "{} ranks along {axes} cannot be divided into subgroups of {length}",
                members.len()
            )));
        }
        let index = members.iter().position(|rank| *rank == self.rank);
        let index = index.unwrap_or(0);
        let within = members[index - index % length..][..length].to_vec();
        let across = members.into_iter().skip(index % length).step_by(length);
        let across: Vec<usize> = across.collect();
        Ok((
            self.get_or_create(format!("{axes} within {length}"), || Ok(within))?,
            self.get_or_create(format!("{axes} across {length}"), || Ok(across))?,
        ))
    }

    /// The group with this name; the first call creates it from `members`.
    fn get_or_create(
        &self,
        name: String,
        members: impl FnOnce() -> Result<Vec<usize>, MeshError>,
    ) -> Result<Group> {
        let mut groups = self.groups.lock().unwrap_or_else(|p| p.into_inner());
        if let Some(group) = groups.get(&name) {
            return Ok(group.clone());
        }
        let group = self.create_group(name.clone(), &members()?)?;
        groups.insert(name, group.clone());
        Ok(group)
    }

    /// The group of all ranks.
    pub fn world_group(&self) -> Result<Group> {
        self.group(AxisSet::ALL)
    }

    /// Sets the timeout of existing and future groups. Must not be called while a collective is in flight.
    pub fn set_timeout(&self, wanted: Duration) -> Result<()> {
        let Transport::Connected { timeout, .. } = &self.transport else {
            return Ok(());
        };
        let groups = self.groups.lock().unwrap_or_else(|p| p.into_inner());
        *timeout.lock().unwrap_or_else(|p| p.into_inner()) = wanted;
        groups
            .values()
            .try_for_each(|group| group.set_timeout(wanted))
    }

    /// The bytes that all groups have transferred so far; see [`Group::wire_bytes`].
    pub fn wire_bytes(&self) -> WireBytes {
        let groups = self.groups.lock().unwrap_or_else(|p| p.into_inner());
        let counted = groups.values().map(Group::wire_bytes);
        counted.fold(WireBytes::default(), |sum, group| sum + group)
    }

    /// Creates the group of `members`, which are in ascending order.
    fn create_group(&self, name: String, members: &[usize]) -> Result<Group> {
        let index = members.iter().position(|rank| *rank == self.rank);
        let info = GroupInfo {
            name,
            rank: self.rank,
            index: index.unwrap_or(0),
            size: members.len(),
        };
        let backend_group = match &self.transport {
            _ if info.size == 1 => BackendGroup::SingleRank,
            Transport::SingleRank => BackendGroup::SingleRank,
            Transport::Fake => BackendGroup::Fake(Mutex::default()),
            Transport::Connected {
                store,
                attempt,
                address,
                timeout,
            } => {
                // The first member distinguishes the parallel groups along the same axes.
                let first = members.first().copied().unwrap_or(0);
                let name = format!("{attempt}group/{}/{first}", info.name);
                let store = store.prefixed(&name)?;
                let timeout = *timeout.lock().unwrap_or_else(|p| p.into_inner());
                let connecting = Connecting {
                    info: &info,
                    members,
                    is_served_by_rank_0: attempt.is_empty(),
                    address,
                    timeout,
                    ledger: &self.ledger,
                    shares_memory: self.shares_memory,
                };
                match self.device {
                    Device::Cuda(index) => {
                        BackendGroup::Nccl(connecting.nccl(&store, &name, index)?)
                    }
                    _ => BackendGroup::Gloo(connecting.gloo(&store)?),
                }
            }
        };
        Ok(Group::new(info, self.ledger.clone(), backend_group))
    }
}

/// A group whose ranks connect to each other.
struct Connecting<'a> {
    info: &'a GroupInfo,
    members: &'a [usize],
    /// Whether rank 0 serves the store, and not an agent.
    is_served_by_rank_0: bool,
    address: &'a str,
    timeout: Duration,
    ledger: &'a Ledger,
    shares_memory: bool,
}

impl Connecting<'_> {
    fn gloo(&self, store: &Store) -> Result<Gloo> {
        let (index, size) = (self.info.index as i32, self.info.size as i32);
        let second = store.prefixed("downward")?;
        let form = |store: &Store| {
            let timeout = millis(self.timeout);
            ffi::gloo_group(store.raw(), index, size, self.address, timeout)
        };
        let ((handle, downward), sockets) = Sockets::created_during(store.port(), || {
            Ok::<_, cxx::Exception>((form(store)?, form(&second)?))
        })
        .map_err(|e| self.failed(Backend::Gloo, e.what().to_owned()))?;
        let comm_thread =
            CommThread::new(&self.info.name, self.ledger.clone()).map_err(|error| {
                let message = format!("cannot start the communication thread: {error}");
                self.failed(Backend::Gloo, message)
            })?;
        let sockets = Arc::new(sockets);
        let shared_memory = if self.shares_memory {
            let store = store.prefixed("shared memory")?;
            SharedMemory::connect(&store, self.info.index, self.info.size, self.timeout)?
        } else {
            None
        };
        let server = self.is_served_by_rank_0.then_some(0);
        let ends = store.prefixed("ends")?;
        Ok(Gloo {
            handle,
            downward,
            comm_thread,
            peers: Peers::publish(&sockets, ends, self.members, self.info.index, server)?,
            sockets,
            shared_memory: shared_memory.map(Arc::new),
        })
    }

    fn nccl(&self, store: &Store, name: &str, device: usize) -> Result<Nccl> {
        let (index, size) = (self.info.index as i32, self.info.size as i32);
        let form = |direction: &str| {
            let (store, name) = (store.prefixed(direction)?, format!("{name} {direction}"));
            let timeout = millis(self.timeout);
            ffi::gpu_group(store.raw(), index, size, device as i32, &name, timeout)
                .map_err(|e| self.failed(Backend::Nccl, e.what().to_owned()))
        };
        Ok(Nccl {
            host: self.gloo(&store.prefixed("host")?)?,
            handle: form("upward")?,
            downward: form("downward")?,
            device: Device::Cuda(device),
        })
    }

    fn failed(&self, backend: Backend, message: String) -> TorchError {
        TorchError::GroupInit {
            rank: self.info.rank,
            group: self.info.name.clone(),
            backend: backend.name(),
            message,
        }
    }
}

impl Backend {
    /// The name of the backend: `gloo` or `nccl`.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Gloo => "gloo",
            Backend::Nccl => "nccl",
        }
    }

    /// NCCL if this node has a GPU, Gloo otherwise.
    pub fn auto() -> Backend {
        if gpu_library::has_gpu() {
            Backend::Nccl
        } else {
            Backend::Gloo
        }
    }

    /// The device of this process: with NCCL, the GPU with the number of the local rank.
    pub fn local_device(self) -> Device {
        match self {
            Backend::Gloo => Device::Cpu,
            Backend::Nccl => Device::Cuda(local_rank()),
        }
    }
}

/// The rank of this process on its node, as the launcher numbers them; 0 without a launcher.
fn local_rank() -> usize {
    let rank = std::env::var("LOCAL_RANK").ok();
    rank.and_then(|rank| rank.parse().ok()).unwrap_or(0)
}

/// The number of ranks that the launcher started on this node; `None` without a launcher.
pub fn local_world_size() -> Option<usize> {
    std::env::var("LOCAL_WORLD_SIZE").ok()?.parse().ok()
}

/// Prepares this process for GPUs; returns an error if it cannot use them.
pub fn require_gpu(rank: usize) -> Result<()> {
    let no_gpu = || "this node has no GPU; use the backend gloo, which runs on CPU".to_owned();
    let usable = if gpu_library::has_gpu() {
        gpu_library::load()
    } else {
        Err(no_gpu())
    };
    let usable = usable.and_then(|()| match tch::Cuda::device_count() {
        0 => Err(no_gpu()),
        _ => Ok(()),
    });
    usable.map_err(|message| TorchError::GroupInit {
        rank,
        group: "world".to_owned(),
        backend: "nccl",
        message,
    })
}

/// The local address that routes to the store: loopback for a job on one node.
fn own_address(master_addr: &str, master_port: u16) -> String {
    UdpSocket::bind("0.0.0.0:0")
        .and_then(|socket| {
            // Connecting a UDP socket sends nothing; it only selects the route.
            socket.connect((master_addr, master_port.max(1)))?;
            Ok(socket.local_addr()?.ip().to_string())
        })
        .unwrap_or_else(|_| master_addr.to_owned())
}

/// The prefix that separates the keys of this attempt from those of others if an agent serves the store: torchrun's
/// restart count and the epoch of the elastic run.
fn attempt() -> Option<String> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let is_served = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
    let restarts = variable("TORCHELASTIC_RESTART_COUNT");
    let epoch = variable("TRAINYARD_EPOCH");
    is_served.then(|| format!("attempt {restarts}/epoch {epoch}/"))
}

fn text(name: &'static str) -> Result<String> {
    std::env::var(name).map_err(|_| TorchError::Environment {
        name,
        problem: "is not set".to_owned(),
    })
}

fn number<T: std::str::FromStr>(name: &'static str) -> Result<T> {
    let value = text(name)?;
    value.parse().map_err(|_| TorchError::Environment {
        name,
        problem: format!("is {value:?}, not a number"),
    })
}
