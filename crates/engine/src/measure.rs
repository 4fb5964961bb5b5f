//! Memory, page faults and CPU time of this process, and quantiles.

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
    (stat_field(11) + stat_field(12)) / TICKS_PER_SECOND
}

/// Page faults so far that read nothing from a disk: most are the first use of memory from the kernel.
pub fn minor_faults() -> f64 {
    stat_field(7)
}

/// A field of this process's `stat`, counted from its state. The program name before it may contain spaces.
fn stat_field(index: usize) -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let field = fields.split_whitespace().nth(index);
    field.and_then(|field| field.parse().ok()).unwrap_or(0.0)
}

/// The time of the threads of this process so far, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadTimes {
    /// The main thread, on a core.
    pub main_running: f64,
    /// The main thread, ready to run while other threads had the cores.
    pub main_waiting_for_core: f64,
    /// All other threads, on a core. Those that have ended are missing.
    pub others_running: f64,
}

/// Reads the times of all threads.
pub fn thread_times() -> ThreadTimes {
    let mut times = ThreadTimes::default();
    let main = std::process::id().to_string();
    for task in fs::read_dir("/proc/self/task")
        .into_iter()
        .flatten()
        .flatten()
    {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        let mut ns = text.split_whitespace().map(|ns| ns.parse().unwrap_or(0.0));
        let mut seconds = || ns.next().unwrap_or(0.0) / 1e9;
        if task.file_name() == main.as_str() {
            times.main_running = seconds();
            times.main_waiting_for_core = seconds();
        } else {
            times.others_running += seconds();
        }
    }
    times
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
        assert!(minor_faults() > 0.0);
        // The test itself runs in another thread.
        assert!(thread_times().others_running > 0.0);
    }
}
