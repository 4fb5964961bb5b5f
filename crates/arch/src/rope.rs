//! The frequencies of rotary embeddings.

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

use crate::ArchError;

/// How rotary frequencies change for sequences longer than in pretraining.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RopeScalingKeys", into = "RopeScalingKeys")]
pub enum RopeScaling {
    /// All frequencies are divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies are divided, high ones stay, and those between are interpolated, as in Llama 3.1.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Frequencies with fewer turns than this over the original length are low.
        low_freq_factor: f64,
        /// Frequencies with more turns than this are high.
        high_freq_factor: f64,
        /// The original maximum sequence length.
        original_max_position_embeddings: usize,
    },
    /// The same with other bounds, and queries and keys are scaled too, as in DeepSeek-V3.
    Yarn {
        /// The divisor of low frequencies.
        factor: f64,
        /// The original maximum sequence length.
        original_max_position_embeddings: usize,
        /// Frequencies with more turns than this over the original length are high.
        beta_fast: f64,
        /// Frequencies with fewer turns than this are low.
        beta_slow: f64,
        /// How much the rotated part of queries and keys is scaled.
        mscale: f64,
        /// How much all of attention is scaled instead.
        mscale_all_dim: f64,
        /// The factor of the rotated part of queries and keys; it follows from the two before if absent.
        attention_factor: Option<f64>,
    },
}

impl RopeScaling {
    /// The factor of the rotated queries and keys.
    pub fn attention_scaling(&self) -> f64 {
        match *self {
            RopeScaling::Yarn {
                factor,
                mscale,
                mscale_all_dim,
                attention_factor,
                ..
            } => attention_factor.unwrap_or_else(|| {
                if mscale == 0.0 || mscale_all_dim == 0.0 {
                    yarn_scale(factor, 1.0)
                } else {
                    yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)
                }
            }),
            RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        }
    }

    /// The factor of attention's products of queries and keys.
    pub fn softmax_scale_factor(&self) -> f64 {
        match *self {
            RopeScaling::Yarn {
                factor,
                mscale_all_dim,
                ..
            } => yarn_scale(factor, mscale_all_dim).powi(2),
            RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => 1.0,
        }
    }
}

/// A kind of scaling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RopeType {
    Linear,
    Llama3,
    Yarn,
}

/// The keys of Hugging Face's `rope_scaling`, all in one table, whatever the kind.
#[derive(Serialize, Deserialize)]
struct RopeScalingKeys {
    rope_type: RopeType,
    factor: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    low_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high_freq_factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_max_position_embeddings: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beta_fast: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    beta_slow: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mscale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mscale_all_dim: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_factor: Option<f64>,
}

impl RopeScalingKeys {
    fn new(rope_type: RopeType, factor: f64) -> RopeScalingKeys {
        RopeScalingKeys {
            rope_type,
            factor,
            low_freq_factor: None,
            high_freq_factor: None,
            original_max_position_embeddings: None,
            beta_fast: None,
            beta_slow: None,
            mscale: None,
            mscale_all_dim: None,
            attention_factor: None,
        }
    }
}

impl TryFrom<RopeScalingKeys> for RopeScaling {
    type Error = ArchError;

    fn try_from(keys: RopeScalingKeys) -> Result<RopeScaling, ArchError> {
        fn need<T>(key: &str, value: Option<T>) -> Result<T, ArchError> {
            let missing =
                || ArchError::contradiction(format!("rope_scaling lacks {key}"), "add it");
            value.ok_or_else(missing)
        }
        let original = need(
            "original_max_position_embeddings",
            keys.original_max_position_embeddings,
        );
        let factor = keys.factor;
        Ok(match keys.rope_type {
            RopeType::Linear => RopeScaling::Linear { factor },
            RopeType::Llama3 => RopeScaling::Llama3 {
                factor,
                low_freq_factor: need("low_freq_factor", keys.low_freq_factor)?,
                high_freq_factor: need("high_freq_factor", keys.high_freq_factor)?,
                original_max_position_embeddings: original?,
            },
            RopeType::Yarn => RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original?,
                beta_fast: keys.beta_fast.unwrap_or(32.0),
                beta_slow: keys.beta_slow.unwrap_or(1.0),
                mscale: keys.mscale.unwrap_or(1.0),
                mscale_all_dim: keys.mscale_all_dim.unwrap_or(0.0),
                attention_factor: keys.attention_factor,
            },
        })
    }
}

