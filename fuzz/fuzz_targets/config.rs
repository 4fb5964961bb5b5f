//! Any text as a config file, and as a `config.json` of Hugging Face's: refused or read, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use trainyard_config::{Config, LlamaConfig};

fuzz_target!(|text: &str| {
    if let Ok(config) = Config::parse(text, &[]) {
        let _ = config.mesh(8);
        let _ = config.to_toml();
    }
    let _ = LlamaConfig::from_hugging_face(text);
});
