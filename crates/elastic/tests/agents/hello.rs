//! What a worker of a test does first: it meets the other workers in their store, and prints what it knows.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;

/// The main function of a worker: prints `hello EPOCH RANK WORLD RESTARTS STORE` once all workers have come to the
/// store. STORE is what rank 0 has put there, so workers of one world print the same.
pub fn hello_main() -> ExitCode {
    match meet() {
        Ok(store) => {
            let variable = |name: &str| std::env::var(name).unwrap();
            let [epoch, rank, world, restarts] = [
                "TRAINYARD_EPOCH",
                "RANK",
                "WORLD_SIZE",
                "TORCHELASTIC_RESTART_COUNT",
            ]
            .map(variable);
            println!("hello {epoch} {rank} {world} {restarts} {store}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("the store failed: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Waits for all workers; returns what rank 0 has put into the store.
fn meet() -> io::Result<String> {
    let number = |name: &str| std::env::var(name).unwrap().parse::<usize>().unwrap();
    let address = std::env::var("MASTER_ADDR").unwrap();
    assert_eq!(
        address, "127.0.0.1",
        "the address of the agent on this node"
    );
    let mut store = TcpStream::connect((address, number("MASTER_PORT") as u16))?;
    store.write_all(b"\0\xce\xf7\x85\x3c")?;
    let key = |rank: usize| format!("rank {rank}").into_bytes();
    let name = format!("{}-{}", number("TRAINYARD_EPOCH"), std::process::id());
    let mut set = vec![1];
    add(&mut set, &key(number("RANK")));
    add(&mut set, name.as_bytes());
    store.write_all(&set)?;
    let world = number("WORLD_SIZE");
    let mut wait = vec![6];
    wait.extend((world as u64).to_le_bytes());
    for rank in 0..world {
        add(&mut wait, &key(rank));
    }
    store.write_all(&wait)?;
    store.read_exact(&mut [0])?;
    let mut get = vec![3];
    add(&mut get, &key(0));
    store.write_all(&get)?;
    let mut length = [0; 8];
    store.read_exact(&mut length)?;
    let mut value = vec![0; u64::from_le_bytes(length) as usize];
    store.read_exact(&mut value)?;
    Ok(String::from_utf8_lossy(&value).into_owned())
}

/// Appends length-prefixed bytes.
fn add(query: &mut Vec<u8>, bytes: &[u8]) {
    query.extend((bytes.len() as u64).to_le_bytes());
    query.extend(bytes);
}
