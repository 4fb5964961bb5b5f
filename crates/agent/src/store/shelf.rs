//! What is in a store, and the news of it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// More than the workers of any job need to find each other, and less than would fill a machine's memory.
const MOST_BYTES: usize = 256 << 20;

/// Keys and their values.
#[derive(Debug)]
pub struct Shelf {
    values: Mutex<Values>,
    /// Changes whenever a key comes.
    news: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Values {
    of: HashMap<Vec<u8>, Vec<u8>>,
    bytes: usize,
}

impl Default for Shelf {
    fn default() -> Shelf {
        Shelf {
            values: Mutex::default(),
            news: watch::channel(()).0,
        }
    }
}

/// A shelf takes no more.
#[derive(Debug)]
pub struct Full;

impl Shelf {
    pub fn set(&self, key: Vec<u8>, value: Vec<u8>) -> Result<(), Full> {
        self.values().put(key, value)?;
        self.news.send_replace(());
        Ok(())
    }

    pub fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.values().of.get(key).cloned()
    }

    /// Sets what is `expected`, or not there where nothing is; says what is there then. Of a key that is
    /// not there and should be, what was expected, as `TCPStore` has it.
    pub fn compare_set(
        &self,
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
    ) -> Result<Vec<u8>, Full> {
        let mut values = self.values();
        let now = values.of.get(&key);
        let is_as_expected = now.map_or(expected.is_empty(), |value| *value == expected);
        if !is_as_expected {
            return Ok(now.cloned().unwrap_or(expected));
        }
        values.put(key, desired.clone())?;
        drop(values);
        self.news.send_replace(());
        Ok(desired)
    }

    /// Adds to a number, which is kept as digits; one that is not there is 0.
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

    /// Makes a new value of an old one, which is empty where there is none.
    fn change(&self, key: Vec<u8>, make: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Result<(), Full> {
        let mut values = self.values();
        let old = values.of.get(&key).cloned().unwrap_or_default();
        values.put(key, make(old))?;
        drop(values);
        self.news.send_replace(());
        Ok(())
    }

    /// Whether it was there.
    pub fn delete(&self, key: &[u8]) -> bool {
        self.values().take(key).is_some()
    }

    pub fn has_all(&self, keys: &[Vec<u8>]) -> bool {
        let values = self.values();
        keys.iter().all(|key| values.of.contains_key(key))
    }

    /// Returns when all keys are there.
    pub async fn wait(&self, keys: &[Vec<u8>]) {
        let mut news = self.news.subscribe();
        while !self.has_all(keys) {
            // The sender lives as long as this.
            let _ = news.changed().await;
        }
    }

    pub fn keys(&self) -> Vec<Vec<u8>> {
        self.values().of.keys().cloned().collect()
    }

    fn values(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Values {
    fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> Result<(), Full> {
        let before = self.of.get(&key).map_or(0, |old| size(&key, old));
        let bytes = self.bytes - before + size(&key, &value);
        if bytes > MOST_BYTES {
            return Err(Full);
        }
        self.bytes = bytes;
        self.of.insert(key, value);
        Ok(())
    }

    fn take(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        let value = self.of.remove(key)?;
        self.bytes -= size(key, &value);
        Some(value)
    }
}

/// With what it costs to keep it.
fn size(key: &[u8], value: &[u8]) -> usize {
    const KEPT: usize = 64;
    key.len() + value.len() + KEPT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_digits() {
        let shelf = Shelf::default();
        assert_eq!(shelf.add(b"n".into(), 3).unwrap(), 3);
        assert_eq!(shelf.get(b"n"), Some(b"3".into()));
        assert_eq!(shelf.add(b"n".into(), -5).unwrap(), -2);
    }

    #[test]
    fn comparing_follows_tcp_store() {
        let shelf = Shelf::default();
        let set = |expected: &str, desired: &str| {
            let value = shelf.compare_set(b"k".into(), expected.into(), desired.into());
            String::from_utf8(value.unwrap()).unwrap()
        };
        assert_eq!(set("e", "v"), "e", "nothing is there");
        assert_eq!(shelf.get(b"k"), None);
        assert_eq!(set("", "v"), "v");
        assert_eq!(set("", "w"), "v", "something is there");
        assert_eq!(set("v", "w"), "w");
    }

    #[test]
    fn one_of_many_who_compare_at_once_wins() {
        for _ in 0..100 {
            let shelf = Shelf::default();
            let claim = |name: &'static [u8]| {
                let shelf = &shelf;
                move || shelf.compare_set(b"k".into(), vec![], name.into()).unwrap() == name
            };
            let wins = std::thread::scope(|scope| {
                let claims = [scope.spawn(claim(b"a")), scope.spawn(claim(b"b"))];
                claims.map(|claim| claim.join().unwrap())
            });
            assert!(wins[0] != wins[1]);
        }
    }

    #[test]
    fn a_full_shelf_takes_no_more_and_keeps_what_fits() {
        let shelf = Shelf::default();
        let half = || vec![0; MOST_BYTES / 2];
        shelf.set(b"a".into(), half()).unwrap();
        assert!(shelf.set(b"b".into(), half()).is_err());
        shelf.set(b"a".into(), half()).unwrap();
        assert!(shelf.delete(b"a"));
        shelf.set(b"b".into(), half()).unwrap();
        assert!(shelf.append(b"b".into(), &half()).is_err());
        assert_eq!(shelf.get(b"b"), Some(half()));
    }
}
