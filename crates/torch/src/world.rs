//! All ranks of a job, and the groups along any axes of their mesh.

use std::collections::HashMap;
use std::net::UdpSocket;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use trainyard_mesh::{AxisSet, Mesh, MeshError};
use trainyard_trace::Ledger;

use crate::bridge::ffi;
use crate::error::{Result, TorchError};
use crate::group::{Engine, Gloo, Group, Place};
use crate::lane::Lane;
use crate::sockets::{Sockets, WireBytes};
use crate::store::{Store, millis};

/// What carries messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backend {
    /// TCP, for tensors on CPU.
    Gloo,
    /// For tensors on GPUs. Needs the feature `cuda` and a GPU.
    Nccl,
}

/// How to reach the other ranks.
#[derive(Debug, Clone)]
pub struct Rendezvous {
    /// Global rank of this process.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Host of the store; if rank 0 serves it, on that address only.
    pub master_addr: String,
    /// Port of the store.
    pub master_port: u16,
    /// Where an agent serves the store, what all keys of this attempt begin with, since those of the last
    /// one may still be there. Where none does, rank 0 serves it.
    pub agent_store: Option<String>,
    /// How long to wait for others, when forming groups and in collectives.
    pub timeout: Duration,
}

impl Rendezvous {
    /// Reads the environment that `trainyard run` and torchrun set; without it, a world of one.
    pub fn from_env(timeout: Duration) -> Result<Rendezvous> {
        if std::env::var_os("WORLD_SIZE").is_none() {
            return Ok(Rendezvous {
                rank: 0,
                world_size: 1,
                master_addr: "127.0.0.1".to_owned(),
                master_port: 0,
                agent_store: None,
                timeout,
            });
        }
        Ok(Rendezvous {
            rank: number("RANK")?,
            world_size: number("WORLD_SIZE")?,
            master_addr: text("MASTER_ADDR")?,
            master_port: number("MASTER_PORT")?,
            agent_store: attempt(),
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

/// This process among all ranks of a job. Groups form when they are first asked for.
pub struct World {
    mesh: Mesh,
    rank: usize,
    ledger: Ledger,
    carrier: Carrier,
    /// By name.
    groups: Mutex<HashMap<String, Group>>,
}

enum Carrier {
    Alone,
    Fake,
    Real {
        store: Store,
        /// What all keys begin with.
        attempt: String,
        backend: Backend,
        address: String,
        /// Of groups to come, too.
        timeout: Mutex<Duration>,
    },
}

impl World {
    /// Joins the other ranks. Returns when the store is reachable; groups form later.
    pub fn join(mesh: Mesh, backend: Backend, at: &Rendezvous, ledger: Ledger) -> Result<World> {
        if mesh.world_size() != at.world_size {
            return Err(TorchError::Invalid(format!(
                "the mesh {mesh} has {} ranks but {} were started: change the degrees or --nproc-per-node",
                mesh.world_size(),
                at.world_size
            )));
        }
        if backend == Backend::Nccl {
            require_gpu(at.rank)?;
        }
        let carrier = match at.world_size {
            1 => Carrier::Alone,
            _ => Carrier::Real {
                store: at.store()?,
                attempt: at.agent_store.clone().unwrap_or_default(),
                backend,
                address: own_address(&at.master_addr, at.master_port),
                timeout: Mutex::new(at.timeout),
            },
        };
        Ok(Self::with(mesh, at.rank, ledger, carrier))
    }

    /// One rank of a mesh of any size, whose collectives are counted and never sent.
    pub fn fake(mesh: Mesh, rank: usize, ledger: Ledger) -> Result<World> {
        mesh.coordinates(rank)?;
        Ok(Self::with(mesh, rank, ledger, Carrier::Fake))
    }

    /// A job of one rank.
    pub fn alone(ledger: Ledger) -> Result<World> {
        Ok(Self::with(Mesh::new(&[])?, 0, ledger, Carrier::Alone))
    }

    fn with(mesh: Mesh, rank: usize, ledger: Ledger, carrier: Carrier) -> World {
        World {
            mesh,
            rank,
            ledger,
            carrier,
            groups: Mutex::default(),
        }
    }

    /// A dictionary of all ranks for something that is no part of training, over a connection of its
    /// own: whoever waits in it holds nobody else up. None where there is one rank.
    pub fn meeting(&self, name: &str) -> Result<Option<Store>> {
        match &self.carrier {
            Carrier::Real { store, attempt, .. } => {
                let name = format!("{attempt}{name}");
                Ok(Some(store.reconnected()?.prefixed(&name)?))
            }
            Carrier::Alone | Carrier::Fake => Ok(None),
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

    /// What this rank did.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Whether nothing is ever sent: a dry run.
    pub fn is_fake(&self) -> bool {
        matches!(self.carrier, Carrier::Fake)
    }

    /// The group of ranks that differ from this one along `axes` only. All of them must ask for it;
    /// the first time forms it, which waits for all of them; afterwards it is at hand.
    pub fn group(&self, axes: impl Into<AxisSet>) -> Result<Group> {
        // Sets along which groups are the same share one.
        let axes = self.mesh.simplest(axes);
        self.named(axes.to_string(), || self.mesh.group(self.rank, axes))
    }

    /// The group along `axes` cut into pieces of `length` ranks that follow each other, as those of one machine
    /// do: the ranks of this one's piece, and those that stand where this one does in theirs. All ranks of
    /// the group must ask for both.
    pub fn pieces(&self, axes: impl Into<AxisSet>, length: usize) -> Result<(Group, Group)> {
        let axes = self.mesh.simplest(axes);
        let members = self.mesh.group(self.rank, axes)?;
        if length == 0 || !members.len().is_multiple_of(length) {
            return Err(TorchError::Invalid(format!(
                "{} ranks along {axes} cannot be cut into pieces of {length}",
                members.len()
            )));
        }
        let index = members.iter().position(|rank| *rank == self.rank);
        let index = index.unwrap_or(0);
        let within = members[index - index % length..][..length].to_vec();
        let across = members.into_iter().skip(index % length).step_by(length);
        let across: Vec<usize> = across.collect();
        Ok((
            self.named(format!("{axes} within {length}"), || Ok(within))?,
            self.named(format!("{axes} across {length}"), || Ok(across))?,
        ))
    }

    /// The group of a name, which forms of these members when it is first asked for.
    fn named(
        &self,
        name: String,
        members: impl FnOnce() -> Result<Vec<usize>, MeshError>,
    ) -> Result<Group> {
        let mut groups = self.groups.lock().unwrap_or_else(|p| p.into_inner());
        if let Some(group) = groups.get(&name) {
            return Ok(group.clone());
        }
        let group = self.form(name.clone(), &members()?)?;
        groups.insert(name, group.clone());
        Ok(group)
    }

    /// The group of all ranks.
    pub fn everyone(&self) -> Result<Group> {
        self.group(AxisSet::ALL)
    }

    /// How long to wait for others from now on. Only while no collective is under way.
    pub fn set_timeout(&self, wanted: Duration) -> Result<()> {
        let Carrier::Real { timeout, .. } = &self.carrier else {
            return Ok(());
        };
        let groups = self.groups.lock().unwrap_or_else(|p| p.into_inner());
        *timeout.lock().unwrap_or_else(|p| p.into_inner()) = wanted;
        groups
            .values()
            .try_for_each(|group| group.set_timeout(wanted))
    }

    /// What the kernel counted on the connections of all groups formed so far.
    pub fn wire_bytes(&self) -> WireBytes {
        let groups = self.groups.lock().unwrap_or_else(|p| p.into_inner());
        let counted = groups.values().map(Group::wire_bytes);
        counted.fold(WireBytes::default(), |sum, group| WireBytes {
            sent: sum.sent + group.sent,
            received: sum.received + group.received,
        })
    }

    /// The group of `members`, ascending.
    fn form(&self, name: String, members: &[usize]) -> Result<Group> {
        let index = members.iter().position(|rank| *rank == self.rank);
        let place = Place {
            name,
            rank: self.rank,
            index: index.unwrap_or(0),
            size: members.len(),
        };
        let engine = match &self.carrier {
            _ if place.size == 1 => Engine::Alone,
            Carrier::Alone => Engine::Alone,
            Carrier::Fake => Engine::Fake(Mutex::default()),
            Carrier::Real {
                store,
                attempt,
                backend,
                address,
                timeout,
            } => {
                // Named for its first member: the groups along the same axes are many.
                let first = members.first().copied().unwrap_or(0);
                let name = format!("{attempt}group/{}/{first}", place.name);
                let store = store.prefixed(&name)?;
                let timeout = *timeout.lock().unwrap_or_else(|p| p.into_inner());
                self.connect(&place, &store, *backend, address, timeout)?
            }
        };
        Ok(Group::new(place, self.ledger.clone(), engine))
    }

    fn connect(
        &self,
        place: &Place,
        store: &Store,
        backend: Backend,
        address: &str,
        timeout: Duration,
    ) -> Result<Engine> {
        let failed = |message: String| TorchError::Forming {
            rank: self.rank,
            group: place.name.clone(),
            backend: backend.name(),
            message,
        };
        let (index, size) = (place.index as i32, place.size as i32);
        match backend {
            Backend::Gloo => {
                let second = store.prefixed("downward")?;
                let form = |store: &Store| {
                    ffi::gloo_group(store.raw(), index, size, address, millis(timeout))
                };
                let ((handle, downward), sockets) = Sockets::during(store.port(), || {
                    Ok::<_, cxx::Exception>((form(store)?, form(&second)?))
                })
                .map_err(|e| failed(e.what().to_owned()))?;
                let lane = Lane::new(&place.name, self.ledger.clone())
                    .map_err(|e| failed(format!("cannot start a thread: {e}")))?;
                Ok(Engine::Gloo(Gloo {
                    handle,
                    downward,
                    lane,
                    sockets: Arc::new(sockets),
                }))
            }
            Backend::Nccl => ffi::nccl_group(store.raw(), index, size, millis(timeout))
                .map(Engine::Nccl)
                .map_err(|e| failed(e.what().to_owned())),
        }
    }
}

impl Backend {
    /// `gloo` or `nccl`.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Gloo => "gloo",
            Backend::Nccl => "nccl",
        }
    }
}

/// How many ranks the launcher started on this machine; none without a launcher.
pub fn ranks_on_this_machine() -> Option<usize> {
    std::env::var("LOCAL_WORLD_SIZE").ok()?.parse().ok()
}

/// Says why NCCL cannot be used here, and what can.
pub fn require_gpu(rank: usize) -> Result<()> {
    let message = if cfg!(not(feature = "cuda")) {
        "this program was built without it; build with `--features cuda`, or use backend gloo on CPU"
    } else if tch::Cuda::device_count() == 0 {
        "there is no GPU on this machine; use backend gloo, which runs on CPU"
    } else {
        return Ok(());
    };
    Err(TorchError::Forming {
        rank,
        group: "world".to_owned(),
        backend: "nccl",
        message: message.to_owned(),
    })
}

/// The address of this machine on the way to the store: loopback for a job on one machine.
fn own_address(master_addr: &str, master_port: u16) -> String {
    UdpSocket::bind("0.0.0.0:0")
        .and_then(|socket| {
            // Connecting a datagram socket sends nothing; it only picks the route.
            socket.connect((master_addr, master_port.max(1)))?;
            Ok(socket.local_addr()?.ip().to_string())
        })
        .unwrap_or_else(|_| master_addr.to_owned())
}

/// What tells the keys of this attempt from others', if an agent serves the store: how often workers were
/// started again, as torchrun has it, and in which world of an elastic run.
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
