//! In-memory peer checkpoints: a job loses a worker, a launcher or a node, resumes from the replicas on the other
//! node, and reaches the same losses.
//!
//! Two loopback addresses play two nodes, each with a launcher and one rank.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;
use tempfile::TempDir;
use trainyard_checkpoint::Store;
use trainyard_conformance::as_trials;
use trainyard_conformance::programs::{Running, find, kill_rank, repository};
use trainyard_peer_checkpoint::{PeerStore, ReplicaPlacement};
use trainyard_tls::RunSecret;

const NODES: [&str; 2] = ["127.0.0.1", "127.0.0.2"];
const STEPS: u64 = 40;
/// The step after which the faults happen.
const FAULT_STEP: u64 = 9;
const MARK: &str = "TRAINYARD_TEST_MARK";
/// The longest wait for a line of output.
const LINE_TIMEOUT: Duration = Duration::from_secs(240);

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
/// The loss and the gradient norm of each step, as printed.
type Losses = BTreeMap<u64, String>;

/// One test per fault.
pub fn trials() -> Vec<Trial> {
    as_trials(
        "peer_checkpoint",
        &[
            (
                "a_killed_worker_resumes_from_peer_memory",
                a_killed_worker_resumes_from_peer_memory,
            ),
            (
                "a_killed_launcher_resumes_with_an_empty_replica_server",
                a_killed_launcher_resumes_with_an_empty_replica_server,
            ),
            (
                "a_lost_node_resumes_from_its_buddy_without_storage",
                a_lost_node_resumes_from_its_buddy_without_storage,
            ),
            (
                "strangers_are_rejected_and_the_job_continues",
                strangers_are_rejected_and_the_job_continues,
            ),
        ],
    )
}

fn a_killed_worker_resumes_from_peer_memory() -> Outcome {
    for killed in 0..2 {
        let cluster = Cluster::new()?;
        let mut launchers = cluster.start(&["--max-restarts", "5"], &[])?;
        launchers[0].wait_for(&format!("step: {FAULT_STEP:>2} "))?;
        cluster.kill_worker(killed)?;
        launchers[0].wait_for("resumed from step")?;
        let [first, second] = finish(launchers)?;
        assert!(second.contains("restarting the ranks"), "{second}");
        assert!(
            first.contains("in peer memory; storage has none"),
            "{first}"
        );
        assert_same_losses(&first)?;
    }
    Ok(())
}

fn a_killed_launcher_resumes_with_an_empty_replica_server() -> Outcome {
    let cluster = Cluster::new()?;
    let options = ["--max-restarts", "5"];
    let [mut first, second] = cluster.start(&options, &[])?;
    first.wait_for(&format!("step: {FAULT_STEP:>2} "))?;
    // Killing a launcher also ends its worker and its replica server.
    drop(second);
    first.wait_for("restarting the ranks")?;
    let second = cluster.start_node(1, &options, &[])?;
    let [first, _] = finish([first, second])?;
    assert!(
        first.contains("in peer memory; storage has none"),
        "{first}"
    );
    assert_same_losses(&first)
}

fn a_lost_node_resumes_from_its_buddy_without_storage() -> Outcome {
    let cluster = Cluster::new()?;
    let mut servers = [cluster.replica_server(0)?, cluster.replica_server(1)?];
    let [mut first, second] = cluster.start(&["--external-replica-servers"], &[])?;
    first.wait_for(&format!("step: {FAULT_STEP:>2} "))?;
    // The node is lost: its replica server, its launcher, and so its worker.
    servers[1].kill();
    drop(second);
    first.read_to_end()?;
    assert!(!first.child.0.wait()?.success());
    servers[1] = cluster.replica_server(1)?;
    // A directory below a file: every access to it fails.
    let unusable = cluster.secret.display().to_string();
    let storage = [
        "--checkpoint.enable",
        "true",
        "--job.dump_folder",
        &unusable,
    ];
    let launchers = cluster.start(&["--external-replica-servers"], &storage)?;
    let ([again, _], successes) = wait(launchers)?;
    assert!(
        again.contains("cannot list checkpoints in storage"),
        "{again}"
    );
    assert!(again.contains("resumed from step"), "{again}");
    // The job trains to its end; only its final checkpoint cannot be saved.
    assert!(again.contains(&format!("step: {STEPS} ")), "{again}");
    let unsaved = format!("the final checkpoint, of step {STEPS}, was not saved");
    assert!(again.contains(&unsaved), "{again}");
    assert_eq!(successes, [false, false], "{again}");
    assert_same_losses(&first.text())?;
    assert_same_losses(&again)
}

