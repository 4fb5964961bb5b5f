//! When and how replicas exchange what they have learned, and how much faster a method must be to be worth its effect on
//! convergence.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Compression, LocalUpdateMethod, LocalUpdates};

/// When and how replicas exchange gradients or parameters.
#[derive(Copy, Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Synchronization {
    /// Gradients are averaged over all replicas in every step.
    EveryStep(Compression),
    /// Replicas along `dp_outer` take optimizer steps of their own.
    LocalUpdates(LocalUpdates),
    /// Workers along `dp_outer`, each of one rank, send gradients to servers and receive parameters from them.
    ParameterServer {
        /// The number of steps by which a worker may be ahead of the slowest one.
        staleness: u64,
    },
}

// All margins are judgments. No run of this trainer has measured how these methods converge.

/// Rounds gradients, and changes nothing else. The margin is the price of a deviation that nobody has measured for the model
/// at hand.
const ROUNDED: f64 = 1.05;

/// Sends most of a gradient late, which slows the beginning of training down.
const ERROR_FEEDBACK: f64 = 1.25;

/// Changes what is optimized. Published runs of DiLoCo need about as many samples as synchronous training, but the outer
/// learning rate and the interval are two more hyperparameters, and the loss is not that of the synchronous run.
const LOCAL_UPDATES: f64 = 1.25;

/// As local updates without an outer optimizer. They are assumed to need more samples for the same loss.
const AVERAGED: f64 = 1.5;

/// Computes the same as gradients in every step, but needs servers, whose cost is not part of a step.
const SERVERS: f64 = 1.05;

/// Applies gradients of earlier parameters. Dense models are rarely trained this way, and reports of it are mostly of worse
/// results.
const STALE: f64 = 1.5;

impl Synchronization {
    /// Uncompressed gradients in every step: what every other method is compared with.
    pub const PLAIN: Synchronization = Synchronization::EveryStep(Compression::None);

    /// How many times as many samples per second this must reach as [`Synchronization::PLAIN`] to be recommended. The
    /// planner knows nothing about convergence: this margin stands for the samples that a method may need in addition, and
    /// for the risk of another result.
    pub fn required_speedup(&self) -> f64 {
        match self {
            Synchronization::EveryStep(compression) => of_compression(*compression),
            Synchronization::LocalUpdates(local) => {
                let of_method = match local.method {
                    LocalUpdateMethod::LocalSgd => AVERAGED,
                    LocalUpdateMethod::Diloco | LocalUpdateMethod::SparseLoco { .. } => {
                        LOCAL_UPDATES
                    }
                };
                of_method * of_compression(local.compression)
            }
            Synchronization::ParameterServer { staleness: 0 } => SERVERS,
            Synchronization::ParameterServer { .. } => STALE,
        }
    }

    /// The local updates, if replicas take steps of their own.
    pub const fn local_updates(&self) -> Option<&LocalUpdates> {
        match self {
            Synchronization::LocalUpdates(local) => Some(local),
            _ => None,
        }
    }
}

const fn of_compression(compression: Compression) -> f64 {
    match compression {
        Compression::None => 1.0,
        Compression::Bf16 | Compression::Fp16 | Compression::Int8 | Compression::Fp8 => ROUNDED,
        Compression::TopK { .. } | Compression::RandomK { .. } | Compression::PowerSgd { .. } => {
            ERROR_FEEDBACK
        }
    }
}

/// The name of the method, as in `diloco every 100 steps, int8`.
impl fmt::Display for Synchronization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Synchronization::EveryStep(Compression::None) => "every step".to_owned(),
            Synchronization::EveryStep(compression) => {
                format!("every step, {}", compression.name())
            }
            Synchronization::LocalUpdates(local) => describe_local(local),
            Synchronization::ParameterServer { staleness } => {
                format!("parameter server, staleness {staleness}")
            }
        };
        f.pad(&name)
    }
}

fn describe_local(local: &LocalUpdates) -> String {
    let mut name = format!("{} every {} steps", local.method.name(), local.sync_steps);
    if local.compression != Compression::None {
        name.push_str(&format!(", {}", local.compression.name()));
    }
    if local.num_fragments > 1 {
        name.push_str(&format!(", {} fragments", local.num_fragments));
    }
    if local.fragment_sync_delay > 0 {
        name.push_str(&format!(", {} steps late", local.fragment_sync_delay));
    }
    name
}
