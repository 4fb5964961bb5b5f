//! OLMo 3: OLMo 2 with sliding windows.

use serde_json::{Map, Value};

use super::window_keys::{self, Defaults};
use super::{Family, Keys, olmo2};
use crate::{ArchError, DecoderConfig};

pub(super) const OLMO3: Family = Family {
    model_type: "olmo3",
    architecture: "Olmo3ForCausalLM",
    read,
    write,
};

const DEFAULTS: Defaults = Defaults {
    sliding_window: 4096,
    full_attention_every: 4,
    rope_theta: 5e5,
    rope_local_base_freq: None,
};

fn read(keys: &Keys) -> Result<DecoderConfig, ArchError> {
    window_keys::read(keys, &DEFAULTS, olmo2::read(keys)?)
}

fn write(decoder: &DecoderConfig) -> Map<String, Value> {
    let mut keys = olmo2::write(decoder);
    window_keys::write(decoder, &mut keys);
    keys
}
