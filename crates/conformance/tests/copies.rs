//! Copies in peers' memory: workers, launchers and whole hosts are killed, and the job goes on from what
//! others hold, to the same losses.
//!
//! Two addresses of this machine stand for two hosts, each with a launcher and one rank.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;
use trainyard_checkpoint::Store;
use trainyard_conformance::programs::{Running, find, kill_rank, repository};
use trainyard_copies::{Neighbourhood, PeerStore, Secret};

const HOSTS: [&str; 2] = ["127.0.0.1", "127.0.0.2"];
const STEPS: u64 = 40;
/// The step whose line is waited for before anybody is killed.
const MIDDLE: u64 = 9;
const MARK: &str = "TRAINYARD_TEST_MARK";
/// Nothing here takes so long.
const PATIENCE: Duration = Duration::from_secs(240);

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
/// What was printed of each step: its loss and the norm of its gradient.
type Losses = BTreeMap<u64, String>;

#[test]
fn a_killed_worker_comes_back_from_memory() -> Outcome {
    for killed in 0..2 {
        let cluster = Cluster::new()?;
        let mut hosts = cluster.start(&["--max-restarts", "5"], &[])?;
        hosts[0].wait_for(&format!("step: {MIDDLE:>2} "))?;
        cluster.kill_worker(killed)?;
        hosts[0].wait_for("resumed after step")?;
        let [first, second] = finish(hosts)?;
        assert!(second.contains("starting again"), "{second}");
        assert!(
            first.contains("in peers' memory; storage has none"),
            "{first}"
        );
        assert_same_losses(&first)?;
    }
    Ok(())
}

#[test]
fn a_killed_launcher_comes_back_with_an_empty_holder() -> Outcome {
    let cluster = Cluster::new()?;
    let options = ["--max-restarts", "5"];
    let [mut first, second] = cluster.start(&options, &[])?;
    first.wait_for(&format!("step: {MIDDLE:>2} "))?;
    // Its worker and its holder go with it.
    drop(second);
    first.wait_for("starting again")?;
    let second = cluster.start_host(1, &options, &[])?;
    let [first, _] = finish([first, second])?;
    assert!(
        first.contains("in peers' memory; storage has none"),
        "{first}"
    );
    assert_same_losses(&first)
}

#[test]
fn a_lost_host_comes_back_from_its_partner_without_storage() -> Outcome {
    let cluster = Cluster::new()?;
    let mut holders = [cluster.holder(0)?, cluster.holder(1)?];
    let [mut first, second] = cluster.start(&["--external-holders"], &[])?;
    first.wait_for(&format!("step: {MIDDLE:>2} "))?;
    // The host goes: its holder, its launcher, and so its worker.
    holders[1].end();
    drop(second);
    first.read_to_end()?;
    assert!(!first.child.0.wait()?.success());
    holders[1] = cluster.holder(1)?;
    // A folder below a file: whoever reads or writes there fails.
    let nowhere = cluster.secret.display().to_string();
    let storage = ["--checkpoint.enable", "true", "--job.dump_folder", &nowhere];
    let hosts = cluster.start(&["--external-holders"], &storage)?;
    let ([again, _], ends) = ended(hosts)?;
    assert!(again.contains("nothing from storage"), "{again}");
    assert!(again.contains("resumed after step"), "{again}");
    // It trained to its end, and only what it came to is not where it should be.
    assert!(again.contains(&format!("step: {STEPS} ")), "{again}");
    let unsaved = format!("the state after step {STEPS}, the job's last, was not saved");
    assert!(again.contains(&unsaved), "{again}");
    assert_eq!(ends, [false, false], "{again}");
    assert_same_losses(&first.text())?;
    assert_same_losses(&again)
}

#[test]
fn strangers_are_refused_and_the_job_goes_on() -> Outcome {
    let cluster = Cluster::new()?;
    let mut hosts = cluster.start(&[], &[])?;
    hosts[0].wait_for("saved step-2 in peers' memory")?;
    let neighbourhood = Neighbourhood::parse(&cluster.holders, 0)?;
    let stranger = PeerStore::new(neighbourhood, Secret::of(b"the secret of another run"));
    let error = stranger.list("").expect_err("let in").to_string();
    assert!(error.contains("another secret"), "{error}");
    let mut socket = TcpStream::connect(cluster.holders.split(',').next().unwrap_or_default())?;
    socket.write_all(&[0xa5; 4096])?;
    let mut answer = Vec::new();
    // It may be closed in the middle of what was sent.
    let _ = socket.read_to_end(&mut answer);
    assert!(answer.len() <= 44, "more than a greeting");
    let [first, _] = finish(hosts)?;
    let refusals = first.matches("it does not know the run's secret").count();
    assert!(refusals >= 2, "{first}");
    assert_same_losses(&first)
}

/// What both hosts know.
struct Cluster {
    folder: TempDir,
    secret: PathBuf,
    /// As `--holders` has them.
    holders: String,
    master_port: String,
}

