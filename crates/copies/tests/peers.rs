//! Holders and workers of several hosts, in one process.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use trainyard_checkpoint::{
    Dtype, Elements, Part, Store, TrainState, commit, latest_whole, retain, step_folder,
    write_shard,
};
use trainyard_copies::{Holder, Neighbourhood, PeerStore, Secret};
use trainyard_mesh::Slice;

const SECRET: &[u8] = b"the secret of this run";
const MIB: u64 = 1 << 20;

fn holder(capacity: u64) -> Holder {
    Holder::start("127.0.0.1:0", capacity, Secret::of(SECRET)).unwrap()
}

fn holders(num: usize) -> Vec<Holder> {
    (0..num).map(|_| holder(64 * MIB)).collect()
}

fn store(holders: &[Holder], own: usize) -> Arc<dyn Store> {
    store_with(holders, own, SECRET)
}

fn store_with(holders: &[Holder], own: usize, secret: &[u8]) -> Arc<dyn Store> {
    let list: Vec<String> = holders.iter().map(|h| h.address().to_string()).collect();
    let neighbourhood = Neighbourhood::parse(&list.join(","), own).unwrap();
    Arc::new(PeerStore::new(neighbourhood, Secret::of(secret)))
}

fn write(store: &dyn Store, path: &str, bytes: &[u8]) {
    let mut sink = store.create(path).unwrap();
    bytes.chunks(1_000_003).for_each(|c| sink.write(c).unwrap());
    sink.finish().unwrap();
}

struct Ramp(u8);

impl Elements for Ramp {
    fn copy(&self, _: usize, start: usize, into: &mut [u8]) -> std::io::Result<()> {
        let bytes = into.iter_mut().enumerate();
        bytes.for_each(|(i, byte)| *byte = ((start + i) % 251) as u8 ^ self.0);
        Ok(())
    }
}

/// A checkpoint of one tensor, of which every host has written a row.
fn save(stores: &[Arc<dyn Store>], step: u64) {
    let shape = vec![stores.len(), 1_500_000];
    let shards = stores.iter().enumerate().map(|(host, store)| {
        let mut slice = Slice::whole(&shape);
        (slice.region.offsets[0], slice.region.lengths[0]) = (host, 1);
        let part = Part {
            name: "model/weight".to_owned(),
            dtype: Dtype::F32,
            shape: shape.clone(),
            slice,
        };
        let file = format!("rank{host:05}-{step}.safetensors");
        write_shard(
            &**store,
            &step_folder(step),
            &file,
            &[part],
            &Ramp(host as u8),
        )
        .unwrap()
    });
    let state = TrainState {
        step,
        samples_seen: 8 * step,
        seed: 0,
        world_size: stores.len(),
        config: String::new(),
        schedule: serde_json::Value::Null,
    };
    let shards = shards.collect();
    commit(&*stores[0], state, shards).unwrap();
    retain(&*stores[0], step, 1).unwrap();
}

fn newest_step(store: &Arc<dyn Store>) -> Option<u64> {
    let newest = latest_whole(store).unwrap()?;
    newest.verify(|_| ()).unwrap();
    Some(newest.state().unwrap().step)
}

#[test]
fn a_store_of_one_host_keeps_what_it_is_given() {
    let holders = holders(1);
    let store = store(&holders, 0);
    let bytes: Vec<u8> = (0..9_000_001u32).map(|i| (i % 253) as u8).collect();
    write(&*store, "step-1/a", &bytes);
    store.put("step-1/m", b"first").unwrap();
    store.put("step-1/m", b"second").unwrap();
    assert_eq!(store.size("step-1/a").unwrap(), Some(9_000_001));
    assert_eq!(store.size("step-1/b").unwrap(), None);
    let part = store.read("step-1/a", 77..8_500_000).unwrap();
    assert!(part == bytes[77..8_500_000]);
    assert_eq!(store.read("step-1/m", 0..6).unwrap(), b"second");
    assert!(store.read("step-1/m", 0..7).is_err());
    assert!(store.read("step-1/b", 0..1).is_err());
    assert_eq!(store.list("").unwrap(), ["step-1"]);
    assert_eq!(store.list("step-1").unwrap(), ["a", "m"]);
    store.remove("step-1/m").unwrap();
    store.remove_folder("step-1").unwrap();
    assert_eq!(store.list("").unwrap(), [""; 0]);
    assert_eq!(holders[0].num_bytes(), 0);
}

#[test]
fn any_one_host_can_be_lost() {
    for lost in 0..3 {
        let mut holders = holders(3);
        let stores: Vec<_> = (0..3).map(|host| store(&holders, host)).collect();
        save(&stores, 2);
        save(&stores, 4);
        // A new holder at the same place, and empty.
        let address = holders[lost].address().to_string();
        drop(holders.remove(lost));
        let survivors: Vec<_> = (0..3).filter(|host| *host != lost).collect();
        for &host in &survivors {
            assert_eq!(newest_step(&stores[host]), Some(4), "lost {lost}");
        }
        let again = Holder::start(&address, 64 * MIB, Secret::of(SECRET)).unwrap();
        holders.insert(lost, again);
        assert_eq!(newest_step(&store(&holders, lost)), Some(4), "lost {lost}");
    }
}

