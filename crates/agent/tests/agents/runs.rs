//! What must hold wherever agents meet.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::etcd::{Etcd, free_port};
use crate::machine::{HELLO, Machine, Run, Said};

/// Where a run is held.
pub struct Venue {
    way: String,
    folder: TempDir,
}

impl Venue {
    /// At a server, which the first agent starts.
    pub fn server() -> Venue {
        Venue {
            way: format!("127.0.0.1:{}", free_port()),
            folder: TempDir::new().unwrap(),
        }
    }

    pub fn etcd(etcd: &Etcd) -> Venue {
        Venue {
            way: etcd.url.clone(),
            folder: TempDir::new().unwrap(),
        }
    }

    /// Runs a test with what all machines have in common.
    fn run(
        &self,
        id: &str,
        nodes: (u32, u32),
        restarts: u32,
        script: &str,
        test: impl Fn(&Run<'_>),
    ) {
        let script = format!("{HELLO}{script}");
        test(&Run {
            id,
            way: &self.way,
            secret: &self.folder.path().join("secret"),
            nodes,
            max_restarts: restarts,
            script: &script,
        });
    }
}

fn all_after(machines: &[&Machine], epoch: u64) -> Vec<Said> {
    let said: Vec<Said> = machines
        .iter()
        .map(|machine| machine.said_after(epoch))
        .collect();
    let epochs: Vec<u64> = said.iter().map(|said| said.epoch).collect();
    assert!(epochs.iter().all(|epoch| *epoch == epochs[0]), "{said:?}");
    assert!(
        said.iter().all(|one| one.store == said[0].store),
        "{said:?}"
    );
    let mut ranks: Vec<usize> = said.iter().map(|said| said.rank).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, (0..machines.len()).collect::<Vec<_>>(), "{said:?}");
    assert!(
        said.iter().all(|one| one.world == machines.len()),
        "{said:?}"
    );
    said
}

/// Machines of one run. The first serves the others, where there is no etcd, so it is up before them, and
/// not one of those that are lost.
fn start<const N: usize>(run: &Run<'_>, nodes: [&str; N]) -> [Machine; N] {
    let mut is_first = true;
    nodes.map(|node| {
        let machine = Machine::start(run, node);
        if std::mem::take(&mut is_first) {
            wait_until_reached(run.way);
        }
        machine
    })
}

fn wait_until_reached(way: &str) {
    let began = Instant::now();
    while TcpStream::connect(way.trim_start_matches("http://")).is_err() {
        assert!(began.elapsed() < Duration::from_secs(30), "nobody at {way}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A run of three whose workers go on for ever, all of which have begun.
fn three(run: &Run<'_>) -> ([Machine; 3], Vec<Said>) {
    let machines = start(run, ["a", "b", "c"]);
    let said = all_after(&[&machines[0], &machines[1], &machines[2]], 0);
    (machines, said)
}

pub fn success(venue: &Venue) {
    venue.run("succeeds", (2, 2), 0, "exit 0", |run| {
        let mut machines = start(run, ["a", "b"]);
        all_after(&[&machines[0], &machines[1]], 0);
        for machine in &mut machines {
            let (code, stderr) = machine.end();
            assert_eq!(code, 0, "{stderr}");
        }
    });
}

pub fn lost_and_back(venue: &Venue) {
    venue.run("loses", (2, 3), 0, "exec sleep 1000", |run| {
        let ([a, b, c], first) = three(run);
        c.kill();
        let began = Instant::now();
        let second = all_after(&[&a, &b], first[0].epoch);
        println!("a world of two {:?} after the kill", began.elapsed());
        assert!(began.elapsed() < Duration::from_secs(20));
        keep_their_ranks(&first, &second);

        let c = Machine::start(run, "c");
        let third = all_after(&[&a, &b, &c], second[0].epoch);
        assert_eq!(third[0].rank, second[0].rank);
        assert_eq!(third[1].rank, second[1].rank);
        assert_eq!(third[0].restarts, 0, "a lost machine costs no restart");
    });
}

/// A survivor keeps its rank where the world is large enough for it.
fn keep_their_ranks(before: &[Said], after: &[Said]) {
    for (before, after) in before.iter().zip(after) {
        if before.rank < after.world {
            assert_eq!(before.rank, after.rank);
        }
    }
}

pub fn failures(venue: &Venue) {
    // The one that fails waits for the other to have said hello.
    let folder = venue.folder.path().display();
    let script = format!(
        "touch {folder}/$TRAINYARD_EPOCH-$RANK; [ $RANK = 1 ] || exec sleep 1000; \
         until [ -e {folder}/$TRAINYARD_EPOCH-0 ]; do sleep 0.01; done; echo no data >&2; exit 7"
    );
    venue.run("fails", (2, 2), 1, &script, |run| {
        let mut machines = start(run, ["a", "b"]);
        let first = all_after(&[&machines[0], &machines[1]], 0);
        let again = all_after(&[&machines[0], &machines[1]], first[0].epoch);
        assert_eq!((first[0].restarts, again[0].restarts), (0, 1));
        let failed = ["a", "b"][again.iter().position(|said| said.rank == 1).unwrap()];
        for machine in &mut machines {
            let (code, stderr) = machine.end();
            assert_eq!(code, 1);
            let expected =
                format!("a worker failed on node `{failed}` after 1 restarts: rank 1 (pid ");
            assert!(stderr.contains(&expected), "{stderr}");
            assert!(stderr.contains("exited with code 7"), "{stderr}");
            assert!(stderr.contains("| no data"), "{stderr}");
        }
    });
}

pub fn leaving(venue: &Venue) {
    let script = "trap 'sleep 0.3; exit 0' TERM; sleep 1000 & wait";
    venue.run("leaves", (2, 3), 0, script, |run| {
        let ([a, b, mut c], first) = three(run);
        c.signal(Signal::TERM);
        let (code, stderr) = c.end();
        assert_eq!(code, 3, "{stderr}");
        all_after(&[&a, &b], first[0].epoch);
    });
}

pub fn hung(venue: &Venue) {
    venue.run("hangs", (2, 3), 0, "exec sleep 1000", |run| {
        let ([a, b, c], first) = three(run);
        c.signal(Signal::STOP);
        let second = all_after(&[&a, &b], first[0].epoch);
        c.signal(Signal::CONT);
        all_after(&[&a, &b, &c], second[0].epoch);
    });
}

/// Where there is etcd, no machine is more than another: the one with the store is lost.
pub fn store_moves(venue: &Venue) {
    venue.run("moves", (2, 3), 0, "exec sleep 1000", |run| {
        let (machines, first) = three(run);
        let holder = first.iter().position(|said| said.rank == 0).unwrap();
        let mut left: Vec<Machine> = machines.into();
        left.remove(holder).kill();
        let second = all_after(&[&left[0], &left[1]], first[0].epoch);
        assert_ne!(second[0].store, first[0].store);
    });
}
