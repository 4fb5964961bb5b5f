//! Accelerators by name, every figure with its source.
//!
//! Vendors print figures with sparsity, in both directions or in bits; here all are dense, one
//! direction, in bytes.

use crate::Figure;

/// What one accelerator can do and how it is connected.
#[derive(Clone, Debug, PartialEq)]
pub struct Accelerator {
    /// What it is called.
    pub name: String,
    /// Dense 16-bit operations per second it is sold with.
    pub peak: Figure,
    /// The most that matrix products reach of it.
    pub sustained: Figure,
    /// Bytes of memory.
    pub memory: Figure,
    /// Bytes per second to that memory.
    pub memory_bandwidth: Figure,
    /// Bytes per second to all peers in its machine together, one direction.
    pub link: Figure,
    /// Bytes per second to one peer.
    pub link_per_peer: Figure,
    /// Bytes per second to the machine's main memory.
    pub host: Figure,
    /// Bytes per second of its share of the machine's network cards.
    pub network: Figure,
    /// Accelerators in a machine, where it is usual.
    pub per_machine: usize,
}

const ML_ENGINEERING: &str = "stas00/ml-engineering 744d01e1, compute/accelerator and network";
const AICONFIGURATOR: &str = "ai-dynamo/aiconfigurator 095f58a5, systems";
const DGX: &str = "NVIDIA DGX BasePOD, core components";

/// A row of figures in the units vendors print.
struct Row {
    name: &'static str,
    teraflops: f64,
    /// The most measured, and who did; none where nobody has.
    sustained: Option<f64>,
    gigabytes: f64,
    memory_gb_s: f64,
    memory_source: &'static str,
    link_gb_s: f64,
    per_peer_gb_s: f64,
    host_gb_s: f64,
    network: (f64, Network),
    per_machine: usize,
}

