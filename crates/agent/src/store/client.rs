//! One client of a store, from its greeting to its end.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::shelf::{Full, Shelf};
use super::wire::{
    NOT_READY, Query, READY, STOP_WAITING, VALIDATE, WAIT_CANCELED, validate, write,
};

/// One value of the greatest length fits in either.
const LONGEST_QUERY: u64 = 80 << 20;
const LONGEST_ANSWER: u64 = 256 << 20;

/// Answers until the client leaves.
pub async fn serve(stream: TcpStream, shelf: &Shelf) -> io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let kind = stream.read_u8().await?;
        if kind == VALIDATE {
            validate(&mut stream).await?;
            continue;
        }
        match read(kind, &mut stream).await? {
            Query::Wait(keys) => wait(&mut stream, shelf, &keys).await?,
            query => {
                let answer = answer(query, shelf)?;
                stream.write_all(&answer).await?;
            }
        }
    }
}

/// The rest of a query, if it is not too long as a whole.
async fn read(kind: u8, stream: &mut BufReader<TcpStream>) -> io::Result<Query> {
    Query::read(kind, &mut stream.take(LONGEST_QUERY)).await
}

/// Waits for keys; the client may think better of it.
async fn wait(
    stream: &mut BufReader<TcpStream>,
    shelf: &Shelf,
    keys: &[Vec<u8>],
) -> io::Result<()> {
    let end = tokio::select! {
        biased;
        () = shelf.wait(keys) => STOP_WAITING,
        kind = stream.read_u8() => match read(kind?, stream).await? {
            Query::CancelWait => WAIT_CANCELED,
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "asks while it waits")),
        },
    };
    stream.write_all(&[end]).await
}

fn answer(query: Query, shelf: &Shelf) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    match query {
        Query::Set(key, value) => shelf.set(key, value)?,
        Query::MultiSet(pairs) => {
            for (key, value) in pairs {
                shelf.set(key, value)?;
            }
        }
        Query::Append(key, bytes) => shelf.append(key, &bytes)?,
        Query::CompareSet {
            key,
            expected,
            desired,
        } => write(&shelf.compare_set(key, expected, desired)?, &mut answer),
        // Clients wait for a key before they get it.
        Query::Get(key) => write(&shelf.get(&key).unwrap_or_default(), &mut answer),
        Query::MultiGet(keys) => {
            for key in keys {
                write(&shelf.get(&key).unwrap_or_default(), &mut answer);
                if answer.len() as u64 > LONGEST_ANSWER {
                    let message = format!("asks for more than {LONGEST_ANSWER} bytes at once");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, message));
                }
            }
        }
        Query::Add(key, amount) => answer.extend(shelf.add(key, amount)?.to_le_bytes()),
        Query::Check(keys) => answer.push(match shelf.has_all(&keys) {
            true => READY,
            false => NOT_READY,
        }),
        Query::NumKeys => answer.extend((shelf.keys().len() as i64).to_le_bytes()),
        Query::Delete(key) => answer.extend(i64::from(shelf.delete(&key)).to_le_bytes()),
        Query::Ping(nonce) => answer.extend(nonce.to_le_bytes()),
        Query::ListKeys => {
            let keys = shelf.keys();
            answer.extend((keys.len() as u64).to_le_bytes());
            for key in keys {
                write(&key, &mut answer);
            }
        }
        // The wait ended before this came; clients expect an answer to both.
        Query::CancelWait => answer.push(WAIT_CANCELED),
        Query::Wait(_) => {}
    }
    Ok(answer)
}

impl From<Full> for io::Error {
    fn from(_: Full) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, "the store is full")
    }
}
