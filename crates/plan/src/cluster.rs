//! The cluster a plan is for: `64xH100`, two sites as `2x64xH100@10Gb/s,30ms`, or a TOML file with more detail.
//!
//! ```toml
//! nodes = 8
//! gpus_per_node = 8
//! gpu = "H100"                 # a known accelerator, whose figures the keys below replace
//! memory_gib = 80
//! link_gb_s = 450              # within a node, per direction, to all peers together
//! nics_per_node = 8
//! nic_gbit_s = 400
//! sites = 2                    # nodes / sites nodes are in each of them
//! site_gbit_s = 10             # from one site to the others, per direction
//! site_round_trip_ms = 30      # between two sites
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

use crate::sites::MAX_SITES;
use crate::{Accelerator, Basis, Constants, Sites, SourcedValue};

/// Equal nodes with equal accelerators.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// The accelerator of every rank.
    pub accelerator: Accelerator,
    /// The number of nodes, of all sites together.
    pub num_nodes: usize,
    /// Accelerators per node.
    pub gpus_per_node: usize,
    /// The sites, if there are several.
    pub sites: Option<Sites>,
    /// Efficiency constants from the cluster file, by name.
    pub(crate) constants: BTreeMap<String, f64>,
}

/// Why a cluster is rejected.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// The text is not of the form `64xH100`.
    #[error(
        "cannot read the cluster {text:?}: write it as 64xH100, or two sites as 2x64xH100@10Gb/s,30ms, with one of {names}"
    )]
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
    #[error("{key} = {value} is out of range: use {least} to {limit}")]
    Count {
        /// The key.
        key: &'static str,
        /// Its value.
        value: usize,
        /// The smallest valid value.
        least: usize,
        /// The largest valid value.
        limit: usize,
    },
    /// The nodes cannot be divided over the sites.
    #[error(
        "{num_nodes} nodes cannot be divided evenly over {num_sites} sites: change nodes or sites"
    )]
    UnevenSites {
        /// The nodes of all sites.
        num_nodes: usize,
        /// The sites.
        num_sites: usize,
    },
    /// Several sites without the network between them.
    #[error("the network between the sites is missing: add site_gbit_s, in Gb/s")]
    NoSiteNetwork,
    /// A network between sites, but one site.
    #[error("{key} is given, but there is one site: add sites = 2, or remove it")]
    OneSite {
        /// The key.
        key: &'static str,
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
                return Err(ClusterError::Count {
                    key,
                    value,
                    least: 1,
                    limit,
                });
            }
        }
        Ok(Cluster {
            accelerator,
            num_nodes,
            gpus_per_node,
            sites: None,
            constants: BTreeMap::new(),
        })
    }

    /// The cluster with its nodes divided over these sites.
    ///
    /// # Errors
    /// The sites do not divide the nodes.
    pub fn with_sites(mut self, sites: Sites) -> Result<Cluster, ClusterError> {
        let (num_nodes, num_sites) = (self.num_nodes, sites.num_sites);
        if num_sites == 0 || !num_nodes.is_multiple_of(num_sites) {
            return Err(ClusterError::UnevenSites {
                num_nodes,
                num_sites,
            });
        }
        self.sites = Some(sites);
        Ok(self)
    }

    /// The number of sites.
    pub fn num_sites(&self) -> usize {
        self.sites.as_ref().map_or(1, |sites| sites.num_sites)
    }

    /// Accelerators per site.
    pub fn gpus_per_site(&self) -> usize {
        self.world_size() / self.num_sites()
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
        if let Some(sites) = &self.sites {
            let _ = writeln!(
                text,
                "sites = {}\nsite_gbit_s = {}",
                sites.num_sites,
                sites.gbit_s()
            );
            if sites.round_trip.basis != Basis::Assumed {
                let _ = writeln!(text, "site_round_trip_ms = {}", sites.round_trip_ms());
            }
        }
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
        if let Some(sites) = file.sites()? {
            cluster = cluster.with_sites(sites)?;
        }
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
        let Some((nodes, network)) = text.split_once('@') else {
            return one_site(text, 1);
        };
        let (num_sites, site) = split_count(nodes).ok_or_else(|| unknown(text))?;
        if num_sites > MAX_SITES {
            return Err(ClusterError::Count {
                key: "sites",
                value: num_sites,
                least: 2,
                limit: MAX_SITES,
            });
        }
        let sites = Sites::parse(num_sites, network).ok_or_else(|| unknown(text))??;
        one_site(site, num_sites)?.with_sites(sites)
    }
}