enum Network {
    Specified(&'static str),
    Assumed(&'static str),
}

const fn sxm(name: &'static str, teraflops: f64, sustained: f64) -> Row {
    Row {
        name,
        teraflops,
        sustained: Some(sustained),
        gigabytes: 80.0,
        memory_gb_s: 0.0,
        memory_source: ML_ENGINEERING,
        link_gb_s: 0.0,
        per_peer_gb_s: 0.0,
        host_gb_s: 63.0,
        network: (50.0, Network::Specified(DGX)),
        per_machine: 8,
    }
}

const ONE_CARD_EACH: &str =
    "aiconfigurator: one 200 Gb/s card per GPU, not a property of the product";
const NO_SOURCE: &str = "no source; one 400 Gb/s card per GPU is usual";
const PCIE_CARD: &str = "no source; one 100 Gb/s card per GPU";

fn rows() -> [Row; 8] {
    let a100 = |name, gigabytes, memory_gb_s| Row {
        gigabytes,
        memory_gb_s,
        memory_source: AICONFIGURATOR,
        link_gb_s: 300.0,
        per_peer_gb_s: 300.0,
        host_gb_s: 31.0,
        network: (25.0, Network::Assumed(ONE_CARD_EACH)),
        ..sxm(name, 312.0, 271.2)
    };
    let hopper = |name, gigabytes, memory_gb_s| Row {
        gigabytes,
        memory_gb_s,
        link_gb_s: 450.0,
        per_peer_gb_s: 450.0,
        ..sxm(name, 989.0, 794.5)
    };
    let card = |name, teraflops, gigabytes, memory_gb_s| Row {
        name,
        teraflops,
        sustained: None,
        gigabytes,
        memory_gb_s,
        memory_source: ML_ENGINEERING,
        link_gb_s: 31.0,
        per_peer_gb_s: 31.0,
        host_gb_s: 31.0,
        network: (12.5, Network::Assumed(PCIE_CARD)),
        per_machine: 8,
    };
    [
        a100("A100-40GB", 40.0, 1555.0),
        a100("A100-80GB", 80.0, 2039.0),
        hopper("H100", 80.0, 3350.0),
        hopper("H200", 141.0, 4800.0),
        Row {
            gigabytes: 180.0,
            memory_gb_s: 8000.0,
            link_gb_s: 900.0,
            per_peer_gb_s: 900.0,
            network: (50.0, Network::Specified("NVIDIA DGX B200 user guide")),
            ..sxm("B200", 2250.0, 1745.0)
        },
        Row {
            gigabytes: 192.0,
            memory_gb_s: 5300.0,
            link_gb_s: 448.0,
            per_peer_gb_s: 64.0,
            network: (50.0, Network::Assumed(NO_SOURCE)),
            ..sxm("MI300X", 1307.0, 668.4)
        },
        card("L40S", 362.05, 48.0, 864.0),
        card("RTX4090", 165.2, 24.0, 1008.0),
    ]
}

impl Accelerator {
    /// All names.
    pub fn names() -> Vec<&'static str> {
        rows().map(|row| row.name).to_vec()
    }

    /// The accelerator of that name; `A100` is the one of 80 GB. Case, dashes and `SXM` do not count.
    pub fn named(name: &str) -> Option<Accelerator> {
        let plain = |name: &str| {
            let mut plain = name.to_uppercase().replace(['-', '_', ' '], "");
            plain = plain.replace("SXM", "");
            plain
        };
        let wanted = match plain(name).as_str() {
            "A100" => "A10080GB".to_owned(),
            "H10080GB" => "H100".to_owned(),
            "H200141GB" => "H200".to_owned(),
            "B200180GB" => "B200".to_owned(),
            other => other.to_owned(),
        };
        let row = rows().into_iter().find(|row| plain(row.name) == wanted)?;
        Some(Accelerator::from_row(row))
    }

    fn from_row(row: Row) -> Accelerator {
        const GIGA: f64 = 1e9;
        // Cards are sold by the binary gigabyte and keep some of it to themselves.
        let bytes = row.gigabytes * 1024f64.powi(3);
        let sustained = match row.sustained {
            Some(teraflops) => Figure::measured(
                teraflops * 1e12,
                "ml-engineering: most achievable matmul, same kind of accelerator",
            ),
            None => Figure::assumed(row.teraflops * 0.8e12, "0.8 of the peak, as on others"),
        };
        let (network, basis) = row.network;
        Accelerator {
            name: row.name.to_owned(),
            peak: Figure::specified(row.teraflops * 1e12, ML_ENGINEERING),
            sustained,
            memory: Figure::specified(bytes, ML_ENGINEERING),
            memory_bandwidth: Figure::specified(row.memory_gb_s * GIGA, row.memory_source),
            link: Figure::specified(row.link_gb_s * GIGA, ML_ENGINEERING),
            link_per_peer: Figure::specified(row.per_peer_gb_s * GIGA, ML_ENGINEERING),
            host: Figure::specified(row.host_gb_s * GIGA, ML_ENGINEERING),
            network: match basis {
                Network::Specified(source) => Figure::specified(network * GIGA, source),
                Network::Assumed(reason) => Figure::assumed(network * GIGA, reason),
            },
            per_machine: row.per_machine,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Basis;

    #[test]
    fn names_lead_to_accelerators() {
        for name in Accelerator::names() {
            assert_eq!(Accelerator::named(name).unwrap().name, name);
        }
        assert_eq!(Accelerator::named("h100-sxm").unwrap().peak.value, 989e12);
        assert_eq!(Accelerator::named("A100").unwrap().name, "A100-80GB");
        assert!(Accelerator::named("abacus").is_none());
    }

    #[test]
    fn what_nobody_says_is_marked() {
        let amd = Accelerator::named("MI300X").unwrap();
        assert_eq!(amd.network.basis, Basis::Assumed);
        assert_eq!(amd.sustained.basis, Basis::Measured);
        assert_eq!(
            Accelerator::named("L40S").unwrap().sustained.basis,
            Basis::Assumed
        );
    }
}
