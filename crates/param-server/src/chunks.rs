//! Bytes that are too many for one message, in several.

use std::io::{self, ErrorKind};
use std::ops::Range;

/// Small enough that a slow network transfers a message before its timeout.
const CHUNK_BYTES: usize = 1 << 20;

/// Sends these intervals of bytes, one after the other. What fills a message is not copied.
pub(crate) fn send_chunks(
    bytes: &[u8],
    intervals: &[Range<usize>],
    mut send: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut chunk = Vec::new();
    for interval in intervals {
        for part in bytes[interval.clone()].chunks(CHUNK_BYTES) {
            if chunk.len() + part.len() > CHUNK_BYTES {
                send(&chunk)?;
                chunk.clear();
            }
            if part.len() == CHUNK_BYTES {
                send(part)?;
            } else {
                chunk.extend_from_slice(part);
            }
        }
    }
    if chunk.is_empty() {
        Ok(())
    } else {
        send(&chunk)
    }
}

/// Receives this many bytes, and allocates them as they come.
pub(crate) fn receive_chunks(
    num_bytes: usize,
    mut receive: impl FnMut() -> io::Result<Vec<u8>>,
) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    while bytes.len() < num_bytes {
        bytes.extend(receive()?);
    }
    if bytes.len() > num_bytes {
        return Err(ErrorKind::InvalidData.into());
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_sent_is_received(lengths in proptest::collection::vec(prop_oneof![0..10_usize, 0..3 * CHUNK_BYTES], 0..5)) {
            let total: usize = lengths.iter().sum();
            let bytes: Vec<u8> = (0..total).map(|number| number as u8).collect();
            let mut first = 0;
            let intervals: Vec<_> = lengths.iter().map(|length| { first += length; first - length..first }).collect();
            let mut messages = VecDeque::new();
            send_chunks(&bytes, &intervals, |message| { messages.push_back(message.to_vec()); Ok(()) }).unwrap();
            prop_assert!(messages.iter().all(|message| (1..=CHUNK_BYTES).contains(&message.len())));
            let received = receive_chunks(total, || messages.pop_front().ok_or(ErrorKind::UnexpectedEof.into())).unwrap();
            prop_assert!(received == bytes && messages.is_empty());
        }
    }
}
