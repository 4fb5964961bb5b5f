//! A connection between two processes that know the run secret.
//!
//! The connection is TLS 1.3 in both directions (see [`trainyard_tls`]), over blocking sockets. Inside it, a message
//! is its length (4 bytes, little endian) and its bytes. The receiver checks the length before it allocates anything.
//!
//! The handshake must end within a few seconds, counted from the first byte to the last, and so must every message:
//! a peer that sends single bytes cannot extend a deadline.

use std::fmt::{self, Debug, Formatter};
use std::io::{self, BufReader, ErrorKind, IoSlice, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::ops::DerefMut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, ConnectionCommon, ServerConfig,
    ServerConnection, SideData, StreamOwned,
};

/// How long connecting, and then the TLS handshake, may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one message may take from its first byte to its last.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(20);
/// rustls reads 4 KiB at a time, so a buffer saves most of the system calls.
const RECEIVE_BUFFER_BYTES: usize = 256 << 10;
/// How much plaintext is encrypted before the next write to the socket.
const SEND_BUFFER_BYTES: usize = 1 << 20;
/// The length and the start of a message go out together, in one TLS record.
const FIRST_WRITE_BYTES: usize = 16 << 10;

/// The end of a connection that opened it.
pub type ClientStream = AuthenticatedStream<ClientConnection>;
/// The end of a connection that accepted it.
pub type ServerStream = AuthenticatedStream<ServerConnection>;

/// What both ends of a protocol agree on.
#[derive(Clone, Copy, Debug)]
pub struct MessageProtocol {
    /// The name of the server in errors, such as `replica server`.
    pub server_name: &'static str,
    /// The size of the longest message.
    pub max_message_bytes: usize,
}

/// An authenticated connection that carries messages.
pub struct AuthenticatedStream<C> {
    tls: StreamOwned<C, Socket>,
    protocol: MessageProtocol,
}

impl ClientStream {
    /// Connects to the server at `address`, a host and a port.
    pub fn connect(
        address: &str,
        config: &Arc<ClientConfig>,
        protocol: MessageProtocol,
    ) -> io::Result<ClientStream> {
        let server = protocol.server_name;
        let stream = connect(address)?;
        // The name is neither sent nor checked: the key of the server is.
        let name = ServerName::from(std::net::IpAddr::from([0, 0, 0, 0]));
        let connection =
            ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        AuthenticatedStream::handshake(connection, stream, protocol).map_err(|error| match tls_error(&error) {
            Some(rustls::Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure)) => {
                let reason = format!(
                    "the {server} has another run secret: give all nodes the same --run-secret-file"
                );
                io::Error::new(ErrorKind::PermissionDenied, reason)
            }
            Some(cause) => {
                let reason = format!("there is no {server} of this version: {cause}");
                io::Error::new(ErrorKind::InvalidData, reason)
            }
            None => error,
        })
    }
}

impl ServerStream {
    /// Accepts a connection from a client that knows the run secret.
    pub fn accept(
        stream: TcpStream,
        config: &Arc<ServerConfig>,
        protocol: MessageProtocol,
    ) -> io::Result<ServerStream> {
        let connection = ServerConnection::new(Arc::clone(config)).map_err(io::Error::other)?;
        AuthenticatedStream::handshake(connection, stream, protocol).map_err(
            |error| match tls_error(&error) {
                Some(cause) => {
                    let reason =
                        format!("the client did not prove that it knows the run secret: {cause}");
                    io::Error::new(ErrorKind::PermissionDenied, reason)
                }
                None => error,
            },
        )
    }
}

impl<C, S> AuthenticatedStream<C>
where
    C: DerefMut<Target = ConnectionCommon<S>>,
    S: SideData,
{
    fn handshake(
        mut connection: C,
        stream: TcpStream,
        protocol: MessageProtocol,
    ) -> io::Result<AuthenticatedStream<C>> {
        stream.set_nodelay(true)?;
        let mut socket = Socket::new(stream, Instant::now() + HANDSHAKE_TIMEOUT);
        while connection.is_handshaking() {
            connection.complete_io(&mut socket)?;
        }
        connection.set_buffer_limit(Some(SEND_BUFFER_BYTES));
        Ok(AuthenticatedStream {
            tls: StreamOwned::new(connection, socket),
            protocol,
        })
    }

    /// Sends a message.
    pub fn send(&mut self, message: &[u8]) -> io::Result<()> {
        if let Some(reason) = self.protocol.rejection(message.len()) {
            return Err(io::Error::new(ErrorKind::InvalidInput, reason));
        }
        self.set_timeout(MESSAGE_TIMEOUT);
        let length = (message.len() as u32).to_le_bytes();
        let (start, rest) = message.split_at(message.len().min(FIRST_WRITE_BYTES - length.len()));
        self.tls.write_all(&[&length, start].concat())?;
        self.tls.write_all(rest)?;
        self.tls.flush()
    }

    /// Waits for the response to a request.
    pub fn receive(&mut self) -> io::Result<Vec<u8>> {
        self.receive_within(MESSAGE_TIMEOUT)
    }

    /// Waits for a message, which must start within `timeout`.
    pub fn receive_within(&mut self, timeout: Duration) -> io::Result<Vec<u8>> {
        self.set_timeout(timeout);
        let mut length = [0; 4];
        self.tls.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if let Some(reason) = self.protocol.rejection(length) {
            return Err(io::Error::new(ErrorKind::InvalidData, reason));
        }
        self.set_timeout(MESSAGE_TIMEOUT);
        let mut message = vec![0; length];
        self.tls.read_exact(&mut message)?;
        Ok(message)
    }

    fn set_timeout(&mut self, timeout: Duration) {
        self.tls.sock.0.get_mut().deadline = Instant::now() + timeout;
    }
}

