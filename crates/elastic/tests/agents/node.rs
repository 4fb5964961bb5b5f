//! A node of a test: an agent in its own process, the output of its workers, and the processes it leaves.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use trainyard_elastic::{AgentConfig, AgentExit, RendezvousConfig, run_agent};
use trainyard_launcher::{Console, Job};
use trainyard_rendezvous::{Address, Policy, RunOutcome, RunSecret};

/// Longer than anything here takes, even on a busy host.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a worker printed when it started.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerInfo {
    pub epoch: u64,
    pub rank: usize,
    pub world: usize,
    pub restarts: usize,
    pub store: String,
}

/// The command that prints a worker's `WorkerInfo`. If the world breaks before all workers have come, the agent ends
/// the worker.
pub const HELLO: &str = "\"$TEST_PROGRAM\" hello || exec sleep 1000; ";

pub struct Node {
    child: Child,
    mark: String,
    lines: Receiver<String>,
    stderr: Option<std::thread::JoinHandle<String>>,
}

/// What all nodes of a run have in common.
pub struct Run<'a> {
    pub id: &'a str,
    pub endpoint: &'a str,
    pub secret: &'a Path,
    pub nodes: (u32, u32),
    pub max_restarts: u32,
    pub script: &'a str,
}

impl Node {
    pub fn start(run: &Run<'_>, node: &str) -> Node {
        let mark = format!("{}-{node}-{}", run.id, std::process::id());
        let (min, max) = run.nodes;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["agent", node, run.id, run.endpoint])
            .arg(run.secret)
            .args([min, max, run.max_restarts].map(|number| number.to_string()))
            .arg(run.script)
            .env("MARK", &mark)
            .env("TEST_PROGRAM", std::env::current_exe().unwrap())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = stderr.read_to_string(&mut text);
            text
        });
        Node {
            child,
            mark,
            lines,
            stderr: Some(stderr),
        }
    }

    /// The first worker of this node in an epoch after `epoch`.
    pub fn worker_after(&self, epoch: u64) -> WorkerInfo {
        let began = Instant::now();
        loop {
            let remaining = TIMEOUT.saturating_sub(began.elapsed());
            let Ok(line) = self.lines.recv_timeout(remaining) else {
                panic!("{}: no worker after epoch {epoch}", self.mark);
            };
            let Some(fields) = line.strip_prefix("hello ") else {
                continue;
            };
            let fields: Vec<&str> = fields.split(' ').collect();
            let worker = WorkerInfo {
                epoch: fields[0].parse().unwrap(),
                rank: fields[1].parse().unwrap(),
                world: fields[2].parse().unwrap(),
                restarts: fields[3].parse().unwrap(),
                store: fields[4].to_owned(),
            };
            if worker.epoch > epoch {
                return worker;
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Kills the agent; none of its processes may be left a second later.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        let began = Instant::now();
        while !self.left().is_empty() {
            let left = self.left();
            assert!(
                began.elapsed() < Duration::from_secs(1),
                "{left:?} are left"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the agent to exit; returns its exit code and its stderr.
    pub fn wait(&mut self) -> (i32, String) {
        let began = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code().unwrap();
            }
            assert!(began.elapsed() < TIMEOUT, "{} does not exit", self.mark);
            std::thread::sleep(Duration::from_millis(10));
        };
        let left = self.left();
        assert!(left.is_empty(), "{left:?} are left");
        (code, self.stderr.take().unwrap().join().unwrap())
    }

    /// Its running processes.
    fn left(&self) -> Vec<i32> {
        let wanted = format!("MARK={}", self.mark);
        let is_marked = |pid: &i32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            variables.any(|variable| variable == wanted.as_bytes())
        };
        let processes = fs::read_dir("/proc").unwrap();
        let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        pids.filter(is_marked).collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The main function of an agent process with one worker.
pub fn agent_main(args: &[String]) -> ExitCode {
    let [node, run, endpoint, secret, min, max, max_restarts, script] = args else {
        panic!("{args:?}");
    };
    let number = |text: &String| text.parse::<u32>().unwrap();
    let mut policy = Policy::new(number(min), number(max));
    policy.lease = Duration::from_secs(3);
    policy.last_call_timeout = Duration::from_millis(1000);
    policy.rejoin_timeout = Duration::from_millis(300);
    policy.join_timeout = Duration::from_secs(50);
    policy.max_restarts = number(max_restarts);
    let mut job = Job::new("sh", 1)
        .args(["-c", script])
        .console(Console::Plain);
    job.run_id = run.clone();
    job.grace = Duration::from_secs(5);
    let config = AgentConfig {
        job,
        rendezvous: rendezvous_config(endpoint),
        secret: RunSecret::read_or_create(Path::new(secret)).unwrap(),
        policy,
        node_name: node.clone(),
        node_rank: None,
        host: "127.0.0.1".to_owned(),
        store_port: 0,
        log_dir: None,
    };
    match run_agent(&config).map(|outcome| outcome.exit) {
        Ok(AgentExit::RunEnded(RunOutcome::Succeeded)) => ExitCode::SUCCESS,
        Ok(AgentExit::Interrupted(_)) => ExitCode::from(3),
        other => {
            match other {
                Ok(AgentExit::RunEnded(outcome)) => eprintln!("{outcome}"),
                other => eprintln!("{other:?}"),
            }
            ExitCode::FAILURE
        }
    }
}

fn rendezvous_config(endpoint: &str) -> RendezvousConfig {
    if endpoint.starts_with("http://") {
        return RendezvousConfig::Etcd {
            members: vec![endpoint.to_owned()],
            tls: None,
            user: None,
        };
    }
    let (host, port) = endpoint.rsplit_once(':').unwrap();
    RendezvousConfig::Server(Address {
        host: host.to_owned(),
        port: port.parse().unwrap(),
    })
}
