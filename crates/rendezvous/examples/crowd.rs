//! How a server bears a crowd: agents as tasks, the server as a process, TLS between them.
//!
//! ```sh
//! cargo run --release -p trainyard-rendezvous --example crowd -- 250 500 1000
//! ```

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use trainyard_rendezvous::server::{Client, Limits, serve};
use trainyard_rendezvous::{
    Address, Advert, Backend, Decision, Epoch, Join, Policy, Report, Seat, Secret,
};

type Error = Box<dyn std::error::Error>;

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Runtime::new()?;
    if let [word, folder] = &args[..]
        && word == "serve"
    {
        return runtime.block_on(serve_until_closed(Path::new(folder)));
    }
    let sizes = match args.is_empty() {
        true => vec![250, 500, 1000],
        false => args
            .iter()
            .map(|size| size.parse())
            .collect::<Result<_, _>>()?,
    };
    println!(
        "agents  form s  letters  answers  re-form s  beyond lease s  letters  answers  server MiB"
    );
    sizes
        .into_iter()
        .try_for_each(|size| runtime.block_on(measure(size)))
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

async fn measure(size: usize) -> Result<(), Error> {
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
    let agents: Vec<Agent> = (0..size)
        .map(|number| Agent::start(&client, number, &policy))
        .collect();
    wait_for_world(&agents, Epoch(1)).await?;
    let formed = began.elapsed();
    let first = server.traffic()?;

    let mut agents = agents;
    drop(agents.remove(size / 3));
    let began = Instant::now();
    wait_for_world(&agents, Epoch(2)).await?;
    let formed_again = began.elapsed();
    let second = server.traffic()?;

    let each = size as f64;
    println!(
        "{size:6}  {:6.2}  {:7.2}  {:7.2}  {:9.2}  {:14.2}  {:7.2}  {:7.2}  {:10.1}",
        formed.as_secs_f64(),
        first.0 / each,
        first.1 / each,
        formed_again.as_secs_f64(),
        formed_again.as_secs_f64() - policy.lease.as_secs_f64(),
        (second.0 - first.0) / each,
        (second.1 - first.1) / each,
        server.peak_mib()?,
    );
    Ok(())
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
            seen: Epoch(0),
            said: None,
        };
        let (shown, runs) = watch::channel(Epoch(0));
        let (client, beat) = (Arc::clone(client), policy.heartbeat());
        let life = tokio::spawn(async move {
            match client.join(join).await {
                Ok(seat) => live(&*seat, beat, shown).await,
                Err(error) => eprintln!("{error}"),
            }
        });
        Agent { runs, life }
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
