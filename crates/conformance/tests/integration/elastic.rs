//! Elastic training: workers and agents are killed and come back, worlds shrink and grow, and every loss equals that
//! of a job without faults.
//!
//! In double precision, so that a different order of summation does not show in the digits of the log.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use trainyard_conformance::as_trials;
use trainyard_conformance::programs::{Running, find, processes, python, repository, signal_rank};

const STEPS: u64 = 60;
/// Longer than anything here takes.
const TIMEOUT: Duration = Duration::from_secs(240);
/// The exit code of an agent that got SIGTERM.
const TERMINATED: i32 = 128 + 15;
const MARK: &str = "TRAINYARD_TEST_MARK";

type Outcome<T = ()> = Result<T, Box<dyn Error>>;
/// The logged losses of every step; several if the step was repeated.
type Losses = BTreeMap<u64, Vec<String>>;

/// One test for each fault.
pub fn trials() -> Vec<Trial> {
    as_trials(
        "elastic",
        &[
            (
                "a_killed_worker_costs_at_most_one_step_and_the_losses_stay_the_same",
                a_killed_worker_costs_at_most_one_step_and_the_losses_stay_the_same,
            ),
            (
                "a_killed_worker_with_nccl_groups_resumes",
                a_killed_worker_with_nccl_groups_resumes,
            ),
            (
                "a_stopped_worker_is_killed_and_the_losses_stay_the_same",
                a_stopped_worker_is_killed_and_the_losses_stay_the_same,
            ),
            (
                "a_terminated_job_saves_and_resumes",
                a_terminated_job_saves_and_resumes,
            ),
            (
                "a_terminated_node_costs_no_step",
                a_terminated_node_costs_no_step,
            ),
            (
                "pytorch_ranks_meet_in_the_store_of_their_agents",
                pytorch_ranks_meet_in_the_store_of_their_agents,
            ),
            (
                "a_world_shrinks_and_grows_and_the_losses_stay_the_same",
                a_world_shrinks_and_grows_and_the_losses_stay_the_same,
            ),
        ],
    )
}

fn a_killed_worker_costs_at_most_one_step_and_the_losses_stay_the_same() -> Outcome {
    let run = Run::new("2")?;
    let mut agents = [run.agent()?, run.agent()?];
    run.wait_for_step(8)?;
    run.signal_worker(1, Signal::KILL)?;
    run.wait_for("resumed from step")?;
    let lines = run.wait_for_step(STEPS)?;
    assert!(
        lines.contains("in peer memory; storage has none"),
        "{lines}"
    );
    for agent in &mut agents {
        assert!(agent.0.wait()?.success(), "{}", run.text());
    }
    assert_same_losses(&run)
}

/// On simulated GPUs, whose kernels compute nothing, so losses cannot be compared.
fn a_killed_worker_with_nccl_groups_resumes() -> Outcome {
    let run = Run::new("1")?;
    let mut agent = run.agent_on_gpus()?;
    run.wait_for_step(8)?;
    run.signal_worker(1, Signal::KILL)?;
    run.wait_for("resumed from step")?;
    let text = run.wait_for_step(STEPS)?;
    assert!(text.contains("in peer memory; storage has none"), "{text}");
    assert!(agent.0.wait()?.success(), "{}", run.text());
    let all = losses(&text);
    let repeated = all.values().filter(|losses| losses.len() > 1).count();
    assert!(repeated <= 1, "{repeated} steps were repeated:\n{text}");
    Ok(())
}

