//! Limits the memory that the requests and responses of all clients take together.
//!
//! Almost all of them are small. A large one needs one of few slots, from its first large field until it has been
//! handled, so clients take memory in proportion to their number, and large requests one after another. A client that
//! waits for keys gives its slot back, because the key may come with another large request; keys that are waited for
//! have a limit of their own.

use std::io;

use tokio::sync::{Semaphore, SemaphorePermit};

/// The largest query or response that needs no slot.
const MAX_SMALL_BYTES: u64 = 64 << 10;
/// The largest query or response: larger than the largest value.
const MAX_LARGE_BYTES: u64 = 80 << 20;
const NUM_SLOTS: usize = 2;
/// The keys of all clients that wait.
const MAX_WAITING_BYTES: usize = 256 << 20;
/// The overhead of a key or value, estimated.
const OVERHEAD_BYTES: u64 = 64;

/// The limit of one store.
#[derive(Debug)]
pub struct MemoryLimit {
    slots: Semaphore,
    waiting_bytes: Semaphore,
}

impl Default for MemoryLimit {
    fn default() -> MemoryLimit {
        MemoryLimit {
            slots: Semaphore::new(NUM_SLOTS),
            waiting_bytes: Semaphore::new(MAX_WAITING_BYTES),
        }
    }
}

impl MemoryLimit {
    /// The memory of one query and its response.
    pub fn query(&self) -> QueryMemory<'_> {
        QueryMemory {
            limit: self,
            slot: None,
            num_bytes: 0,
        }
    }
}

/// The memory of one query, or of its response.
#[derive(Debug)]
pub struct QueryMemory<'a> {
    limit: &'a MemoryLimit,
    slot: Option<SemaphorePermit<'a>>,
    num_bytes: u64,
}

impl<'a> QueryMemory<'a> {
    /// Waits until this many more bytes may be allocated; fails if they are too many for one query.
    pub async fn charge(&mut self, num_bytes: u64) -> io::Result<()> {
        self.num_bytes = self
            .num_bytes
            .saturating_add(num_bytes.saturating_add(OVERHEAD_BYTES));
        if self.num_bytes > MAX_LARGE_BYTES {
            let message = format!("a query or response exceeds {MAX_LARGE_BYTES} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        if self.num_bytes > MAX_SMALL_BYTES && self.slot.is_none() {
            let slot = self.limit.slots.acquire().await;
            self.slot = Some(slot.map_err(io::Error::other)?);
        }
        Ok(())
    }

    /// Whether it needs no slot.
    pub fn is_small(&self) -> bool {
        self.slot.is_none()
    }

    /// Gives the slot back while the client waits for the keys of its query; fails if clients wait for too many keys.
    pub fn while_waiting(self) -> io::Result<SemaphorePermit<'a>> {
        let num_bytes = u32::try_from(self.num_bytes).unwrap_or(u32::MAX);
        let permit = self.limit.waiting_bytes.try_acquire_many(num_bytes);
        permit.map_err(|_| {
            let message = format!("clients wait for keys of more than {MAX_WAITING_BYTES} bytes");
            io::Error::new(io::ErrorKind::InvalidData, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(future)
    }

    #[test]
    fn large_queries_wait_for_each_other_and_small_ones_do_not() {
        let limit = MemoryLimit::default();
        block_on(async {
            let mut large: Vec<QueryMemory<'_>> = (0..=NUM_SLOTS).map(|_| limit.query()).collect();
            let (last, first) = large.split_last_mut().unwrap();
            for query in first {
                query.charge(MAX_SMALL_BYTES).await.unwrap();
            }
            limit.query().charge(100).await.unwrap();
            let mut waiting = std::pin::pin!(last.charge(MAX_SMALL_BYTES));
            assert!(is_pending(&mut waiting).await);
        });
    }

    /// Whether a future is still pending after one poll.
    async fn is_pending(future: &mut (impl Future + Unpin)) -> bool {
        tokio::select! {
            biased;
            _ = future => false,
            () = std::future::ready(()) => true,
        }
    }

    #[test]
    fn the_fields_of_a_query_are_limited_together() {
        let limit = MemoryLimit::default();
        block_on(async {
            let mut query = limit.query();
            query.charge(MAX_LARGE_BYTES / 2).await.unwrap();
            assert!(query.charge(MAX_LARGE_BYTES / 2).await.is_err());
            assert!(
                limit
                    .query()
                    .charge(u64::MAX - OVERHEAD_BYTES)
                    .await
                    .is_err()
            );
        });
    }
}
