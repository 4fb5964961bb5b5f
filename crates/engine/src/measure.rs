//! Memory and CPU time of this process, and quantiles.

use std::fs;

/// Current resident set size, in bytes.
pub fn resident_bytes() -> u64 {
    status_field("VmRSS:")
}

/// Peak resident set size, in bytes.
pub fn peak_resident_bytes() -> u64 {
    status_field("VmHWM:")
}

fn status_field(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// User and system time of all threads so far, in seconds.
pub fn cpu_seconds() -> f64 {
    // `USER_HZ` is 100 on x86-64 and AArch64.
    const TICKS_PER_SECOND: f64 = 100.0;
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The program name may contain spaces, so fields are counted after its closing parenthesis.
    let fields = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .split_whitespace();
    let ticks: f64 = fields
        .skip(11)
        .take(2)
        .filter_map(|f| f.parse::<f64>().ok())
        .sum();
    ticks / TICKS_PER_SECOND
}

/// A quantile, with linear interpolation between order statistics.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let position = q * last as f64;
    let low = (position as usize).min(last);
    let high = (low + 1).min(last);
    sorted[low] + (sorted[high] - sorted[low]) * (position - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        assert_eq!(quantile(&[3.0, 1.0, 2.0], 0.5), 2.0);
        assert_eq!(quantile(&[1.0, 2.0], 0.5), 1.5);
        assert!(quantile(&[], 0.5).is_nan());
    }

    #[test]
    fn this_process_uses_memory_and_time() {
        // The peak last: other tests of this process allocate meanwhile.
        let resident = resident_bytes();
        assert!(resident > 0 && peak_resident_bytes() >= resident);
        assert!(cpu_seconds() >= 0.0);
    }
}
