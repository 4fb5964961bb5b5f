//! What a server bears: conversations that were right until a die fell, from a seed, over real connections.
//!
//! ```sh
//! cargo run --release -p trainyard-rendezvous --example siege -- 10.0.0.1:29400 llama7 llama7.secret SEED SECONDS
//! ```
//!
//! Most come from somebody who knows the secret, because strangers get no further than the handshake. Their policy is
//! not the run's, so that none that is still right after all can become part of it. Prints what it tried; whether
//! anybody was harmed is for `bench/faults/hostile` to see.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use trainyard_rendezvous::server::Client;
use trainyard_rendezvous::{
    Address, Advert, Epoch, Join, Letter, Policy, Report, Say, Secret, Seen,
};

type Error = Box<dyn std::error::Error + Send + Sync>;

const AT_ONCE: u64 = 8;
/// How long an answer is waited for, and so how fast the siege is at most.
const PATIENCE: Duration = Duration::from_millis(100);

#[tokio::main]
async fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [address, run, secret, seed, seconds] = &args[..] else {
        return Err("siege ADDRESS:PORT RUN SECRET_FILE SEED SECONDS".into());
    };
    let (host, port) = address.rsplit_once(':').ok_or("ADDRESS:PORT")?;
    let address = Address {
        host: host.to_owned(),
        port: port.parse()?,
    };
    let client = Client::new(address, run, &Secret::read(Path::new(secret))?)?;
    let until = Instant::now() + Duration::from_secs_f64(seconds.parse()?);
    let seed: u64 = seed.parse()?;
    let besiegers = (0..AT_ONCE).map(|number| {
        let besieger = Besieger {
            client: client.clone(),
            at: args[0].clone(),
            run: run.clone(),
            dice: Dice::new(seed, number),
            tried: Tried::default(),
        };
        tokio::spawn(besieger.until(until))
    });
    let mut tried = Tried::default();
    for besieger in besiegers.collect::<Vec<_>>() {
        tried.add(&besieger.await??);
    }
    println!("{}", serde_json::to_string(&tried)?);
    Ok(())
}

/// How many of what.
#[derive(Default, serde::Serialize)]
struct Tried {
    handshakes: u64,
    frames: u64,
    lengths: u64,
    letters: u64,
    /// The server closed the connection, or said no, before patience ended.
    answered: u64,
}

impl Tried {
    fn add(&mut self, other: &Tried) {
        self.handshakes += other.handshakes;
        self.frames += other.frames;
        self.lengths += other.lengths;
        self.letters += other.letters;
        self.answered += other.answered;
    }
}

struct Besieger {
    client: Client,
    at: String,
    run: String,
    dice: Dice,
    tried: Tried,
}

impl Besieger {
    async fn until(mut self, until: Instant) -> Result<Tried, Error> {
        while Instant::now() < until {
            let is_answered = match self.dice.below(10) {
                0 => self.handshake().await?,
                1 | 2 => self.frames().await?,
                3 | 4 => self.lengths().await?,
                _ => self.letters().await?,
            };
            self.tried.answered += u64::from(is_answered);
        }
        Ok(self.tried)
    }

    /// Bytes that look like the beginning of TLS.
    async fn handshake(&mut self) -> Result<bool, Error> {
        self.tried.handshakes += 1;
        let mut hello = vec![22, 3, 1, 0, 0, 1, 0, 0, 0];
        let length = self.dice.below(600);
        hello.extend(self.dice.bytes(length));
        let length = hello.len() - 5;
        hello[3..5].copy_from_slice(&(length as u16).to_be_bytes());
        hello[6..9].copy_from_slice(&(length as u32 - 4).to_be_bytes()[1..]);
        self.dice.spoil(&mut hello);
        say(TcpStream::connect(&self.at).await?, &hello).await
    }

    /// HTTP/2 that is spoiled anywhere.
    async fn frames(&mut self) -> Result<bool, Error> {
        self.tried.frames += 1;
        let letters = self.right_letters()?;
        let mut bytes = conversation(letters.iter().map(|letter| grpc(letter)));
        self.dice.spoil(&mut bytes);
        say(self.client.connect().await?, &bytes).await
    }

    /// gRPC's frames that lie about their length, or say that they are compressed.
    async fn lengths(&mut self) -> Result<bool, Error> {
        self.tried.lengths += 1;
        let letters = self.right_letters()?;
        let mut framed: Vec<Vec<u8>> = letters.iter().map(|letter| grpc(letter)).collect();
        let which = self.dice.below(framed.len());
        let place = self.dice.below(5);
        framed[which][place] = self.dice.byte();
        say(self.client.connect().await?, &conversation(framed)).await
    }