impl Cluster {
    fn new() -> Outcome<Cluster> {
        let folder = tempfile::tempdir()?;
        let secret = folder.path().join("secret");
        fs::write(&secret, [42; 32])?;
        fs::set_permissions(&secret, Permissions::from_mode(0o600))?;
        // All at once, so that they differ.
        let listeners = [HOSTS[0], HOSTS[1], HOSTS[0]].map(|host| TcpListener::bind((host, 0)));
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
            holders: format!("{},{}", addresses[0], addresses[1]),
            master_port: addresses[2].port().to_string(),
            folder,
            secret,
        })
    }

    /// A launcher with one rank on each host.
    fn start(&self, options: &[&str], keys: &[&str]) -> Outcome<[Host; 2]> {
        let start = |host| self.start_host(host, options, keys);
        Ok([start(0)?, start(1)?])
    }

    fn start_host(&self, host: usize, options: &[&str], keys: &[&str]) -> Outcome<Host> {
        let program = find("trainyard")?;
        let mut command = self.trainyard("run")?;
        command
            .args(["--nnodes", "2", "--node-rank", &host.to_string()])
            .args([
                "--master-addr",
                HOSTS[0],
                "--master-port",
                &self.master_port,
            ])
            .args(["--holders", &self.holders, "--run-secret-file"])
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
            .arg(self.folder.path().join("outputs"))
            .args(keys);
        Host::of(&mut command)
    }

    /// A holder as a process of its own, when it listens.
    fn holder(&self, host: usize) -> Outcome<Host> {
        let address = self.holders.split(',').nth(host).unwrap_or_default();
        let mut command = self.trainyard("holder")?;
        command
            .args(["--listen", address, "--run-secret-file"])
            .arg(&self.secret);
        let mut holder = Host::of(&mut command)?;
        holder.wait_for("holder at")?;
        Ok(holder)
    }

    fn trainyard(&self, subcommand: &str) -> Outcome<Command> {
        let mut command = Command::new(find("trainyard")?);
        command
            .current_dir(repository(""))
            .arg(subcommand)
            .env(MARK, self.folder.path())
            .env("OMP_NUM_THREADS", "1");
        Ok(command)
    }

    fn kill_worker(&self, rank: usize) -> Outcome {
        kill_rank(&format!("{MARK}={}", self.folder.path().display()), rank)
    }
}

/// A process of a host, and what it has said so far.
struct Host {
    child: Running,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Host {
    fn of(command: &mut Command) -> Outcome<Host> {
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut child = Running(child);
        let lines = lines(&mut child.0);
        Ok(Host {
            child,
            lines,
            said: Vec::new(),
        })
    }

    fn wait_for(&mut self, text: &str) -> Outcome {
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.said.push(line);
            if self.said.last().is_some_and(|line| line.contains(text)) {
                return Ok(());
            }
        }
        Err(format!("never said {text:?}:\n{}", self.text()).into())
    }

    fn read_to_end(&mut self) -> Outcome {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => self.said.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
                Err(error) => return Err(format!("{error}:\n{}", self.text()).into()),
            }
        }
    }

    fn text(&self) -> String {
        self.said.join("\n")
    }

    /// By SIGKILL.
    fn end(&mut self) {
        let _ = self.child.0.kill();
        let _ = self.child.0.wait();
    }
}

/// The lines of both streams of a process, as they come.
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

/// What both said to the end, which must be a good one.
fn finish(hosts: [Host; 2]) -> Outcome<[String; 2]> {
    let (texts, ends) = ended(hosts)?;
    assert_eq!(ends, [true, true], "{}", texts.join("\n--- second host\n"));
    Ok(texts)
}

/// What both said to the end, and whether it was a good one.
fn ended(hosts: [Host; 2]) -> Outcome<([String; 2], [bool; 2])> {
    let end = |mut host: Host| -> Outcome<(String, bool)> {
        host.read_to_end()?;
        let is_good = host.child.0.wait()?.success();
        Ok((host.text(), is_good))
    };
    let [first, second] = hosts;
    let (first, second) = (end(first)?, end(second)?);
    Ok(([first.0, second.0], [first.1, second.1]))
}

/// Every step that was told, told again or not, is that of a job that nobody disturbed.
fn assert_same_losses(text: &str) -> Outcome {
    static UNDISTURBED: OnceLock<Result<Losses, String>> = OnceLock::new();
    let expected = UNDISTURBED.get_or_init(|| undisturbed().map_err(|e| e.to_string()));
    let expected = expected.as_ref().map_err(Clone::clone)?;
    let mut num_told = 0;
    for line in text.lines() {
        if let Some((step, loss)) = told(line) {
            assert_eq!(Some(&loss), expected.get(&step), "step {step}");
            num_told += 1;
        }
    }
    assert!(num_told > 0, "no step was told:\n{text}");
    Ok(())
}

fn undisturbed() -> Outcome<Losses> {
    let cluster = Cluster::new()?;
    let [first, _] = finish(cluster.start(&[], &["--checkpoint.memory_interval", "0"])?)?;
    let losses: Losses = first.lines().filter_map(told).collect();
    assert_eq!(losses.len() as u64, STEPS, "{first}");
    Ok(losses)
}

fn told(line: &str) -> Option<(u64, String)> {
    let rest = line.split_once("step:")?.1;
    let step = rest.split_whitespace().next()?.parse().ok()?;
    let numbers = rest.split_once("loss:")?.1.split_once("memory:")?.0;
    Some((step, numbers.trim().to_owned()))
}
