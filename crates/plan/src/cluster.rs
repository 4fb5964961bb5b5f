//! The machines a plan is for: `64xH100`, or a file that says more.
//!
//! ```toml
//! machines = 8
//! gpus_per_machine = 8
//! gpu = "H100"                 # a known one, whose figures the keys below replace
//! memory_gib = 80
//! link_gb_s = 450              # inside a machine, one direction, to all peers together
//! nics_per_machine = 8
//! nic_gbit_s = 400
//! [measured]                   # the same keys; marked as measured in every report
//! matmul_tflops = 760
//! memory_gb_s = 3100
//! link_gb_s = 370
//! network_gb_s = 45            # of one GPU's share of the cards
//! [constants]                  # any of the constants that a fit finds
//! link_latency = 1.5e-5
//! ```
//!
//! What was measured is what is reached, so the constant that stands for falling short of a data sheet is 1
//! where a measured figure takes the sheet's place.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::str::FromStr;

use serde::Deserialize;

use crate::{Accelerator, Basis, Constants, Figure};

/// Equal machines with equal accelerators.
#[derive(Clone, Debug, PartialEq)]
pub struct Cluster {
    /// What each rank computes on.
    pub accelerator: Accelerator,
    /// How many machines.
    pub num_machines: usize,
    /// Accelerators in each.
    pub per_machine: usize,
    /// Constants that its file states, by name.
    pub(crate) constants: BTreeMap<String, f64>,
}

/// Why a cluster was refused.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// Not `64xH100`.
    #[error("cannot read the cluster {text:?}: write it as 64xH100, with one of {names}")]
    Syntax {
        /// What was given.
        text: String,
        /// Known accelerators.
        names: String,
    },
    /// GPUs do not fill machines.
    #[error("{count} GPUs do not fill machines of {per_machine}: use {nearest}")]
    Uneven {
        /// GPUs asked for.
        count: usize,
        /// GPUs of a machine.
        per_machine: usize,
        /// The next count that does.
        nearest: usize,
    },
    /// A figure that cannot be.
    #[error("{key} = {value} is no positive number: remove it or correct it")]
    Figure {
        /// The key.
        key: String,
        /// What it says.
        value: f64,
    },
    /// Counts that cannot be.
    #[error("{key} = {value} is out of range: use 1 to {limit}")]
    Count {
        /// The key.
        key: &'static str,
        /// What it says.
        value: usize,
        /// The most it may say.
        limit: usize,
    },
    /// A constant that nobody has.
    #[error("{name:?} is no constant: use one of {}", Constants::names().join(", "))]
    Constant {
        /// What it is called.
        name: String,
    },
    /// A file that cannot be read.
    #[error("{path}: {reason}")]
    Unreadable {
        /// Which.
        path: String,
        /// Why.
        reason: String,
    },
    /// Not TOML, or unknown keys.
    #[error("not a cluster file: {0}")]
    Toml(String),
}

const MOST_MACHINES: usize = 1 << 20;
const MOST_PER_MACHINE: usize = 1 << 10;

impl Cluster {
    /// Machines of that many of these accelerators.
    pub fn new(
        accelerator: Accelerator,
        num_machines: usize,
        per_machine: usize,
    ) -> Result<Cluster, ClusterError> {
        let counts = [
            ("machines", num_machines, MOST_MACHINES),
            ("gpus_per_machine", per_machine, MOST_PER_MACHINE),
        ];
        for (key, value, limit) in counts {
            if value == 0 || value > limit {
                return Err(ClusterError::Count { key, value, limit });
            }
        }
        Ok(Cluster {
            accelerator,
            num_machines,
            per_machine,
            constants: BTreeMap::new(),
        })
    }

    /// The cluster that is meant: the path of a file that ends in `.toml`, or a short form.
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

    /// Says what a constant is here.
    pub fn with_constant(mut self, name: &str, value: f64) -> Result<Cluster, ClusterError> {
        if !Constants::names().contains(&name) {
            let name = name.to_owned();
            return Err(ClusterError::Constant { name });
        }
        if !(value.is_finite() && value > 0.0) {
            let key = name.to_owned();
            return Err(ClusterError::Figure { key, value });
        }
        self.constants.insert(name.to_owned(), value);
        Ok(self)
    }