/// A step takes a few hundredths of a second here, so the limit is five seconds.
fn a_stopped_worker_is_killed_and_the_losses_stay_the_same() -> Outcome {
    let run = Run::new("2")?;
    let mut agents = [run.agent()?, run.agent()?];
    run.wait_for_step(12)?;
    let (victims, stopped) = (run.worker(1), Instant::now());
    run.signal_worker(1, Signal::STOP)?;
    run.wait_for(" hung and was killed")?;
    let found = stopped.elapsed();
    assert!(found <= Duration::from_secs(5), "found after {found:?}");
    // No process is left that SIGCONT could wake up.
    let left = run.worker(1);
    assert!(victims.iter().all(|victim| !left.contains(victim)));
    run.wait_for("resumed from step")?;
    let text = run.wait_for_step(STEPS)?;
    for agent in &mut agents {
        assert!(agent.0.wait()?.success(), "{text}");
    }
    assert!(
        text.contains("rank 1 is not running: its process has been stopped or starved for "),
        "{text}"
    );
    let mentions_rank_0 = |line: &str| line.contains("rank 0 (pid") && line.contains("hung");
    assert!(!text.lines().any(mentions_rank_0), "{text}");
    assert_same_losses(&run)
}

/// A PyTorch script, unchanged, on two agents: each rank reaches its own agent over loopback, and one agent relays.
fn pytorch_ranks_meet_in_the_store_of_their_agents() -> Outcome {
    let run = Run::new("2")?;
    let script = "import os, torch, torch.distributed as dist\n\
         dist.init_process_group('gloo')\n\
         sum = torch.tensor([dist.get_rank() + 1.0])\n\
         dist.all_reduce(sum)\n\
         print('sum', sum.item(), os.environ['MASTER_ADDR'], flush=True)\n\
         dist.destroy_process_group()\n";
    let worker = [python()?.display().to_string(), "-c".into(), script.into()];
    let start = || run.start_agent(&mut Command::new(find("trainyard")?), "1", &worker);
    for mut agent in [start()?, start()?] {
        assert!(agent.0.wait()?.success(), "{}", run.text());
    }
    run.wait_for("sum 3.0 127.0.0.1")?;
    run.wait_for("sum 3.0 127.0.0.1")?;
    Ok(())
}

/// As a scheduler preempts a job: all agents get SIGTERM, and the same job is started again later.
fn a_terminated_job_saves_and_resumes() -> Outcome {
    let run = Run::new("2")?;
    let dir = run.dir.path().join("outputs").display().to_string();
    let to_files = ["--checkpoint.enable", "true", "--job.dump_folder", &dir];
    let start = || -> Outcome<[Running; 2]> {
        Ok([run.agent_with(&to_files)?, run.agent_with(&to_files)?])
    };
    let mut first = start()?;
    run.wait_for_step(8)?;
    for agent in &first {
        terminate(agent)?;
    }
    for agent in &mut first {
        assert_eq!(agent.0.wait()?.code(), Some(TERMINATED), "{}", run.text());
    }
    let step = left_after(&run.text())?;
    let mut second = start()?;
    run.wait_for(&format!("resumed from step {step}:"))?;
    let text = run.wait_for_step(STEPS)?;
    for agent in &mut second {
        assert!(agent.0.wait()?.success(), "{}", run.text());
    }
    assert!(
        losses(&text).values().all(|losses| losses.len() == 1),
        "{text}"
    );
    assert_same_losses(&run)
}

/// When one node is preempted, all ranks save, and the others continue without it and without losing a step.
fn a_terminated_node_costs_no_step() -> Outcome {
    let run = Run::new("1:2")?;
    let rarely = ["--checkpoint.memory_interval", "100000"];
    let mut survivor = run.agent_with(&rarely)?;
    let mut leaver = run.agent_with(&rarely)?;
    run.wait_for(" of 2, node ")?;
    run.wait_for_step(8)?;
    terminate(&leaver)?;
    assert_eq!(leaver.0.wait()?.code(), Some(TERMINATED), "{}", run.text());
    run.wait_for("1 of 2 ranks: data parallel 1 x 1")?;
    let text = run.wait_for("resumed from step")?;
    let step = left_after(&text)?;
    assert!(
        text.contains(&format!("resumed from step {step}:")),
        "{text}"
    );
    let text = run.wait_for_step(STEPS)?;
    assert!(survivor.0.wait()?.success(), "{}", run.text());
    assert!(
        losses(&text).values().all(|losses| losses.len() == 1),
        "{text}"
    );
    assert_same_losses(&run)
}

