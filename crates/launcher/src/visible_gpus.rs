//! The GPUs that programs may use: those of this node, as far as `CUDA_VISIBLE_DEVICES` shows them.

use std::collections::BTreeSet;
use std::fs;

/// The variable.
pub const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// The visible GPUs, each as the variable would name it: by number or by UUID. `variable` is its value, if it is set.
pub fn visible_gpus(variable: Option<&str>, num_gpus: usize) -> Vec<String> {
    let Some(list) = variable else {
        return (0..num_gpus).map(|gpu| gpu.to_string()).collect();
    };
    // CUDA ignores everything after the first entry that names no GPU, and shows none if one is named twice.
    let is_gpu = |entry: &&str| {
        let is_uuid = entry.starts_with("GPU-") || entry.starts_with("MIG-");
        is_uuid || entry.parse::<usize>().is_ok_and(|number| number < num_gpus)
    };
    let entries: Vec<&str> = list.split(',').map(str::trim).take_while(is_gpu).collect();
    let distinct: BTreeSet<&&str> = entries.iter().collect();
    if distinct.len() < entries.len() {
        return Vec::new();
    }
    entries.into_iter().map(str::to_owned).collect()
}

/// Counts the GPU devices of the kernel, because querying CUDA would mean loading it.
pub fn num_gpus() -> usize {
    let is_gpu = |name: &str| {
        let number = name.strip_prefix("nvidia");
        number.is_some_and(|number| number.parse::<usize>().is_ok())
    };
    let devices = fs::read_dir("/dev").into_iter().flatten().flatten();
    let gpus = devices.filter(|device| device.file_name().to_str().is_some_and(is_gpu));
    gpus.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_limits_the_gpus_as_in_cuda() {
        let visible = |variable| visible_gpus(variable, 4);
        let none: [&str; 0] = [];
        assert_eq!(visible(None), ["0", "1", "2", "3"]);
        assert_eq!(visible(Some("2, 0")), ["2", "0"]);
        assert_eq!(visible(Some("1,7,2")), ["1"], "there is no GPU 7");
        assert_eq!(visible(Some("GPU-8f,MIG-1a")), ["GPU-8f", "MIG-1a"]);
        assert_eq!(visible(Some("1,1")), none);
        assert_eq!(visible(Some("")), none);
        assert_eq!(visible(Some("-1")), none);
    }
}
