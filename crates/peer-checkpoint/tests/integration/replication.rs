//! Replica servers and workers of several nodes, in one process.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use trainyard_checkpoint::{
    Dtype, ElementSource, Store, TrainState, WriteItem, commit, latest_complete, retain, step_dir,
    write_shard,
};
use trainyard_mesh::Slice;
use trainyard_peer_checkpoint::{PeerStore, ReplicaPlacement, ReplicaServer};
use trainyard_tls::RunSecret;

static SECRET: LazyLock<RunSecret> = LazyLock::new(|| RunSecret::random().unwrap());
const MIB: u64 = 1 << 20;
/// The size of a TLS alert, the most that a server sends to a client that speaks no TLS.
const ALERT_BYTES: usize = 7;

fn server(capacity: u64) -> ReplicaServer {
    ReplicaServer::start("127.0.0.1:0", capacity, &SECRET).unwrap()
}

fn servers(num: usize) -> Vec<ReplicaServer> {
    (0..num).map(|_| server(64 * MIB)).collect()
}

fn store(servers: &[ReplicaServer], node: usize) -> Arc<dyn Store> {
    store_with(servers, node, &SECRET)
}

fn store_with(servers: &[ReplicaServer], node: usize, secret: &RunSecret) -> Arc<dyn Store> {
    let list: Vec<String> = servers.iter().map(|s| s.address().to_string()).collect();
    let placement = ReplicaPlacement::new(&list, node).unwrap();
    Arc::new(PeerStore::new(&placement, secret).unwrap())
}

fn write(store: &dyn Store, path: &str, bytes: &[u8]) {
    let mut writer = store.create(path).unwrap();
    bytes
        .chunks(1_000_003)
        .for_each(|c| writer.write(c).unwrap());
    writer.finish().unwrap();
}

struct Ramp(u8);

impl ElementSource for Ramp {
    fn copy(&self, _: usize, start: usize, into: &mut [u8]) -> std::io::Result<()> {
        let bytes = into.iter_mut().enumerate();
        bytes.for_each(|(i, byte)| *byte = ((start + i) % 251) as u8 ^ self.0);
        Ok(())
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
}

/// Saves a checkpoint of one tensor, of which every node writes a row.
fn save(stores: &[Arc<dyn Store>], step: u64) {
    let shape = vec![stores.len(), 1_500_000];
    let shards = stores.iter().enumerate().map(|(node, store)| {
        let mut slice = Slice::full(&shape);
        (slice.region.offsets[0], slice.region.lengths[0]) = (node, 1);
        let item = WriteItem {
            name: "model/weight".to_owned(),
            dtype: Dtype::F32,
            shape: shape.clone(),
            slice,
        };
        let file = format!("rank{node:05}-{step}.safetensors");
        write_shard(&**store, &step_dir(step), &file, &[item], &Ramp(node as u8)).unwrap()
    });
    let state = TrainState {
        step,
        samples_seen: 8 * step,
        seed: 0,
        world_size: stores.len(),
        config: String::new(),
        extra_state: serde_json::Value::Null,
    };
    let shards = shards.collect();
    commit(&*stores[0], state, shards).unwrap();
    retain(&*stores[0], step, 1, None).unwrap();
}

/// The step of the newest complete checkpoint, whose digests are right.
fn newest_step(store: &Arc<dyn Store>) -> Option<u64> {
    let newest = latest_complete(store).unwrap()?;
    newest.verify(|_| ()).unwrap();
    Some(newest.state().unwrap().step)
}

#[test]
fn a_store_on_one_node_keeps_files() {
    let servers = servers(1);
    let store = store(&servers, 0);
    let bytes: Vec<u8> = (0..9_000_001u32).map(|i| (i % 253) as u8).collect();
    write(&*store, "step-1/a", &bytes);
    store.put("step-1/m", b"first").unwrap();
    store.put("step-1/m", b"second").unwrap();
    assert_eq!(store.size("step-1/a").unwrap(), Some(9_000_001));
    assert_eq!(store.size("step-1/b").unwrap(), None);
    let range = store.read("step-1/a", 77..8_500_000).unwrap();
    assert!(range == bytes[77..8_500_000]);
    assert_eq!(store.read("step-1/m", 0..6).unwrap(), b"second");
    assert!(store.read("step-1/m", 0..7).is_err());
    assert!(store.read("step-1/b", 0..1).is_err());
    assert_eq!(store.list("").unwrap(), ["step-1"]);
    assert_eq!(store.list("step-1").unwrap(), ["a", "m"]);
    store.remove("step-1/m").unwrap();
    store.remove_dir("step-1").unwrap();
    assert_eq!(store.list("").unwrap(), [""; 0]);
    assert_eq!(servers[0].num_bytes(), 0);
}

#[test]
fn a_checkpoint_survives_the_loss_of_any_one_node() {
    for lost in 0..3 {
        let mut servers = servers(3);
        let stores: Vec<_> = (0..3).map(|node| store(&servers, node)).collect();
        save(&stores, 2);
        save(&stores, 4);
        let address = servers[lost].address().to_string();
        drop(servers.remove(lost));
        let survivors: Vec<_> = (0..3).filter(|node| *node != lost).collect();
        for &node in &survivors {
            assert_eq!(newest_step(&stores[node]), Some(4), "lost {lost}");
        }
        // A new, empty server at the same address.
        let restarted = ReplicaServer::start(&address, 64 * MIB, &SECRET).unwrap();
        servers.insert(lost, restarted);
        assert_eq!(newest_step(&store(&servers, lost)), Some(4), "lost {lost}");
    }
}

#[test]
fn a_checkpoint_that_lost_two_adjacent_nodes_is_not_offered() {
    let mut servers = servers(3);
    let stores: Vec<_> = (0..3).map(|node| store(&servers, node)).collect();
    save(&stores, 2);
    servers.drain(..2);
    assert_eq!(newest_step(&stores[2]), None);
}

#[test]
fn servers_keep_two_replicas_of_one_checkpoint() {
    let servers = servers(2);
    let stores: Vec<_> = (0..2).map(|node| store(&servers, node)).collect();
    for step in 1..6 {
        save(&stores, step);
        for server in &servers {
            // Both rows of 6 MB, the manifest and overhead.
            let bytes = server.num_bytes();
            assert!((12_000_000..12_100_000).contains(&bytes), "{bytes}");
        }
        assert_eq!(stores[0].list("").unwrap(), [step_dir(step)]);
    }
}

#[test]
fn an_unfinished_file_is_discarded_with_its_connection() {
    let servers = servers(1);
    let store = store(&servers, 0);
    let mut writer = store.create("a").unwrap();
    writer.write(&vec![1; 5 << 20]).unwrap();
    drop(writer);
    wait_until(|| servers[0].num_bytes() == 0);
    assert_eq!(store.size("a").unwrap(), None);
}

#[test]
fn a_full_server_reports_it_and_keeps_its_files() {
    let servers = [server(6 * MIB)];
    let store = store(&servers, 0);
    write(&*store, "small", &[1; 1000]);
    let mut writer = store.create("large").unwrap();
    // The server reads the whole file, so that the client gets to read the reason.
    for _ in 0..30 {
        writer.write(&vec![2; MIB as usize]).unwrap();
    }
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("--replica-bytes"), "{error}");
    assert_eq!(store.read("small", 0..1000).unwrap(), [1; 1000]);
    assert!(servers[0].num_bytes() < 2000);
}

