//! The TCP connections of a group: found when it forms, counted when bytes are verified, shut when a
//! waiting rank must leave. Gloo's own abort does not release a waiter; closing its sockets does.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Mutex;

use rustix::net::{AddressFamily, Shutdown, SocketAddrAny, SocketType};

/// Groups form one at a time, so that a new connection belongs to the group being formed.
static FORMING: Mutex<()> = Mutex::new(());

/// The connections that came to exist while a group formed.
#[derive(Debug, Default)]
pub(crate) struct Sockets(Vec<RawFd>);

/// Bytes the kernel counted on a group's connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WireBytes {
    /// Sent; what had to be sent again counts once.
    pub sent: u64,
    /// Received.
    pub received: u64,
}

impl Sockets {
    /// Runs `form` and notes the connections it made. Those of the store at `store_port`, which others
    /// may open to us meanwhile, are not among them.
    pub(crate) fn during<T, E>(
        store_port: Option<u16>,
        form: impl FnOnce() -> Result<T, E>,
    ) -> Result<(T, Sockets), E> {
        let _one_at_a_time = FORMING.lock().unwrap_or_else(|p| p.into_inner());
        let before = connections(store_port);
        let out = form()?;
        let after = connections(store_port);
        let made = after.difference(&before).copied().collect();
        Ok((out, Sockets(made)))
    }

    /// Ends every connection; whoever waits on one gets an error at once.
    pub(crate) fn shut(&self) {
        for &fd in &self.0 {
            // A socket that is closed already needs no shutting.
            let _ = rustix::net::shutdown(borrowed(fd), Shutdown::Both);
        }
    }

    /// What the kernel counted so far.
    pub(crate) fn wire_bytes(&self) -> WireBytes {
        let mut total = WireBytes::default();
        for &fd in &self.0 {
            if let Some(bytes) = tcp_info(fd) {
                total.sent += bytes.sent;
                total.received += bytes.received;
            }
        }
        total
    }
}

/// Connected TCP sockets of this process, but for those to or at a port.
fn connections(except_port: Option<u16>) -> BTreeSet<RawFd> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return BTreeSet::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&fd| is_connection(fd, except_port))
        .collect()
}

fn is_connection(fd: RawFd, except_port: Option<u16>) -> bool {
    let socket = borrowed(fd);
    let stream = rustix::net::sockopt::socket_type(socket) == Ok(SocketType::STREAM);
    let domain = rustix::net::sockopt::socket_domain(socket);
    let internet = domain == Ok(AddressFamily::INET) || domain == Ok(AddressFamily::INET6);
    let ends = [
        rustix::net::getsockname(socket).ok(),
        rustix::net::getpeername(socket).ok().flatten(),
    ];
    let is_other = |end: Option<SocketAddrAny>| {
        let address = end.and_then(|end| SocketAddr::try_from(end).ok());
        address.is_some_and(|address| Some(address.port()) != except_port)
    };
    stream && internet && ends.into_iter().all(is_other)
}

fn borrowed(fd: RawFd) -> BorrowedFd<'static> {
    // SAFETY: used for one system call only, which checks the descriptor itself: one that was closed
    // meanwhile gives an error. Listed descriptors are never -1.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// `tcpi_bytes_sent` without `tcpi_bytes_retrans`, and `tcpi_bytes_received`, of the kernel's TCP_INFO. Not
/// `tcpi_bytes_acked`: what has arrived is acknowledged up to 40 ms later.
fn tcp_info(fd: RawFd) -> Option<WireBytes> {
    const RECEIVED: usize = 128;
    const SENT: usize = 200;
    const SENT_AGAIN: usize = 208;
    let mut info = [0u8; 256];
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
    if status != 0 || (length as usize) < SENT_AGAIN + 8 {
        return None;
    }
    let read = |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().unwrap_or_default());
    Some(WireBytes {
        sent: read(SENT).saturating_sub(read(SENT_AGAIN)),
        received: read(RECEIVED),
    })
}
