//! The known GPUs in whose memory a rank fits.

use trainyard_plan::Accelerator;

/// Says which known GPUs have this much memory, and what to do if none has.
pub fn fitting_gpus(peak_bytes: u64) -> String {
    let known = Accelerator::names().into_iter();
    let known = known.filter_map(Accelerator::named);
    let (larger, smaller): (Vec<_>, Vec<_>) =
        known.partition(|gpu| gpu.memory.value >= peak_bytes as f64);
    let list = |gpus: &[Accelerator]| {
        let names: Vec<&str> = gpus.iter().map(|gpu| gpu.name.as_str()).collect();
        names.join(", ")
    };
    match (larger.is_empty(), smaller.is_empty()) {
        (_, true) => "in every GPU that the planner knows".to_owned(),
        (true, _) => {
            "in no GPU that the planner knows: shard over more ranks, or recompute activations"
                .to_owned()
        }
        _ => format!("in {}; not in {}", list(&larger), list(&smaller)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn gpus_are_divided_by_their_memory() {
        assert_eq!(fitting_gpus(GIB), "in every GPU that the planner knows");
        assert!(fitting_gpus(1000 * GIB).starts_with("in no GPU"));
        let some = fitting_gpus(60 * GIB);
        let (larger, smaller) = some.split_once("; not in ").expect("both kinds");
        assert!(
            larger.contains("H100") && smaller.contains("A100-40GB"),
            "{some}"
        );
    }
}