#[test]
fn a_save_succeeds_with_one_of_two_servers_full() {
    let servers = [server(64 * MIB), server(MIB)];
    let stores = [store(&servers, 0), store(&servers, 1)];
    save(&stores, 3);
    assert_eq!(newest_step(&stores[1]), Some(3));
}

#[test]
fn a_client_with_another_secret_is_rejected() {
    let servers = servers(1);
    store(&servers, 0).put("a", b"kept").unwrap();
    let stranger = store_with(&servers, 0, &RunSecret::random().unwrap());
    let error = stranger.list("").unwrap_err().to_string();
    assert!(error.contains("another run secret"), "{error}");
    assert!(stranger.put("a", b"changed").is_err());
    // The client fails first and then sends the alert that the server counts.
    wait_until(|| servers[0].num_rejected() >= 1);
    assert_eq!(store(&servers, 0).read("a", 0..4).unwrap(), b"kept");
}

#[test]
fn silent_connections_do_not_lock_out_clients() {
    let servers = servers(1);
    let silent: Vec<TcpStream> = (0..200)
        .map(|_| TcpStream::connect(servers[0].address()).unwrap())
        .collect();
    let store = store(&servers, 0);
    store.put("a", b"there").unwrap();
    assert_eq!(store.read("a", 0..5).unwrap(), b"there");
    drop(silent);
}

#[test]
fn a_slow_handshake_is_closed_at_its_deadline() {
    let servers = servers(1);
    let mut stream = TcpStream::connect(servers[0].address()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(250)))
        .unwrap();
    // The start of a TLS record with a client hello, 16 KiB long. At a byte every quarter of a second it would take
    // more than an hour.
    let mut hello = [0x16, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc]
        .into_iter()
        .chain(std::iter::repeat(0));
    let start = Instant::now();
    let mut received: Vec<u8> = Vec::new();
    while start.elapsed() < Duration::from_secs(12) {
        let mut buffer = [0; 64];
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => received.extend(&buffer[..length]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                if stream.write_all(&[hello.next().unwrap()]).is_err() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    let elapsed = start.elapsed();
    assert!(elapsed > Duration::from_secs(4), "{elapsed:?}");
    assert!(elapsed < Duration::from_secs(10), "{elapsed:?}");
    assert!(received.len() <= ALERT_BYTES, "{received:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Random bytes get no answer beyond an alert, and do no harm.
    #[test]
    fn random_bytes_are_rejected(bytes in proptest::collection::vec(any::<u8>(), 64..400)) {
        static SERVERS: LazyLock<Vec<ReplicaServer>> = LazyLock::new(|| servers(1));
        let mut stream = TcpStream::connect(SERVERS[0].address()).unwrap();
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        prop_assert!(answer.len() <= ALERT_BYTES);
        prop_assert_eq!(SERVERS[0].num_bytes(), 0);
        prop_assert!(store(&SERVERS, 0).list("").unwrap().is_empty());
    }
}