fn a_world_shrinks_and_grows_and_the_losses_stay_the_same() -> Outcome {
    let run = Run::new("1:2")?;
    let mut survivor = run.agent()?;
    let lost = run.agent()?;
    run.wait_for(" of 2, node ")?;
    run.wait_for_step(8)?;
    // Kills its worker and its replica server, too.
    drop(lost);
    run.wait_for("1 of 2 ranks: data parallel 1 x 1")?;
    run.wait_for("resumed from step")?;
    run.wait_for("step:")?;
    let mut back = run.agent()?;
    run.wait_for("2 of 2 ranks: data parallel 2 x 1")?;
    run.wait_for_step(STEPS)?;
    assert!(survivor.0.wait()?.success(), "{}", run.text());
    assert!(back.0.wait()?.success(), "{}", run.text());
    assert_same_losses(&run)
}

/// A run on loopback, and the output of its agents.
struct Run {
    dir: TempDir,
    nodes: &'static str,
    endpoint: String,
    output: Output,
    lines: Mutex<Receiver<String>>,
    _server: Running,
}

#[derive(Clone)]
struct Output {
    all: Arc<Mutex<Vec<String>>>,
    new_lines: std::sync::mpsc::Sender<String>,
}

impl Run {
    fn new(nodes: &'static str) -> Outcome<Run> {
        let dir = TempDir::new()?;
        let endpoint = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let (new_lines, lines) = channel();
        let output = Output {
            all: Arc::default(),
            new_lines,
        };
        let mut command = Command::new(find("trainyard")?);
        command
            .args(["rendezvous", "--rdzv-id", "elastic", "--bind", &endpoint])
            .arg("--run-secret-file")
            .arg(dir.path().join("secret"))
            .arg("--record")
            .arg(dir.path().join("record"));
        let run = Run {
            _server: output.start(&mut command)?,
            lines: Mutex::new(lines),
            dir,
            nodes,
            endpoint,
            output,
        };
        run.wait_for("rendezvous of run")?;
        Ok(run)
    }

    /// An agent whose ranks save an in-memory checkpoint after every step.
    fn agent(&self) -> Outcome<Running> {
        self.agent_with(&["--checkpoint.memory_interval", "1"])
    }

    fn agent_with(&self, keys: &[&str]) -> Outcome<Running> {
        let mut worker = train()?;
        worker.extend(keys.iter().map(|key| (*key).to_owned()));
        self.start_agent(&mut Command::new(find("trainyard")?), "1", &worker)
    }

    /// An agent with two ranks on simulated GPUs.
    fn agent_on_gpus(&self) -> Outcome<Running> {
        let mut command = Command::new(find("trainyard")?);
        command
            .args(["simulate", "--gpus", "2", "--"])
            .arg(find("trainyard")?);
        let mut worker = train()?;
        worker.extend(["--checkpoint.memory_interval", "1"].map(str::to_owned));
        self.start_agent(&mut command, "2", &worker)
    }

    fn start_agent(
        &self,
        command: &mut Command,
        num_ranks: &str,
        worker: &[String],
    ) -> Outcome<Running> {
        command
            .args(["run", "--nnodes", self.nodes, "--max-restarts", "5"])
            .args(["--nproc-per-node", num_ranks])
            .args(["--rdzv-id", "elastic", "--rdzv-backend", "server"])
            .args(["--rdzv-conf", "lease=3,last_call_timeout=1"])
            .args(["--rdzv-endpoint", &self.endpoint, "--run-secret-file"])
            .arg(self.dir.path().join("secret"))
            .arg("--")
            .args(worker)
            .current_dir(repository(""))
            .env(MARK, self.dir.path())
            .env("OMP_NUM_THREADS", "1");
        self.output.start(command)
    }

