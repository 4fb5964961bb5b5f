//! Fuzzes a rendezvous server: sends sessions that were valid before a seeded mutation, over real connections.
//!
//! ```sh
//! cargo run --release -p trainyard-rendezvous --example fuzz_server -- 10.0.0.1:29400 run7 run7.secret SEED SECONDS
//! ```
//!
//! Most clients know the run secret, because the others get no further than the TLS handshake. Their policy differs
//! from that of the run, so that a session that is still valid cannot join it. Prints the number of attempts as JSON;
//! `bench/faults/hostile` checks that the run is not affected.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use trainyard_rendezvous::server::{Client, SESSION_METHOD};
use trainyard_rendezvous::{
    Address, Epoch, Join, NodeInfo, Policy, Report, Request, RequestKind, RunSecret, Watermark,
};

type Error = Box<dyn std::error::Error + Send + Sync>;

const NUM_CLIENTS: u64 = 8;
/// How long a client waits for the reaction of the server, which limits the rate of attempts.
const REACTION_TIMEOUT: Duration = Duration::from_millis(100);

#[tokio::main]
async fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, run, secret, seed, seconds] = &args[..] else {
        return Err("fuzz_server ADDRESS:PORT RUN SECRET_FILE SEED SECONDS".into());
    };
    let (host, port) = address.rsplit_once(':').ok_or("ADDRESS:PORT")?;
    let address = Address {
        host: host.to_owned(),
        port: port.parse()?,
    };
    let client = Client::new(address, run, &RunSecret::read(Path::new(secret))?)?;
    let until = Instant::now() + Duration::from_secs_f64(seconds.parse()?);
    let seed: u64 = seed.parse()?;
    let clients = (0..NUM_CLIENTS).map(|number| {
        let client = FuzzClient {
            client: client.clone(),
            address: args[0].clone(),
            run: run.clone(),
            rng: Rng::new(seed, number),
            attempts: Attempts::default(),
        };
        tokio::spawn(client.run_until(until))
    });
    let mut attempts = Attempts::default();
    for client in clients.collect::<Vec<_>>() {
        attempts.add(&client.await??);
    }
    println!("{}", serde_json::to_string(&attempts)?);
    Ok(())
}

/// The number of attempts of each kind.
#[derive(Default, serde::Serialize)]
struct Attempts {
    handshakes: u64,
    frames: u64,
    lengths: u64,
    requests: u64,
    /// Attempts that the server answered with a rejection, or by closing the connection, in time.
    rejected: u64,
}

impl Attempts {
    fn add(&mut self, other: &Attempts) {
        self.handshakes += other.handshakes;
        self.frames += other.frames;
        self.lengths += other.lengths;
        self.requests += other.requests;
        self.rejected += other.rejected;
    }
}

struct FuzzClient {
    client: Client,
    address: String,
    run: String,
    rng: Rng,
    attempts: Attempts,
}

impl FuzzClient {
    async fn run_until(mut self, until: Instant) -> Result<Attempts, Error> {
        while Instant::now() < until {
            let is_rejected = match self.rng.below(10) {
                0 => self.handshake().await?,
                1 | 2 => self.frames().await?,
                3 | 4 => self.lengths().await?,
                _ => self.requests().await?,
            };
            self.attempts.rejected += u64::from(is_rejected);
        }
        Ok(self.attempts)
    }

    /// Sends bytes that look like the beginning of a TLS handshake.
    async fn handshake(&mut self) -> Result<bool, Error> {
        self.attempts.handshakes += 1;
        let mut hello = vec![22, 3, 1, 0, 0, 1, 0, 0, 0];
        let length = self.rng.below(600);
        hello.extend(self.rng.bytes(length));
        let length = hello.len() - 5;
        hello[3..5].copy_from_slice(&(length as u16).to_be_bytes());
        hello[6..9].copy_from_slice(&(length as u32 - 4).to_be_bytes()[1..]);
        self.rng.mutate(&mut hello);
        send(TcpStream::connect(&self.address).await?, &hello).await
    }

    /// Sends HTTP/2 with mutations anywhere.
    async fn frames(&mut self) -> Result<bool, Error> {
        self.attempts.frames += 1;
        let requests = self.valid_requests()?;
        let mut bytes = http2_session(requests.iter().map(|request| grpc(request)));
        self.rng.mutate(&mut bytes);
        send(self.client.connect().await?, &bytes).await
    }

    /// Sends gRPC frames with a wrong length or a wrong compression flag.
    async fn lengths(&mut self) -> Result<bool, Error> {
        self.attempts.lengths += 1;
        let requests = self.valid_requests()?;
        let mut framed: Vec<Vec<u8>> = requests.iter().map(|request| grpc(request)).collect();
        let which = self.rng.below(framed.len());
        let at = self.rng.below(5);
        framed[which][at] = self.rng.byte();
        send(self.client.connect().await?, &http2_session(framed)).await
    }

    /// Sends requests that are not JSON, or not what an agent would send.
    async fn requests(&mut self) -> Result<bool, Error> {
        self.attempts.requests += 1;
        let mut requests = self.valid_requests()?;
        let which = self.rng.below(requests.len());
        self.rng.mutate(&mut requests[which]);
        let framed = requests.iter().map(|request| grpc(request));
        send(self.client.connect().await?, &http2_session(framed)).await
    }

