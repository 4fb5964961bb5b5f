//! The memory of the device, for metrics that report memory as a percentage.

use std::fs;
use std::path::Path;

use trainyard_torch::{Device, device};

use crate::{Result, TrainError};

/// All memory of a GPU, or the host memory of this node, in bytes.
pub fn memory_capacity(device: Device) -> Result<u64> {
    match device::memory(device)? {
        Some(memory) => Ok(memory.capacity),
        None => host_memory(),
    }
}

fn host_memory() -> Result<u64> {
    let path = Path::new("/proc/meminfo");
    let text = fs::read_to_string(path).map_err(TrainError::io(path))?;
    mem_total(&text).ok_or_else(|| {
        let reason = std::io::Error::other("no line `MemTotal: N kB`");
        TrainError::io(path)(reason)
    })
}

/// Reads the line `MemTotal:       24689764 kB`.
fn mem_total(text: &str) -> Option<u64> {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        assert_eq!(mem_total("MemTotal:  2 kB\nMemFree:  1 kB\n"), Some(2048));
        assert_eq!(mem_total("MemFree:  1 kB\n"), None);
        assert_eq!(mem_total("MemTotal:  many kB\n"), None);
    }

    #[test]
    fn this_host_has_memory() {
        assert!(memory_capacity(Device::Cpu).unwrap() > 1 << 20);
    }
}
