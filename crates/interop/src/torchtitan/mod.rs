//! torchtitan's configs: TOML up to 0.2.2, a command line since 0.3.0.
//!
//! Both have the same keys with few differences, which [`adapt`] handles. A config names a registered model.

mod adapt;
mod flavors;
mod keys;
mod model;
mod read;
mod text;
mod translate;

use super::{
    EmittedConfig, Framework, FrameworkError, LaunchInfo, ParsedJob, TranslateOptions, Translation,
};
pub(super) use flavors::is_flavor;
use keys::Keys;
use trainyard_arch::DecoderConfig;
use trainyard_plan::{Precision, Strategy};
pub(super) use translate::DATASETS;

/// The precisions with their `training.dtype`, the type of weights, gradients and states, and their
/// `training.mixed_precision_param`, the type of compute.
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

/// Whether mixed precision takes effect. In 0.2.2, FSDP implements it, or autocast with DDP alone; otherwise layers
/// compute in `training.dtype`. 0.3.0 always uses FSDP.
fn mixes_types(framework: Framework, s: &Strategy) -> bool {
    let d = &s.degrees;
    framework == Framework::TorchtitanCommandLine || d.dp_shard * d.cp > 1 || d.tp * d.pp == 1
}

pub(super) fn write_toml(
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Result<EmittedConfig, FrameworkError> {
    let (adapted, flavor) = adapt::adapt(Framework::Torchtitan, shape, strategy)?;
    Ok(EmittedConfig {
        text: text::toml(&adapted, flavor),
        deviations: adapted.deviations,
    })
}

pub(super) fn write_command_line(
    shape: &DecoderConfig,
    strategy: &Strategy,
) -> Result<EmittedConfig, FrameworkError> {
    let (adapted, flavor) = adapt::adapt(Framework::TorchtitanCommandLine, shape, strategy)?;
    Ok(EmittedConfig {
        text: text::command_line(&adapted, flavor),
        deviations: adapted.deviations,
    })
}

pub(super) fn read_toml(text: &str, launch: &LaunchInfo) -> Result<ParsedJob, FrameworkError> {
    read::read(&Keys::from_toml(text)?, None, launch)
}

pub(super) fn read_command_line(
    text: &str,
    launch: &LaunchInfo,
) -> Result<ParsedJob, FrameworkError> {
    let (keys, world) = Keys::from_command_line(text)?;
    read::read(&keys, world, launch)
}

pub(super) fn translate_toml(
    text: &str,
    options: &TranslateOptions,
) -> Result<Translation, FrameworkError> {
    translate::translate(text, options)
}