    /// The valid requests of a session, in random order and with numbers at the limits of their range.
    fn valid_requests(&mut self) -> Result<Vec<Vec<u8>>, Error> {
        let node = format!("fuzz-{}", self.rng.below(100));
        let instance = self.rng.number();
        let count = 1 + self.rng.below(6);
        let mut requests = Vec::new();
        for _ in 0..count {
            let request = Request {
                id: self.rng.number(),
                node: node.clone(),
                instance,
                kind: self.valid_kind(&node, instance),
            };
            requests.push(serde_json::to_vec(&request)?);
        }
        Ok(requests)
    }

    fn valid_kind(&mut self, node: &str, instance: u64) -> RequestKind {
        let epoch = Epoch(self.rng.number());
        match self.rng.below(5) {
            0 => RequestKind::Heartbeat {
                known: Some(self.rng.number()),
            },
            1 => RequestKind::Report {
                epoch,
                report: Report::Failed {
                    message: "x".repeat(self.rng.below(3000)),
                    is_final: false,
                },
            },
            2 => RequestKind::Leave,
            _ => {
                // A larger world than any test forms, so the server rejects this join.
                let policy = Policy::new(5000, 5000 + self.rng.below(5000) as u32);
                let node_info = NodeInfo {
                    node: node.to_owned(),
                    instance,
                    num_workers: self.rng.number() as u32,
                    capabilities: BTreeSet::from(["x".repeat(self.rng.below(300))]),
                    node_rank: Some(self.rng.number() as u32),
                    store: Address {
                        host: "h".repeat(self.rng.below(300)),
                        port: self.rng.number() as u16,
                    },
                };
                RequestKind::Join(Box::new(Join {
                    run: self.run.clone(),
                    policy,
                    node_info,
                    watermark: Watermark {
                        epoch,
                        version: self.rng.number(),
                    },
                    last_report: Some((epoch, Report::Stopped)),
                }))
            }
        }
    }
}

/// Sends bytes, and returns whether the server closes the connection or responds with a rejection in time.
async fn send(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    bytes: &[u8],
) -> Result<bool, Error> {
    // The server may close the connection before it has read everything.
    if stream.write_all(bytes).await.is_err() || stream.flush().await.is_err() {
        return Ok(true);
    }
    let mut received = Vec::with_capacity(4096);
    let receive = async {
        loop {
            match stream.read_buf(&mut received).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    };
    let is_closed = tokio::time::timeout(REACTION_TIMEOUT, receive)
        .await
        .is_ok();
    let rejection = b"\"Rejected\"";
    let mut windows = received.windows(rejection.len());
    Ok(is_closed || windows.any(|window| window == rejection))
}

/// A request in a gRPC frame.
fn grpc(request: &[u8]) -> Vec<u8> {
    let length = (request.len() as u32).to_be_bytes();
    [&[0], &length[..], request].concat()
}

/// An HTTP/2 connection from its first byte: settings, the request's headers, and its body in frames.
fn http2_session(body: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    const SETTINGS: u8 = 4;
    const HEADERS: u8 = 1;
    const DATA: u8 = 0;
    const END_HEADERS: u8 = 4;
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    let head: Vec<u8> = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", SESSION_METHOD),
        (":authority", "rendezvous"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    .iter()
    .flat_map(|(name, value)| header(name, value))
    .collect();
    bytes.extend(frame(HEADERS, END_HEADERS, 1, &head));
    for message in body {
        bytes.extend(frame(DATA, 0, 1, &message));
    }
    bytes
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = &(payload.len() as u32).to_be_bytes()[1..];
    [length, &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A literal header field in HPACK.
fn header(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// Random numbers that a seed determines.
struct Rng(blake3::OutputReader);

impl Rng {
    fn new(seed: u64, number: u64) -> Rng {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&seed.to_le_bytes())
            .update(&number.to_le_bytes());
        Rng(hasher.finalize_xof())
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.0.fill(&mut bytes);
        bytes
    }

    fn byte(&mut self) -> u8 {
        self.bytes(1)[0]
    }

    fn any(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.any() % end.max(1) as u64) as usize
    }

    /// A number that is small, at a limit of its range, or arbitrary.
    fn number(&mut self) -> u64 {
        let any = self.any();
        let numbers = [any % 10, 0, u64::MAX, u64::MAX >> 1, 1 << 48, 1 << 32, any];
        numbers[self.below(numbers.len())]
    }

    /// Flips, replaces, truncates, repeats or inserts bytes, up to three times.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.byte(),
                2 => bytes.truncate(at),
                3 => {
                    let end = at + self.below(bytes.len() - at);
                    let again = bytes[at..end].to_vec();
                    bytes.splice(at..at, again);
                }
                4 => {
                    let length = self.below(64);
                    let noise = self.bytes(length);
                    bytes.splice(at..at, noise);
                }
                _ => {
                    let digits = self.number().to_string().into_bytes();
                    bytes.splice(at..at, digits);
                }
            }
        }
    }
}