    /// Letters that are no JSON, or none that a right agent would write.
    async fn letters(&mut self) -> Result<bool, Error> {
        self.tried.letters += 1;
        let mut letters = self.right_letters()?;
        let which = self.dice.below(letters.len());
        self.dice.spoil(&mut letters[which]);
        let framed = letters.iter().map(|letter| grpc(letter));
        say(self.client.connect().await?, &conversation(framed)).await
    }

    /// A conversation's letters, in any order, with numbers from the edges.
    fn right_letters(&mut self) -> Result<Vec<Vec<u8>>, Error> {
        let node = format!("siege-{}", self.dice.below(100));
        let instance = self.dice.number();
        let count = 1 + self.dice.below(6);
        let mut letters = Vec::new();
        for _ in 0..count {
            let letter = Letter {
                number: self.dice.number(),
                node: node.clone(),
                instance,
                say: self.right_words(&node, instance),
            };
            letters.push(serde_json::to_vec(&letter)?);
        }
        Ok(letters)
    }

    fn right_words(&mut self, node: &str, instance: u64) -> Say {
        let epoch = Epoch(self.dice.number());
        match self.dice.below(5) {
            0 => Say::Heartbeat {
                known: Some(self.dice.number()),
            },
            1 => Say::Report {
                epoch,
                report: Report::Failed {
                    message: "x".repeat(self.dice.below(3000)),
                },
            },
            2 => Say::Leave,
            _ => {
                // Larger than any run of a test.
                let policy = Policy::new(5000, 5000 + self.dice.below(5000) as u32);
                let advert = Advert {
                    node: node.to_owned(),
                    instance,
                    num_workers: self.dice.number() as u32,
                    capabilities: BTreeSet::from(["x".repeat(self.dice.below(300))]),
                    node_rank: Some(self.dice.number() as u32),
                    store: Address {
                        host: "h".repeat(self.dice.below(300)),
                        port: self.dice.number() as u16,
                    },
                };
                Say::Join(Box::new(Join {
                    run: self.run.clone(),
                    policy,
                    advert,
                    seen: Seen {
                        epoch,
                        version: self.dice.number(),
                    },
                    said: Some((epoch, Report::Stopped)),
                }))
            }
        }
    }
}

/// Says it, and waits a little for the end of the connection or an answer that is a refusal.
async fn say(mut line: impl AsyncRead + AsyncWrite + Unpin, bytes: &[u8]) -> Result<bool, Error> {
    // Whoever is shown out in the middle has been answered, too.
    if line.write_all(bytes).await.is_err() || line.flush().await.is_err() {
        return Ok(true);
    }
    let mut heard = Vec::with_capacity(4096);
    let listen = async {
        loop {
            match line.read_buf(&mut heard).await {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    };
    let ended = tokio::time::timeout(PATIENCE, listen).await.is_ok();
    let says_no = heard.windows(9).any(|window| window == b"\"Refused\"");
    Ok(ended || says_no)
}

/// A letter in gRPC's frame.
fn grpc(letter: &[u8]) -> Vec<u8> {
    let length = (letter.len() as u32).to_be_bytes();
    [&[0], &length[..], letter].concat()
}

/// HTTP/2 from its first byte: settings, the request's head, and its body in frames.
fn conversation(body: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    const SETTINGS: u8 = 4;
    const HEADERS: u8 = 1;
    const DATA: u8 = 0;
    const END_HEADERS: u8 = 4;
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    let head: Vec<u8> = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/trainyard.Rendezvous/Attend"),
        (":authority", "rendezvous"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    .iter()
    .flat_map(|(name, value)| header(name, value))
    .collect();
    bytes.extend(frame(HEADERS, END_HEADERS, 1, &head));
    for part in body {
        bytes.extend(frame(DATA, 0, 1, &part));
    }
    bytes
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = &(payload.len() as u32).to_be_bytes()[1..];
    [length, &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// A header that is spelled out, in HPACK.
fn header(name: &str, value: &str) -> Vec<u8> {
    let text = |text: &str| [&[text.len() as u8], text.as_bytes()].concat();
    [vec![0], text(name), text(value)].concat()
}

/// Numbers that follow from a seed.
struct Dice(blake3::OutputReader);

impl Dice {
    fn new(seed: u64, number: u64) -> Dice {
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&seed.to_le_bytes())
            .update(&number.to_le_bytes());
        Dice(hasher.finalize_xof())
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

    /// Small, at an edge, or anything.
    fn number(&mut self) -> u64 {
        let any = self.any();
        let numbers = [any % 10, 0, u64::MAX, u64::MAX >> 1, 1 << 48, 1 << 32, any];
        numbers[self.below(numbers.len())]
    }

    /// Changes a few bytes, cuts, repeats, or puts something in.
    fn spoil(&mut self, bytes: &mut Vec<u8>) {
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
