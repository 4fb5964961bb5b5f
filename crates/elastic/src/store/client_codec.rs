//! The client side of the TCPStore protocol: the requests that an agent sends.

use super::wire::{MAGIC, VALIDATE, write};

const SET: u8 = 1;
const MULTI_GET: u8 = 10;

/// The first request of a client. It has no response.
pub(crate) fn hello() -> Vec<u8> {
    let mut request = vec![VALIDATE];
    request.extend(MAGIC.to_le_bytes());
    request
}

/// Sets a value. The request has no response.
pub(crate) fn set(key: &[u8], value: &[u8]) -> Vec<u8> {
    let mut request = vec![SET];
    write(key, &mut request);
    write(value, &mut request);
    request
}

/// Requests several values. The response has all of them, in order; missing ones are empty.
pub(crate) fn multi_get(keys: &[Vec<u8>]) -> Vec<u8> {
    let mut request = vec![MULTI_GET];
    request.extend((keys.len() as u64).to_le_bytes());
    for key in keys {
        write(key, &mut request);
    }
    request
}
