//! Binds ranks to the processors near their GPUs, with the four strategies of torchrun.
//!
//! A rank that runs on another socket than its GPU sends every command and every batch over the link between the
//! sockets. The kernel says in `/sys` which processors share a socket, a cache or a core.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::visible_gpus::{VISIBLE_DEVICES, visible_gpus};

/// Which processors a rank may use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NumaBinding {
    /// Those of the NUMA node of its GPU.
    Node,
    /// Those of the socket of its GPU.
    Socket,
    /// Its share of the cores of the NUMA node of its GPU, which no other rank uses.
    Exclusive,
    /// Those that share the last-level cache with each other, on the NUMA node of its GPU.
    CoreComplex,
}

impl FromStr for NumaBinding {
    type Err = String;

    fn from_str(text: &str) -> Result<NumaBinding, String> {
        match text {
            "node" => Ok(NumaBinding::Node),
            "socket" => Ok(NumaBinding::Socket),
            "exclusive" => Ok(NumaBinding::Exclusive),
            "core-complex" => Ok(NumaBinding::CoreComplex),
            _ => Err("write node, socket, exclusive or core-complex".to_owned()),
        }
    }
}

/// A set of processors by their numbers.
pub(crate) type Cpus = BTreeSet<usize>;

/// What the kernel says about this host.
#[derive(Clone, Debug)]
pub(crate) struct Topology {
    /// `/`, except in tests.
    root: PathBuf,
}

impl Topology {
    /// This host.
    pub(crate) fn of_host() -> Topology {
        Topology { root: "/".into() }
    }

    /// The GPUs of NVIDIA by their PCI addresses, in the order in which CUDA numbers equal ones.
    pub(crate) fn gpus(&self) -> io::Result<Vec<String>> {
        let dir = self.root.join("proc/driver/nvidia/gpus");
        let entries = fs::read_dir(&dir).map_err(|error| at(&dir, &error))?;
        let names = entries
            .flatten()
            .map(|entry| entry.file_name().to_string_lossy().to_lowercase());
        let mut names: Vec<String> = names.collect();
        names.sort();
        Ok(names)
    }

    /// The processors for a GPU, of those that this process may use.
    pub(crate) fn cpus(
        &self,
        binding: NumaBinding,
        gpus: &[String],
        gpu: usize,
        allowed: &Cpus,
    ) -> io::Result<Cpus> {
        let address = gpus.get(gpu).ok_or_else(|| {
            io::Error::other(format!(
                "there is no GPU {gpu}: this node has {}",
                gpus.len()
            ))
        })?;
        let node = self.node_of(address)?;
        let of_node: Cpus = &self.cpus_of_node(node)? & allowed;
        let cpus = match binding {
            NumaBinding::Node => of_node,
            NumaBinding::Socket => self.cpus_of_socket(&of_node, allowed)?,
            NumaBinding::Exclusive | NumaBinding::CoreComplex => {
                let neighbors = self.gpus_of_node(gpus, node)?;
                let position = neighbors.iter().filter(|other| **other < gpu).count();
                match binding {
                    NumaBinding::Exclusive => {
                        share_of_cores(&self.cores(&of_node)?, position, neighbors.len())?
                    }
                    _ => cache_group(&self.groups_by_cache(&of_node)?, position),
                }
            }
        };
        if cpus.is_empty() {
            return Err(io::Error::other(format!(
                "this process may use no processor near GPU {gpu} ({address}, NUMA node {node})"
            )));
        }
        Ok(cpus)
    }

    fn gpus_of_node(&self, gpus: &[String], node: usize) -> io::Result<Vec<usize>> {
        let mut found = Vec::new();
        for (gpu, address) in gpus.iter().enumerate() {
            if self.node_of(address)? == node {
                found.push(gpu);
            }
        }
        Ok(found)
    }

    /// The NUMA node of a PCI device. The kernel says -1 on hosts with a single one.
    fn node_of(&self, address: &str) -> io::Result<usize> {
        let text = self.text(&format!("sys/bus/pci/devices/{address}/numa_node"))?;
        Ok(text.parse().unwrap_or(0))
    }

    fn cpus_of_node(&self, node: usize) -> io::Result<Cpus> {
        self.cpu_list(&format!("sys/devices/system/node/node{node}/cpulist"))
    }

    fn cpus_of_socket(&self, of_node: &Cpus, allowed: &Cpus) -> io::Result<Cpus> {
        let socket_of = |cpu: usize| self.of_cpu(cpu, "topology/physical_package_id");
        let Some(first) = of_node.first() else {
            return Ok(Cpus::new());
        };
        let socket = socket_of(*first)?;
        let mut cpus = Cpus::new();
        for cpu in allowed {
            if socket_of(*cpu)? == socket {
                cpus.insert(*cpu);
            }
        }
        Ok(cpus)
    }

