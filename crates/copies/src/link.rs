//! A connection between two that know the run's secret.
//!
//! ```text
//! holder -> client   magic and version, the holder's nonce             44 bytes
//! client -> holder   the client's nonce, the client's proof            64 bytes
//! holder -> client   the holder's proof                                32 bytes
//! then, either way   length (4), the message, its signature (32)
//! ```
//!
//! Until both have proved themselves everything has a fixed length and must be there in a few seconds,
//! counted from the first byte to the last. Afterwards a message says its length, which is checked
//! before anything is allocated. A signature covers the direction and the number of the message too, so
//! none can be changed, left out, repeated or sent back.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::secret::{Nonces, Secret, Side, nonce};
use crate::wire::LONGEST;

const GREETING: &[u8; 12] = b"trainyard\0\0\x01";

/// How long reaching somebody, and proving oneself, may take.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long one message may take from its first byte to its last.
const MESSAGE: Duration = Duration::from_secs(20);

/// A connection, proven.
#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    sent: Signer,
    received: Signer,
}

/// Signs the messages of one direction.
#[derive(Debug)]
struct Signer {
    key: [u8; 32],
    number: u64,
}

impl Signer {
    fn new(key: [u8; 32]) -> Signer {
        Signer { key, number: 0 }
    }

    /// The signature of the next message.
    fn sign(&mut self, message: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&self.number.to_le_bytes()).update(message);
        self.number += 1;
        hasher.finalize()
    }
}

impl Link {
    /// Reaches a holder at `address`, a host and a port.
    pub(crate) fn connect(address: &str, secret: &Secret) -> io::Result<Link> {
        let deadline = Instant::now() + HANDSHAKE;
        let mut stream = reach(address)?;
        let mut greeting = [0; 44];
        read_by(&mut stream, &mut greeting, deadline)?;
        let (magic, holder) = greeting.split_at(GREETING.len());
        if magic != GREETING {
            let reason = "no holder, or one of another version, answers there";
            return Err(io::Error::new(ErrorKind::InvalidData, reason));
        }
        let mut nonces = Nonces {
            client: nonce()?,
            ..Nonces::default()
        };
        nonces.holder.copy_from_slice(holder);
        let proof = secret.proof(Side::Client, &nonces);
        let answer = [&nonces.client[..], proof.as_bytes()].concat();
        write_by(&mut stream, &answer, deadline)?;
        let mut proof = [0; 32];
        read_by(&mut stream, &mut proof, deadline).map_err(|_| foreign())?;
        // This comparison takes the same time wherever they differ.
        match secret.proof(Side::Holder, &nonces) == proof {
            true => Ok(Link::new(stream, secret, &nonces, Side::Client)),
            false => Err(foreign()),
        }
    }

    /// Lets somebody in who knows the secret.
    pub(crate) fn accept(mut stream: TcpStream, secret: &Secret) -> io::Result<Link> {
        let deadline = Instant::now() + HANDSHAKE;
        stream.set_nodelay(true)?;
        let mut nonces = Nonces {
            holder: nonce()?,
            ..Nonces::default()
        };
        let greeting = [&GREETING[..], &nonces.holder].concat();
        write_by(&mut stream, &greeting, deadline)?;
        let mut answer = [0; 64];
        read_by(&mut stream, &mut answer, deadline)?;
        let (client, proof) = answer.split_at(32);
        nonces.client.copy_from_slice(client);
        if secret.proof(Side::Client, &nonces) != *proof {
            let reason = "it does not know the run's secret";
            return Err(io::Error::new(ErrorKind::PermissionDenied, reason));
        }
        let proof = secret.proof(Side::Holder, &nonces);
        write_by(&mut stream, proof.as_bytes(), deadline)?;
        Ok(Link::new(stream, secret, &nonces, Side::Holder))
    }

    fn new(stream: TcpStream, secret: &Secret, nonces: &Nonces, own: Side) -> Link {
        let other = match own {
            Side::Client => Side::Holder,
            Side::Holder => Side::Client,
        };
        Link {
            stream,
            sent: Signer::new(secret.key(own, nonces)),
            received: Signer::new(secret.key(other, nonces)),
        }
    }

