//! An agent's way to a server.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Streaming};

use super::identity::client_config;
use super::wire::{ATTEND, Json, LONGEST_FRAME};
use crate::jitter::Jitter;
use crate::seat::{self, Command, Window};
use crate::{
    Address, Answer, Backend, Call, Decision, Join, Letter, RendezvousError, Seat, Secret,
};

/// Letters that wait for the network.
const MOST_WAITING: usize = 64;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Short, because a network that is whole again is only noticed by the next attempt.
const REACH_WITHIN: Duration = Duration::from_secs(1);
const OPEN_WITHIN: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The way to a server that a [`Secret`] opens.
#[derive(Clone, Debug)]
pub struct Client {
    way: Arc<Way>,
}

#[derive(Debug)]
struct Way {
    address: Address,
    tls: Arc<ClientConfig>,
}

impl Client {
    /// Connects to nothing yet.
    pub fn new(address: Address, run: &str, secret: &Secret) -> Result<Client, RendezvousError> {
        let tls = client_config(secret, run).map_err(|error| RendezvousError::Unreachable {
            endpoint: address.to_string(),
            cause: error.to_string(),
        })?;
        Ok(Client {
            way: Arc::new(Way { address, tls }),
        })
    }

    /// A connection that has proven to know the secret and on which nothing was said yet, for those who speak the
    /// rest themselves: whoever tries what a server bears.
    pub async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        connect(&self.way.address, &self.way.tls).await
    }
}

#[async_trait]
impl Backend for Client {
    async fn join(&self, join: Join) -> Result<Arc<dyn Seat>, RendezvousError> {
        let attend = |inbox, window| {
            let correspondent = Correspondent {
                way: Arc::clone(&self.way),
                heartbeat: join.policy.heartbeat(),
                lease: join.policy.lease,
                started: Instant::now(),
                heard: Instant::now(),
                line: None,
                opening: None,
                jitter: Jitter::new(join.advert.instance),
                pause: FIRST_PAUSE,
                retry_at: Instant::now(),
                trouble: "no answer yet".into(),
                was_in: false,
                window,
                call: Call::new(join),
            };
            tokio::spawn(correspondent.run(inbox)).abort_handle()
        };
        seat::take(attend).await
    }
}

/// Keeps the conversation going, whatever becomes of connections.
struct Correspondent {
    way: Arc<Way>,
    call: Call,
    started: Instant,
    line: Option<Line>,
    /// A line on its way. Apart, because a lease lapses meanwhile, too.
    opening: Option<JoinHandle<Result<Line, String>>>,
    heartbeat: Duration,
    lease: Duration,
    heard: Instant,
    jitter: Jitter,
    pause: Duration,
    retry_at: Instant,
    /// What went wrong last.
    trouble: String,
    was_in: bool,
    window: Window,
}

/// An open stream.
struct Line {
    letters: mpsc::Sender<Letter>,
    answers: Streaming<Answer>,
}

impl Correspondent {
    async fn run(mut self, mut inbox: mpsc::Receiver<Command>) {
        let ended = self.correspond(&mut inbox).await;
        if let Err(error) = ended {
            self.window.fail(error);
        }
    }

    async fn correspond(
        &mut self,
        inbox: &mut mpsc::Receiver<Command>,
    ) -> Result<(), RendezvousError> {
        loop {
            if self.line.is_none() && self.opening.is_none() && Instant::now() >= self.retry_at {
                let way = Arc::clone(&self.way);
                self.opening = Some(tokio::spawn(async move { way.open().await }));
            }
            let lapse = self.call.lapses_at().map(|at| self.started + at);
            let now = Instant::now();
            let wake = [
                lapse.filter(|&at| at > now),
                self.line.is_some().then_some(self.heard + self.patience()),
                (self.opening.is_none() && !self.call.has_joined())
                    .then_some(self.retry_at.max(now)),
                Some(self.gives_up_at()),
            ];
            let wake = wake
                .into_iter()
                .flatten()
                .min()
                .unwrap_or(now + LONGEST_PAUSE);
            tokio::select! {
                biased;
                answer = next_answer(&mut self.line) => self.hear(answer)?,
                opened = opened(&mut self.opening) => self.connected(opened),
                command = inbox.recv() => match command {
                    Some(Command::Leave) => return self.leave().await,
                    Some(command) => self.obey(command),
                    None => return Ok(()),
                },
                () = sleep_until(wake) => self.try_again(),
            }
            if Instant::now() >= self.gives_up_at() {
                return Err(self.unreachable());
            }
            self.show();
        }
    }