    fn wait_for(&self, text: &str) -> Outcome<String> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        while let Ok(line) = lines.recv_timeout(TIMEOUT) {
            if line.contains(text) {
                return Ok(self.text());
            }
        }
        Err(format!("no line with {text:?} in time:\n{}", self.text()).into())
    }

    fn wait_for_step(&self, step: u64) -> Outcome<String> {
        self.wait_for(&format!("step: {step:>2} "))
    }

    fn text(&self) -> String {
        let all = self.output.all.lock();
        all.unwrap_or_else(PoisonError::into_inner).join("\n")
    }

    fn mark(&self) -> String {
        format!("{MARK}={}", self.dir.path().display())
    }

    /// The processes of a rank.
    fn worker(&self, rank: usize) -> Vec<i32> {
        processes(&[&self.mark(), &format!("RANK={rank}")])
    }

    fn signal_worker(&self, rank: usize, signal: Signal) -> Outcome {
        signal_rank(&self.mark(), rank, signal)
    }
}

impl Output {
    /// Starts a process and collects its lines.
    fn start(&self, command: &mut Command) -> Outcome<Running> {
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Running(command.spawn()?);
        let stdout = child.0.stdout.take().map(|stream| Box::new(stream) as _);
        let stderr = child.0.stderr.take().map(|stream| Box::new(stream) as _);
        let streams: [Option<Box<dyn Read + Send>>; 2] = [stdout, stderr];
        for stream in streams.into_iter().flatten() {
            let output = self.clone();
            thread::spawn(move || {
                for line in BufReader::new(stream).lines().map_while(Result::ok) {
                    let mut all = output.all.lock().unwrap_or_else(PoisonError::into_inner);
                    all.push(line.clone());
                    let _ = output.new_lines.send(line);
                }
            });
        }
        Ok(child)
    }
}

fn terminate(agent: &Running) -> Outcome {
    Ok(kill_process(Pid::from_child(&agent.0), Signal::TERM)?)
}

/// The step after which ranks saved and exited.
fn left_after(text: &str) -> Outcome<u64> {
    let marker = "preempted by SIGTERM: stopping after step ";
    let rest = text.split_once(marker).ok_or("no rank stopped")?.1;
    Ok(rest.split_whitespace().next().unwrap_or_default().parse()?)
}

fn train() -> Outcome<Vec<String>> {
    let program = find("trainyard")?.display().to_string();
    let steps = STEPS.to_string();
    let args = [
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
    Ok(args.map(str::to_owned).to_vec())
}

/// Every logged loss, also of repeated steps, equals that of a job without faults.
fn assert_same_losses(run: &Run) -> Outcome {
    static REFERENCE: OnceLock<Result<Losses, String>> = OnceLock::new();
    let expected = REFERENCE.get_or_init(|| reference().map_err(|e| e.to_string()));
    let expected = expected.as_ref().map_err(Clone::clone)?;
    let logged = losses(&run.text());
    assert_eq!(logged.len() as u64, STEPS, "a step was never logged");
    for (step, losses) in logged {
        for loss in losses {
            assert_eq!(Some(&loss), expected[&step].first(), "step {step}");
        }
    }
    Ok(())
}

fn reference() -> Outcome<Losses> {
    let output = Command::new(find("trainyard")?)
        .args(["run", "--standalone", "--nproc-per-node", "2", "--"])
        .args(train()?)
        .current_dir(repository(""))
        .output()?;
    Ok(losses(&String::from_utf8_lossy(&output.stdout)))
}

fn losses(text: &str) -> Losses {
    let mut losses = Losses::new();
    for (step, loss) in text.lines().filter_map(step_and_loss) {
        losses.entry(step).or_default().push(loss);
    }
    losses
}

fn step_and_loss(line: &str) -> Option<(u64, String)> {
    let rest = line.split_once("step:")?.1;
    let step = rest.split_whitespace().next()?.parse().ok()?;
    let loss = rest.split_once("loss:")?.1.split_whitespace().next()?;
    Some((step, loss.to_owned()))
}