/// Splits `64xH100` into the number and the rest.
fn split_count(text: &str) -> Option<(usize, &str)> {
    let (count, rest) = text.split_once(['x', 'X', '*'])?;
    Some((count.trim().parse().ok()?, rest.trim()))
}

/// `num_sites` times as many nodes as `64xH100` describes, without the network between the sites.
fn one_site(text: &str, num_sites: usize) -> Result<Cluster, ClusterError> {
    let (count, name) = split_count(text).ok_or_else(|| unknown(text))?;
    let accelerator = Accelerator::named(name).ok_or_else(|| unknown(text))?;
    let gpus_per_node = accelerator.gpus_per_node;
    if count <= gpus_per_node {
        return Cluster::new(accelerator, num_sites, count);
    }
    if !count.is_multiple_of(gpus_per_node) {
        return Err(ClusterError::Uneven {
            count,
            gpus_per_node,
            nearest: (count / gpus_per_node).saturating_mul(gpus_per_node),
        });
    }
    let num_nodes = (count / gpus_per_node).saturating_mul(num_sites);
    Cluster::new(accelerator, num_nodes, gpus_per_node)
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
    sites: Option<usize>,
    site_gbit_s: Option<f64>,
    site_round_trip_ms: Option<f64>,
    #[serde(default)]
    measured: Overrides,
    #[serde(default)]
    constants: BTreeMap<String, f64>,
}

impl File {
    fn sites(&self) -> Result<Option<Sites>, ClusterError> {
        let num_sites = self.sites.unwrap_or(1);
        let of_several = [
            ("site_gbit_s", self.site_gbit_s),
            ("site_round_trip_ms", self.site_round_trip_ms),
        ];
        if num_sites == 1 {
            let given = of_several.iter().find(|(_, value)| value.is_some());
            return given.map_or(Ok(None), |(key, _)| Err(ClusterError::OneSite { key }));
        }
        let gbit_s = self.site_gbit_s.ok_or(ClusterError::NoSiteNetwork)?;
        Sites::new(num_sites, gbit_s, self.site_round_trip_ms).map(Some)
    }
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
    fn short_forms_of_sites() {
        let cluster: Cluster = "2x64xH100@10Gb/s,30ms".parse().unwrap();
        assert_eq!((cluster.num_nodes, cluster.world_size()), (16, 128));
        assert_eq!((cluster.num_sites(), cluster.gpus_per_site()), (2, 64));
        let sites = cluster.sites.clone().unwrap();
        assert_eq!((sites.gbit_s(), sites.round_trip_ms()), (10.0, 30.0));
        assert_eq!(sites.bandwidth.value, 1.25e9);
        assert_eq!(Cluster::from_toml(&cluster.to_toml()).unwrap(), cluster);
        let assumed: Cluster = "4 x 2xRTX4090 @ 2.5 Gbps".parse().unwrap();
        assert_eq!((assumed.num_nodes, assumed.gpus_per_node), (4, 2));
        let sites = assumed.sites.clone().unwrap();
        assert_eq!(sites.round_trip.basis, Basis::Assumed);
        assert_eq!(Cluster::from_toml(&assumed.to_toml()).unwrap(), assumed);
        for wrong in [
            "2x64xH100",
            "64xH100@10Gb/s",
            "1x64xH100@10Gb/s",
            "0x64xH100@10Gb/s",
            "2x60xH100@10Gb/s",
            "2x64xH100@10",
            "2x64xH100@-1Gb/s",
            "2x64xH100@10Gb/s,30",
            "2x64xH100@10Gb/s,0ms",
            "99999999xx64xH100@10Gb/s",
        ] {
            assert!(wrong.parse::<Cluster>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn files_of_sites() {
        let file = |keys: &str| Cluster::from_toml(&format!("nodes = 16\ngpu = 'H100'\n{keys}"));
        let cluster = file("sites = 2\nsite_gbit_s = 10\nsite_round_trip_ms = 30").unwrap();
        assert_eq!(cluster, "2x64xH100@10Gb/s,30ms".parse().unwrap());
        assert_eq!(file("sites = 1").unwrap().sites, None);
        for (wrong, reason) in [
            ("sites = 2", "site_gbit_s"),
            ("site_gbit_s = 10", "one site"),
            ("sites = 3\nsite_gbit_s = 10", "3 sites"),
            ("sites = 0\nsite_gbit_s = 10", "sites = 0"),
            ("sites = 2\nsite_gbit_s = 0", "site_gbit_s = 0"),
        ] {
            let error = file(wrong).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
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