    /// The file that describes it; reading it gives the same figures.
    pub fn to_toml(&self) -> String {
        let mut text = format!(
            "machines = {}\ngpus_per_machine = {}\ngpu = {:?}\n",
            self.num_machines, self.per_machine, self.accelerator.name
        );
        let usual = Accelerator::named(&self.accelerator.name);
        let own = FIGURES.iter().map(|(key, unit, of)| {
            let figure = of(&self.accelerator);
            let is_usual = usual.as_ref().is_some_and(|usual| of(usual) == figure);
            (*key, figure.value / unit, figure.basis, is_usual)
        });
        let own: Vec<_> = own.filter(|(.., is_usual)| !is_usual).collect();
        for (key, value, basis, _) in &own {
            if *basis != Basis::Measured {
                let _ = match *key {
                    // The key says it of a machine's cards.
                    "network_gb_s" => writeln!(
                        text,
                        "nics_per_machine = {}\nnic_gbit_s = {}",
                        self.per_machine,
                        value * 8.0
                    ),
                    _ => writeln!(text, "{key} = {value}"),
                };
            }
        }
        let measured = || own.iter().filter(|own| own.2 == Basis::Measured);
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

    /// How many ranks there can be.
    pub const fn world_size(&self) -> usize {
        self.num_machines * self.per_machine
    }

    /// The cluster a file describes.
    pub fn from_toml(text: &str) -> Result<Cluster, ClusterError> {
        let file: File = toml::from_str(text).map_err(|e| ClusterError::Toml(e.to_string()))?;
        let mut accelerator = Accelerator::named(&file.gpu).ok_or_else(|| unknown(&file.gpu))?;
        let per_machine = file.gpus_per_machine.unwrap_or(accelerator.per_machine);
        let cards = file.nics_per_machine.unwrap_or(per_machine) as f64;
        let network = file.nic_gbit_s.map(|gbit| gbit / 8.0 * cards);
        let stated = Overrides {
            matmul_tflops: None,
            memory_gib: file.memory_gib,
            memory_gb_s: file.memory_gb_s,
            link_gb_s: file.link_gb_s,
            host_gb_s: file.host_gb_s,
            network_gb_s: network.map(|all| all / per_machine.max(1) as f64),
        };
        stated.apply(&mut accelerator, Figure::specified)?;
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
        measured.apply(&mut accelerator, Figure::measured)?;
        let mut cluster = Cluster::new(accelerator, file.machines, per_machine)?;
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
        let per_machine = accelerator.per_machine;
        if count <= per_machine {
            return Cluster::new(accelerator, 1, count);
        }
        if !count.is_multiple_of(per_machine) {
            return Err(ClusterError::Uneven {
                count,
                per_machine,
                nearest: (count / per_machine).saturating_mul(per_machine),
            });
        }
        Cluster::new(accelerator, count / per_machine, per_machine)
    }
}

type FigureOf = fn(&Accelerator) -> &Figure;

/// Keys of figures, their units and where they are kept.
const FIGURES: [(&str, f64, FigureOf); 6] = [
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
    machines: usize,
    gpu: String,
    gpus_per_machine: Option<usize>,
    memory_gib: Option<f64>,
    memory_gb_s: Option<f64>,
    link_gb_s: Option<f64>,
    host_gb_s: Option<f64>,
    nics_per_machine: Option<usize>,
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
        figure: fn(f64, &'static str) -> Figure,
    ) -> Result<(), ClusterError> {
        let gib = 1024f64.powi(3);
        let per_peer = &mut to.link_per_peer;
        if let Some(link) = self.link_gb_s {
            // A switch gives one peer all there is; a mesh of links keeps its share.
            let share = per_peer.value / to.link.value;
            *per_peer = figure(link * share * 1e9, "the cluster file");
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
        for (key, value, unit, place) in settings {
            let Some(value) = value else { continue };
            if !(value.is_finite() && value > 0.0) {
                let key = key.to_owned();
                return Err(ClusterError::Figure { key, value });
            }
            *place = figure(value * unit, "the cluster file");
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
        assert_eq!((cluster.num_machines, cluster.per_machine), (8, 8));
        assert_eq!("16384xH100".parse::<Cluster>().unwrap().world_size(), 16384);
        assert_eq!("4xRTX4090".parse::<Cluster>().unwrap().num_machines, 1);
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
    fn what_is_written_is_read() {
        let text = "machines = 4\ngpu = 'H100'\nnics_per_machine = 4\nnic_gbit_s = 200\n\
                    memory_gib = 64\n[measured]\nlink_gb_s = 370\nmatmul_tflops = 700\n\
                    [constants]\nlink_latency = 1.5e-5\n";
        let cluster = Cluster::from_toml(text).unwrap();
        assert_eq!(cluster.constants["link"], 1.0);
        assert_eq!(cluster.constants["matmul"], 700.0 / 989.0);
        assert_eq!(Cluster::from_toml(&cluster.to_toml()).unwrap(), cluster);
        let plain: Cluster = "64xH100".parse().unwrap();
        assert_eq!(Cluster::from_toml(&plain.to_toml()).unwrap(), plain);
        for wrong in ["lnik = 1.0", "link = -1.0", "link = nan"] {
            let text = format!("machines = 1\ngpu = 'H100'\n[constants]\n{wrong}");
            assert!(Cluster::from_toml(&text).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_replaces_figures() {
        let text = "machines = 4\ngpu = 'H100'\nnics_per_machine = 4\nnic_gbit_s = 200\n\
                    [measured]\nlink_gb_s = 370\n";
        let cluster = Cluster::from_toml(text).unwrap();
        assert_eq!(cluster.world_size(), 32);
        assert_eq!(cluster.accelerator.network.value, 12.5e9);
        assert_eq!(cluster.accelerator.link.basis, Basis::Measured);
        assert_eq!(cluster.accelerator.link_per_peer.value, 370e9);
        for wrong in [
            "machines = 0\ngpu = 'H100'",
            "machines = 1\ngpu = 'H100'\nmemory_gib = -3",
            "machines = 1\ngpu = 'H100'\nmemory = 80",
            "machines = 1\ngpu = 'H100'\ngpus_per_machine = 0",
        ] {
            assert!(Cluster::from_toml(wrong).is_err(), "{wrong}");
        }
    }
}