    fn unreachable(&self) -> RendezvousError {
        RendezvousError::Unreachable {
            endpoint: self.way.address.to_string(),
            cause: self.trouble.clone(),
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn gives_up_at(&self) -> Instant {
        self.started + self.call.gives_up_at()
    }

    /// A line on which nothing was heard for so long is given up: a network that was cut drops it without a word, and
    /// TCP would only find out minutes after it is whole again.
    fn patience(&self) -> Duration {
        self.lease.max(OPEN_WITHIN)
    }

    /// Says what there is to say, unless the agent hangs.
    fn speak(&mut self) {
        if self.call.hangs(self.now()) {
            return;
        }
        let letters = self.call.speak(self.now());
        self.post(letters);
    }

    fn connected(&mut self, opened: Result<Line, String>) {
        self.opening = None;
        match opened {
            Ok(line) => {
                (self.line, self.pause) = (Some(line), FIRST_PAUSE);
                self.heard = Instant::now();
                self.retry_at = Instant::now() + self.heartbeat;
                self.speak();
            }
            Err(cause) => self.broken(cause),
        }
    }

    /// The next attempt comes later, and not at the same moment as everybody else's.
    fn broken(&mut self, cause: String) {
        tracing::warn!(endpoint = %self.way.address, cause, "connection to the rendezvous");
        (self.line, self.trouble) = (None, cause);
        self.call.interrupted();
        self.retry_at = Instant::now() + self.jitter.around(self.pause);
        self.pause = (2 * self.pause).min(LONGEST_PAUSE);
    }

    /// Not in yet, or not any more: asks again, on another line if this one is silent.
    fn try_again(&mut self) {
        if self.line.is_some() && self.heard.elapsed() >= self.patience() {
            self.broken(format!("no word for {:?}", self.patience()));
        }
        if self.line.is_some() && !self.call.has_joined() && Instant::now() >= self.retry_at {
            self.retry_at = Instant::now() + self.heartbeat;
            self.speak();
        }
    }

    fn hear(&mut self, answer: Result<Answer, String>) -> Result<(), RendezvousError> {
        let answer = match answer {
            Ok(answer) => answer,
            Err(cause) => {
                self.broken(cause);
                return Ok(());
            }
        };
        self.heard = Instant::now();
        let had_joined = self.call.has_joined();
        match self.call.hear(answer) {
            Err(refusal) if refusal.passes() => self.trouble = refusal.to_string(),
            Err(refusal) => return Err(refusal.into()),
            Ok(()) => {}
        }
        // The lease was lost: back in, at once.
        if had_joined && !self.call.has_joined() {
            self.retry_at = Instant::now();
        }
        self.was_in |= self.call.has_joined();
        Ok(())
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Heartbeat => {
                self.call.asked(self.now());
                self.speak();
            }
            Command::Report(epoch, report) => {
                let letter = self.call.report(epoch, report, self.now());
                self.post(letter.into_iter().collect());
            }
            Command::Leave => {}
        }
    }

    fn post(&mut self, letters: Vec<Letter>) {
        let Some(line) = &self.line else {
            return; // what is not said now is said after the next connection
        };
        if letters
            .into_iter()
            .any(|letter| line.letters.try_send(letter).is_err())
        {
            self.broken("the connection takes no more letters".into());
        }
    }

    /// Waits for the answer, or the end of the connection, but not for long.
    async fn leave(&mut self) -> Result<(), RendezvousError> {
        let letter = self.call.leave(self.now());
        let number = letter.number;
        self.post(vec![letter]);
        if self.line.is_none() {
            return Err(RendezvousError::Left);
        }
        let heard = async {
            loop {
                match next_answer(&mut self.line).await {
                    Ok(
                        Answer::Heard { number: heard, .. } | Answer::Refused { number: heard, .. },
                    ) if heard == number => {
                        return;
                    }
                    Ok(_) => {}
                    Err(_) => return,
                }
            }
        };
        let _ = timeout(Duration::from_secs(1), heard).await;
        Err(RendezvousError::Left)
    }

    /// The agent is shown what is new, once it is in.
    fn show(&mut self) {
        let decision = self.call.decide(self.started.elapsed());
        if !self.was_in && !matches!(decision, Decision::Close(_)) {
            return;
        }
        self.window.show(decision);
    }
}

/// The next answer, or why there is none; never, where there is no line.
async fn next_answer(line: &mut Option<Line>) -> Result<Answer, String> {
    let Some(line) = line else {
        return std::future::pending().await;
    };
    match line.answers.message().await {
        Ok(Some(answer)) => Ok(answer),
        Ok(None) => Err("the server ended the conversation".into()),
        Err(status) => Err(status.to_string()),
    }
}

/// The line that is on its way; never, where none is.
async fn opened(opening: &mut Option<JoinHandle<Result<Line, String>>>) -> Result<Line, String> {
    match opening {
        Some(task) => task.await.unwrap_or_else(|error| Err(error.to_string())),
        None => std::future::pending().await,
    }
}

impl Way {
    async fn open(&self) -> Result<Line, String> {
        let opened = timeout(OPEN_WITHIN, self.try_open()).await;
        opened.unwrap_or_else(|_| Err(format!("no answer within {OPEN_WITHIN:?}")))
    }

