//! The line to the rendezvous: what is said there comes to a loop that polls.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use trainyard_rendezvous::{Decision, Epoch, Join, Place, RendezvousError, Report, Seat, Secret};

use crate::decide::Event;
use crate::way::{Served, Way};

/// Longer than handing over a message takes; the loop must not hang on it.
const HAND_OVER: Duration = Duration::from_millis(200);
/// How long a farewell may take.
const FAREWELL: Duration = Duration::from_secs(3);

/// An agent's line to its rendezvous. It is there before the agent has a seat.
pub(crate) struct Line {
    runtime: Runtime,
    shared: Arc<Shared>,
    news: mpsc::Receiver<Event>,
    bell: UnixStream,
    follower: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    seat: OnceLock<Arc<dyn Seat>>,
    served: Mutex<Option<Served>>,
}

/// The follower's end: what it says rings the bell.
struct Mouth {
    news: mpsc::Sender<Event>,
    bell: UnixStream,
}

impl Line {
    /// Joins in the background, for as long as the policy has patience, and follows what is decided.
    pub(crate) fn open(runtime: Runtime, way: Way, secret: Secret, join: Join) -> io::Result<Line> {
        let (bell, ringer) = UnixStream::pair()?;
        bell.set_nonblocking(true)?;
        ringer.set_nonblocking(true)?;
        let (sender, news) = mpsc::channel();
        let mouth = Mouth {
            news: sender,
            bell: ringer,
        };
        let shared = Arc::<Shared>::default();
        let follower = runtime.spawn(follow(way, secret, join, Arc::clone(&shared), mouth));
        Ok(Line {
            runtime,
            shared,
            news,
            bell,
            follower,
        })
    }

    /// What was said since the last call.
    pub(crate) fn news(&mut self) -> Vec<Event> {
        let mut rung = [0; 64];
        while matches!(self.bell.read(&mut rung), Ok(length) if length > 0) {}
        self.news.try_iter().collect()
    }

    /// Whether a place is still this agent's.
    pub(crate) fn is_still(&self, place: &Place) -> bool {
        let decision = self.shared.seat.get().map(|seat| seat.decision());
        matches!(decision, Some(Decision::Run(now)) if now == *place)
    }

    /// Keeps the lease.
    pub(crate) fn heartbeat(&self) {
        self.with_seat(HAND_OVER, async |seat| seat.heartbeat().await);
    }

    /// Says how workers are.
    pub(crate) fn report(&self, epoch: Epoch, report: Report) {
        self.with_seat(FAREWELL, async |seat| seat.report(epoch, report).await);
    }

    /// Gives up the place.
    pub(crate) fn leave(&self) {
        self.with_seat(FAREWELL, async |seat| seat.leave().await);
    }

    /// The end. Whoever serves the run stays until the others have heard, or for so long.
    pub(crate) fn close(self, patience: Duration) {
        self.follower.abort();
        let served = self.shared.served.lock();
        let served = served.unwrap_or_else(PoisonError::into_inner).take();
        // The seat goes, and with it this agent's own connection.
        drop(self.shared);
        if let Some(served) = served {
            self.runtime.block_on(async {
                let _ = self.follower.await;
                served.emptied(patience).await;
            });
        }
        self.runtime.shutdown_timeout(HAND_OVER);
    }

    fn with_seat(&self, within: Duration, act: impl AsyncFnOnce(&dyn Seat)) {
        if let Some(seat) = self.shared.seat.get() {
            let act = async {
                if tokio::time::timeout(within, act(&**seat)).await.is_err() {
                    tracing::warn!("the line to the rendezvous does not move");
                }
            };
            self.runtime.block_on(act);
        }
    }
}

impl AsFd for Line {
    /// Becomes readable when there is news.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl Mouth {
    fn say(&mut self, event: Event) {
        let _ = self.news.send(event);
        // A bell that is full is heard anyway.
        let _ = self.bell.write(&[1]);
    }
}

async fn follow(way: Way, secret: Secret, join: Join, shared: Arc<Shared>, mut mouth: Mouth) {
    let Err(error) = follow_until_cut(way, secret, join, shared, &mut mouth).await;
    mouth.say(Event::Cut(error));
}

async fn follow_until_cut(
    way: Way,
    secret: Secret,
    join: Join,
    shared: Arc<Shared>,
    mouth: &mut Mouth,
) -> Result<std::convert::Infallible, RendezvousError> {
    let opened = way.open(&join.run, &secret).await?;
    *shared.served.lock().unwrap_or_else(PoisonError::into_inner) = opened.served;
    let seat = opened.backend.join(join).await?;
    let seat = shared.seat.get_or_init(|| seat);
    loop {
        mouth.say(Event::Told(seat.next().await?));
    }
}
