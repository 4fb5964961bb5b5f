//! A cluster's own figures, from what people measure first: nccl-tests and a sweep of matrix products.
//!
//! Every table becomes a straight line, seconds over bytes on the wire: where it begins is the latency, how
//! it rises the bandwidth. Tables of one machine speak about links, those of several about the network.

mod matmul;
mod nccl;

pub use matmul::{Product, read_products};
pub use nccl::{Collective, Table, read_tables};

use crate::operator::REFERENCE_PEAK;
use crate::{Cluster, ClusterError, Figure};

/// Why a measurement cannot be used.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum CalibrateError {
    /// No rows at all.
    #[error("{file}: no table of nccl-tests in it: paste the whole output, header and rows")]
    NoTable {
        /// Which file.
        file: String,
    },
    /// A row that is cut off or has no number where one should be.
    #[error("{file}, line {line}: {what} is no {wanted}")]
    Row {
        /// Which file.
        file: String,
        /// Which line, from 1.
        line: usize,
        /// What stands there.
        what: String,
        /// What should.
        wanted: &'static str,
    },
    /// Nothing says how many ranks took part.
    #[error(
        "{file}: it does not say how many ranks took part: keep its lines `# Rank ... on HOST`"
    )]
    NoRanks {
        /// Which file.
        file: String,
    },
    /// Nothing says which collective it was.
    #[error(
        "{file}: it does not say which collective it is: call the file all_reduce_perf.txt or so"
    )]
    NoCollective {
        /// Which file.
        file: String,
    },
    /// Too few rows for a line.
    #[error("{file}: {found} rows are too few: measure at least {wanted} sizes")]
    Few {
        /// Which file.
        file: String,
        /// How many there are.
        found: usize,
        /// How many there must be.
        wanted: usize,
    },
    /// Times that do not grow with sizes.
    #[error("{file}: time does not grow with size, so no bandwidth follows: measure larger sizes")]
    Flat {
        /// Which file.
        file: String,
    },
    /// A figure that follows and cannot be.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
}

/// A cluster with its own figures, and how well they explain what was measured.
#[derive(Clone, Debug)]
pub struct Calibrated {
    /// The cluster.
    pub cluster: Cluster,
    /// A line per measurement.
    pub notes: Vec<String>,
}

/// The least latency that is written: none at all would be a fit's slip.
const LEAST_LATENCY: f64 = 1e-7;

/// Puts what was measured in place of what data sheets say.
pub fn calibrate(
    cluster: &Cluster,
    tables: &[Table],
    products: &[Product],
) -> Result<Calibrated, CalibrateError> {
    let mut notes = Vec::new();
    let mut wires = Wires::default();
    // Those inside a machine first: the others' latency is over theirs.
    let inside = tables.iter().filter(|table| table.num_machines == 1);
    let across = tables.iter().filter(|table| table.num_machines > 1);
    for table in inside.chain(across) {
        let line = table.line()?;
        notes.push(table.note(&line));
        wires.learn(table, &line);
    }
    let mut cluster = wires.apply(cluster.clone())?;
    if !products.is_empty() {
        let peak = cluster.accelerator.peak.value;
        let fit = matmul::fit(products, peak)?;
        let share = rounded(fit.share);
        notes.push(format!(
            "{} matrix products: {:.0} Tflop/s for very large ones, {:.1} % off on average",
            products.len(),
            fit.share * peak / 1e12,
            100.0 * fit.error
        ));
        cluster.accelerator.sustained =
            Figure::measured(rounded(share * peak), "a sweep of products");
        cluster = cluster
            .with_constant("matmul", share)?
            .with_constant("matmul_area", rounded(fit.area * REFERENCE_PEAK / peak))?
            .with_constant("matmul_depth", rounded(fit.depth))?;
    }
    Ok(Calibrated { cluster, notes })
}

/// What tables say about wires; of several the geometric mean.
#[derive(Default)]
struct Wires {
    link: Mean,
    link_latency: Mean,
    peer: Mean,
    network: Mean,
    network_latency: Mean,
}

impl Wires {
    fn learn(&mut self, table: &Table, line: &nccl::Line) {
        let rate = line.bytes_per_second;
        let doublings = (table.num_ranks as f64).log2().max(1.0);
        // A gather takes half of a sum's latency, as it takes half of its bytes.
        let latency = match table.collective {
            Collective::AllGather | Collective::ReduceScatter => 2.0 * line.latency,
            _ => line.latency,
        };
        let is_message = table.collective == Collective::SendReceive;
        if table.num_machines == 1 {
            match is_message {
                true => self.peer.add(rate),
                false => {
                    self.link.add(rate);
                    self.link_latency
                        .add((latency / doublings).max(LEAST_LATENCY));
                }
            }
            return;
        }
        let inside = (table.num_ranks / table.num_machines) as f64;
        let network = match table.collective {
            // Rings of a machine's ranks share its cards.
            Collective::AllReduce | Collective::AllGather | Collective::ReduceScatter => {
                rate / inside
            }
            // Only what leaves the machine passes its card.
            Collective::AllToAll => {
                let size = table.num_ranks as f64;
                rate * (size - inside) / (size - 1.0)
            }
            Collective::SendReceive => rate,
        };
        self.network.add(network);
        let within = match is_message {
            true => 0.0,
            false => self.link_latency.value().unwrap_or(0.0) * doublings,
        };
        self.network_latency
            .add((latency - within).max(LEAST_LATENCY));
    }

    fn apply(&self, mut cluster: Cluster) -> Result<Cluster, ClusterError> {
        const SOURCE: &str = "nccl-tests";
        let accelerator = &mut cluster.accelerator;
        let share = accelerator.link_per_peer.value / accelerator.link.value;
        let mut constants = Vec::new();
        if let Some(link) = self.link.value() {
            accelerator.link = Figure::measured(link, SOURCE);
            accelerator.link_per_peer = Figure::measured(link * share, SOURCE);
            constants.push(("link", 1.0));
        }
        if let Some(peer) = self.peer.value() {
            let whole = accelerator.link_per_peer.value;
            constants.push(("peer", (peer / whole).min(1.0)));
        }
        if let Some(network) = self.network.value() {
            accelerator.network = Figure::measured(network, SOURCE);
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

/// To four digits: no measurement has more.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod layouts;
#[cfg(test)]
mod tests;
