//! Whether the client of a loopback connection is a process of this user.
//!
//! libtorch's clients cannot send a token, but the kernel knows the owner of every socket. A token would protect no
//! better: any process of this user could read it from the workers.

use std::fs;
use std::io;
use std::net::{SocketAddr, SocketAddrV4};

use rustix::process::geteuid;

/// Fails unless a process of this user, or root, owns the client's end of a connection.
pub fn check(client: SocketAddr, server: SocketAddr) -> io::Result<()> {
    let (SocketAddr::V4(client), SocketAddr::V4(server)) = (client, server) else {
        return Err(denied("it is not a connection over IPv4"));
    };
    // libtorch connects to an IPv4 address with an IPv6 socket, unless the kernel has no IPv6.
    let tables = [
        (fs::read_to_string("/proc/net/tcp")?, ""),
        (
            fs::read_to_string("/proc/net/tcp6").unwrap_or_default(),
            mapped_prefix(),
        ),
    ];
    let mut owners = tables
        .iter()
        .map(|(table, prefix)| owner(table, prefix, client, server));
    match owners.find_map(|owner| owner) {
        Some(owner) if owner == geteuid().as_raw() || owner == 0 => Ok(()),
        Some(owner) => Err(denied(&format!("the client belongs to user {owner}"))),
        None => Err(denied("the client is gone")),
    }
}

fn denied(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, reason.to_owned())
}

/// What precedes an IPv4 address in the kernel's table of IPv6 sockets: the words of `::ffff:`.
fn mapped_prefix() -> &'static str {
    if cfg!(target_endian = "little") {
        "0000000000000000FFFF0000"
    } else {
        "00000000000000000000FFFF"
    }
}

/// The user who owns the socket with this local and this remote address, in the kernel's table of TCP sockets.
fn owner(table: &str, prefix: &str, local: SocketAddrV4, remote: SocketAddrV4) -> Option<u32> {
    let hex = |address| format!("{prefix}{}", hex(address));
    let (local, remote) = (hex(local), hex(remote));
    table.lines().skip(1).find_map(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let is_it = fields.next() == Some(&local) && fields.next() == Some(&remote);
        // After the state, the queues, the timer and the retransmits.
        is_it.then(|| fields.nth(4)?.parse().ok()).flatten()
    })
}

/// An address as the kernel prints it: the bytes of the address as a number of this machine, and the port.
fn hex(address: SocketAddrV4) -> String {
    let ip = u32::from_ne_bytes(address.ip().octets());
    format!("{ip:08X}:{:04X}", address.port())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn the_owner_of_a_connection_is_found() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mapped = format!("[::ffff:127.0.0.1]:{}", address.port());
        for to in [address.to_string(), mapped] {
            let client = TcpStream::connect(&to).unwrap();
            let (_, from) = listener.accept().unwrap();
            check(from, address).unwrap_or_else(|error| panic!("{to}: {error}"));
            drop(client);
        }
    }

    #[test]
    fn another_user_is_denied() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
             0: 0100007F:A2D0 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1001        0 42 1 0 20 4 30 10 -1\n";
        let address = |text: &str| text.parse().unwrap();
        let (client, server) = (address("127.0.0.1:41680"), address("127.0.0.1:8080"));
        if cfg!(target_endian = "little") {
            assert_eq!(owner(table, "", client, server), Some(1001));
        }
        assert_eq!(owner(table, "", server, client), None);
    }
}
