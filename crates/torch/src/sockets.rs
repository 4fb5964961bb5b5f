//! The TCP connections of a Gloo group: found when the group is created, read to verify byte counts and to find out which
//! peers are gone, and shut down to abort the group. Gloo's own abort does not wake a waiting thread; closing its sockets
//! does.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::{Mutex, OnceLock};

use rustix::net::{AddressFamily, Shutdown, SocketAddrAny, SocketType};

/// Groups are created one at a time, so that a new connection belongs to the group being created.
static CREATING_GROUP: Mutex<()> = Mutex::new(());

/// The connections that were opened while a group was created.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    connections: Vec<Connection>,
    /// The ends of peers that were gone when this rank shut down its own.
    lost: OnceLock<Vec<SocketAddr>>,
}

/// A connected socket. Gloo may close it at any time, and the number of its descriptor is then given to another file,
/// so the inode tells whether the descriptor is still that of the socket.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct Connection {
    fd: RawFd,
    inode: u64,
    local: SocketAddr,
    remote: SocketAddr,
}

/// Bytes that a group's ranks exchanged, as the kernel counted them on its connections, or in memory that they share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WireBytes {
    /// Bytes sent, without retransmissions.
    pub sent: u64,
    /// Bytes received.
    pub received: u64,
}

impl std::ops::Add for WireBytes {
    type Output = WireBytes;

    fn add(self, other: WireBytes) -> WireBytes {
        WireBytes {
            sent: self.sent + other.sent,
            received: self.received + other.received,
        }
    }
}

impl Sockets {
    /// Runs `create` and returns the connections that it opened, except those of the store at `store_port`, which
    /// other ranks may open to this process meanwhile.
    pub(crate) fn created_during<T, E>(
        store_port: Option<u16>,
        create: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, Sockets), E> {
        let _one_at_a_time = CREATING_GROUP.lock().unwrap_or_else(|p| p.into_inner());
        let before = connections(store_port);
        let out = create()?;
        let after = connections(store_port);
        let opened = after.difference(&before).copied().collect();
        let sockets = Sockets {
            connections: opened,
            lost: OnceLock::new(),
        };
        Ok((out, sockets))
    }

    /// This rank's ends of the connections.
    pub(crate) fn local_ends(&self) -> impl Iterator<Item = SocketAddr> {
        self.connections.iter().map(|each| each.local)
    }

    /// The other ends of connections that peers have closed. What happens after this rank has shut them down does not
    /// count.
    pub(crate) fn lost_ends(&self) -> &[SocketAddr] {
        self.lost.get_or_init(|| {
            let is_lost = |each: &&Connection| !each.is_open() || !is_established(each.fd);
            let lost = self.connections.iter().filter(is_lost);
            lost.map(|each| each.remote).collect()
        })
    }

    /// Whether this rank has shut down its connections, because it aborted the group or a collective failed.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.lost.get().is_some()
    }

    /// Whether a connection is closed, by this rank or by its peer.
    pub(crate) fn is_broken(&self) -> bool {
        let is_whole = |each: &Connection| each.is_open() && is_established(each.fd);
        !self.connections.iter().all(is_whole)
    }

    /// Shuts down every connection; a thread that waits on one gets an error at once.
    pub(crate) fn shutdown(&self) {
        self.lost_ends();
        for connection in self
            .connections
            .iter()
            .filter(|connection| connection.is_open())
        {
            // Fails only if the socket is closed already.
            let _ = rustix::net::shutdown(borrowed(connection.fd), Shutdown::Both);
        }
    }

    /// The bytes that the kernel counted so far.
    pub(crate) fn wire_bytes(&self) -> WireBytes {
        let mut total = WireBytes::default();
        for connection in self
            .connections
            .iter()
            .filter(|connection| connection.is_open())
        {
            if let Some(bytes) = wire_bytes(connection.fd) {
                total.sent += bytes.sent;
                total.received += bytes.received;
            }
        }
        total
    }
}

