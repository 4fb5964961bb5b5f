//! Whether the kernel's out-of-memory killer ended a worker: the kernel counts its kills.

use std::fs;
use std::path::PathBuf;

/// How many processes the out-of-memory killer has ended: of this process's control group, or else of the node. `None` if
/// the kernel does not say.
pub(crate) fn oom_kills() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let counters = groups.lines().filter_map(counter_file);
    let mut texts = counters.filter_map(|path| fs::read_to_string(path).ok());
    let of_group = texts.find_map(|text| count(&text));
    of_group.or_else(|| count(&fs::read_to_string("/proc/vmstat").ok()?))
}

/// The file with the counter of a line of `/proc/self/cgroup`, such as `0::/system.slice` (version 2) or
/// `4:memory:/docker` (version 1).
fn counter_file(line: &str) -> Option<PathBuf> {
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, group) = (parts.next()?, parts.next()?);
    match controllers {
        "" => Some(format!("/sys/fs/cgroup{group}/memory.events").into()),
        list if list.split(',').any(|name| name == "memory") => {
            Some(format!("/sys/fs/cgroup/memory{group}/memory.oom_control").into())
        }
        _ => None,
    }
}

/// The value of `oom_kill`, in a file of lines `name value`.
fn count(text: &str) -> Option<u64> {
    let value = |line: &str| line.strip_prefix("oom_kill ")?.trim().parse().ok();
    text.lines().find_map(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_both_versions_are_read() {
        let file = |line| counter_file(line).map(|path| path.display().to_string());
        assert_eq!(
            file("0::/a/b").as_deref(),
            Some("/sys/fs/cgroup/a/b/memory.events")
        );
        assert_eq!(
            file("4:cpu,memory:/x").as_deref(),
            Some("/sys/fs/cgroup/memory/x/memory.oom_control")
        );
        assert_eq!(file("3:cpu:/x"), None);
        let v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        let v2 = "low 0\nhigh 0\nmax 12\noom 4\noom_kill 2\noom_group_kill 0\n";
        assert_eq!(
            (count(v1), count(v2), count("oom 4")),
            (Some(3), Some(2), None)
        );
    }
}
