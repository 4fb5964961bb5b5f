//! How a server bears a crowd: agents as tasks, the server as a process, TLS between them.
//!
//! ```sh
//! cargo run --release -p trainyard-rendezvous --example crowd -- 250 500 1000
//! ```
//!
//! With `--json`, a line of JSON for every size; `bench/faults/thousand` judges those.

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
    Address, Advert, Backend, Decision, Epoch, Join, Policy, Report, Seat, Secret, Seen,
};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Runtime::new()?;
    if let [word, folder] = &args[..]
        && word == "serve"
    {
        return runtime.block_on(serve_until_closed(Path::new(folder)));
    }
    let is_json = args.iter().any(|word| word == "--json");
    args.retain(|word| word != "--json");
    let mut sizes = args
        .iter()
        .map(|size| size.parse())
        .collect::<Result<Vec<usize>, _>>()?;
    if sizes.is_empty() {
        sizes = vec![250, 500, 1000];
    }
    if !is_json {
        println!(
            "agents  form s  letters  answers  re-form s  beyond lease s  letters  answers  left: re-form s  server MiB"
        );
    }
    for size in sizes {
        let measured = runtime.block_on(measure(size))?;
        match is_json {
            true => println!("{}", serde_json::to_string(&measured)?),
            false => println!("{measured}"),
        }
    }
    Ok(())
}

/// Seconds, and per agent how many letters came and answers went, heartbeats included.
#[derive(serde::Serialize)]
struct Measured {
    agents: usize,
    form: f64,
    form_letters: f64,
    form_answers: f64,
    /// After one died, which only its lease can tell.
    reform: f64,
    reform_beyond_lease: f64,
    reform_letters: f64,
    reform_answers: f64,
    /// After one said that it goes.
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
            self.form_letters,
            self.form_answers,
            self.reform,
            self.reform_beyond_lease,
            self.reform_letters,
            self.reform_answers,
            self.reform_after_leave,
            self.server_mib,
        )
    }
}

/// Answers every line with how many letters and answers there were.
async fn serve_until_closed(folder: &Path) -> Result<(), Error> {
    let secret = Secret::read(&folder.join("secret"))?;
    let record = folder.join("record");
    let server = serve(
        ([127, 0, 0, 1], 0).into(),
        "crowd",
        &secret,
        &record,
        Limits::default(),
    )
    .await?;
    println!("{}", server.address().port());
    let mut lines = std::io::stdin().lines();
    while let Some(Ok(_)) = tokio::task::block_in_place(|| lines.next()) {
        let (letters, answers) = server.traffic();
        println!("{letters} {answers}");
    }
    Ok(())
}

/// The server's process.
struct Server {
    child: Child,
    ask: ChildStdin,
    said: BufReader<ChildStdout>,
    port: u16,
}

impl Server {
    fn start(folder: &Path) -> Result<Server, Error> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("serve")
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let ask = child.stdin.take().ok_or("no stdin")?;
        let mut said = BufReader::new(child.stdout.take().ok_or("no stdout")?);
        let mut port = String::new();
        said.read_line(&mut port)?;
        let port = port.trim().parse()?;
        Ok(Server {
            child,
            ask,
            said,
            port,
        })
    }

    fn traffic(&mut self) -> Result<(f64, f64), Error> {
        writeln!(self.ask)?;
        let mut line = String::new();
        self.said.read_line(&mut line)?;
        let (letters, answers) = line.trim().split_once(' ').ok_or("no two numbers")?;
        Ok((letters.parse()?, answers.parse()?))
    }

    /// The most memory it ever held.
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
    let folder = tempfile::tempdir()?;
    let secret = Secret::read_or_create(&folder.path().join("secret"))?;
    let mut server = Server::start(folder.path())?;
    let address = Address {
        host: "127.0.0.1".into(),
        port: server.port,
    };
    let client = Arc::new(Client::new(address, "crowd", &secret)?);
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
        form_letters: first.0 / each,
        form_answers: first.1 / each,
        reform,
        reform_beyond_lease: reform - policy.lease.as_secs_f64(),
        reform_letters: (second.0 - first.0) / each,
        reform_answers: (second.1 - first.1) / each,
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
        let mut runs = agent.runs.clone();
        tokio::time::timeout(
            Duration::from_secs(60),
            runs.wait_for(|runs| *runs == epoch),
        )
        .await??;
    }
    Ok(())
}

struct Agent {
    runs: watch::Receiver<Epoch>,
    /// Asks it to go.
    leave: Arc<Notify>,
    life: JoinHandle<()>,
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.life.abort();
    }
}

impl Agent {
    fn start(client: &Arc<Client>, number: usize, policy: &Policy) -> Agent {
        let node = format!("node-{number}");
        let join = Join {
            run: "crowd".into(),
            policy: policy.clone(),
            advert: Advert {
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
            seen: Seen::default(),
            said: None,
        };
        let (shown, runs) = watch::channel(Epoch(0));
        let (client, beat) = (Arc::clone(client), policy.heartbeat());
        let leave = Arc::<Notify>::default();
        let asked = Arc::clone(&leave);
        let life = tokio::spawn(async move {
            match client.join(join).await {
                Ok(seat) => tokio::select! {
                    () = live(&*seat, beat, shown) => {}
                    () = asked.notified() => seat.leave().await,
                },
                Err(error) => eprintln!("{error}"),
            }
        });
        Agent { runs, leave, life }
    }
}

async fn live(seat: &dyn Seat, beat: Duration, shown: watch::Sender<Epoch>) {
    let mut beats = tokio::time::interval_at(tokio::time::Instant::now() + beat, beat);
    let mut decision = Ok(seat.decision());
    loop {
        match decision {
            Ok(Decision::Run(place)) => {
                shown.send_replace(place.epoch);
            }
            Ok(Decision::Wait { epoch, .. } | Decision::Lapsed { epoch }) if epoch > Epoch(0) => {
                seat.report(epoch, Report::Stopped).await;
            }
            Ok(_) => {}
            Err(_) => return,
        }
        decision = loop {
            tokio::select! {
                biased;
                next = seat.next() => break next,
                _ = beats.tick() => seat.heartbeat().await,
            }
        };
    }
}
