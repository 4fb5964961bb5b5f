//! Ranks in the names of files that PyTorch writes.

/// Endings that follow the rank in the names of profiler traces and of dumps that people have renamed.
const ENDINGS: [&str; 7] = [".gz", ".json", ".trace", ".pt", ".pickle", ".pkl", ".bin"];

/// The rank in the name of a Flight Recorder dump, its trailing number: PyTorch appends the rank to a prefix
/// such as `/tmp/nccl_trace_rank_`.
pub(crate) fn trailing_rank(file_name: &str) -> Option<usize> {
    let stem = without_endings(file_name);
    let digits = stem
        .trim_end_matches(|each: char| each.is_ascii_digit())
        .len();
    stem.get(digits..)?.parse().ok()
}

/// Whether a file of a directory may be a dump or a profiler trace. `torch.profiler`'s handler for TensorBoard
/// writes names such as `host_4711.1790857026000.pt.trace.json.gz`.
pub(crate) fn may_be_trace(file_name: &str) -> bool {
    file_name.ends_with(".pt.trace.json")
        || file_name.ends_with(".pt.trace.json.gz")
        || trailing_rank(file_name).is_some()
}

fn without_endings(file_name: &str) -> &str {
    let mut stem = file_name;
    while let Some(shorter) = ENDINGS.iter().find_map(|each| stem.strip_suffix(each)) {
        stem = shorter;
    }
    stem
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rank_is_the_trailing_number() {
        assert_eq!(trailing_rank("nccl_trace_rank_12"), Some(12));
        assert_eq!(trailing_rank("fr3.json"), Some(3));
        assert_eq!(trailing_rank("rank0.json"), Some(0));
        assert_eq!(trailing_rank("7"), Some(7));
        assert_eq!(trailing_rank("metrics.json"), None);
        assert_eq!(trailing_rank("99999999999999999999999"), None);
    }

    #[test]
    fn traces_of_the_profiler_need_no_rank_in_their_name() {
        assert!(may_be_trace("host_1.1790857026000.pt.trace.json"));
        assert!(may_be_trace("worker.pt.trace.json.gz"));
        assert!(!may_be_trace("metrics.json"));
    }
}
