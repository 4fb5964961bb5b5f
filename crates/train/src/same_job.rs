//! All ranks of a world must run the same program with the same config: a node with an older build or another file
//! would train something else, or wait forever.

use std::fs;

use trainyard_checkpoint::Digest;
use trainyard_config::Config;
use trainyard_torch::World;

use crate::agreement::{gather, outliers};
use crate::error::{Result, TrainError};

/// Compares the program and the effective config of all ranks. This is a collective call; every rank returns the error.
pub(crate) fn check(config: &Config, world: &World) -> Result<()> {
    let config = config.to_toml()?;
    // A program that cannot be read is not compared.
    let program = std::env::current_exe()
        .and_then(fs::read)
        .unwrap_or_default();
    let own = [number(config.as_bytes()), number(&program)];
    let all = gather(&world.world_group()?, &own)?;
    for (index, what) in ["config", "program"].into_iter().enumerate() {
        let numbers: Vec<i64> = all.iter().skip(index).step_by(own.len()).copied().collect();
        let ranks = outliers(&numbers);
        if !ranks.is_empty() {
            return Err(TrainError::DifferentJobs { what, ranks });
        }
    }
    Ok(())
}

/// A digest of bytes as a number.
fn number(bytes: &[u8]) -> i64 {
    let text = Digest::of(bytes).to_string();
    i64::from_str_radix(&text[..15], 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_differ() {
        assert_ne!(number(b"a"), number(b"b"));
        assert_ne!(number(b""), 0);
    }
}
