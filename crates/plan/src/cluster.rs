//! The cluster a plan is for: `64xH100`, or a TOML file with more detail.
//!
//! ```toml
//! nodes = 8
//! gpus_per_node = 8
//! gpu = "H100"                 # a known accelerator, whose figures the keys below replace
//! memory_gib = 80
//! link_gb_s = 450              # within a node, per direction, to all peers together
//! nics_per_node = 8
//! nic_gbit_s = 400
//! [measured]                   # the same keys; reports mark them as measured
//! matmul_tflops = 760
//! memory_gb_s = 3100
//! link_gb_s = 370
//! network_gb_s = 45            # per GPU: its share of the NICs
//! [constants]                  # any of the efficiency constants
//! link_latency = 1.5e-5
//! ```
//!
//! A measured figure is what the hardware reaches, so the constant for its efficiency becomes 1.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use crate::{Accelerator, Basis, Constants, SourcedValue};

/// Equal nodes with equal accelerators.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// The accelerator of every rank.
    pub accelerator: Accelerator,
    /// The number of nodes.
    pub num_nodes: usize,
    /// Accelerators per node.
    pub gpus_per_node: usize,
    /// Efficiency constants from the cluster file, by name.
    pub(crate) constants: BTreeMap<String, f64>,
}

/// Why a cluster is rejected.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// The text is not of the form `64xH100`.
    #[error("cannot read the cluster {text:?}: write it as 64xH100, with one of {names}")]
    Syntax {
        /// The text.
        text: String,
        /// The known accelerators.
        names: String,
    },
    /// The GPUs do not fill whole nodes.
    #[error("{count} GPUs do not fill nodes of {gpus_per_node} GPUs: use {nearest}")]
    Uneven {
        /// The requested number of GPUs.
        count: usize,
        /// GPUs per node.
        gpus_per_node: usize,
        /// The largest smaller number that fills whole nodes.
        nearest: usize,
    },
    /// A value that must be positive and finite.
    #[error("{key} = {value} is not a positive number: remove or correct it")]
    NotPositive {
        /// The key.
        key: String,
        /// Its value.
        value: f64,
    },
    /// A count out of range.
    #[error("{key} = {value} is out of range: use 1 to {limit}")]
    Count {
        /// The key.
        key: &'static str,
        /// Its value.
        value: usize,
        /// The largest valid value.
        limit: usize,
    },
    /// An unknown constant.
    #[error("{name:?} is not a known constant: use one of {}", Constants::names().join(", "))]
    Constant {
        /// The unknown name.
        name: String,
    },
    /// A cluster file that cannot be read.
    #[error("{path}: {reason}")]
    Unreadable {
        /// The file's path.
        path: String,
        /// The I/O error.
        reason: String,
    },
    /// Invalid TOML, or unknown keys.
    #[error("not a cluster file: {0}")]
    Toml(String),
}

const MAX_NODES: usize = 1 << 20;
const MAX_GPUS_PER_NODE: usize = 1 << 10;

impl Cluster {
    /// A cluster of `num_nodes` nodes with `gpus_per_node` accelerators each.
    pub fn new(
        accelerator: Accelerator,
        num_nodes: usize,
        gpus_per_node: usize,
    ) -> Result<Cluster, ClusterError> {
        let counts = [
            ("nodes", num_nodes, MAX_NODES),
            ("gpus_per_node", gpus_per_node, MAX_GPUS_PER_NODE),
        ];
        for (key, value, limit) in counts {
            if value == 0 || value > limit {
                return Err(ClusterError::Count { key, value, limit });
            }
        }
        Ok(Cluster {
            accelerator,
            num_nodes,
            gpus_per_node,
            constants: BTreeMap::new(),
        })
    }

    /// The cluster named by a path that ends in `.toml`, or by a short form such as `64xH100`.
    pub fn named(text: &str) -> Result<Cluster, ClusterError> {
        if !text.ends_with(".toml") {
            return text.parse();
        }
        let file = std::fs::read_to_string(Path::new(text));
        let file = file.map_err(|error| ClusterError::Unreadable {
            path: text.to_owned(),
            reason: error.to_string(),
        })?;
        Cluster::from_toml(&file)
    }

    /// Sets an efficiency constant.
    pub fn with_constant(mut self, name: &str, value: f64) -> Result<Cluster, ClusterError> {
        if !Constants::names().contains(&name) {
            let name = name.to_owned();
            return Err(ClusterError::Constant { name });
        }
        if !(value.is_finite() && value > 0.0) {
            let key = name.to_owned();
            return Err(ClusterError::NotPositive { key, value });
        }
        self.constants.insert(name.to_owned(), value);
        Ok(self)
    }

