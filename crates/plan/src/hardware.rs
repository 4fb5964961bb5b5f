//! Known accelerators, every figure with its source.
//!
//! Vendors quote figures with sparsity, in both directions or in bits. Here all are dense, per direction and in
//! bytes.

use crate::SourcedValue;

/// An accelerator's performance and how it is connected.
#[derive(Clone, Debug, PartialEq)]
pub struct Accelerator {
    /// The product name.
    pub name: String,
    /// Specified dense 16-bit operations per second.
    pub peak: SourcedValue,
    /// The highest rate that matrix products reach.
    pub sustained: SourcedValue,
    /// Device memory in bytes.
    pub memory: SourcedValue,
    /// Memory bandwidth in bytes per second.
    pub memory_bandwidth: SourcedValue,
    /// Bandwidth to all peers in the node together, per direction, in bytes per second.
    pub link: SourcedValue,
    /// Bandwidth to one peer in bytes per second.
    pub link_per_peer: SourcedValue,
    /// Bandwidth to host memory in bytes per second.
    pub host: SourcedValue,
    /// Bandwidth of its share of the node's NICs in bytes per second.
    pub network: SourcedValue,
    /// The usual number of accelerators in a node.
    pub gpus_per_node: usize,
}

const ML_ENGINEERING: &str = "stas00/ml-engineering 744d01e1, compute/accelerator and network";
const AICONFIGURATOR: &str = "ai-dynamo/aiconfigurator 095f58a5, systems";
const DGX: &str = "NVIDIA DGX BasePOD, core components";

/// Figures in the units vendors quote.
struct Row {
    name: &'static str,
    /// The source of all figures that name no other.
    source: &'static str,
    teraflops: f64,
    /// The highest measured matmul rate, if one is known.
    sustained: Option<f64>,
    gigabytes: f64,
    memory_gb_s: f64,
    memory_source: &'static str,
    link_gb_s: f64,
    per_peer_gb_s: f64,
    host_gb_s: f64,
    network: (f64, Network),
    gpus_per_node: usize,
}