impl From<RopeScaling> for RopeScalingKeys {
    fn from(scaling: RopeScaling) -> RopeScalingKeys {
        match scaling {
            RopeScaling::Linear { factor } => RopeScalingKeys::new(RopeType::Linear, factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => RopeScalingKeys {
                low_freq_factor: Some(low_freq_factor),
                high_freq_factor: Some(high_freq_factor),
                original_max_position_embeddings: Some(original_max_position_embeddings),
                ..RopeScalingKeys::new(RopeType::Llama3, factor)
            },
            RopeScaling::Yarn {
                factor,
                original_max_position_embeddings,
                beta_fast,
                beta_slow,
                mscale,
                mscale_all_dim,
                attention_factor,
            } => RopeScalingKeys {
                original_max_position_embeddings: Some(original_max_position_embeddings),
                beta_fast: Some(beta_fast),
                beta_slow: Some(beta_slow),
                mscale: Some(mscale),
                mscale_all_dim: Some(mscale_all_dim),
                attention_factor,
                ..RopeScalingKeys::new(RopeType::Yarn, factor)
            },
        }
    }
}

/// The frequency of each pair of a head of `head_dim` elements, in radians per position.
pub fn rotary_frequencies(head_dim: usize, theta: f64, scaling: Option<&RopeScaling>) -> Vec<f64> {
    let pairs = 0..head_dim / 2;
    let plain = |pair: usize| theta.powf(-2.0 * pair as f64 / head_dim as f64);
    let interpolated = |frequency: f64, factor: f64, share: f64| {
        (1.0 - share) * frequency / factor + share * frequency
    };
    match scaling {
        None => pairs.map(plain).collect(),
        Some(&RopeScaling::Linear { factor }) => pairs.map(|pair| plain(pair) / factor).collect(),
        Some(&RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        }) => {
            let scaled = |frequency: f64| {
                let turns = original_max_position_embeddings as f64 * frequency / TAU;
                let share = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                interpolated(frequency, factor, share.clamp(0.0, 1.0))
            };
            pairs.map(plain).map(scaled).collect()
        }
        Some(&RopeScaling::Yarn {
            factor,
            original_max_position_embeddings,
            beta_fast,
            beta_slow,
            ..
        }) => {
            // The pair that makes so many turns over the original length.
            let pair_of = |turns: f64| {
                let ratio = original_max_position_embeddings as f64 / (turns * TAU);
                head_dim as f64 * ratio.ln() / (2.0 * theta.ln())
            };
            let last = head_dim as f64 - 1.0;
            let high = pair_of(beta_fast).floor().clamp(0.0, last);
            let low = pair_of(beta_slow).ceil().clamp(0.0, last);
            let width = if low == high { 0.001 } else { low - high };
            let scaled = |pair: usize| {
                let share = 1.0 - ((pair as f64 - high) / width).clamp(0.0, 1.0);
                interpolated(plain(pair), factor, share)
            };
            pairs.map(scaled).collect()
        }
    }
}

/// How much longer sequences sharpen attention.
fn yarn_scale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * mscale * factor.ln() + 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn yarn_keeps_high_frequencies_and_divides_low_ones() {
        let yarn = RopeScaling::Yarn {
            factor: 40.0,
            original_max_position_embeddings: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 1.0,
            mscale_all_dim: 1.0,
            attention_factor: None,
        };
        let (plain, scaled) = (
            rotary_frequencies(64, 1e4, None),
            rotary_frequencies(64, 1e4, Some(&yarn)),
        );
        assert_eq!(plain[..10], scaled[..10]);
        assert!((plain[31] / scaled[31] - 40.0).abs() < 1e-9);
        assert_eq!(yarn.attention_scaling(), 1.0);
        assert!((yarn.softmax_scale_factor() - 1.874).abs() < 1e-3);
    }
}
