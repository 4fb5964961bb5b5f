//! Arbitrary text as a config file: it is accepted or rejected without a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use trainyard_config::Config;
use trainyard_fuzz::bounded;

fuzz_target!(|text: &str| {
    bounded(text.len(), || {
        if let Ok(config) = Config::parse(text, &[]) {
            let _ = config.mesh(8);
            let _ = config.to_toml();
        }
    });
});