fn strangers_are_rejected_and_the_job_continues() -> Outcome {
    let cluster = Cluster::new()?;
    let mut launchers = cluster.start(&[], &[])?;
    launchers[0].wait_for("step-2 in peer memory")?;
    let placement = ReplicaPlacement::parse(&cluster.replica_servers, 0)?;
    let stranger = PeerStore::new(&placement, &RunSecret::random()?)?;
    let error = stranger.list("").expect_err("must be rejected").to_string();
    assert!(error.contains("another run secret"), "{error}");
    let mut socket = TcpStream::connect(placement.local_server())?;
    socket.write_all(&[0xa5; 4096])?;
    let mut answer = Vec::new();
    // The server may close the connection before it has read everything.
    let _ = socket.read_to_end(&mut answer);
    assert!(answer.len() <= 7, "more than a TLS alert: {answer:?}");
    let [first, _] = finish(launchers)?;
    let rejections = first
        .matches("did not prove that it knows the run secret")
        .count();
    assert!(rejections >= 2, "{first}");
    assert_same_losses(&first)
}

/// What both nodes share.
struct Cluster {
    dir: TempDir,
    secret: PathBuf,
    /// The value of `--replica-servers`.
    replica_servers: String,
    master_port: String,
}

impl Cluster {
    fn new() -> Outcome<Cluster> {
        let dir = tempfile::tempdir()?;
        let secret = dir.path().join("secret");
        RunSecret::read_or_create(&secret)?;
        // All are open at the same time, so the ports differ.
        let listeners = [NODES[0], NODES[1], NODES[0]].map(|node| TcpListener::bind((node, 0)));
        let mut addresses = Vec::new();
        for listener in &listeners {
            addresses.push(
                listener
                    .as_ref()
                    .map_err(ToString::to_string)?
                    .local_addr()?,
            );
        }
        Ok(Cluster {
            replica_servers: format!("{},{}", addresses[0], addresses[1]),
            master_port: addresses[2].port().to_string(),
            dir,
            secret,
        })
    }

    /// Starts a launcher with one rank on each node.
    fn start(&self, options: &[&str], keys: &[&str]) -> Outcome<[Process; 2]> {
        let start = |node| self.start_node(node, options, keys);
        Ok([start(0)?, start(1)?])
    }

    fn start_node(&self, node: usize, options: &[&str], keys: &[&str]) -> Outcome<Process> {
        let program = find("trainyard")?;
        let mut command = self.trainyard("run")?;
        command
            .args(["--nnodes", "2", "--node-rank", &node.to_string()])
            // On a busy machine a step may take so long that it looks like a hang.
            .args(["--hang-timeout", "0"])
            .args([
                "--master-addr",
                NODES[0],
                "--master-port",
                &self.master_port,
            ])
            .args([
                "--replica-servers",
                &self.replica_servers,
                "--run-secret-file",
            ])
            .arg(&self.secret)
            .args(options)
            .arg("--")
            .arg(&program)
            .args([
                "train",
                "configs/llama-tiny.toml",
                "--metrics.log_freq",
                "1",
            ])
            .args(["--training.steps", &STEPS.to_string()])
            .args(["--training.seq_len", "32"])
            .args(["--checkpoint.memory_interval", "2"])
            .arg("--job.dump_folder")
            .arg(self.dir.path().join("outputs"))
            .args(keys);
        Process::start(&mut command)
    }

    /// Starts a replica server as a process of its own, and waits until it listens.
    fn replica_server(&self, node: usize) -> Outcome<Process> {
        let address = self
            .replica_servers
            .split(',')
            .nth(node)
            .unwrap_or_default();
        let mut command = self.trainyard("replica-server")?;
        command
            .args(["--listen", address, "--run-secret-file"])
            .arg(&self.secret);
        let mut server = Process::start(&mut command)?;
        server.wait_for("replica server at")?;
        Ok(server)
    }

    fn trainyard(&self, subcommand: &str) -> Outcome<Command> {
        let mut command = Command::new(find("trainyard")?);
        command
            .current_dir(repository(""))
            .arg(subcommand)
            .env(MARK, self.dir.path())
            .env("OMP_NUM_THREADS", "1");
        Ok(command)
    }