impl<C> Debug for AuthenticatedStream<C> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AuthenticatedStream").finish_non_exhaustive()
    }
}

impl MessageProtocol {
    /// Why a message of this length is rejected.
    fn rejection(self, length: usize) -> Option<String> {
        let max = self.max_message_bytes;
        (length > max).then(|| format!("a message of {length} bytes is longer than {max}"))
    }
}

/// The error of TLS, where it is one and not the socket's.
fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Connects to the first address of a name that answers.
fn connect(address: &str) -> io::Result<TcpStream> {
    let mut outcome = Err(io::Error::new(
        ErrorKind::NotFound,
        "the name has no address",
    ));
    for address in address.to_socket_addrs()? {
        outcome = TcpStream::connect_timeout(&address, HANDSHAKE_TIMEOUT);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

/// A socket with a read buffer and a deadline.
struct Socket(BufReader<DeadlineStream>);

impl Socket {
    fn new(stream: TcpStream, deadline: Instant) -> Socket {
        let stream = DeadlineStream { stream, deadline };
        Socket(BufReader::with_capacity(RECEIVE_BUFFER_BYTES, stream))
    }
}

impl Read for Socket {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Socket {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.get_mut().write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.get_mut().write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A socket on which reads and writes fail once a point in time has passed.
struct DeadlineStream {
    stream: TcpStream,
    deadline: Instant,
}

impl DeadlineStream {
    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            self.stream.set_write_timeout(Some(self.time_left()?))?;
            match self.stream.write_vectored(slices) {
                Err(error) if is_transient(&error) => {}
                written => return written,
            }
        }
    }

    fn time_left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            Err(ErrorKind::TimedOut.into())
        } else {
            Ok(left)
        }
    }
}

impl Read for DeadlineStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            self.stream.set_read_timeout(Some(self.time_left()?))?;
            match self.stream.read(bytes) {
                Err(error) if is_transient(&error) => {}
                read => return read,
            }
        }
    }
}

