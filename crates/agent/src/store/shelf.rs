//! What is in a store, and the news of it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

/// Keys and their values.
#[derive(Debug)]
pub struct Shelf {
    values: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    /// Changes whenever a key comes.
    news: watch::Sender<()>,
}

impl Default for Shelf {
    fn default() -> Shelf {
        Shelf {
            values: Mutex::default(),
            news: watch::channel(()).0,
        }
    }
}

impl Shelf {
    pub fn set(&self, key: Vec<u8>, value: Vec<u8>) {
        self.values().insert(key, value);
        self.news.send_replace(());
    }

    pub fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.values().get(key).cloned()
    }

    /// Sets what is `expected`, or not there where nothing is; says what is there then. Of a key that is
    /// not there and should be, what was expected, as `TCPStore` has it.
    pub fn compare_set(&self, key: Vec<u8>, expected: Vec<u8>, desired: Vec<u8>) -> Vec<u8> {
        let now = self.get(&key);
        let is_as_expected = match &now {
            Some(value) => *value == expected,
            None => expected.is_empty(),
        };
        if !is_as_expected {
            return now.unwrap_or(expected);
        }
        self.set(key, desired.clone());
        desired
    }

    /// Adds to a number, which is kept as digits; one that is not there is 0.
    pub fn add(&self, key: Vec<u8>, amount: i64) -> i64 {
        let mut values = self.values();
        let value = values.entry(key).or_default();
        let digits = std::str::from_utf8(value).unwrap_or_default();
        let sum = digits.trim().parse::<i64>().unwrap_or(0);
        let sum = sum.wrapping_add(amount);
        *value = sum.to_string().into_bytes();
        drop(values);
        self.news.send_replace(());
        sum
    }

    pub fn append(&self, key: Vec<u8>, bytes: &[u8]) {
        self.values()
            .entry(key)
            .or_default()
            .extend_from_slice(bytes);
        self.news.send_replace(());
    }

    /// Whether it was there.
    pub fn delete(&self, key: &[u8]) -> bool {
        self.values().remove(key).is_some()
    }

    pub fn has_all(&self, keys: &[Vec<u8>]) -> bool {
        let values = self.values();
        keys.iter().all(|key| values.contains_key(key))
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
        self.values().keys().cloned().collect()
    }

    fn values(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Vec<u8>>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_digits() {
        let shelf = Shelf::default();
        assert_eq!(shelf.add(b"n".into(), 3), 3);
        assert_eq!(shelf.get(b"n"), Some(b"3".into()));
        assert_eq!(shelf.add(b"n".into(), -5), -2);
    }

    #[test]
    fn comparing_follows_tcp_store() {
        let shelf = Shelf::default();
        let set = |expected: &str, desired: &str| {
            let value = shelf.compare_set(b"k".into(), expected.into(), desired.into());
            String::from_utf8(value).unwrap()
        };
        assert_eq!(set("e", "v"), "e", "nothing is there");
        assert_eq!(shelf.get(b"k"), None);
        assert_eq!(set("", "v"), "v");
        assert_eq!(set("", "w"), "v", "something is there");
        assert_eq!(set("v", "w"), "w");
    }
}