    /// Sends a message.
    pub(crate) fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if message.len() > LONGEST {
            let reason = format!("a message of {} bytes is too long", message.len());
            return Err(io::Error::new(ErrorKind::InvalidInput, reason));
        }
        let deadline = Instant::now() + MESSAGE;
        let signature = self.sent.sign(message);
        let length = (message.len() as u32).to_le_bytes();
        write_by(&mut self.stream, &length, deadline)?;
        write_by(&mut self.stream, message, deadline)?;
        write_by(&mut self.stream, signature.as_bytes(), deadline)
    }

    /// Waits for the other's answer.
    pub(crate) fn receive(&mut self) -> io::Result<Vec<u8>> {
        self.receive_within(MESSAGE)
    }

    /// Waits so long for a message to begin.
    pub(crate) fn receive_within(&mut self, patience: Duration) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        read_by(&mut self.stream, &mut length, Instant::now() + patience)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > LONGEST {
            let reason = format!("a message of {length} bytes is too long");
            return Err(io::Error::new(ErrorKind::InvalidData, reason));
        }
        let deadline = Instant::now() + MESSAGE;
        let mut message = vec![0; length];
        read_by(&mut self.stream, &mut message, deadline)?;
        let mut signature = [0; 32];
        read_by(&mut self.stream, &mut signature, deadline)?;
        match self.received.sign(&message) == signature {
            true => Ok(message),
            false => Err(io::Error::new(
                ErrorKind::InvalidData,
                "a message was changed on its way",
            )),
        }
    }
}

fn foreign() -> io::Error {
    let reason = "the holder there has another secret: give all the same --run-secret-file";
    io::Error::new(ErrorKind::PermissionDenied, reason)
}

/// Connects to the first address of a name that answers.
fn reach(address: &str) -> io::Result<TcpStream> {
    let nobody = io::Error::new(ErrorKind::NotFound, "the name has no address");
    let mut outcome = Err(nobody);
    for address in address.to_socket_addrs()? {
        outcome = TcpStream::connect_timeout(&address, HANDSHAKE);
        if outcome.is_ok() {
            break;
        }
    }
    let stream = outcome?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Fills `bytes`, all of it by the deadline: a drip does not put it off.
fn read_by(stream: &mut TcpStream, mut bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_read_timeout(Some(time_left(deadline)?))?;
        match stream.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => bytes = &mut bytes[length..],
            Err(error) => again(error)?,
        }
    }
    Ok(())
}

fn write_by(stream: &mut TcpStream, mut bytes: &[u8], deadline: Instant) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.set_write_timeout(Some(time_left(deadline)?))?;
        match stream.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(length) => bytes = &bytes[length..],
            Err(error) => again(error)?,
        }
    }
    Ok(())
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

/// Whether it is the deadline's turn to judge.
fn again(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn pair(ours: &'static [u8], theirs: &'static [u8]) -> (io::Result<Link>, io::Result<Link>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let client = thread::spawn(move || Link::connect(&address, &Secret::of(ours)));
        let (stream, _) = listener.accept().unwrap();
        let holder = Link::accept(stream, &Secret::of(theirs));
        (client.join().unwrap(), holder)
    }

    #[test]
    fn messages_go_both_ways() {
        let (client, holder) = pair(b"same", b"same");
        let (mut client, mut holder) = (client.unwrap(), holder.unwrap());
        for message in [&b""[..], b"one", &[7; 100_000]] {
            client.send(message).unwrap();
            assert_eq!(holder.receive().unwrap(), message);
            holder.send(message).unwrap();
            assert_eq!(client.receive().unwrap(), message);
        }
    }

    #[test]
    fn another_secret_is_refused_on_both_sides() {
        let (client, holder) = pair(b"one", b"another");
        let (client, holder) = (client.unwrap_err(), holder.unwrap_err());
        assert_eq!(client.kind(), ErrorKind::PermissionDenied);
        assert_eq!(holder.kind(), ErrorKind::PermissionDenied);
    }

    #[test]
    fn what_was_changed_repeated_or_reflected_is_refused() {
        let refused = |tamper: fn(&mut Link, &mut Link)| {
            let (client, holder) = pair(b"same", b"same");
            let (mut client, mut holder) = (client.unwrap(), holder.unwrap());
            tamper(&mut client, &mut holder);
            client.send(b"tampered").unwrap();
            assert_eq!(holder.receive().unwrap_err().kind(), ErrorKind::InvalidData);
        };
        refused(|client, _| client.sent.key[0] ^= 1);
        refused(|client, _| client.sent.number += 1);
        refused(|client, holder| {
            client.send(b"first").unwrap();
            assert_eq!(holder.receive().unwrap(), b"first");
            client.sent.number = 0;
        });
        refused(|client, holder| client.sent.key = holder.sent.key);
        refused(|client, _| {
            let length = (LONGEST as u32 + 1).to_le_bytes();
            client.stream.write_all(&length).unwrap();
        });
    }
}