/// Whether to try again, if the deadline allows it.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
    )
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};
    use std::thread;

    use crate::{Identity, RunSecret, Service};

    use super::*;

    /// A client's records are: hello, change cipher spec, the rest of the handshake, then one per short message.
    const FIRST_MESSAGE: usize = 3;

    const MAX_MESSAGE_BYTES: usize = 1 << 20;
    const PROTOCOL: MessageProtocol = MessageProtocol {
        server_name: "replica server",
        max_message_bytes: MAX_MESSAGE_BYTES,
    };

    type Pair = (io::Result<ClientStream>, io::Result<ServerStream>);

    fn identity(secret: &RunSecret) -> Identity {
        Identity::new(secret, Service::PeerCheckpoint, "").unwrap()
    }

    fn listen() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        (listener, address)
    }

    /// A client and a server; `relay` is given both sockets of whatever is between them.
    fn relayed(client: &RunSecret, server: &RunSecret, relay: fn(TcpStream, TcpStream)) -> Pair {
        let client = identity(client).client_config().unwrap();
        let server = identity(server).server_config().unwrap();
        let (outside, relay_address) = listen();
        let (inside, server_address) = listen();
        let client =
            thread::spawn(move || ClientStream::connect(&relay_address, &client, PROTOCOL));
        let from_client = outside.accept().unwrap().0;
        let to_server = TcpStream::connect(server_address).unwrap();
        thread::spawn(move || relay(from_client, to_server));
        let server = ServerStream::accept(inside.accept().unwrap().0, &server, PROTOCOL);
        (client.join().unwrap(), server)
    }

    fn pass_on(from: TcpStream, to: TcpStream) {
        forward(from, to, |_, bytes| vec![bytes]);
    }

    /// Forwards the server's bytes as they are, and each record of the client as `tamper` returns it.
    fn forward(
        client: TcpStream,
        server: TcpStream,
        mut tamper: impl FnMut(usize, Vec<u8>) -> Vec<Vec<u8>>,
    ) {
        let (mut server_reads, mut client_writes) =
            (server.try_clone().unwrap(), client.try_clone().unwrap());
        thread::spawn(move || {
            let _ = io::copy(&mut server_reads, &mut client_writes);
            let _ = client_writes.shutdown(Shutdown::Write);
        });
        let (mut client, mut server) = (client, server);
        for number in 0.. {
            let mut record = vec![0; 5];
            if client.read_exact(&mut record).is_err() {
                break;
            }
            let length = usize::from(u16::from_be_bytes([record[3], record[4]]));
            record.resize(5 + length, 0);
            if client.read_exact(&mut record[5..]).is_err() {
                break;
            }
            for record in tamper(number, record) {
                let _ = server.write_all(&record);
            }
        }
        let _ = server.shutdown(Shutdown::Write);
    }

    #[test]
    fn messages_go_both_ways() {
        let secret = RunSecret::random().unwrap();
        let (client, server) = relayed(&secret, &secret, pass_on);
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        for message in [&b""[..], b"one", &[7; 100_000], &[8; MAX_MESSAGE_BYTES]] {
            let sent = message.to_vec();
            let sender = thread::spawn(move || client.send(&sent).map(|()| client));
            assert!(server.receive().unwrap() == message);
            client = sender.join().unwrap().unwrap();
            let sent = message.to_vec();
            let sender = thread::spawn(move || server.send(&sent).map(|()| server));
            assert!(client.receive().unwrap() == message);
            server = sender.join().unwrap().unwrap();
        }
        let longer = vec![0; MAX_MESSAGE_BYTES + 1];
        assert_eq!(
            client.send(&longer).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
    }

    #[test]
    fn another_secret_is_rejected_on_both_sides() {
        let (client, server) = relayed(
            &RunSecret::random().unwrap(),
            &RunSecret::random().unwrap(),
            pass_on,
        );
        let (client, server) = (client.unwrap_err(), server.unwrap_err());
        assert_eq!(client.kind(), ErrorKind::PermissionDenied, "{client}");
        assert_eq!(server.kind(), ErrorKind::PermissionDenied, "{server}");
    }

    #[test]
    fn changed_repeated_and_omitted_records_are_rejected() {
        let relays: [fn(TcpStream, TcpStream); 3] = [
            |from, to| {
                forward(from, to, |number, mut record| {
                    record[5] ^= u8::from(number == FIRST_MESSAGE);
                    vec![record]
                });
            },
            |from, to| {
                forward(from, to, |number, record| {
                    if number == FIRST_MESSAGE {
                        vec![record.clone(), record]
                    } else {
                        vec![record]
                    }
                });
            },
            |from, to| {
                forward(from, to, |number, record| {
                    if number == FIRST_MESSAGE {
                        vec![]
                    } else {
                        vec![record]
                    }
                });
            },
        ];
        let secret = RunSecret::random().unwrap();
        for (case, relay) in relays.into_iter().enumerate() {
            let (client, server) = relayed(&secret, &secret, relay);
            let (mut client, mut server) = (client.unwrap(), server.unwrap());
            client.send(b"first").unwrap();
            client.send(b"second").unwrap();
            // Of a repeated message the first may arrive.
            let num_valid = usize::from(case == 1);
            let error = (0..=num_valid)
                .find_map(|_| server.receive().err())
                .unwrap();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "case {case}: {error}");
        }
    }

    #[test]
    fn a_reflected_record_is_rejected() {
        let secret = RunSecret::random().unwrap();
        let (client, _server) = relayed(&secret, &secret, |from, to| {
            let mut back = from.try_clone().unwrap();
            forward(from, to, move |number, record| {
                if number == FIRST_MESSAGE {
                    back.write_all(&record).map(|()| vec![]).unwrap()
                } else {
                    vec![record]
                }
            });
        });
        let mut client = client.unwrap();
        client.send(b"first").unwrap();
        assert_eq!(client.receive().unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn a_length_beyond_the_limit_is_rejected_before_anything_is_allocated() {
        let secret = RunSecret::random().unwrap();
        let (client, server) = relayed(&secret, &secret, pass_on);
        let (mut client, mut server) = (client.unwrap(), server.unwrap());
        let length = (MAX_MESSAGE_BYTES as u32 + 1).to_le_bytes();
        client.tls.write_all(&length).unwrap();
        assert_eq!(server.receive().unwrap_err().kind(), ErrorKind::InvalidData);
    }
}
