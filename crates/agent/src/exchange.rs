//! What agents tell each other of their ranks, through the workers' store.
//!
//! Everybody tells once in a while, which is little. Only who sees its ranks stand still asks for what the
//! others told, to say who keeps whom waiting. Nothing is decided by it: only the words about
//! who hangs are made of it.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use trainyard_rendezvous::Place;
use trainyard_trace::Sighting;

use crate::store::ask;

/// How often an agent tells.
const EVERY: Duration = Duration::from_secs(1);
/// A rank that has not got on for so long makes its agent ask.
const STILL: Duration = Duration::from_secs(1);
/// A store that does not answer is asked again later.
const ANSWERED_WITHIN: Duration = Duration::from_secs(2);
/// More than the ranks of a machine say.
const LONGEST: u64 = 16 << 20;

/// The agents of one world.
pub(crate) struct Exchange {
    own: watch::Sender<Vec<Sighting>>,
    heard: Arc<Mutex<Vec<Sighting>>>,
    next: Instant,
    task: AbortHandle,
}

impl Exchange {
    /// Begins to tell the others of this world.
    pub(crate) fn start(place: &Place, runtime: &Handle) -> Exchange {
        let (own, told) = watch::channel(Vec::new());
        let heard = Arc::<Mutex<Vec<Sighting>>>::default();
        let task = runtime.spawn(carry(place.clone(), told, Arc::clone(&heard)));
        Exchange {
            own,
            heard,
            next: Instant::now(),
            task: task.abort_handle(),
        }
    }

    /// Tells what was seen of this machine's ranks, if it is time.
    pub(crate) fn tell(&mut self, own: impl FnOnce() -> Vec<Sighting>, now: Instant) {
        if now >= self.next {
            self.next = now + EVERY;
            self.own.send_replace(own());
        }
    }

    /// What was heard last of the ranks of other machines.
    pub(crate) fn heard(&self) -> Vec<Sighting> {
        let heard = self.heard.lock();
        heard.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(
    place: Place,
    mut told: watch::Receiver<Vec<Sighting>>,
    heard: Arc<Mutex<Vec<Sighting>>>,
) {
    let mut line = None;
    while told.changed().await.is_ok() {
        let own = told.borrow_and_update().clone();
        let round = round(&mut line, &place, &own);
        match tokio::time::timeout(ANSWERED_WITHIN, round).await {
            Ok(Ok(others)) => {
                *heard.lock().unwrap_or_else(PoisonError::into_inner) = others;
            }
            Ok(Err(_)) | Err(_) => line = None,
        }
    }
}

/// Tells, and asks if there is a reason to.
async fn round(
    line: &mut Option<BufReader<TcpStream>>,
    place: &Place,
    own: &[Sighting],
) -> io::Result<Vec<Sighting>> {
    let stream = match line.take() {
        Some(stream) => stream,
        None => connect(&place.store.host, place.store.port).await?,
    };
    let stream = line.insert(stream);
    let value = serde_json::to_vec(own).map_err(io::Error::other)?;
    stream
        .write_all(&ask::set(&key(place.node_rank), &value))
        .await?;
    if !own.iter().any(|seen| seen.stalled >= STILL) {
        return Ok(Vec::new());
    }
    let others: Vec<Vec<u8>> = (0..place.num_nodes)
        .filter(|node| *node != place.node_rank)
        .map(key)
        .collect();
    Ok(values(stream, &others).await?.concat())
}

async fn connect(host: &str, port: u16) -> io::Result<BufReader<TcpStream>> {
    let mut stream = BufReader::new(TcpStream::connect((host, port)).await?);
    stream.write_all(&ask::greeting()).await?;
    Ok(stream)
}

/// What was told under each of these keys; nothing, where nothing was told yet.
async fn values(
    stream: &mut BufReader<TcpStream>,
    keys: &[Vec<u8>],
) -> io::Result<Vec<Vec<Sighting>>> {
    stream.write_all(&ask::multi_get(keys)).await?;
    let mut all = Vec::new();
    for _ in keys {
        let value = answer(stream).await?;
        all.push(serde_json::from_slice(&value).unwrap_or_default());
    }
    Ok(all)
}

/// What the agents of a job have told of their ranks, each with its machine: for those who look at the job
/// from outside.
pub fn told(host: &str, port: u16, num_nodes: usize) -> io::Result<Vec<(usize, Sighting)>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let keys: Vec<Vec<u8>> = (0..num_nodes as u32).map(key).collect();
    runtime.block_on(async {
        let ask = async {
            let mut stream = connect(host, port).await?;
            values(&mut stream, &keys).await
        };
        let values = tokio::time::timeout(ANSWERED_WITHIN, ask).await??;
        let of_node =
            |(node, seen): (usize, Vec<Sighting>)| seen.into_iter().map(move |s| (node, s));
        Ok(values.into_iter().enumerate().flat_map(of_node).collect())
    })
}

fn key(node: u32) -> Vec<u8> {
    format!("trainyard/seen/{node}").into_bytes()
}

async fn answer(stream: &mut BufReader<TcpStream>) -> io::Result<Vec<u8>> {
    let length = stream.read_u64_le().await?;
    if length > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut value = Vec::new();
    stream.take(length).read_to_end(&mut value).await?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use trainyard_rendezvous::{Address, Epoch};
    use trainyard_trace::Pulse;

    use super::*;
    use crate::Store;

    fn seen(rank: usize, stalled: Duration) -> Vec<Sighting> {
        let pulse = Pulse {
            rank,
            ..Pulse::default()
        };
        vec![Sighting {
            pulse,
            stalled,
            ..Sighting::default()
        }]
    }

    #[test]
    fn who_stands_still_hears_of_the_others() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        let store = Store::serve("127.0.0.1", 0, runtime.handle()).unwrap();
        store.open();
        let start = |node_rank| {
            let place = Place {
                epoch: Epoch(1),
                node_rank,
                num_nodes: 2,
                first_rank: node_rank,
                world_size: 2,
                restarts: 0,
                store: Address {
                    host: "127.0.0.1".into(),
                    port: store.address().port(),
                },
                holds_store: node_rank == 0,
            };
            Exchange::start(&place, runtime.handle())
        };
        let (mut one, mut other) = (start(0), start(1));
        let mut now = Instant::now();
        let deadline = now + Duration::from_secs(20);
        // As the loop does it: again and again.
        while one.heard().is_empty() {
            assert!(Instant::now() < deadline, "it was never heard");
            other.tell(|| seen(1, Duration::ZERO), now);
            one.tell(|| seen(0, STILL), now);
            now += EVERY;
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(one.heard()[0].pulse.rank, 1);
        let told = told("127.0.0.1", store.address().port(), 2).unwrap();
        let ranks: Vec<(usize, usize)> = told
            .iter()
            .map(|(node, seen)| (*node, seen.pulse.rank))
            .collect();
        assert_eq!(ranks, [(0, 0), (1, 1)]);
        assert!(other.heard().is_empty(), "it had no reason to ask");
    }
}
