//! A server that speaks S3's protocol, as a process on this machine: `moto`, from PyPI.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use trainyard_checkpoint::store::ObjectStore;

pub const BUCKET: &str = "trainyard";

/// How long a server may take to start on a busy machine.
const STARTING: Duration = Duration::from_secs(120);

/// The Python that has the server, or why there is none.
pub fn python() -> Result<PathBuf, String> {
    let python = std::env::var_os("TRAINYARD_PYTHON").map(PathBuf::from);
    let python = python.ok_or("TRAINYARD_PYTHON is not set; ./setup does that")?;
    let found = Command::new(&python)
        .args(["-c", "import moto.server"])
        .stderr(Stdio::null())
        .status();
    match found.is_ok_and(|status| status.success()) {
        true => Ok(python),
        false => Err(format!(
            "{} has no moto; ./setup installs it",
            python.display()
        )),
    }
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// A server with one empty bucket, until it is dropped.
pub struct Server {
    process: Child,
    port: u16,
    /// Lines as it writes them.
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
            // The server must not stop at a full pipe when nobody reads its log any more.
            lines.for_each(|line| drop(written.send(line)));
        });
        let server = Server { process, port, log };
        server.log_until("Running on");
        server.ask("PUT", &format!("/{BUCKET}"));
        server
    }

    /// A request without a library; the whole answer.
    pub fn ask(&self, method: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request\r\n\
             Connection: close\r\n\r\n"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Lines of its log up to one that has `text`.
    fn log_until(&self, text: &str) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            match self.log.recv_timeout(STARTING) {
                Ok(line) if line.contains(text) => return lines,
                Ok(line) => lines.push(line),
                Err(_) => panic!("no {text:?} of the server: {lines:?}"),
            }
        }
    }

    /// What was asked since the last look.
    pub fn requests(&self) -> Vec<String> {
        // A request of our own ends what there is to look at.
        self.ask("GET", "/up-to-here");
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

/// What the environment of a job would have.
pub fn variables(port: u16) -> Vec<(String, String)> {
    [
        ("AWS_ACCESS_KEY_ID", "somebody"),
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
