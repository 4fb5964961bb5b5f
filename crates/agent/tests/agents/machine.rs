//! A machine of a test: an agent as a process, what its workers say, and what is left of it.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use trainyard_agent::{Ending, Part, Way, attend};
use trainyard_elastic::{Console, Job};
use trainyard_rendezvous::{Address, Close, Policy, Secret};

/// Longer than anything here takes, on a machine that is busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a worker said when it began, and whose it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Said {
    pub epoch: u64,
    pub rank: usize,
    pub world: usize,
    pub restarts: usize,
    pub store: String,
}

/// The lines with which workers begin.
pub const HELLO: &str = "echo hello $TRAINYARD_EPOCH $RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $MASTER_ADDR:$MASTER_PORT; ";

pub struct Machine {
    child: Child,
    mark: String,
    lines: Receiver<String>,
    stderr: Option<std::thread::JoinHandle<String>>,
}

/// What all machines of a run have in common.
pub struct Run<'a> {
    pub id: &'a str,
    pub way: &'a str,
    pub secret: &'a Path,
    pub nodes: (u32, u32),
    pub max_restarts: u32,
    pub script: &'a str,
}

impl Machine {
    pub fn start(run: &Run<'_>, node: &str) -> Machine {
        let mark = format!("{}-{node}-{}", run.id, std::process::id());
        let (min, max) = run.nodes;
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["agent", node, run.id, run.way])
            .arg(run.secret)
            .args([min, max, run.max_restarts].map(|number| number.to_string()))
            .arg(run.script)
            .env("MARK", &mark)
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
        Machine {
            child,
            mark,
            lines,
            stderr: Some(stderr),
        }
    }

    /// What its worker says at the beginning of an epoch after `epoch`.
    pub fn said_after(&self, epoch: u64) -> Said {
        let began = Instant::now();
        loop {
            let left = PATIENCE.saturating_sub(began.elapsed());
            let Ok(line) = self.lines.recv_timeout(left) else {
                panic!("{}: no worker after epoch {epoch}", self.mark);
            };
            let Some(words) = line.strip_prefix("hello ") else {
                continue;
            };
            let words: Vec<&str> = words.split(' ').collect();
            let said = Said {
                epoch: words[0].parse().unwrap(),
                rank: words[1].parse().unwrap(),
                world: words[2].parse().unwrap(),
                restarts: words[3].parse().unwrap(),
                store: words[4].to_owned(),
            };
            if said.epoch > epoch {
                return said;
            }
        }
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Kills the agent; nothing of it may be left a second later.
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

    /// Waits for its end: its code, and what it wrote on stderr.
    pub fn end(&mut self) -> (i32, String) {
        let began = Instant::now();
        let code = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status.code().unwrap();
            }
            assert!(began.elapsed() < PATIENCE, "{} does not end", self.mark);
            std::thread::sleep(Duration::from_millis(10));
        };
        let left = self.left();
        assert!(left.is_empty(), "{left:?} are left");
        (code, self.stderr.take().unwrap().join().unwrap())
    }

    /// Its processes, zombies aside.
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

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other side: an agent of one worker, as its arguments say.
pub fn be_an_agent(args: &[String]) -> ExitCode {
    let [node, run, way, secret, min, max, max_restarts, script] = args else {
        panic!("{args:?}");
    };
    let number = |text: &String| text.parse::<u32>().unwrap();
    let mut policy = Policy::new(number(min), number(max));
    policy.lease = Duration::from_secs(3);
    policy.last_call = Duration::from_millis(1000);
    policy.regather = Duration::from_millis(300);
    policy.join_timeout = Duration::from_secs(50);
    policy.max_restarts = number(max_restarts);
    let mut job = Job::new("sh", 1)
        .args(["-c", script])
        .console(Console::Plain);
    job.run_id = run.clone();
    job.grace = Duration::from_secs(5);
    let part = Part {
        job,
        way: way_of(way),
        secret: Secret::read_or_create(Path::new(secret)).unwrap(),
        policy,
        node: node.clone(),
        node_rank: None,
        host: "127.0.0.1".to_owned(),
        store_port: 0,
        log_dir: None,
    };
    match attend(&part).map(|attendance| attendance.ending) {
        Ok(Ending::Closed(Close::Succeeded)) => ExitCode::SUCCESS,
        Ok(Ending::Interrupted(_)) => ExitCode::from(3),
        other => {
            match other {
                Ok(Ending::Closed(how)) => eprintln!("{how}"),
                other => eprintln!("{other:?}"),
            }
            ExitCode::FAILURE
        }
    }
}

fn way_of(way: &str) -> Way {
    if way.starts_with("http://") {
        return Way::Etcd {
            members: vec![way.to_owned()],
            tls: None,
        };
    }
    let (host, port) = way.rsplit_once(':').unwrap();
    Way::Server(Address {
        host: host.to_owned(),
        port: port.parse().unwrap(),
    })
}
