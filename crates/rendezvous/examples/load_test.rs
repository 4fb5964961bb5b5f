//! Load test of a rendezvous server: agents as tasks of one process, the server as another, TLS between them.
//!
//! ```sh
//! cargo run --release -p trainyard-rendezvous --example load_test -- 250 500 1000
//! ```
//!
//! With `--json` it prints a line of JSON for every size, which `bench/faults/thousand` compares with its limits.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use trainyard_rendezvous::server::{Client, Limits, serve};
use trainyard_rendezvous::{
    Address, Backend, Decision, Epoch, Join, Membership, NodeInfo, Policy, Report, RunSecret,
    Watermark,
};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Runtime::new()?;
    if let [command, dir] = &args[..]
        && command == "serve"
    {
        return runtime.block_on(serve_until_closed(Path::new(dir)));
    }
    let is_json = args.iter().any(|arg| arg == "--json");
    args.retain(|arg| arg != "--json");
    let mut sizes = args
        .iter()
        .map(|size| size.parse())
        .collect::<Result<Vec<usize>, _>>()?;
    if sizes.is_empty() {
        sizes = vec![250, 500, 1000];
    }
    if !is_json {
        println!(
            "agents  form s  requests  responses  re-form s  beyond lease s  requests  responses  leave: re-form s  server MiB"
        );
    }
    for size in sizes {
        let measured = runtime.block_on(measure(size))?;
        if is_json {
            println!("{}", serde_json::to_string(&measured)?)
        } else {
            println!("{measured}")
        }
    }
    Ok(())
}

/// Times in seconds, and the number of requests and responses per agent, including heartbeats.
#[derive(serde::Serialize)]
struct Measured {
    agents: usize,
    form: f64,
    form_requests: f64,
    form_responses: f64,
    /// The time to form a world after an agent crashed, which the others learn when its lease expires.
    reform: f64,
    reform_beyond_lease: f64,
    reform_requests: f64,
    reform_responses: f64,
    /// The time to form a world after an agent left.
    reform_after_leave: f64,
    server_mib: f64,
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:6}  {:6.2}  {:7.2}  {:7.2}  {:9.2}  {:14.2}  {:7.2}  {:7.2}  {:15.2}  {:10.1}",
            self.agents,
            self.form,
            self.form_requests,
            self.form_responses,
            self.reform,
            self.reform_beyond_lease,
            self.reform_requests,
            self.reform_responses,
            self.reform_after_leave,
            self.server_mib,
        )
    }
}

/// Runs the server, and answers every line on stdin with the number of requests and responses so far.
async fn serve_until_closed(dir: &Path) -> Result<(), Error> {
    let secret = RunSecret::read(&dir.join("secret"))?;
    let record = dir.join("record");
    let server = serve(
        ([127, 0, 0, 1], 0).into(),
        "load-test",
        &secret,
        &record,
        Limits::default(),
    )
    .await?;
    println!("{}", server.address().port());
    let mut lines = std::io::stdin().lines();
    while let Some(Ok(_)) = tokio::task::block_in_place(|| lines.next()) {
        let (requests, responses) = server.traffic();
        println!("{requests} {responses}");
    }
    Ok(())
}

/// The process of the server.
struct Server {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    port: u16,
}