    /// The physical cores, by their lowest processor.
    fn cores(&self, cpus: &Cpus) -> io::Result<Vec<Cpus>> {
        let groups = self.groups(cpus, |cpu| {
            self.of_cpu(cpu, "topology/thread_siblings_list")
        })?;
        Ok(groups.into_values().collect())
    }

    /// The processors that share the last cache: the largest groups first.
    fn groups_by_cache(&self, cpus: &Cpus) -> io::Result<Vec<Cpus>> {
        let groups = self.groups(cpus, |cpu| self.last_cache(cpu))?;
        let mut groups: Vec<Cpus> = groups.into_values().collect();
        groups.sort_by_key(|group| (std::cmp::Reverse(group.len()), group.first().copied()));
        Ok(groups)
    }

    /// Processors with the same key, by the lowest of them.
    fn groups(
        &self,
        cpus: &Cpus,
        key: impl Fn(usize) -> io::Result<String>,
    ) -> io::Result<BTreeMap<usize, Cpus>> {
        let mut first: BTreeMap<String, usize> = BTreeMap::new();
        let mut groups: BTreeMap<usize, Cpus> = BTreeMap::new();
        for cpu in cpus {
            let lowest = *first.entry(key(*cpu)?).or_insert(*cpu);
            groups.entry(lowest).or_default().insert(*cpu);
        }
        Ok(groups)
    }

    /// The processors that share the cache of the highest level with a processor.
    fn last_cache(&self, cpu: usize) -> io::Result<String> {
        let dir = self
            .root
            .join(format!("sys/devices/system/cpu/cpu{cpu}/cache"));
        let mut last = (0, String::new());
        for entry in fs::read_dir(&dir)
            .map_err(|error| at(&dir, &error))?
            .flatten()
        {
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let level: usize = read("level").trim().parse().unwrap_or(0);
            if read("type").trim() != "Instruction" && level > last.0 {
                last = (level, read("shared_cpu_list").trim().to_owned());
            }
        }
        Ok(last.1)
    }

    fn of_cpu(&self, cpu: usize, name: &str) -> io::Result<String> {
        self.text(&format!("sys/devices/system/cpu/cpu{cpu}/{name}"))
    }

    fn cpu_list(&self, path: &str) -> io::Result<Cpus> {
        let text = self.text(path)?;
        parse_cpu_list(&text).ok_or_else(|| {
            at(
                &self.root.join(path),
                &io::Error::other(format!("`{text}` is no list of processors")),
            )
        })
    }

    fn text(&self, path: &str) -> io::Result<String> {
        let path = self.root.join(path);
        let text = fs::read_to_string(&path).map_err(|error| at(&path, &error))?;
        Ok(text.trim().to_owned())
    }
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// The processors that this process may use.
fn allowed_cpus() -> io::Result<Cpus> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect())
}

/// The processors for a local rank on this host, in the kernel's notation.
pub(crate) fn cpus_of_rank(binding: NumaBinding, local_rank: usize) -> io::Result<String> {
    let host = Topology::of_host();
    let gpus = host.gpus()?;
    let variable = std::env::var(VISIBLE_DEVICES).ok();
    let visible = visible_gpus(variable.as_deref(), gpus.len());
    let gpu = visible.get(local_rank).ok_or_else(|| {
        io::Error::other(format!(
            "local rank {local_rank} has no GPU: {} are visible",
            visible.len()
        ))
    })?;
    let gpu = gpu.parse().map_err(|_| {
        io::Error::other(format!(
            "{VISIBLE_DEVICES} must number the GPUs, and names {gpu}"
        ))
    })?;
    let cpus = host.cpus(binding, &gpus, gpu, &allowed_cpus()?)?;
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    Ok(cpus.join(","))
}

/// The kernel's notation of processors: `0-3,8`.
pub(crate) fn parse_cpu_list(text: &str) -> Option<Cpus> {
    let mut cpus = Cpus::new();
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cpus)
}

/// The cores of one of several GPUs; the first ones get one more if they cannot be divided evenly.
fn share_of_cores(cores: &[Cpus], position: usize, num_gpus: usize) -> io::Result<Cpus> {
    let (each, left) = (cores.len() / num_gpus, cores.len() % num_gpus);
    if each == 0 {
        let message = format!(
            "{} cores cannot be divided among {num_gpus} GPUs",
            cores.len()
        );
        return Err(io::Error::other(message));
    }
    let first = position * each + position.min(left);
    let num = each + usize::from(position < left);
    Ok(cores
        .iter()
        .skip(first)
        .take(num)
        .flatten()
        .copied()
        .collect())
}