    async fn try_open(&self) -> Result<Line, String> {
        let said = |error: &dyn std::error::Error| chain(error);
        let channel = self.channel().await.map_err(|error| said(&error))?;
        let (letters, outbox) = mpsc::channel(MOST_WAITING);
        let mut grpc = tonic::client::Grpc::new(channel).max_decoding_message_size(LONGEST_FRAME);
        grpc.ready().await.map_err(|error| said(&error))?;
        let outbox = Request::new(ReceiverStream::new(outbox));
        let path = PathAndQuery::from_static(ATTEND);
        let codec = Json::<Letter, Answer>::default();
        let answers = grpc
            .streaming(outbox, path, codec)
            .await
            .map_err(|status| said(&status))?;
        Ok(Line {
            letters,
            answers: answers.into_inner(),
        })
    }

    async fn channel(&self) -> Result<Channel, tonic::transport::Error> {
        let (address, tls) = (self.address.clone(), Arc::clone(&self.tls));
        let connect = move |_: http::Uri| {
            let (address, tls) = (address.clone(), Arc::clone(&tls));
            Box::pin(async move { connect(&address, &tls).await.map(TokioIo::new) })
        };
        Endpoint::from_static("http://rendezvous")
            .connect_with_connector(tower::service_fn(connect))
            .await
    }
}

async fn connect(address: &Address, tls: &Arc<ClientConfig>) -> io::Result<TlsStream<TcpStream>> {
    let reached = TcpStream::connect((address.host.as_str(), address.port));
    let stream = timeout(REACH_WITHIN, reached).await??;
    stream.set_nodelay(true)?;
    // Keys are known beforehand, so no name is looked at.
    let name = ServerName::IpAddress(std::net::Ipv4Addr::LOCALHOST.into());
    TlsConnector::from(Arc::clone(tls))
        .connect(name, stream)
        .await
}

/// An error with all that lies under it: the last is usually what happened.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    text
}
