//! Items that go together: into one file, or into memory at once.

/// Neighbours in groups of up to `most` bytes, and of at least one item.
pub fn neighbours<T>(items: &[T], most: u64, size: impl Fn(&T) -> u64) -> Vec<&[T]> {
    let mut groups = Vec::new();
    let (mut start, mut filled) = (0, 0);
    for (index, item) in items.iter().enumerate() {
        if filled > 0 && filled + size(item) > most {
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
    use super::neighbours;

    #[test]
    fn groups_are_full_but_not_too_full() {
        let items = [3, 3, 4, 9, 1, 1];
        let groups = neighbours(&items, 6, |&size| size);
        assert_eq!(groups, [&[3, 3][..], &[4], &[9], &[1, 1]]);
        assert_eq!(neighbours(&[0u64; 0], 6, |&size| size), [&[0u64; 0]]);
    }
}