    /// The cluster file; reading it gives the same cluster.
    pub fn to_toml(&self) -> String {
        let mut text = format!(
            "nodes = {}\ngpus_per_node = {}\ngpu = {:?}\n",
            self.num_nodes, self.gpus_per_node, self.accelerator.name
        );
        let default = Accelerator::named(&self.accelerator.name);
        let overrides = VALUE_KEYS.iter().map(|(key, unit, of)| {
            let sourced = of(&self.accelerator);
            let is_default = default
                .as_ref()
                .is_some_and(|default| of(default) == sourced);
            (*key, sourced.value / unit, sourced.basis, is_default)
        });
        let overrides: Vec<_> = overrides.filter(|(.., is_default)| !is_default).collect();
        for (key, value, basis, _) in &overrides {
            if *basis != Basis::Measured {
                let _ = match *key {
                    // The file states the bandwidth of the node's NICs.
                    "network_gb_s" => writeln!(
                        text,
                        "nics_per_node = {}\nnic_gbit_s = {}",
                        self.gpus_per_node,
                        value * 8.0
                    ),
                    _ => writeln!(text, "{key} = {value}"),
                };
            }
        }
        let measured = || {
            overrides
                .iter()
                .filter(|overrides| overrides.2 == Basis::Measured)
        };
        if measured().next().is_some() {
            text.push_str("\n[measured]\n");
        }
        for (key, value, ..) in measured() {
            let _ = writeln!(text, "{key} = {value}");
        }
        if !self.constants.is_empty() {
            text.push_str("\n[constants]\n");
        }
        for (name, value) in &self.constants {
            let _ = writeln!(text, "{name} = {value:e}");
        }
        text
    }

    /// The total number of accelerators.
    pub const fn world_size(&self) -> usize {
        self.num_nodes * self.gpus_per_node
    }

    /// Parses a cluster file.
    pub fn from_toml(text: &str) -> Result<Cluster, ClusterError> {
        let file: File = toml::from_str(text).map_err(|e| ClusterError::Toml(e.to_string()))?;
        let mut accelerator = Accelerator::named(&file.gpu).ok_or_else(|| unknown(&file.gpu))?;
        let gpus_per_node = file.gpus_per_node.unwrap_or(accelerator.gpus_per_node);
        let nics = file.nics_per_node.unwrap_or(gpus_per_node) as f64;
        let network = file.nic_gbit_s.map(|gbit| gbit / 8.0 * nics);
        let stated = Overrides {
            matmul_tflops: None,
            memory_gib: file.memory_gib,
            memory_gb_s: file.memory_gb_s,
            link_gb_s: file.link_gb_s,
            host_gb_s: file.host_gb_s,
            network_gb_s: network.map(|all| all / gpus_per_node.max(1) as f64),
        };
        stated.apply(&mut accelerator, SourcedValue::specified)?;
        let measured = file.measured;
        let reached = [
            ("link", measured.link_gb_s.map(|_| 1.0)),
            ("network", measured.network_gb_s.map(|_| 1.0)),
            ("memory", measured.memory_gb_s.map(|_| 1.0)),
            (
                "matmul",
                measured
                    .matmul_tflops
                    .map(|teraflops| (teraflops * 1e12 / accelerator.peak.value).min(1.0)),
            ),
        ];
        measured.apply(&mut accelerator, SourcedValue::measured)?;
        let mut cluster = Cluster::new(accelerator, file.nodes, gpus_per_node)?;
        for (name, value) in reached {
            if let Some(value) = value {
                cluster = cluster.with_constant(name, value)?;
            }
        }
        for (name, value) in &file.constants {
            cluster = cluster.with_constant(name, *value)?;
        }
        Ok(cluster)
    }
}

impl FromStr for Cluster {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Cluster, ClusterError> {
        let (count, name) = text
            .split_once(['x', 'X', '*'])
            .ok_or_else(|| unknown(text))?;
        let count: usize = count.trim().parse().map_err(|_| unknown(text))?;
        let accelerator = Accelerator::named(name.trim()).ok_or_else(|| unknown(text))?;
        let gpus_per_node = accelerator.gpus_per_node;
        if count <= gpus_per_node {
            return Cluster::new(accelerator, 1, count);
        }
        if !count.is_multiple_of(gpus_per_node) {
            return Err(ClusterError::Uneven {
                count,
                gpus_per_node,
                nearest: (count / gpus_per_node).saturating_mul(gpus_per_node),
            });
        }
        Cluster::new(accelerator, count / gpus_per_node, gpus_per_node)
    }
}

type ValueOf = fn(&Accelerator) -> &SourcedValue;

/// The keys of the figures, their units and their fields.
const VALUE_KEYS: [(&str, f64, ValueOf); 6] = [
    ("matmul_tflops", 1e12, |a| &a.sustained),
    ("memory_gib", 1024.0 * 1024.0 * 1024.0, |a| &a.memory),
    ("memory_gb_s", 1e9, |a| &a.memory_bandwidth),
    ("link_gb_s", 1e9, |a| &a.link),
    ("host_gb_s", 1e9, |a| &a.host),
    ("network_gb_s", 1e9, |a| &a.network),
];

