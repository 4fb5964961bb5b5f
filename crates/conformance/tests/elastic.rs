//! Elastic training: workers and agents are killed and come back, worlds shrink and grow, and every loss
//! is that of a job that nobody disturbed.
//!
//! In double precision, so that another order of sums does not show in the digits that are told.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trainyard_conformance::programs::{Running, find, processes, repository, signal_rank};

const STEPS: u64 = 60;
/// Nothing here takes so long.
const PATIENCE: Duration = Duration::from_secs(240);
/// The exit code of an agent that SIGTERM has ended.
const TERMINATED: i32 = 128 + 15;
const MARK: &str = "TRAINYARD_TEST_MARK";

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
/// Of every step, the losses it was told with.
type Losses = BTreeMap<u64, Vec<String>>;

#[test]
fn a_killed_worker_costs_a_step_and_no_digit() -> Outcome {
    let run = Run::new("2")?;
    let mut agents = [run.agent()?, run.agent()?];
    run.wait_for_step(8)?;
    run.signal_worker(1, Signal::KILL)?;
    run.wait_for("resumed after step")?;
    let lines = run.wait_for_step(STEPS)?;
    assert!(
        lines.contains("in peers' memory; storage has none"),
        "{lines}"
    );
    for agent in &mut agents {
        assert!(agent.0.wait()?.success(), "{}", run.text());
    }
    assert_same_losses(&run)
}

/// A step takes a few hundredths of a second here, so five seconds are the limit.
#[test]
fn a_stopped_worker_is_found_and_killed_and_costs_no_digit() -> Outcome {
    let run = Run::new("2")?;
    let mut agents = [run.agent()?, run.agent()?];
    run.wait_for_step(12)?;
    let (victims, stopped) = (run.worker(1), Instant::now());
    run.signal_worker(1, Signal::STOP)?;
    run.wait_for(" hung and was killed")?;
    let found = stopped.elapsed();
    assert!(found <= Duration::from_secs(5), "found after {found:?}");
    // Nothing that SIGCONT could wake is left of it.
    let left = run.worker(1);
    assert!(victims.iter().all(|victim| !left.contains(victim)));
    run.wait_for("resumed after step")?;
    let text = run.wait_for_step(STEPS)?;
    for agent in &mut agents {
        assert!(agent.0.wait()?.success(), "{text}");
    }
    assert!(
        text.contains("rank 1 does not run: stopped or starved for "),
        "{text}"
    );
    let blames_zero = |line: &str| line.contains("rank 0 (pid") && line.contains("hung");
    assert!(!text.lines().any(blames_zero), "{text}");
    assert_same_losses(&run)
}

/// As a scheduler ends a job: everybody is told, and the same job is started again later.
#[test]
fn a_job_that_is_told_to_end_saves_and_goes_on_later() -> Outcome {
    let run = Run::new("2")?;
    let folder = run.folder.path().join("outputs").display().to_string();
    let to_files = ["--checkpoint.enable", "true", "--job.dump_folder", &folder];
    let start = || -> Outcome<[Running; 2]> {
        Ok([run.agent_with(&to_files)?, run.agent_with(&to_files)?])
    };
    let mut first = start()?;
    run.wait_for_step(8)?;
    for agent in &first {
        tell_to_end(agent)?;
    }
    for agent in &mut first {
        assert_eq!(agent.0.wait()?.code(), Some(TERMINATED), "{}", run.text());
    }
    let step = left_after(&run.text())?;
    let mut second = start()?;
    run.wait_for(&format!("resumed after step {step} from"))?;
    let text = run.wait_for_step(STEPS)?;
    for agent in &mut second {
        assert!(agent.0.wait()?.success(), "{}", run.text());
    }
    assert!(losses(&text).values().all(|told| told.len() == 1), "{text}");
    assert_same_losses(&run)
}

