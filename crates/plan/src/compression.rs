//! Compression of gradients, and how compressed gradients travel.

use serde::{Deserialize, Serialize};
use trainyard_arch::{BlockKind, DecoderConfig};
use trainyard_cost::Encoding;

use crate::network_model::{Group, NetworkModel};

/// What ranks send of their gradients: the values of `parallelism.gradient_compression`.
#[derive(Copy, Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// All of them in their own type.
    #[default]
    None,
    /// All in bfloat16.
    Bf16,
    /// All in float16.
    Fp16,
    /// All in 8-bit integers, with a scale per block.
    Int8,
    /// All in 8-bit floating-point numbers, with a scale per block.
    Fp8,
    /// The largest of every chunk, with their places.
    TopK {
        /// The share that is sent.
        share: f64,
    },
    /// A random choice, the same on all ranks.
    RandomK {
        /// The share that is sent.
        share: f64,
    },
    /// Every matrix as a product of two thin ones.
    PowerSgd {
        /// The number of columns of the thin matrices.
        rank: usize,
    },
}

impl Compression {
    /// The value of the config key.
    pub const fn name(self) -> &'static str {
        match self {
            Compression::None => "none",
            Compression::Bf16 => "bf16",
            Compression::Fp16 => "fp16",
            Compression::Int8 => "int8",
            Compression::Fp8 => "fp8",
            Compression::TopK { .. } => "top_k",
            Compression::RandomK { .. } => "random_k",
            Compression::PowerSgd { .. } => "power_sgd",
        }
    }

    /// Whether what is not sent is added to the next gradients.
    pub const fn keeps_errors(self) -> bool {
        matches!(
            self,
            Compression::TopK { .. } | Compression::RandomK { .. } | Compression::PowerSgd { .. }
        )
    }

    /// Whether neighboring gradients are encoded together, which does not work with tensor parallelism.
    pub const fn encodes_blocks(self) -> bool {
        matches!(
            self,
            Compression::Int8 | Compression::Fp8 | Compression::TopK { .. }
        )
    }

    /// How gradients of a model travel, if uncompressed ones have `width` bytes.
    pub(crate) fn wire(self, shape: &DecoderConfig, width: usize) -> Wire {
        let summed = |share, width| Wire::Summed {
            share,
            width,
            num_rounds: 1.0,
        };
        match self {
            Compression::None => summed(1.0, width as f64),
            Compression::Bf16 | Compression::Fp16 => summed(1.0, 2.0),
            Compression::Int8 | Compression::Fp8 => Wire::TwoHops(Encoding::Blocks8),
            Compression::TopK { share } => {
                Wire::Gathered(Encoding::TopK(Encoding::num_kept(share) as u64))
            }
            Compression::RandomK { share } => summed(share, 4.0),
            // The second matrix is computed from the sum of the first ones.
            Compression::PowerSgd { rank } => Wire::Summed {
                share: low_rank_share(shape, rank),
                width: 4.0,
                num_rounds: 2.0,
            },
        }
    }
}

/// How gradients travel between ranks.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(crate) enum Wire {
    /// A share of them is summed on the way.
    Summed {
        share: f64,
        /// Bytes of one.
        width: f64,
        /// All-reduces that wait for each other.
        num_rounds: f64,
    },
    /// Encoded ones cannot be summed on the way: an all-to-all, a sum on every rank, and an all-gather.
    TwoHops(Encoding),
    /// Every rank gathers what all others send, and sums it.
    Gathered(Encoding),
}