/// The connected TCP sockets of this process, except those that use `except_port` on either end.
fn connections(except_port: Option<u16>) -> BTreeSet<Connection> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return BTreeSet::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(|fd| connection(fd, except_port))
        .collect()
}

impl Connection {
    /// Whether the descriptor is still that of the socket.
    fn is_open(self) -> bool {
        inode(self.fd) == Some(self.inode)
    }
}

fn inode(fd: RawFd) -> Option<u64> {
    Some(rustix::fs::fstat(borrowed(fd)).ok()?.st_ino)
}

fn connection(fd: RawFd, except_port: Option<u16>) -> Option<Connection> {
    let socket = borrowed(fd);
    let stream = rustix::net::sockopt::socket_type(socket) == Ok(SocketType::STREAM);
    let domain = rustix::net::sockopt::socket_domain(socket);
    let internet = domain == Ok(AddressFamily::INET) || domain == Ok(AddressFamily::INET6);
    let end = |address: Option<SocketAddrAny>| {
        let address = SocketAddr::try_from(address?).ok()?;
        (Some(address.port()) != except_port).then_some(address)
    };
    if !(stream && internet) {
        return None;
    }
    Some(Connection {
        fd,
        inode: inode(fd)?,
        local: end(rustix::net::getsockname(socket).ok())?,
        remote: end(rustix::net::getpeername(socket).ok().flatten())?,
    })
}

fn borrowed(fd: RawFd) -> BorrowedFd<'static> {
    // SAFETY: used for one system call only, which fails if the descriptor was closed meanwhile. Listed descriptors
    // are never -1.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// The bytes of a connection: sent without retransmissions, and received. `tcpi_bytes_acked` would lag, because the
/// receiver acknowledges data up to 40 ms later.
fn wire_bytes(fd: RawFd) -> Option<WireBytes> {
    const RECEIVED: usize = 128;
    const SENT: usize = 200;
    const RETRANSMITTED: usize = 208;
    let info = tcp_info(fd).filter(|info| info.len() >= RETRANSMITTED + 8)?;
    let read = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().unwrap_or_default());
    Some(WireBytes {
        sent: read(SENT).saturating_sub(read(RETRANSMITTED)),
        received: read(RECEIVED),
    })
}

/// Whether neither end has closed a connection.
fn is_established(fd: RawFd) -> bool {
    /// `TCP_ESTABLISHED` of the kernel, the first byte of TCP_INFO.
    const ESTABLISHED: u8 = 1;
    tcp_info(fd).is_some_and(|info| info.first() == Some(&ESTABLISHED))
}

/// The kernel's `struct tcp_info`.
fn tcp_info(fd: RawFd) -> Option<Vec<u8>> {
    let mut info = vec![0u8; 256];
    let mut length = info.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes into the buffer.
    let status = unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut length,
        )
    };
    info.truncate(length as usize);
    (status == 0).then_some(info)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_descriptor_of_another_file_is_left_alone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let create = || Ok::<_, std::io::Error>((TcpStream::connect(address)?, listener.accept()?));
        let ((client, _server), sockets) = Sockets::created_during(None, create).unwrap();
        let fd = client.as_raw_fd();
        assert!(
            sockets
                .connections
                .iter()
                .any(|connection| connection.fd == fd)
        );
        let other = TcpStream::connect(address).unwrap();
        let _accepted = listener.accept().unwrap();
        // The number of the closed socket now belongs to another connection.
        let mut reused = std::os::fd::OwnedFd::from(client);
        rustix::io::dup2(&other, &mut reused).unwrap();
        sockets.shutdown();
        assert!(other.peer_addr().is_ok());
        let mut byte = [0];
        other.set_nonblocking(true).unwrap();
        let read = std::io::Read::read(&mut &other, &mut byte);
        assert_eq!(read.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    }
}