fn cache_group(groups: &[Cpus], position: usize) -> Cpus {
    let index = position.checked_rem(groups.len());
    index
        .and_then(|index| groups.get(index))
        .cloned()
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two sockets with two NUMA nodes each, of four processors: two cores with two threads. Every node has a cache and two
    /// GPUs, except the last node, which has none.
    fn host() -> io::Result<(tempfile::TempDir, Topology)> {
        let dir = tempfile::tempdir()?;
        let write = |path: String, text: String| -> io::Result<()> {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
            fs::write(path, text + "\n")
        };
        for node in 0..4 {
            // The second threads of the cores are numbered after all first ones.
            let list = format!(
                "{}-{},{}-{}",
                2 * node,
                2 * node + 1,
                8 + 2 * node,
                9 + 2 * node
            );
            write(
                format!("sys/devices/system/node/node{node}/cpulist"),
                list.clone(),
            )?;
            for core in [2 * node, 2 * node + 1] {
                for cpu in [core, core + 8] {
                    let cpu = format!("sys/devices/system/cpu/cpu{cpu}");
                    write(
                        format!("{cpu}/topology/physical_package_id"),
                        (node / 2).to_string(),
                    )?;
                    write(
                        format!("{cpu}/topology/thread_siblings_list"),
                        format!("{core},{}", core + 8),
                    )?;
                    for (index, level, kind, shared) in [
                        (0, 1, "Data", format!("{core},{}", core + 8)),
                        (1, 3, "Unified", list.clone()),
                        (2, 4, "Instruction", "0-15".to_owned()),
                    ] {
                        let cache = format!("{cpu}/cache/index{index}");
                        write(format!("{cache}/level"), level.to_string())?;
                        write(format!("{cache}/type"), kind.to_owned())?;
                        write(format!("{cache}/shared_cpu_list"), shared)?;
                    }
                }
            }
        }
        for gpu in 0..6 {
            let address = format!("0000:{gpu}a:00.0");
            fs::create_dir_all(
                dir.path()
                    .join(format!("proc/driver/nvidia/gpus/{address}")),
            )?;
            write(
                format!("sys/bus/pci/devices/{address}/numa_node"),
                (gpu / 2).to_string(),
            )?;
        }
        let root = dir.path().to_owned();
        Ok((dir, Topology { root }))
    }

    #[test]
    fn every_strategy_chooses_processors_near_the_gpu() -> io::Result<()> {
        let (_dir, host) = host()?;
        let gpus = host.gpus()?;
        let all: Cpus = (0..16).collect();
        let cpus = |binding, gpu| host.cpus(binding, &gpus, gpu, &all);
        let set = |list: &[usize]| list.iter().copied().collect::<Cpus>();
        assert_eq!(cpus(NumaBinding::Node, 2)?, set(&[2, 3, 10, 11]));
        assert_eq!(
            cpus(NumaBinding::Socket, 2)?,
            set(&[0, 1, 2, 3, 8, 9, 10, 11])
        );
        assert_eq!(cpus(NumaBinding::Exclusive, 2)?, set(&[2, 10]));
        assert_eq!(cpus(NumaBinding::Exclusive, 3)?, set(&[3, 11]));
        assert_eq!(cpus(NumaBinding::CoreComplex, 4)?, set(&[4, 5, 12, 13]));
        assert_eq!(cpus(NumaBinding::CoreComplex, 5)?, set(&[4, 5, 12, 13]));
        assert!(cpus(NumaBinding::Node, 6).is_err());
        Ok(())
    }

    #[test]
    fn processors_that_are_not_allowed_are_left_out() -> io::Result<()> {
        let (_dir, host) = host()?;
        let gpus = host.gpus()?;
        let allowed: Cpus = [0, 2, 8, 10].into();
        let node = host.cpus(NumaBinding::Node, &gpus, 0, &allowed)?;
        assert_eq!(node, [0, 8].into());
        let exclusive = host.cpus(NumaBinding::Exclusive, &gpus, 0, &allowed);
        assert!(exclusive.is_err(), "one core for two GPUs");
        let none = host.cpus(NumaBinding::Node, &gpus, 4, &allowed);
        assert!(none.is_err());
        Ok(())
    }

    #[test]
    fn cores_that_cannot_be_divided_evenly_go_to_the_first_gpus() -> io::Result<()> {
        let cores: Vec<Cpus> = (0..5).map(|core| [core].into()).collect();
        let shares =
            [0, 1, 2].map(|position| share_of_cores(&cores, position, 3).map(|cpus| cpus.len()));
        assert_eq!(
            shares.into_iter().collect::<io::Result<Vec<_>>>()?,
            [2, 2, 1]
        );
        assert_eq!(parse_cpu_list("0-2,7,"), Some([0, 1, 2, 7].into()));
        assert_eq!(parse_cpu_list("0-x"), None);
        Ok(())
    }
}