impl NetworkModel<'_> {
    /// Seconds until every rank of the group has the sum of `elements` gradients.
    pub(crate) fn reduce(&self, group: Group, elements: f64, wire: Wire) -> f64 {
        match wire {
            Wire::Summed {
                share,
                width,
                num_rounds,
            } => num_rounds * self.all_reduce(group, share * width * elements / num_rounds),
            Wire::TwoHops(encoding) => {
                let bytes = encoded_bytes(encoding, elements);
                self.all_to_all(group, bytes) + self.gather(group, bytes)
            }
            Wire::Gathered(encoding) => {
                self.gather(group, encoded_bytes(encoding, elements) * group.size as f64)
            }
        }
    }

    /// Seconds until every rank of the group has its shard of the sum of `elements` gradients.
    pub(crate) fn reduce_scatter(&self, group: Group, elements: f64, wire: Wire) -> f64 {
        match wire {
            Wire::Summed { share, width, .. } => self.gather(group, share * width * elements),
            Wire::TwoHops(encoding) => self.all_to_all(group, encoded_bytes(encoding, elements)),
            Wire::Gathered(_) => self.reduce(group, elements, wire),
        }
    }
}

fn encoded_bytes(encoding: Encoding, elements: f64) -> f64 {
    encoding.bytes(elements.ceil() as u64) as f64
}

/// The share of a model's parameters that `PowerSGD` sends: `rank x (rows + columns)` of a matrix, and all vectors.
fn low_rank_share(shape: &DecoderConfig, rank: usize) -> f64 {
    let of_matrix = |rows: usize, columns: usize| (rank * (rows + columns)).min(rows * columns);
    let of_block = |kind| -> usize {
        let parameters = shape.block_parameters(kind);
        let sent = parameters.iter().map(|parameter| match *parameter.shape {
            [rows, ref others @ ..] if !others.is_empty() => {
                of_matrix(rows, others.iter().product())
            }
            _ => parameter.num_elements() as usize,
        });
        sent.sum()
    };
    let num_tables = if shape.tie_word_embeddings { 1 } else { 2 };
    let sent = shape.num_dense_layers() * of_block(BlockKind::Dense)
        + shape.num_expert_layers() * of_block(BlockKind::Experts)
        + num_tables * of_matrix(shape.vocab_size, shape.hidden_size);
    sent as f64 / shape.num_parameters() as f64
}

#[cfg(test)]
mod tests {
    use trainyard_arch::Flavor;

    use super::*;
    use crate::{Cluster, Constants};

    /// The seconds of the planner follow the volumes that `verify` compares with the trainer's bytes.
    #[test]
    fn seconds_follow_the_volumes_of_the_cost_model() {
        let cluster: Cluster = "4x8xH100@1Gb/s,0.001ms".parse().unwrap();
        let constants = Constants {
            link_latency: 1e-12,
            network_latency: 1e-12,
            ..Constants::prior()
        };
        let network = NetworkModel {
            cluster: &cluster,
            constants: &constants,
        };
        let shape = DecoderConfig::from(Flavor::Llama3_8b);
        let (group, elements) = (Group::new(&cluster, 4, 8), 1u64 << 26);
        let rate = 1e9 / 8.0 / 8.0;
        let k = Encoding::num_kept(0.01) as u64;
        let cases = [
            (
                Compression::None,
                Encoding::Plain(4).all_reduce_volume(elements, 4),
            ),
            (
                Compression::Bf16,
                Encoding::Plain(2).all_reduce_volume(elements, 4),
            ),
            (
                Compression::Int8,
                Encoding::Blocks8.all_reduce_volume(elements, 4),
            ),
            (
                Compression::TopK { share: 0.01 },
                Encoding::TopK(k).gather_volume(elements, 4),
            ),
        ];
        for (compression, volume) in cases {
            let seconds = network.reduce(group, elements as f64, compression.wire(&shape, 4));
            let expected = volume.gradients as f64 / 4.0 / rate;
            assert!((seconds / expected - 1.0).abs() < 1e-4, "{compression:?}");
        }
    }

    #[test]
    fn a_low_rank_is_a_small_share() {
        let shape = DecoderConfig::from(Flavor::Llama3_8b);
        let share = low_rank_share(&shape, 1);
        assert!((2e-4..1e-3).contains(&share), "{share}");
        assert!(low_rank_share(&shape, 4) > 3.0 * share);
    }
}
