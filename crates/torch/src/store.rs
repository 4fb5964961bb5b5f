//! c10d's TCPStore, through which ranks find each other.

use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::IntoRawFd;
use std::time::Duration;

use cxx::SharedPtr;

use crate::bridge::ffi;
use crate::error::{Result, TorchError};

/// A key-value store shared by all ranks. Cheap to clone; safe to share between threads.
#[derive(Clone)]
pub struct Store {
    handle: SharedPtr<ffi::StoreHandle>,
    address: String,
    timeout: Duration,
}

// SAFETY: the handle points to a store that is itself thread safe (see bridge.rs); a SharedPtr's
// count is atomic.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

impl Store {
    /// Serves a store on the given address only, and connects to it. Port 0 selects a free port; see
    /// [`Store::address`].
    pub fn serve(host: &str, port: u16, timeout: Duration) -> Result<Store> {
        let failed = |message: String| TorchError::Store {
            address: format!("{host}:{port}"),
            operation: "serve",
            key: String::new(),
            message,
        };
        let listener = TcpListener::bind((host, port)).map_err(|e| {
            failed(format!(
                "cannot listen on this address ({e}); another job may use the port"
            ))
        })?;
        let port = listener
            .local_addr()
            .map_err(|e| failed(e.to_string()))?
            .port();
        // libtorch takes ownership of the socket.
        Self::open(host, port, listener.into_raw_fd(), timeout)
    }

    /// Connects to a store that another process serves, and waits up to `timeout` for it.
    pub fn connect(host: &str, port: u16, timeout: Duration) -> Result<Store> {
        Self::open(host, port, -1, timeout)
    }

    fn open(host: &str, port: u16, listen_fd: i32, timeout: Duration) -> Result<Store> {
        let address = format!("{host}:{port}");
        let failed = |message: String| TorchError::Store {
            address: address.clone(),
            operation: "connect",
            key: String::new(),
            message,
        };
        (host, port)
            .to_socket_addrs()
            .map_err(|e| failed(format!("cannot resolve the host ({e}); check MASTER_ADDR")))?;
        let handle = ffi::tcp_store(host, port, listen_fd, millis(timeout))
            .map_err(|e| failed(e.what().to_owned()))?;
        Ok(Store {
            handle,
            address,
            timeout,
        })
    }

    /// The same store with every key under a prefix.
    pub fn prefixed(&self, prefix: &str) -> Result<Store> {
        let handle =
            ffi::prefix_store(prefix, self.raw()).map_err(|e| self.failed("prefix", prefix, &e))?;
        Ok(Store {
            handle,
            ..self.clone()
        })
    }

    /// `host:port` of the server.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The port of the server.
    pub(crate) fn port(&self) -> Option<u16> {
        self.host_and_port().map(|(_, port)| port)
    }

    fn host_and_port(&self) -> Option<(&str, u16)> {
        let (host, port) = self.address.rsplit_once(':')?;
        Some((host, port.parse().ok()?))
    }

    /// The same store over a new connection, so that waiting in one does not block the other.
    pub fn reconnect(&self) -> Result<Store> {
        let (host, port) = self.host_and_port().ok_or_else(|| {
            TorchError::Invalid(format!(
                "{} is not a store address (host:port)",
                self.address
            ))
        })?;
        Store::connect(host, port, self.timeout)
    }

    /// Sets a key.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        ffi::store_set(self.raw(), key, value).map_err(|e| self.failed("set", key, &e))
    }

    /// Waits for a key to be set and returns its value.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.get_with_timeout(key, self.timeout)
    }

    /// Waits up to `timeout` for a key to be set and returns its value.
    pub fn get_with_timeout(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        ffi::store_get(self.raw(), key, millis(timeout)).map_err(|e| self.failed("get", key, &e))
    }

    /// Adds to a counter and returns its new value; a counter starts at 0.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        ffi::store_add(self.raw(), key, amount).map_err(|e| self.failed("add", key, &e))
    }

    /// Waits up to `timeout` for a key to be set.
    pub fn wait(&self, key: &str, timeout: Duration) -> Result<()> {
        ffi::store_wait(self.raw(), key, millis(timeout)).map_err(|e| self.failed("wait", key, &e))
    }

    /// Whether a key is set.
    pub fn has(&self, key: &str) -> Result<bool> {
        ffi::store_check(self.raw(), key).map_err(|e| self.failed("check", key, &e))
    }

    pub(crate) fn raw(&self) -> &ffi::StoreHandle {
        // C++ never returns a null handle.
        &self.handle
    }

    fn failed(&self, operation: &'static str, key: &str, e: &cxx::Exception) -> TorchError {
        TorchError::Store {
            address: self.address.clone(),
            operation,
            key: key.to_owned(),
            message: e.what().to_owned(),
        }
    }
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(200);

    #[test]
    fn a_store_sets_gets_adds_and_times_out() {
        let store = Store::serve("127.0.0.1", 0, Duration::from_secs(5)).unwrap();
        let port: u16 = store.address().rsplit(':').next().unwrap().parse().unwrap();
        let other = Store::connect("127.0.0.1", port, Duration::from_secs(5)).unwrap();
        store.set("a", b"1").unwrap();
        assert_eq!(other.get("a").unwrap(), b"1");
        assert_eq!(store.add("n", 2).unwrap(), 2);
        assert_eq!(other.add("n", 3).unwrap(), 5);
        assert!(!other.has("b").unwrap());
        let error = other.get_with_timeout("b", SHORT).unwrap_err().to_string();
        assert!(
            error.contains("get \"b\"") && error.contains("127.0.0.1"),
            "{error}"
        );
        let inner = store.prefixed("p").unwrap();
        inner.set("a", b"2").unwrap();
        assert_eq!(store.get("a").unwrap(), b"1");
    }

    #[test]
    fn a_store_listens_on_the_given_address_only() {
        let store = Store::serve("127.0.0.1", 0, Duration::from_secs(5)).unwrap();
        let port: u16 = store.address().rsplit(':').next().unwrap().parse().unwrap();
        assert!(std::net::TcpStream::connect(("127.0.0.2", port)).is_err());
    }
}