/// A machine that is told to leave saves with the others, who go on without it and without losing a step.
#[test]
fn a_machine_that_is_told_to_leave_costs_no_step() -> Outcome {
    let run = Run::new("1:2")?;
    let rarely = ["--checkpoint.memory_interval", "100000"];
    let mut survivor = run.agent_with(&rarely)?;
    let mut leaver = run.agent_with(&rarely)?;
    run.wait_for(" of 2, node ")?;
    run.wait_for_step(8)?;
    tell_to_end(&leaver)?;
    assert_eq!(leaver.0.wait()?.code(), Some(TERMINATED), "{}", run.text());
    run.wait_for("1 of 2 ranks: data parallel 1 x 1")?;
    let text = run.wait_for("resumed after step")?;
    let step = left_after(&text)?;
    assert!(
        text.contains(&format!("resumed after step {step} from")),
        "{text}"
    );
    let text = run.wait_for_step(STEPS)?;
    assert!(survivor.0.wait()?.success(), "{}", run.text());
    assert!(losses(&text).values().all(|told| told.len() == 1), "{text}");
    assert_same_losses(&run)
}

#[test]
fn a_world_shrinks_and_grows_and_the_losses_stay() -> Outcome {
    let run = Run::new("1:2")?;
    let mut survivor = run.agent()?;
    let lost = run.agent()?;
    run.wait_for(" of 2, node ")?;
    run.wait_for_step(8)?;
    // Its worker and its holder go with it.
    drop(lost);
    run.wait_for("1 of 2 ranks: data parallel 1 x 1")?;
    run.wait_for("resumed after step")?;
    run.wait_for("step:")?;
    let mut back = run.agent()?;
    run.wait_for("2 of 2 ranks: data parallel 2 x 1")?;
    run.wait_for_step(STEPS)?;
    assert!(survivor.0.wait()?.success(), "{}", run.text());
    assert!(back.0.wait()?.success(), "{}", run.text());
    assert_same_losses(&run)
}

/// A run on loopback, and what all of its agents have said.
struct Run {
    folder: TempDir,
    nodes: &'static str,
    endpoint: String,
    said: Said,
    lines: Mutex<Receiver<String>>,
    _server: Running,
}

#[derive(Clone)]
struct Said {
    all: Arc<Mutex<Vec<String>>>,
    news: std::sync::mpsc::Sender<String>,
}

impl Run {
    fn new(nodes: &'static str) -> Outcome<Run> {
        let folder = TempDir::new()?;
        let endpoint = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let (news, lines) = channel();
        let said = Said {
            all: Arc::default(),
            news,
        };
        let mut command = Command::new(find("trainyard")?);
        command
            .args(["rendezvous", "--rdzv-id", "elastic", "--bind", &endpoint])
            .arg("--secret-file")
            .arg(folder.path().join("secret"))
            .arg("--record")
            .arg(folder.path().join("record"));
        let run = Run {
            _server: said.start(&mut command)?,
            lines: Mutex::new(lines),
            folder,
            nodes,
            endpoint,
            said,
        };
        run.wait_for("rendezvous of run")?;
        Ok(run)
    }

    /// With a copy in memory after every step.
    fn agent(&self) -> Outcome<Running> {
        self.agent_with(&["--checkpoint.memory_interval", "1"])
    }

    fn agent_with(&self, keys: &[&str]) -> Outcome<Running> {
        let mut command = Command::new(find("trainyard")?);
        command
            .args(["run", "--nnodes", self.nodes, "--max-restarts", "5"])
            .args(["--rdzv-id", "elastic", "--rdzv-backend", "c10d"])
            .args(["--rdzv-conf", "lease=3,last_call_timeout=1"])
            .args(["--rdzv-endpoint", &self.endpoint, "--run-secret-file"])
            .arg(self.folder.path().join("secret"))
            .arg("--")
            .args(train()?)
            .args(keys)
            .current_dir(repository(""))
            .env(MARK, self.folder.path())
            .env("OMP_NUM_THREADS", "1");
        self.said.start(&mut command)
    }