    fn kill_worker(&self, rank: usize) -> Outcome {
        kill_rank(&format!("{MARK}={}", self.dir.path().display()), rank)
    }
}

/// A process of a node, and its output so far.
struct Process {
    child: Running,
    lines: Receiver<String>,
    output: Vec<String>,
}

impl Process {
    fn start(command: &mut Command) -> Outcome<Process> {
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut child = Running(child);
        let lines = lines(&mut child.0);
        Ok(Process {
            child,
            lines,
            output: Vec::new(),
        })
    }

    fn wait_for(&mut self, text: &str) -> Outcome {
        while let Ok(line) = self.lines.recv_timeout(LINE_TIMEOUT) {
            self.output.push(line);
            if self.output.last().is_some_and(|line| line.contains(text)) {
                return Ok(());
            }
        }
        Err(format!("no line with {text:?}:\n{}", self.text()).into())
    }

    fn read_to_end(&mut self) -> Outcome {
        loop {
            match self.lines.recv_timeout(LINE_TIMEOUT) {
                Ok(line) => self.output.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
                Err(error) => return Err(format!("{error}:\n{}", self.text()).into()),
            }
        }
    }

    fn text(&self) -> String {
        self.output.join("\n")
    }

    /// Sends SIGKILL.
    fn kill(&mut self) {
        let _ = self.child.0.kill();
        let _ = self.child.0.wait();
    }
}

/// The lines of both output streams of a process, as they arrive.
fn lines(child: &mut Child) -> Receiver<String> {
    let (sender, lines) = channel();
    let stdout = child
        .stdout
        .take()
        .map(|s| Box::new(s) as Box<dyn Read + Send>);
    let stderr = child
        .stderr
        .take()
        .map(|s| Box::new(s) as Box<dyn Read + Send>);
    for stream in [stdout, stderr].into_iter().flatten() {
        let sender = sender.clone();
        thread::spawn(move || {
            let lines = BufReader::new(stream).lines().map_while(Result::ok);
            lines.map(|line| sender.send(line)).all(|sent| sent.is_ok());
        });
    }
    lines
}

/// The output of both launchers, which must succeed.
fn finish(launchers: [Process; 2]) -> Outcome<[String; 2]> {
    let (outputs, successes) = wait(launchers)?;
    let all = outputs.join("\n--- second node\n");
    assert_eq!(successes, [true, true], "{all}");
    Ok(outputs)
}

/// The output of both launchers, and whether they succeeded.
fn wait(launchers: [Process; 2]) -> Outcome<([String; 2], [bool; 2])> {
    let wait = |mut launcher: Process| -> Outcome<(String, bool)> {
        launcher.read_to_end()?;
        let has_succeeded = launcher.child.0.wait()?.success();
        Ok((launcher.text(), has_succeeded))
    };
    let [first, second] = launchers;
    let (first, second) = (wait(first)?, wait(second)?);
    Ok(([first.0, second.0], [first.1, second.1]))
}

/// Asserts that every step in the output, repeated or not, is that of a job without faults.
fn assert_same_losses(text: &str) -> Outcome {
    static EXPECTED: OnceLock<Result<Losses, String>> = OnceLock::new();
    let expected = EXPECTED.get_or_init(|| without_faults().map_err(|e| e.to_string()));
    let expected = expected.as_ref().map_err(Clone::clone)?;
    let mut num_steps = 0;
    for line in text.lines() {
        if let Some((step, loss)) = parse_step(line) {
            assert_eq!(Some(&loss), expected.get(&step), "step {step}");
            num_steps += 1;
        }
    }
    assert!(num_steps > 0, "there are no steps in:\n{text}");
    Ok(())
}

fn without_faults() -> Outcome<Losses> {
    let cluster = Cluster::new()?;
    let [first, _] = finish(cluster.start(&[], &["--checkpoint.memory_interval", "0"])?)?;
    let losses: Losses = first.lines().filter_map(parse_step).collect();
    assert_eq!(losses.len() as u64, STEPS, "{first}");
    Ok(losses)
}

fn parse_step(line: &str) -> Option<(u64, String)> {
    let rest = line.split_once("step:")?.1;
    let step = rest.split_whitespace().next()?.parse().ok()?;
    let numbers = rest.split_once("loss:")?.1.split_once("memory:")?.0;
    Some((step, numbers.trim().to_owned()))
}
