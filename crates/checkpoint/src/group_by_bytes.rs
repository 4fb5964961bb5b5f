//! Grouping of consecutive items by size, for files or for batches in memory.

/// Splits `items` into consecutive groups of at most `max_bytes` each. An item larger than that gets a
/// group of its own.
pub fn group_by_bytes<T>(items: &[T], max_bytes: u64, size: impl Fn(&T) -> u64) -> Vec<&[T]> {
    let mut groups = Vec::new();
    let (mut start, mut filled) = (0, 0);
    for (index, item) in items.iter().enumerate() {
        if filled > 0 && filled + size(item) > max_bytes {
            groups.push(&items[start..index]);
            (start, filled) = (index, 0);
        }
        filled += size(item);
    }
    groups.push(&items[start..]);
    groups
}

#[cfg(test)]
mod tests {
    use super::group_by_bytes;

    #[test]
    fn groups_stay_within_the_limit() {
        let items = [3, 3, 4, 9, 1, 1];
        let groups = group_by_bytes(&items, 6, |&size| size);
        assert_eq!(groups, [&[3, 3][..], &[4], &[9], &[1, 1]]);
        assert_eq!(group_by_bytes(&[0u64; 0], 6, |&size| size), [&[0u64; 0]]);
    }
}
