//! The key-value map of a store, with notification of changes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// More than the workers of any job need, and less than would fill the memory of a node.
const MAX_BYTES: usize = 256 << 20;

/// A concurrent key-value map with a size limit.
#[derive(Debug)]
pub struct KvMap {
    values: Mutex<Values>,
    /// Notifies when a key is set.
    changes: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Values {
    /// Shared, so that a response to a client is not a copy.
    of: HashMap<Vec<u8>, Arc<Vec<u8>>>,
    bytes: usize,
}

impl Default for KvMap {
    fn default() -> KvMap {
        KvMap {
            values: Mutex::default(),
            changes: watch::channel(()).0,
        }
    }
}

/// The map has reached its size limit.
#[derive(Debug)]
pub struct Full;

impl KvMap {
    pub fn set(&self, key: Vec<u8>, value: Vec<u8>) -> Result<(), Full> {
        self.values().put(key, Arc::new(value))?;
        self.changes.send_replace(());
        Ok(())
    }

    pub fn get(&self, key: &[u8]) -> Option<Arc<Vec<u8>>> {
        self.values().of.get(key).cloned()
    }

    /// Sets the value if the current one is `expected`, or if there is none and `expected` is empty. Returns the
    /// value afterwards; for a missing key, `expected`, as `TCPStore` does.
    pub fn compare_set(
        &self,
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
    ) -> Result<Arc<Vec<u8>>, Full> {
        let mut values = self.values();
        let now = values.of.get(&key);
        let is_as_expected = now.map_or(expected.is_empty(), |value| **value == expected);
        if !is_as_expected {
            return Ok(now.cloned().unwrap_or_else(|| Arc::new(expected)));
        }
        let desired = Arc::new(desired);
        values.put(key, Arc::clone(&desired))?;
        drop(values);
        self.changes.send_replace(());
        Ok(desired)
    }

    /// Adds to a number, which is stored as decimal digits. A missing number is 0.
    pub fn add(&self, key: Vec<u8>, amount: i64) -> Result<i64, Full> {
        let mut sum = amount;
        self.change(key, |value| {
            let digits = std::str::from_utf8(&value).unwrap_or_default();
            sum = digits
                .trim()
                .parse::<i64>()
                .unwrap_or(0)
                .wrapping_add(amount);
            sum.to_string().into_bytes()
        })?;
        Ok(sum)
    }

    pub fn append(&self, key: Vec<u8>, bytes: &[u8]) -> Result<(), Full> {
        self.change(key, |mut value| {
            value.extend_from_slice(bytes);
            value
        })
    }

    /// Replaces a value by a function of the old one. A missing value is empty.
    fn change(&self, key: Vec<u8>, make: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Result<(), Full> {
        let mut values = self.values();
        let old = values
            .of
            .get(&key)
            .map_or_else(Vec::new, |old| old.to_vec());
        values.put(key, Arc::new(make(old)))?;
        drop(values);
        self.changes.send_replace(());
        Ok(())
    }

    /// Deletes a key; returns whether it existed.
    pub fn delete(&self, key: &[u8]) -> bool {
        self.values().take(key).is_some()
    }

    pub fn has_all(&self, keys: &[Vec<u8>]) -> bool {
        let values = self.values();
        keys.iter().all(|key| values.of.contains_key(key))
    }

    /// Waits until all keys exist.
    pub async fn wait(&self, keys: &[Vec<u8>]) {
        let mut changes = self.changes.subscribe();
        while !self.has_all(keys) {
            // The sender lives as long as `self`.
            let _ = changes.changed().await;
        }
    }

    pub fn num_keys(&self) -> usize {
        self.values().of.len()
    }

    /// All keys; `None` if they take more than `max_bytes`.
    pub fn keys(&self, max_bytes: usize) -> Option<Vec<Vec<u8>>> {
        let values = self.values();
        let num_bytes: usize = values.of.keys().map(|key| size(key, &[])).sum();
        (num_bytes <= max_bytes).then(|| values.of.keys().cloned().collect())
    }

    fn values(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Values {
    fn put(&mut self, key: Vec<u8>, value: Arc<Vec<u8>>) -> Result<(), Full> {
        let before = self.of.get(&key).map_or(0, |old| size(&key, old));
        let bytes = self.bytes - before + size(&key, &value);
        if bytes > MAX_BYTES {
            return Err(Full);
        }
        self.bytes = bytes;
        self.of.insert(key, value);
        Ok(())
    }

    fn take(&mut self, key: &[u8]) -> Option<Arc<Vec<u8>>> {
        let value = self.of.remove(key)?;
        self.bytes -= size(key, &value);
        Some(value)
    }
}

/// The size of an entry, with an estimate of its overhead.
fn size(key: &[u8], value: &[u8]) -> usize {
    const OVERHEAD: usize = 64;
    key.len() + value.len() + OVERHEAD
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_stored_as_digits() {
        let map = KvMap::default();
        assert_eq!(map.add(b"n".into(), 3).unwrap(), 3);
        assert_eq!(*map.get(b"n").unwrap(), b"3");
        assert_eq!(map.add(b"n".into(), -5).unwrap(), -2);
    }

    #[test]
    fn compare_set_behaves_as_in_tcp_store() {
        let map = KvMap::default();
        let set = |expected: &str, desired: &str| {
            let value = map.compare_set(b"k".into(), expected.into(), desired.into());
            String::from_utf8(value.unwrap().to_vec()).unwrap()
        };
        assert_eq!(set("e", "v"), "e", "the key is missing");
        assert_eq!(map.get(b"k"), None);
        assert_eq!(set("", "v"), "v");
        assert_eq!(set("", "w"), "v", "the key exists");
        assert_eq!(set("v", "w"), "w");
    }

    #[test]
    fn exactly_one_of_concurrent_compare_sets_wins() {
        for _ in 0..100 {
            let map = KvMap::default();
            let claim = |name: &'static [u8]| {
                let map = &map;
                move || *map.compare_set(b"k".into(), vec![], name.into()).unwrap() == name
            };
            let wins = std::thread::scope(|scope| {
                let claims = [scope.spawn(claim(b"a")), scope.spawn(claim(b"b"))];
                claims.map(|claim| claim.join().unwrap())
            });
            assert!(wins[0] != wins[1]);
        }
    }

    #[test]
    fn a_full_map_rejects_values_and_keeps_the_others() {
        let map = KvMap::default();
        let half = || vec![0; MAX_BYTES / 2];
        map.set(b"a".into(), half()).unwrap();
        assert!(map.set(b"b".into(), half()).is_err());
        map.set(b"a".into(), half()).unwrap();
        assert!(map.delete(b"a"));
        map.set(b"b".into(), half()).unwrap();
        assert!(map.append(b"b".into(), &half()).is_err());
        assert_eq!(*map.get(b"b").unwrap(), half());
    }
}
