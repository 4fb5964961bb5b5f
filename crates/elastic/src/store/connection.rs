//! The server side of one client connection.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::kv_map::{Full, KvMap};
use super::wire::{
    NOT_READY, Query, READY, STOP_WAITING, VALIDATE, WAIT_CANCELED, validate, write,
};

/// Both are larger than the largest value.
const MAX_QUERY_BYTES: u64 = 80 << 20;
const MAX_RESPONSE_BYTES: u64 = 256 << 20;

/// Serves a client until it disconnects.
pub async fn serve(stream: TcpStream, map: &KvMap) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let kind = stream.read_u8().await?;
        if kind == VALIDATE {
            validate(&mut stream).await?;
            continue;
        }
        match read(kind, &mut stream).await? {
            Query::Wait(keys) => wait(&mut stream, map, &keys).await?,
            query => {
                let response = response(query, map)?;
                stream.write_all(&response).await?;
            }
        }
    }
}

/// Reads the rest of a query, which must not exceed the limit as a whole.
async fn read(kind: u8, stream: &mut BufReader<TcpStream>) -> io::Result<Query> {
    Query::read(kind, &mut stream.take(MAX_QUERY_BYTES)).await
}

/// Waits for keys; the client may cancel the wait.
async fn wait(stream: &mut BufReader<TcpStream>, map: &KvMap, keys: &[Vec<u8>]) -> io::Result<()> {
    let end = tokio::select! {
        biased;
        () = map.wait(keys) => STOP_WAITING,
        kind = stream.read_u8() => match read(kind?, stream).await? {
            Query::CancelWait => WAIT_CANCELED,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "the client sent a query during a wait")),
        },
    };
    stream.write_all(&[end]).await
}

fn response(query: Query, map: &KvMap) -> io::Result<Vec<u8>> {
    let mut response = Vec::new();
    match query {
        Query::Set(key, value) => map.set(key, value)?,
        Query::MultiSet(pairs) => {
            for (key, value) in pairs {
                map.set(key, value)?;
            }
        }
        Query::Append(key, bytes) => map.append(key, &bytes)?,
        Query::CompareSet {
            key,
            expected,
            desired,
        } => write(&map.compare_set(key, expected, desired)?, &mut response),
        // Clients wait for a key before they read it.
        Query::Get(key) => write(&map.get(&key).unwrap_or_default(), &mut response),
        Query::MultiGet(keys) => {
            for key in keys {
                write(&map.get(&key).unwrap_or_default(), &mut response);
                if response.len() as u64 > MAX_RESPONSE_BYTES {
                    let message = format!("the response exceeds {MAX_RESPONSE_BYTES} bytes");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                }
            }
        }
        Query::Add(key, amount) => response.extend(map.add(key, amount)?.to_le_bytes()),
        Query::Check(keys) => response.push(if map.has_all(&keys) { READY } else { NOT_READY }),
        Query::NumKeys => response.extend((map.keys().len() as i64).to_le_bytes()),
        Query::Delete(key) => response.extend(i64::from(map.delete(&key)).to_le_bytes()),
        Query::Ping(nonce) => response.extend(nonce.to_le_bytes()),
        Query::ListKeys => {
            let keys = map.keys();
            response.extend((keys.len() as u64).to_le_bytes());
            for key in keys {
                write(&key, &mut response);
            }
        }
        // The wait completed before the cancellation arrived; clients expect a response to both.
        Query::CancelWait => response.push(WAIT_CANCELED),
        Query::Wait(_) => {}
    }
    Ok(response)
}

impl From<Full> for io::Error {
    fn from(_: Full) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, "the store is full")
    }
}
