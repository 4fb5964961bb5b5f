//! The server side of one client connection.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::time::timeout;

use super::kv_map::{Full, KvMap};
use super::memory_limit::{MemoryLimit, QueryMemory};
use super::wire::{
    NOT_READY, Query, READY, STOP_WAITING, VALIDATE, WAIT_CANCELED, invalid, validate, write,
};

/// How long a client may take from connecting to its first query, which libtorch sends at once.
const FIRST_QUERY_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client may take to send the rest of a query, or to receive a response. Between queries a client may be
/// idle for as long as it likes.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(60);
/// The largest list of all keys, which is a copy.
const MAX_LIST_BYTES: usize = 1 << 20;

/// The keys and the memory limit that the clients of an epoch share.
#[derive(Debug, Default)]
pub struct Contents {
    pub map: KvMap,
    pub memory: MemoryLimit,
}

/// Serves a client until it disconnects.
pub async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    contents: &Contents,
) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    within(FIRST_QUERY_TIMEOUT, async {
        match stream.read_u8().await? {
            VALIDATE => validate(&mut stream).await,
            kind => Err(invalid(format!("the first query has type {kind}"))),
        }
    })
    .await?;
    loop {
        let kind = stream.read_u8().await?;
        let mut memory = contents.memory.query();
        match read(kind, &mut stream, &mut memory).await? {
            Query::Wait(keys) => {
                let _keys = memory.while_waiting()?;
                wait(&mut stream, contents, &keys).await?;
            }
            query => {
                let response = response(query, &contents.map)?;
                drop(memory);
                let memory = contents.memory.query();
                within(TRANSFER_TIMEOUT, send(response, &mut stream, memory)).await?;
            }
        }
    }
}

/// Reads the rest of a query.
async fn read(
    kind: u8,
    stream: &mut (impl AsyncRead + Unpin),
    memory: &mut QueryMemory<'_>,
) -> io::Result<Query> {
    within(TRANSFER_TIMEOUT, Query::read(kind, stream, memory)).await
}

async fn within<T>(
    limit: Duration,
    transfer: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let late = |_| io::Error::new(io::ErrorKind::TimedOut, "the client is too slow");
    timeout(limit, transfer).await.map_err(late)?
}

/// Waits for keys; the client may cancel the wait.
async fn wait(
    stream: &mut BufReader<impl AsyncRead + AsyncWrite + Unpin>,
    contents: &Contents,
    keys: &[Vec<u8>],
) -> io::Result<()> {
    let end = tokio::select! {
        biased;
        () = contents.map.wait(keys) => STOP_WAITING,
        kind = stream.read_u8() => match read(kind?, stream, &mut contents.memory.query()).await? {
            Query::CancelWait => WAIT_CANCELED,
            _ => return Err(invalid("the client sent a query during a wait".to_owned())),
        },
    };
    within(TRANSFER_TIMEOUT, stream.write_all(&[end])).await
}

/// A response. Values are shared with the map, not copied.
enum Response {
    Bytes(Vec<u8>),
    Values(Vec<Arc<Vec<u8>>>),
}

async fn send(
    response: Response,
    stream: &mut (impl AsyncWrite + Unpin),
    mut memory: QueryMemory<'_>,
) -> io::Result<()> {
    let values = match response {
        Response::Bytes(bytes) => return stream.write_all(&bytes).await,
        Response::Values(values) => values,
    };
    // A client that reads slowly keeps values that the map may have dropped.
    for value in &values {
        memory.charge(value.len() as u64).await?;
    }
    if memory.is_small() {
        let mut bytes = Vec::new();
        for value in values {
            write(&value, &mut bytes);
        }
        return stream.write_all(&bytes).await;
    }
    for value in values {
        stream
            .write_all(&(value.len() as u64).to_le_bytes())
            .await?;
        stream.write_all(&value).await?;
    }
    Ok(())
}

fn response(query: Query, map: &KvMap) -> io::Result<Response> {
    let mut bytes = Vec::new();
    match query {
        Query::Set(key, value) => map.set(key, value)?,
        Query::MultiSet(pairs) => {
            for (key, value) in pairs {
                map.set(key, value)?;
            }
        }
        Query::Append(key, added) => map.append(key, &added)?,
        Query::CompareSet {
            key,
            expected,
            desired,
        } => {
            return Ok(Response::Values(vec![
                map.compare_set(key, expected, desired)?,
            ]));
        }
        // Clients wait for a key before they read it.
        Query::Get(key) => return Ok(Response::Values(vec![map.get(&key).unwrap_or_default()])),
        Query::MultiGet(keys) => {
            let values = keys.iter().map(|key| map.get(key).unwrap_or_default());
            return Ok(Response::Values(values.collect()));
        }
        Query::Add(key, amount) => bytes.extend(map.add(key, amount)?.to_le_bytes()),
        Query::Check(keys) => bytes.push(if map.has_all(&keys) { READY } else { NOT_READY }),
        Query::NumKeys => bytes.extend((map.num_keys() as i64).to_le_bytes()),
        Query::Delete(key) => bytes.extend(i64::from(map.delete(&key)).to_le_bytes()),
        Query::Ping(nonce) => bytes.extend(nonce.to_le_bytes()),
        Query::ListKeys => {
            let keys = map.keys(MAX_LIST_BYTES);
            let keys = keys.ok_or_else(|| invalid("the store has too many keys to list".into()))?;
            bytes.extend((keys.len() as u64).to_le_bytes());
            for key in keys {
                write(&key, &mut bytes);
            }
        }
        // The wait completed before the cancellation arrived; clients expect a response to both.
        Query::CancelWait => bytes.push(WAIT_CANCELED),
        Query::Wait(_) => {}
    }
    Ok(Response::Bytes(bytes))
}

impl From<Full> for io::Error {
    fn from(_: Full) -> io::Error {
        invalid("the store is full".to_owned())
    }
}
