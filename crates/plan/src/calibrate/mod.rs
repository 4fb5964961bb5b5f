//! Calibrates a cluster from common measurements: nccl-tests and a sweep of matrix products.
//!
//! Every nccl-tests table is fitted by a line, seconds over bytes on the wire: its intercept is the latency, its
//! slope the inverse bandwidth. Tables of one node determine links, those of several nodes the network.

mod matmul;
mod nccl;

pub use matmul::{MatmulSample, read_matmuls};
pub use nccl::{Collective, Table, read_tables};

use crate::operator::REFERENCE_PEAK;
use crate::{Cluster, ClusterError, SourcedValue};

/// Why a measurement cannot be used.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum CalibrateError {
    /// The file contains no table.
    #[error("{file}: no nccl-tests table found: include the full output with header and rows")]
    NoTable {
        /// The file.
        file: String,
    },
    /// A truncated row or an invalid number.
    #[error("{file}, line {line}: {found} is not a valid {wanted}")]
    Row {
        /// The file.
        file: String,
        /// The line number, from 1.
        line: usize,
        /// The text that was found.
        found: String,
        /// What was expected.
        wanted: &'static str,
    },
    /// The number of ranks is unknown.
    #[error("{file}: the number of ranks is unknown: keep the lines `# Rank ... on HOST`")]
    NoRanks {
        /// The file.
        file: String,
    },
    /// The collective is unknown.
    #[error(
        "{file}: the collective is unknown: name the file after it, for example all_reduce_perf.txt"
    )]
    NoCollective {
        /// The file.
        file: String,
    },
    /// Too few rows for a fit.
    #[error("{file}: {found} rows are too few: measure at least {wanted} sizes")]
    Few {
        /// The file.
        file: String,
        /// Number of rows.
        found: usize,
        /// Number of rows required.
        wanted: usize,
    },
    /// Times that do not grow with sizes.
    #[error(
        "{file}: time does not grow with size, so the bandwidth is undetermined: measure larger sizes"
    )]
    Flat {
        /// The file.
        file: String,
    },
    /// The resulting cluster is invalid.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// A calibrated cluster and the quality of the fit.
#[derive(Clone, Debug)]
pub struct Calibrated {
    /// The calibrated cluster.
    pub cluster: Cluster,
    /// One line per measurement.
    pub notes: Vec<String>,
}

/// The lowest latency that is written; a zero would be an artifact of the fit.
const MIN_LATENCY: f64 = 1e-7;

/// Replaces data-sheet figures by measurements.
pub fn calibrate(
    cluster: &Cluster,
    tables: &[Table],
    matmuls: &[MatmulSample],
) -> Result<Calibrated, CalibrateError> {
    let mut notes = Vec::new();
    let mut network = NetworkFit::default();
    // Tables of one node come first: inter-node latency is measured in addition to theirs.
    let intra_node = tables.iter().filter(|table| table.num_nodes == 1);
    let inter_node = tables.iter().filter(|table| table.num_nodes > 1);
    for table in intra_node.chain(inter_node) {
        let line = table.line()?;
        notes.push(table.note(&line));
        network.add_table(table, &line);
    }
    let mut cluster = network.apply(cluster.clone())?;
    if !matmuls.is_empty() {
        let peak = cluster.accelerator.peak.value;
        let fit = matmul::fit(matmuls, peak)?;
        let share = rounded(fit.share);
        notes.push(format!(
            "{} matrix products: {:.0} TFLOP/s for very large ones, mean error {:.1} %",
            matmuls.len(),
            fit.share * peak / 1e12,
            100.0 * fit.error
        ));
        cluster.accelerator.sustained =
            SourcedValue::measured(rounded(share * peak), "a matmul sweep");
        cluster = cluster
            .with_constant("matmul", share)?
            .with_constant("matmul_area", rounded(fit.area * REFERENCE_PEAK / peak))?
            .with_constant("matmul_depth", rounded(fit.depth))?;
    }
    Ok(Calibrated { cluster, notes })
}

/// Network figures from the tables; several tables give their geometric mean.
#[derive(Default)]
struct NetworkFit {
    link: Mean,
    link_latency: Mean,
    peer: Mean,
    network: Mean,
    network_latency: Mean,
}

impl NetworkFit {
    fn add_table(&mut self, table: &Table, line: &nccl::LinearFit) {
        let rate = line.bytes_per_second;
        let doublings = (table.num_ranks as f64).log2().max(1.0);
        // An all-gather takes half of an all-reduce's latency, as it takes half of its bytes.
        let latency = match table.collective {
            Collective::AllGather | Collective::ReduceScatter => 2.0 * line.latency,
            _ => line.latency,
        };
        let is_point_to_point = table.collective == Collective::SendReceive;
        if table.num_nodes == 1 {
            if is_point_to_point {
                self.peer.add(rate)
            } else {
                self.link.add(rate);
                self.link_latency
                    .add((latency / doublings).max(MIN_LATENCY));
            }
            return;
        }
        let intra_node = (table.num_ranks / table.num_nodes) as f64;
        let network = match table.collective {
            // A ring uses the NICs of all its ranks in a node.
            Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter => {
                rate / intra_node
            }
            // Only data that leaves the node passes its NIC.
            Collective::AllToAll => {
                let size = table.num_ranks as f64;
                rate * (size - intra_node) / (size - 1.0)
            }
            Collective::SendReceive => rate,
        };
        self.network.add(network);
        let intra_node_latency = if is_point_to_point {
            0.0
        } else {
            self.link_latency.value().unwrap_or(0.0) * doublings
        };
        self.network_latency
            .add((latency - intra_node_latency).max(MIN_LATENCY));
    }

    fn apply(&self, mut cluster: Cluster) -> Result<Cluster, ClusterError> {
        const SOURCE: &str = "nccl-tests";
        let accelerator = &mut cluster.accelerator;
        let share = accelerator.link_per_peer.value / accelerator.link.value;
        let mut constants = Vec::new();
        if let Some(link) = self.link.value() {
            accelerator.link = SourcedValue::measured(link, SOURCE);
            accelerator.link_per_peer = SourcedValue::measured(link * share, SOURCE);
            constants.push(("link", 1.0));
        }
        if let Some(peer) = self.peer.value() {
            let specified = accelerator.link_per_peer.value;
            constants.push(("peer", (peer / specified).min(1.0)));
        }
        if let Some(network) = self.network.value() {
            accelerator.network = SourcedValue::measured(network, SOURCE);
            constants.push(("network", 1.0));
        }
        let latencies = [
            ("link_latency", &self.link_latency),
            ("network_latency", &self.network_latency),
        ];
        for (name, mean) in latencies {
            constants.extend(mean.value().map(|value| (name, value)));
        }
        for (name, value) in constants {
            cluster = cluster.with_constant(name, value)?;
        }
        Ok(cluster)
    }
}

/// A geometric mean.
#[derive(Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value.ln();
        self.count += 1.0;
    }

    fn value(&self) -> Option<f64> {
        (self.count > 0.0).then(|| rounded((self.sum / self.count).exp()))
    }
}

/// Rounds to four significant digits.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod layouts;
#[cfg(test)]
mod tests;