impl Server {
    fn start(dir: &Path) -> Result<Server, Error> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = child.stdin.take().ok_or("no stdin")?;
        let mut stdout = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        let mut port = String::new();
        stdout.read_line(&mut port)?;
        let port = port.trim().parse()?;
        Ok(Server {
            child,
            stdin,
            stdout,
            port,
        })
    }

    fn traffic(&mut self) -> Result<(f64, f64), Error> {
        writeln!(self.stdin)?;
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        let (requests, responses) = line
            .trim()
            .split_once(' ')
            .ok_or("the server did not print two numbers")?;
        Ok((requests.parse()?, responses.parse()?))
    }

    /// The peak memory of the server.
    fn peak_mib(&self) -> Result<f64, Error> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib: f64 = line
            .ok_or("no VmHWM")?
            .trim_end_matches("kB")
            .trim()
            .parse()?;
        Ok(kib / 1024.0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

async fn measure(size: usize) -> Result<Measured, Error> {
    let dir = tempfile::tempdir()?;
    let secret = RunSecret::read_or_create(&dir.path().join("secret"))?;
    let mut server = Server::start(dir.path())?;
    let address = Address {
        host: "127.0.0.1".into(),
        port: server.port,
    };
    let client = Arc::new(Client::new(address, "load-test", &secret)?);
    let policy = Policy::new(size as u32 / 2, size as u32);

    let began = Instant::now();
    let mut agents: Vec<Agent> = (0..size)
        .map(|number| Agent::start(&client, number, &policy))
        .collect();
    let form = seconds_until(&agents, Epoch(1), began).await?;
    let first = server.traffic()?;

    let began = Instant::now();
    drop(agents.remove(size / 3));
    let reform = seconds_until(&agents, Epoch(2), began).await?;
    let second = server.traffic()?;

    let began = Instant::now();
    let leaver = agents.remove(size / 2);
    leaver.leave.notify_one();
    let reform_after_leave = seconds_until(&agents, Epoch(3), began).await?;

    let each = size as f64;
    Ok(Measured {
        agents: size,
        form,
        form_requests: first.0 / each,
        form_responses: first.1 / each,
        reform,
        reform_beyond_lease: reform - policy.lease.as_secs_f64(),
        reform_requests: (second.0 - first.0) / each,
        reform_responses: (second.1 - first.1) / each,
        reform_after_leave,
        server_mib: server.peak_mib()?,
    })
}

async fn seconds_until(agents: &[Agent], epoch: Epoch, began: Instant) -> Result<f64, Error> {
    wait_for_world(agents, epoch).await?;
    Ok(began.elapsed().as_secs_f64())
}

async fn wait_for_world(agents: &[Agent], epoch: Epoch) -> Result<(), Error> {
    for agent in agents {
        let mut current = agent.epoch.clone();
        tokio::time::timeout(
            Duration::from_secs(60),
            current.wait_for(|current| *current == epoch),
        )
        .await??;
    }
    Ok(())
}

struct Agent {
    epoch: watch::Receiver<Epoch>,
    /// Asks the agent to leave.
    leave: Arc<Notify>,
    task: JoinHandle<()>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Agent {
    fn start(client: &Arc<Client>, number: usize, policy: &Policy) -> Agent {
        let node = format!("node-{number}");
        let join = Join {
            run: "load-test".into(),
            policy: policy.clone(),
            node_info: NodeInfo {
                store: Address {
                    host: format!("{node}.cluster.local"),
                    port: 29500,
                },
                node,
                instance: number as u64,
                num_workers: 8,
                capabilities: BTreeSet::from(["cuda".to_owned()]),
                node_rank: None,
            },
            watermark: Watermark::default(),
            last_report: None,
        };
        let (epochs, epoch) = watch::channel(Epoch(0));
        let (client, interval) = (Arc::clone(client), policy.heartbeat());
        let leave = Arc::<Notify>::default();
        let requested = Arc::clone(&leave);
        let task = tokio::spawn(async move {
            match client.join(join).await {
                Ok(membership) => tokio::select! {
                    () = follow(&*membership, interval, epochs) => {}
                    () = requested.notified() => membership.leave().await,
                },
                Err(error) => eprintln!("{error}"),
            }
        });
        Agent { epoch, leave, task }
    }
}

async fn follow(membership: &dyn Membership, interval: Duration, epochs: watch::Sender<Epoch>) {
    let mut heartbeats = tokio::time::interval_at(tokio::time::Instant::now() + interval, interval);
    let mut decision = Ok(membership.decision());
    loop {
        match decision {
            Ok(Decision::Run(assignment)) => {
                epochs.send_replace(assignment.epoch);
            }
            Ok(Decision::Wait { epoch, .. } | Decision::LeaseExpired { epoch })
                if epoch > Epoch(0) =>
            {
                membership.report(epoch, Report::Stopped).await;
            }
            Ok(_) => {}
            Err(_) => return,
        }
        decision = loop {
            tokio::select! {
                biased;
                next = membership.next() => break next,
                _ = heartbeats.tick() => membership.heartbeat().await,
            }
        };
    }
}
