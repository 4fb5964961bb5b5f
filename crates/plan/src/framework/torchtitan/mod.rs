//! torchtitan: TOML up to 0.2.2, a command line since.
//!
//! Both have the same keys with few differences, which [`fit`] knows. Models are named, not described.

mod fit;
mod flavors;
mod keys;
mod read;
mod text;

use super::{Framework, FrameworkError, Read, Told, Written};
use crate::{Precision, Shape, Strategy};
use keys::Keys;

/// Weights, gradients and states are held in one type; layers compute in it or in bfloat16. With the
/// values of `training.dtype` and `training.mixed_precision_param`.
const PRECISIONS: [(Precision, &str, &str); 3] = [
    (precision(2, 4), "float32", "bfloat16"),
    (precision(4, 4), "float32", "float32"),
    (precision(2, 2), "bfloat16", "bfloat16"),
];

const fn precision(compute: usize, held: usize) -> Precision {
    Precision {
        compute,
        parameter: held,
        gradient: held,
        reduced: held,
        optimizer: 2 * held,
    }
}

/// Whether number types are mixed at all: 0.2.2 leaves it to FSDP, or to autocast where nothing but copies
/// is asked for, and computes in `training.dtype` otherwise. 0.3.0 always wraps with FSDP.
fn mixes_types(framework: Framework, s: &Strategy) -> bool {
    let d = &s.degrees;
    framework == Framework::TorchtitanCommandLine || d.dp_shard * d.cp > 1 || d.tp * d.pp == 1
}

pub(super) fn write_toml(shape: &Shape, strategy: &Strategy) -> Result<Written, FrameworkError> {
    let (fit, flavor) = fit::fit(Framework::Torchtitan, shape, strategy)?;
    Ok(Written {
        text: text::toml(&fit, flavor),
        losses: fit.losses,
    })
}

pub(super) fn write_command_line(
    shape: &Shape,
    strategy: &Strategy,
) -> Result<Written, FrameworkError> {
    let (fit, flavor) = fit::fit(Framework::TorchtitanCommandLine, shape, strategy)?;
    Ok(Written {
        text: text::command_line(&fit, flavor),
        losses: fit.losses,
    })
}

pub(super) fn read_toml(text: &str, told: &Told) -> Result<Read, FrameworkError> {
    read::read(&Keys::from_toml(text)?, None, told)
}

pub(super) fn read_command_line(text: &str, told: &Told) -> Result<Read, FrameworkError> {
    let (keys, world) = Keys::from_command_line(text)?;
    read::read(&keys, world, told)
}
