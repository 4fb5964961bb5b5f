//! A local S3-compatible server for tests: `moto`, from PyPI.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use trainyard_checkpoint::store::ObjectStore;

pub const BUCKET: &str = "trainyard";

/// The time limit for the server to start on a busy host.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// The Python interpreter that has `moto`, or why there is none.
pub fn python() -> Result<PathBuf, String> {
    let python = std::env::var_os("TRAINYARD_PYTHON").map(PathBuf::from);
    let python = python.ok_or("TRAINYARD_PYTHON is not set; ./setup does that")?;
    let found = Command::new(&python)
        .args(["-c", "import moto.server"])
        .stderr(Stdio::null())
        .status();
    if found.is_ok_and(|status| status.success()) {
        Ok(python)
    } else {
        Err(format!(
            "{} has no moto; ./setup installs it",
            python.display()
        ))
    }
}

/// A port without a listener.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A running server with one empty bucket. Dropping it kills the process.
pub struct Server {
    process: Child,
    port: u16,
    /// The lines of its log.
    log: Receiver<String>,
}

impl Server {
    pub fn start(python: &PathBuf, port: u16) -> Server {
        let mut process = Command::new(python)
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p"])
            .arg(port.to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let (written, log) = mpsc::channel();
        std::thread::spawn(move || {
            let lines = lines.map_while(Result::ok);
            // Keep reading after the receiver is gone, or the server blocks on a full pipe.
            lines.for_each(|line| drop(written.send(line)));
        });
        let server = Server { process, port, log };
        server.log_until("Running on");
        server.send("PUT", &format!("/{BUCKET}"));
        server
    }

    /// Sends a raw HTTP request and returns the whole response.
    pub fn send(&self, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request\r\n\
             Connection: close\r\n\r\n"
        )
        .unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    /// The lines of its log before the next one that contains `text`.
    fn log_until(&self, text: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            match self.log.recv_timeout(START_TIMEOUT) {
                Ok(line) if line.contains(text) => return lines,
                Ok(line) => lines.push(line),
                Err(_) => panic!("the server did not log {text:?}: {lines:?}"),
            }
        }
    }

    /// The requests since the last call.
    pub fn requests(&self) -> Vec<String> {
        // A marker request separates the requests so far from later ones.
        self.send("GET", "/up-to-here");
        let lines = self.log_until("/up-to-here").into_iter();
        lines.filter(|line| line.contains("HTTP/1.1")).collect()
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The environment variables that configure a client of the server.
pub fn variables(port: u16) -> Vec<(String, String)> {
    [
        ("AWS_ACCESS_KEY_ID", "test-key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", &format!("http://127.0.0.1:{port}")),
        ("AWS_ALLOW_HTTP", "true"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

pub fn open(prefix: &str, port: u16) -> ObjectStore {
    ObjectStore::new(BUCKET, prefix, variables(port)).unwrap()
}
