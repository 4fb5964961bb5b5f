//! A client's words, as far as an agent asks.

use super::wire::{MAGIC, VALIDATE, write};

const SET: u8 = 1;
const MULTI_GET: u8 = 10;

/// What a client says first; nobody answers.
pub(crate) fn greeting() -> Vec<u8> {
    let mut words = vec![VALIDATE];
    words.extend(MAGIC.to_le_bytes());
    words
}

/// Puts a value on the shelf; nobody answers.
pub(crate) fn set(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut words = vec![SET];
    write(key, &mut words);
    write(value, &mut words);
    words
}

/// Asks for values, each of which is answered, with nothing if it is not there.
pub(crate) fn multi_get(keys: &[Vec<u8>]) -> Vec<u8> {
    let mut words = vec![MULTI_GET];
    words.extend((keys.len() as u64).to_le_bytes());
    for key in keys {
        write(key, &mut words);
    }
    words
}