enum Network {
    Specified(&'static str),
    Assumed(&'static str),
}

const fn sxm(name: &'static str, teraflops: f64, sustained: f64) -> Row {
    Row {
        name,
        source: ML_ENGINEERING,
        teraflops,
        sustained: Some(sustained),
        gigabytes: 80.0,
        memory_gb_s: 0.0,
        memory_source: ML_ENGINEERING,
        link_gb_s: 0.0,
        per_peer_gb_s: 0.0,
        host_gb_s: 63.0,
        network: (50.0, Network::Specified(DGX)),
        gpus_per_node: 8,
    }
}

const ONE_NIC_PER_GPU: &str =
    "aiconfigurator: one 200 Gb/s NIC per GPU, not a property of the product";
const NO_SOURCE: &str = "no source; one 400 Gb/s NIC per GPU is usual";
const CONNECTX_8: &str = "no source; one ConnectX-8 with 800 Gb/s per GPU is usual";
const NODE_OF_2018: &str = "no source; one 100 Gb/s NIC per GPU, half of which a DGX-1 has";
const PCIE_NIC: &str = "no source; one 100 Gb/s NIC per GPU";

/// An accelerator of which only the data sheet is known.
const fn specified(name: &'static str, source: &'static str) -> Row {
    Row {
        source,
        sustained: None,
        memory_source: source,
        ..sxm(name, 0.0, 0.0)
    }
}

const NVL72: &str = "NVIDIA data sheets of GB200 and GB300 NVL72: the links of a rack join 72 GPUs";

fn rows() -> [Row; 13] {
    let a100 = |name, gigabytes, memory_gb_s| Row {
        gigabytes,
        memory_gb_s,
        memory_source: AICONFIGURATOR,
        link_gb_s: 300.0,
        per_peer_gb_s: 300.0,
        host_gb_s: 31.0,
        network: (25.0, Network::Assumed(ONE_NIC_PER_GPU)),
        ..sxm(name, 312.0, 271.2)
    };
    let hopper = |name, gigabytes, memory_gb_s| Row {
        gigabytes,
        memory_gb_s,
        link_gb_s: 450.0,
        per_peer_gb_s: 450.0,
        ..sxm(name, 989.0, 794.5)
    };
    let rack = |name, gigabytes, network| Row {
        teraflops: 2500.0,
        gigabytes,
        memory_gb_s: 8000.0,
        link_gb_s: 900.0,
        per_peer_gb_s: 900.0,
        host_gb_s: 225.0,
        network,
        gpus_per_node: 72,
        ..specified(name, NVL72)
    };
    let card = |name, teraflops, gigabytes, memory_gb_s| Row {
        name,
        source: ML_ENGINEERING,
        teraflops,
        sustained: None,
        gigabytes,
        memory_gb_s,
        memory_source: ML_ENGINEERING,
        link_gb_s: 31.0,
        per_peer_gb_s: 31.0,
        host_gb_s: 31.0,
        network: (12.5, Network::Assumed(PCIE_NIC)),
        gpus_per_node: 8,
    };
    [
        Row {
            teraflops: 125.0,
            gigabytes: 32.0,
            memory_gb_s: 900.0,
            link_gb_s: 150.0,
            per_peer_gb_s: 50.0,
            host_gb_s: 15.75,
            network: (12.5, Network::Assumed(NODE_OF_2018)),
            ..specified(
                "V100-32GB",
                "NVIDIA data sheet of V100 SXM2; fp16, as it has no bf16",
            )
        },
        a100("A100-40GB", 40.0, 1555.0),
        a100("A100-80GB", 80.0, 2039.0),
        hopper("H100", 80.0, 3350.0),
        Row {
            link_gb_s: 200.0,
            per_peer_gb_s: 200.0,
            ..hopper("H800", 80.0, 3350.0)
        },
        hopper("H200", 141.0, 4800.0),
        Row {
            gigabytes: 180.0,
            memory_gb_s: 8000.0,
            link_gb_s: 900.0,
            per_peer_gb_s: 900.0,
            network: (50.0, Network::Specified("NVIDIA DGX B200 user guide")),
            ..sxm("B200", 2250.0, 1745.0)
        },
        rack("GB200", 186.0, (50.0, Network::Assumed(NO_SOURCE))),
        rack("GB300", 279.0, (100.0, Network::Assumed(CONNECTX_8))),
        Row {
            gigabytes: 192.0,
            memory_gb_s: 5300.0,
            link_gb_s: 448.0,
            per_peer_gb_s: 64.0,
            network: (50.0, Network::Assumed(NO_SOURCE)),
            ..sxm("MI300X", 1307.0, 668.4)
        },
        Row {
            teraflops: 2516.0,
            gigabytes: 288.0,
            memory_gb_s: 8000.0,
            link_gb_s: 537.6,
            per_peer_gb_s: 76.8,
            network: (50.0, Network::Assumed(NO_SOURCE)),
            ..specified("MI355X", "AMD data sheet of Instinct MI355X")
        },
        card("L40S", 362.05, 48.0, 864.0),
        card("RTX4090", 165.2, 24.0, 1008.0),
    ]
}

impl Accelerator {
    /// The names of all known accelerators.
    pub fn names() -> Vec<&'static str> {
        rows().map(|row| row.name).to_vec()
    }

    /// Looks up an accelerator; `A100` means the 80 GB version. Case, dashes and `SXM` are ignored.
    pub fn named(name: &str) -> Option<Accelerator> {
        let plain = |name: &str| {
            let mut plain = name.to_uppercase().replace(['-', '_', ' '], "");
            plain = plain.replace("SXM", "");
            plain
        };
        let wanted = match plain(name).as_str() {
            "A100" => "A10080GB".to_owned(),
            "V100" => "V10032GB".to_owned(),
            "H10080GB" => "H100".to_owned(),
            "H200141GB" => "H200".to_owned(),
            "B200180GB" => "B200".to_owned(),
            other => other.to_owned(),
        };
        let row = rows().into_iter().find(|row| plain(row.name) == wanted)?;
        Some(Accelerator::from_row(row))
    }

    /// The accelerator that its driver calls this. `None` also for products of a known name with other figures, such as
    /// the H100 for PCIe.
    pub fn of_product(product: &str) -> Option<Accelerator> {
        let name = match product.strip_prefix("NVIDIA ").unwrap_or(product) {
            "A100-SXM4-40GB" | "A100-PCIE-40GB" => "A100-40GB",
            "A100-SXM4-80GB" | "A100 80GB PCIe" => "A100-80GB",
            "H100 80GB HBM3" => "H100",
            "Tesla V100-SXM2-32GB" => "V100-32GB",
            "GeForce RTX 4090" => "RTX4090",
            other @ ("H200" | "H800" | "B200" | "GB200" | "GB300" | "L40S") => other,
            _ => return None,
        };
        Accelerator::named(name)
    }

    fn from_row(row: Row) -> Accelerator {
        const GIGA: f64 = 1e9;
        // Vendors count memory in binary gigabytes, of which the device reserves a part.
        let bytes = row.gigabytes * 1024f64.powi(3);
        let sustained = match row.sustained {
            Some(teraflops) => SourcedValue::measured(
                teraflops * 1e12,
                "ml-engineering: maximum achievable matmul rate of the same kind of accelerator",
            ),
            None => SourcedValue::assumed(
                row.teraflops * 0.8e12,
                "0.8 of the peak, as on other accelerators",
            ),
        };
        let (network, basis) = row.network;
        Accelerator {
            name: row.name.to_owned(),
            peak: SourcedValue::specified(row.teraflops * 1e12, row.source),
            sustained,
            memory: SourcedValue::specified(bytes, row.source),
            memory_bandwidth: SourcedValue::specified(row.memory_gb_s * GIGA, row.memory_source),
            link: SourcedValue::specified(row.link_gb_s * GIGA, row.source),
            link_per_peer: SourcedValue::specified(row.per_peer_gb_s * GIGA, row.source),
            host: SourcedValue::specified(row.host_gb_s * GIGA, row.source),
            network: match basis {
                Network::Specified(source) => SourcedValue::specified(network * GIGA, source),
                Network::Assumed(reason) => SourcedValue::assumed(network * GIGA, reason),
            },
            gpus_per_node: row.gpus_per_node,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Basis;

    #[test]
    fn every_name_resolves() {
        for name in Accelerator::names() {
            assert_eq!(Accelerator::named(name).unwrap().name, name);
        }
        assert_eq!(Accelerator::named("h100-sxm").unwrap().peak.value, 989e12);
        assert_eq!(Accelerator::named("A100").unwrap().name, "A100-80GB");
        assert!(Accelerator::named("abacus").is_none());
    }

    #[test]
    fn products_are_known_by_the_name_of_their_driver() {
        let peak = |product| Accelerator::of_product(product).map(|found| found.peak.value);
        assert_eq!(peak("NVIDIA A100-SXM4-80GB"), Some(312e12));
        assert_eq!(peak("NVIDIA H200"), Some(989e12));
        assert_eq!(peak("NVIDIA GeForce RTX 4090"), Some(165.2e12));
        assert_eq!(peak("NVIDIA H100 PCIe"), None);
    }

    #[test]
    fn unsourced_figures_are_marked_assumed() {
        let amd = Accelerator::named("MI300X").unwrap();
        assert_eq!(amd.network.basis, Basis::Assumed);
        assert_eq!(amd.sustained.basis, Basis::Measured);
        assert_eq!(
            Accelerator::named("L40S").unwrap().sustained.basis,
            Basis::Assumed
        );
    }
}