    fn wait_for(&self, text: &str) -> Outcome<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        while let Ok(line) = lines.recv_timeout(PATIENCE) {
            if line.contains(text) {
                return Ok(self.text());
            }
        }
        Err(format!("nobody said {text:?}:\n{}", self.text()).into())
    }

    fn wait_for_step(&self, step: u64) -> Outcome<String> {
        self.wait_for(&format!("step: {step:>2} "))
    }

    fn text(&self) -> String {
        let all = self.said.all.lock();
        all.unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    fn mark(&self) -> String {
        format!("{MARK}={}", self.folder.path().display())
    }

    /// The processes of a rank.
    fn worker(&self, rank: usize) -> Vec<i32> {
        processes(&[&self.mark(), &format!("RANK={rank}")])
    }

    fn signal_worker(&self, rank: usize, signal: Signal) -> Outcome {
        signal_rank(&self.mark(), rank, signal)
    }
}

impl Said {
    /// Starts a process whose lines are heard.
    fn start(&self, command: &mut Command) -> Outcome<Running> {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Running(command.spawn()?);
        let stdout = child.0.stdout.take().map(|stream| Box::new(stream) as _);
        let stderr = child.0.stderr.take().map(|stream| Box::new(stream) as _);
        let streams: [Option<Box<dyn Read + Send>>; 2] = [stdout, stderr];
        for stream in streams.into_iter().flatten() {
            let said = self.clone();
            thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let mut all = said.all.lock().unwrap_or_else(PoisonError::into_inner);
                    all.push(line.clone());
                    let _ = said.news.send(line);
                }
            });
        }
        Ok(child)
    }
}

fn tell_to_end(agent: &Running) -> Outcome {
    Ok(kill_process(Pid::from_child(&agent.0), Signal::TERM)?)
}

/// The step after which ranks said to leave.
fn left_after(text: &str) -> Outcome<u64> {
    let words = "told to end: leaving after step ";
    let rest = text.split_once(words).ok_or("nobody left")?.1;
    Ok(rest.split_whitespace().next().unwrap_or_default().parse()?)
}

fn train() -> Outcome<Vec<String>> {
    let program = find("trainyard")?.display().to_string();
    let steps = STEPS.to_string();
    let words = [
        &program,
        "train",
        "configs/llama-tiny.toml",
        "--metrics.log_freq",
        "1",
        "--training.steps",
        &steps,
        "--training.seq_len",
        "32",
        "--training.dtype",
        "float64",
    ];
    Ok(words.map(str::to_owned).to_vec())
}

/// Every step that was told, told again or not, is that of a job that nobody disturbed.
fn assert_same_losses(run: &Run) -> Outcome {
    static UNDISTURBED: OnceLock<Result<Losses, String>> = OnceLock::new();
    let expected = UNDISTURBED.get_or_init(|| undisturbed().map_err(|e| e.to_string()));
    let expected = expected.as_ref().map_err(Clone::clone)?;
    let told = losses(&run.text());
    assert_eq!(told.len() as u64, STEPS, "a step was never told");
    for (step, losses) in told {
        for loss in losses {
            assert_eq!(Some(&loss), expected[&step].first(), "step {step}");
        }
    }
    Ok(())
}

fn undisturbed() -> Outcome<Losses> {
    let output = Command::new(find("trainyard")?)
        .args(["run", "--standalone", "--nproc-per-node", "2", "--"])
        .args(train()?)
        .current_dir(repository(""))
        .output()?;
    Ok(losses(&String::from_utf8_lossy(&output.stdout)))
}

fn losses(text: &str) -> Losses {
    let mut losses = Losses::new();
    for (step, loss) in text.lines().filter_map(told) {
        losses.entry(step).or_default().push(loss);
    }
    losses
}

fn told(line: &str) -> Option<(u64, String)> {
    let rest = line.split_once("step:")?.1;
    let step = rest.split_whitespace().next()?.parse().ok()?;
    let loss = rest.split_once("loss:")?.1.split_whitespace().next()?;
    Some((step, loss.to_owned()))
}
