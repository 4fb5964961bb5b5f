//! A real etcd with one member, which is killed at the end of the test.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

pub struct Etcd {
    child: Child,
    pub url: String,
    _dir: TempDir,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

impl Etcd {
    /// `None`, with a message, if etcd is not installed.
    pub fn start(test: &str) -> Option<Etcd> {
        if Command::new("etcd").arg("--version").output().is_err() {
            eprintln!("skipped: {test} (no program `etcd`: apt-get install etcd-server)");
            return None;
        }
        let dir = TempDir::new().unwrap();
        let url = format!("http://127.0.0.1:{}", free_port());
        let peer = format!("http://127.0.0.1:{}", free_port());
        let child = Command::new("etcd")
            .args(["--name", "m0", "--initial-cluster", &format!("m0={peer}")])
            .args([
                "--listen-client-urls",
                &url,
                "--advertise-client-urls",
                &url,
            ])
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .arg("--data-dir")
            .arg(dir.path().join("m0"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let etcd = Etcd {
            child,
            url,
            _dir: dir,
        };
        etcd.wait();
        Some(etcd)
    }

    fn wait(&self) {
        let began = Instant::now();
        let address = self.url.trim_start_matches("http://");
        while std::net::TcpStream::connect(address).is_err() {
            assert!(
                began.elapsed() < Duration::from_secs(30),
                "etcd does not listen"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
