//! The wire format of libtorch's `TCPStore`: little-endian integers, and length-prefixed bytes.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

use super::memory_limit::QueryMemory;

/// Limits beyond what any worker needs.
const MAX_KEY_BYTES: u64 = 64 << 10;
const MAX_VALUE_BYTES: u64 = 64 << 20;
const MAX_KEYS: u64 = 128 << 10;

pub const MAGIC: u32 = 0x3C85_F7CE;

/// The first query of a client.
pub const VALIDATE: u8 = 0;

/// Responses to [`Query::Check`]: whether all keys exist.
pub const READY: u8 = 0;
pub const NOT_READY: u8 = 1;
/// Responses to [`Query::Wait`].
pub const STOP_WAITING: u8 = 0;
pub const WAIT_CANCELED: u8 = 1;

/// A request of a client. The names are those of libtorch's `QueryType`.
#[derive(Debug, PartialEq)]
pub enum Query {
    Set(Vec<u8>, Vec<u8>),
    CompareSet {
        key: Vec<u8>,
        expected: Vec<u8>,
        desired: Vec<u8>,
    },
    Get(Vec<u8>),
    Add(Vec<u8>, i64),
    Check(Vec<Vec<u8>>),
    Wait(Vec<Vec<u8>>),
    NumKeys,
    Delete(Vec<u8>),
    Append(Vec<u8>, Vec<u8>),
    MultiGet(Vec<Vec<u8>>),
    MultiSet(Vec<(Vec<u8>, Vec<u8>)>),
    CancelWait,
    Ping(u32),
    ListKeys,
}

/// Reads the rest of a validation query, after its kind.
pub async fn validate(from: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
    match from.read_u32_le().await? {
        MAGIC => Ok(()),
        other => Err(invalid(format!(
            "{other:#x} is not the magic number of TCPStore"
        ))),
    }
}

impl Query {
    /// Reads the rest of a query, after its kind. What it allocates is charged to `memory`.
    pub async fn read(
        kind: u8,
        from: &mut (impl AsyncRead + Unpin),
        memory: &mut QueryMemory<'_>,
    ) -> io::Result<Query> {
        let mut fields = Fields { from, memory };
        Ok(match kind {
            1 => Query::Set(fields.key().await?, fields.value().await?),
            2 => Query::CompareSet {
                key: fields.key().await?,
                expected: fields.value().await?,
                desired: fields.value().await?,
            },
            3 => Query::Get(fields.key().await?),
            4 => Query::Add(fields.key().await?, fields.from.read_i64_le().await?),
            5 => Query::Check(fields.keys().await?),
            6 => Query::Wait(fields.keys().await?),
            7 => Query::NumKeys,
            8 => Query::Delete(fields.key().await?),
            9 => Query::Append(fields.key().await?, fields.value().await?),
            10 => Query::MultiGet(fields.keys().await?),
            11 => {
                let mut pairs = Vec::new();
                for _ in 0..fields.count().await? {
                    pairs.push((fields.key().await?, fields.value().await?));
                }
                Query::MultiSet(pairs)
            }
            12 => Query::CancelWait,
            13 => Query::Ping(fields.from.read_u32_le().await?),
            17 => Query::ListKeys,
            other => return Err(invalid(format!("query type {other} is not supported"))),
        })
    }
}

/// Appends length-prefixed bytes.
pub fn write(bytes: &[u8], into: &mut Vec<u8>) {
    into.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    into.extend_from_slice(bytes);
}

/// The fields of a query.
struct Fields<'a, 'm, S> {
    from: &'a mut S,
    memory: &'a mut QueryMemory<'m>,
}

impl<S: AsyncRead + Unpin> Fields<'_, '_, S> {
    async fn key(&mut self) -> io::Result<Vec<u8>> {
        self.bytes(MAX_KEY_BYTES).await
    }

    async fn value(&mut self) -> io::Result<Vec<u8>> {
        self.bytes(MAX_VALUE_BYTES).await
    }

    async fn keys(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut keys = Vec::new();
        for _ in 0..self.count().await? {
            keys.push(self.key().await?);
        }
        Ok(keys)
    }

    async fn count(&mut self) -> io::Result<u64> {
        match self.from.read_u64_le().await? {
            count if count <= MAX_KEYS => Ok(count),
            count => Err(invalid(format!(
                "{count} keys exceed the limit of {MAX_KEYS}"
            ))),
        }
    }

    /// Reads length-prefixed bytes. Memory is allocated as bytes arrive, not as the length announces them.
    async fn bytes(&mut self, max_bytes: u64) -> io::Result<Vec<u8>> {
        let length = self.from.read_u64_le().await?;
        if length > max_bytes {
            let message = format!("{length} bytes exceed the limit of {max_bytes}");
            return Err(invalid(message));
        }
        self.memory.charge(length).await?;
        let mut bytes = Vec::new();
        (&mut *self.from)
            .take(length)
            .read_to_end(&mut bytes)
            .await?;
        if bytes.len() as u64 == length {
            Ok(bytes)
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}

/// The error of a client that breaks the protocol or exceeds a limit.
pub fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::memory_limit::MemoryLimit;

    fn read(bytes: &[u8]) -> io::Result<Query> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        runtime.block_on(async {
            let mut from = bytes;
            let kind = from.read_u8().await?;
            let limit = MemoryLimit::default();
            Query::read(kind, &mut from, &mut limit.query()).await
        })
    }

    #[test]
    fn the_bytes_of_libtorch_are_parsed() {
        let set = b"\x01\x02\0\0\0\0\0\0\0/a\x01\0\0\0\0\0\0\0x";
        assert_eq!(read(set).unwrap(), Query::Set(b"/a".into(), b"x".into()));
        let check = b"\x05\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0/a\x03\0\0\0\0\0\0\0/zz";
        let keys = vec![b"/a".to_vec(), b"/zz".to_vec()];
        assert_eq!(read(check).unwrap(), Query::Check(keys));
        let add = b"\x04\x02\0\0\0\0\0\0\0/n\x03\0\0\0\0\0\0\0";
        assert_eq!(read(add).unwrap(), Query::Add(b"/n".into(), 3));
    }

    #[test]
    fn an_excessive_length_is_rejected() {
        let mut long = vec![3];
        long.extend_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(read(&long).unwrap_err().kind(), io::ErrorKind::InvalidData);
        long[0] = 6;
        assert_eq!(read(&long).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(&bytes);
        }
    }
}