#[test]
fn two_neighbours_lost_are_noticed_before_anything_is_loaded() {
    let mut holders = holders(3);
    let stores: Vec<_> = (0..3).map(|host| store(&holders, host)).collect();
    save(&stores, 2);
    holders.drain(..2);
    assert_eq!(newest_step(&stores[2]), None);
}

#[test]
fn memory_holds_two_copies_of_one_checkpoint() {
    let holders = holders(2);
    let stores: Vec<_> = (0..2).map(|host| store(&holders, host)).collect();
    for step in 1..6 {
        save(&stores, step);
        for holder in &holders {
            // Both rows of 6 MB, and a little.
            let bytes = holder.num_bytes();
            assert!((12_000_000..12_100_000).contains(&bytes), "{bytes}");
        }
        assert_eq!(stores[0].list("").unwrap(), [step_folder(step)]);
    }
}

#[test]
fn what_is_not_finished_goes_with_its_connection() {
    let holders = holders(1);
    let store = store(&holders, 0);
    let mut sink = store.create("a").unwrap();
    sink.write(&vec![1; 5 << 20]).unwrap();
    drop(sink);
    let began = Instant::now();
    while holders[0].num_bytes() > 0 && began.elapsed() < Duration::from_secs(10) {
        std::thread::yield_now();
    }
    assert_eq!(holders[0].num_bytes(), 0);
    assert_eq!(store.size("a").unwrap(), None);
}

#[test]
fn a_full_holder_says_so_and_keeps_what_it_has() {
    let holders = [holder(6 * MIB)];
    let store = store(&holders, 0);
    write(&*store, "small", &[1; 1000]);
    let mut sink = store.create("large").unwrap();
    // It takes all of it, so that its reason is heard.
    for _ in 0..30 {
        sink.write(&vec![2; MIB as usize]).unwrap();
    }
    let error = sink.finish().unwrap_err().to_string();
    assert!(error.contains("--holder-bytes"), "{error}");
    assert_eq!(store.read("small", 0..1000).unwrap(), [1; 1000]);
    assert!(holders[0].num_bytes() < 2000);
}

#[test]
fn one_full_holder_of_two_does_not_stop_a_save() {
    let holders = [holder(64 * MIB), holder(MIB)];
    let stores = [store(&holders, 0), store(&holders, 1)];
    save(&stores, 3);
    assert_eq!(newest_step(&stores[1]), Some(3));
}

#[test]
fn another_secret_gets_nothing() {
    let holders = holders(1);
    store(&holders, 0).put("a", b"kept").unwrap();
    let stranger = store_with(&holders, 0, b"the secret of another run");
    let error = stranger.list("").unwrap_err().to_string();
    assert!(error.contains("another secret"), "{error}");
    assert!(stranger.put("a", b"changed").is_err());
    assert!(holders[0].num_refused() >= 1);
    assert_eq!(store(&holders, 0).read("a", 0..4).unwrap(), b"kept");
}

#[test]
fn silence_takes_no_place_from_those_who_answer() {
    let holders = holders(1);
    let silent: Vec<TcpStream> = (0..200)
        .map(|_| TcpStream::connect(holders[0].address()).unwrap())
        .collect();
    let store = store(&holders, 0);
    store.put("a", b"there").unwrap();
    assert_eq!(store.read("a", 0..5).unwrap(), b"there");
    drop(silent);
}

#[test]
fn a_drip_is_dropped_by_the_clock() {
    let holders = holders(1);
    let mut drip = TcpStream::connect(holders[0].address()).unwrap();
    drip.set_read_timeout(Some(Duration::from_millis(250)))
        .unwrap();
    let began = Instant::now();
    let mut received: Vec<u8> = Vec::new();
    // A byte of the answer every quarter of a second: all 64 would take 16 s.
    while began.elapsed() < Duration::from_secs(12) {
        let mut piece = [0; 64];
        match drip.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => received.extend(&piece[..length]),
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                if drip.write_all(&[0]).is_err() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    let lasted = began.elapsed();
    assert!(lasted < Duration::from_secs(10), "{lasted:?}");
    assert_eq!(received.len(), 44, "the greeting and nothing else");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// No bytes get an answer beyond the greeting, and none do harm.
    #[test]
    fn random_bytes_are_refused(bytes in proptest::collection::vec(any::<u8>(), 64..400)) {
        static HOLDERS: std::sync::OnceLock<Vec<Holder>> = std::sync::OnceLock::new();
        let holders = HOLDERS.get_or_init(|| holders(1));
        let mut stream = TcpStream::connect(holders[0].address()).unwrap();
        let _ = stream.write_all(&bytes);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        prop_assert!(answer.len() <= 44);
        prop_assert_eq!(holders[0].num_bytes(), 0);
        prop_assert!(store(holders, 0).list("").unwrap().is_empty());
    }
}