fn unknown(text: &str) -> ClusterError {
    ClusterError::Syntax {
        text: text.to_owned(),
        names: Accelerator::names().join(", "),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    nodes: usize,
    gpu: String,
    gpus_per_node: Option<usize>,
    memory_gib: Option<f64>,
    memory_gb_s: Option<f64>,
    link_gb_s: Option<f64>,
    host_gb_s: Option<f64>,
    nics_per_node: Option<usize>,
    nic_gbit_s: Option<f64>,
    #[serde(default)]
    measured: Overrides,
    #[serde(default)]
    constants: BTreeMap<String, f64>,
}

#[derive(Copy, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Overrides {
    matmul_tflops: Option<f64>,
    memory_gib: Option<f64>,
    memory_gb_s: Option<f64>,
    link_gb_s: Option<f64>,
    host_gb_s: Option<f64>,
    network_gb_s: Option<f64>,
}

impl Overrides {
    fn apply(
        self,
        to: &mut Accelerator,
        sourced: fn(f64, &'static str) -> SourcedValue,
    ) -> Result<(), ClusterError> {
        let gib = 1024f64.powi(3);
        let per_peer = &mut to.link_per_peer;
        if let Some(link) = self.link_gb_s {
            // With a switch one peer gets the full bandwidth; in a mesh of links it keeps its share.
            let share = per_peer.value / to.link.value;
            *per_peer = sourced(link * share * 1e9, "the cluster file");
        }
        let settings = [
            ("matmul_tflops", self.matmul_tflops, 1e12, &mut to.sustained),
            ("memory_gib", self.memory_gib, gib, &mut to.memory),
            (
                "memory_gb_s",
                self.memory_gb_s,
                1e9,
                &mut to.memory_bandwidth,
            ),
            ("link_gb_s", self.link_gb_s, 1e9, &mut to.link),
            ("host_gb_s", self.host_gb_s, 1e9, &mut to.host),
            ("network_gb_s", self.network_gb_s, 1e9, &mut to.network),
        ];
        for (key, value, unit, target) in settings {
            let Some(value) = value else { continue };
            if !(value.is_finite() && value > 0.0) {
                let key = key.to_owned();
                return Err(ClusterError::NotPositive { key, value });
            }
            *target = sourced(value * unit, "the cluster file");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Basis;

    #[test]
    fn short_forms() {
        let cluster: Cluster = "64xH100".parse().unwrap();
        assert_eq!((cluster.num_nodes, cluster.gpus_per_node), (8, 8));
        assert_eq!("16384xH100".parse::<Cluster>().unwrap().world_size(), 16384);
        assert_eq!("4xRTX4090".parse::<Cluster>().unwrap().num_nodes, 1);
        for wrong in [
            "",
            "x",
            "64",
            "64xTeapot",
            "-1xH100",
            "0xH100",
            "99999999999999999999xH100",
        ] {
            assert!(wrong.parse::<Cluster>().is_err(), "{wrong}");
        }
        let uneven = "60xH100".parse::<Cluster>().unwrap_err();
        assert!(uneven.to_string().contains("56"), "{uneven}");
    }

    #[test]
    fn cluster_files_round_trip() {
        let text = "nodes = 4\ngpu = 'H100'\nnics_per_node = 4\nnic_gbit_s = 200\n\
                    memory_gib = 64\n[measured]\nlink_gb_s = 370\nmatmul_tflops = 700\n\
                    [constants]\nlink_latency = 1.5e-5\n";
        let cluster = Cluster::from_toml(text).unwrap();
        assert_eq!(cluster.constants["link"], 1.0);
        assert_eq!(cluster.constants["matmul"], 700.0 / 989.0);
        assert_eq!(Cluster::from_toml(&cluster.to_toml()).unwrap(), cluster);
        let plain: Cluster = "64xH100".parse().unwrap();
        assert_eq!(Cluster::from_toml(&plain.to_toml()).unwrap(), plain);
        for wrong in ["lnik = 1.0", "link = -1.0", "link = nan"] {
            let text = format!("nodes = 1\ngpu = 'H100'\n[constants]\n{wrong}");
            assert!(Cluster::from_toml(&text).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_overrides_figures() {
        let text = "nodes = 4\ngpu = 'H100'\nnics_per_node = 4\nnic_gbit_s = 200\n\
                    [measured]\nlink_gb_s = 370\n";
        let cluster = Cluster::from_toml(text).unwrap();
        assert_eq!(cluster.world_size(), 32);
        assert_eq!(cluster.accelerator.network.value, 12.5e9);
        assert_eq!(cluster.accelerator.link.basis, Basis::Measured);
        assert_eq!(cluster.accelerator.link_per_peer.value, 370e9);
        for wrong in [
            "nodes = 0\ngpu = 'H100'",
            "nodes = 1\ngpu = 'H100'\nmemory_gib = -3",
            "nodes = 1\ngpu = 'H100'\nmemory = 80",
            "nodes = 1\ngpu = 'H100'\ngpus_per_node = 0",
        ] {
            assert!(Cluster::from_toml(wrong).is_err(), "{wrong}");
        }
    }
}
