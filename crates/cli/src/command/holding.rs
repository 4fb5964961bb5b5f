//! The options of `run` for copies in memory, and what the launcher keeps because of them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use trainyard_copies::{
    HOLDER, HOLDER_INDEX, HOLDERS, Holder, Neighbourhood, SECRET_FILE, Secret, SharedSecret,
};
use trainyard_elastic::Job;

use crate::failure::Failure;

/// What a holder keeps where nobody can tell how much memory there is.
const MODEST: u64 = 1 << 30;

/// Where copies of the ranks' state are held.
#[derive(Debug, Args)]
pub struct Holding {
    /// The holders of all machines, in their order; this machine's is started here. Without it, one
    /// machine has one on 127.0.0.1
    #[arg(long, value_name = "HOST:PORT,..", requires = "run_secret_file")]
    holders: Option<String>,
    /// The holders run already, as `trainyard holder`
    #[arg(long, alias = "external_holders", requires = "holders")]
    external_holders: bool,
    /// What only members of the run know, in a file of mode 600: 64 hexadecimal digits, or with
    /// --holders any 16 bytes or more
    #[arg(long, alias = "run_secret_file", value_name = "FILE")]
    run_secret_file: Option<PathBuf>,
    /// How many bytes this machine's holder keeps at most; half of the memory when not given
    #[arg(long, alias = "holder_bytes", value_name = "BYTES")]
    holder_bytes: Option<u64>,
}

/// What must live as long as the launcher.
#[derive(Debug, Default)]
pub struct Held {
    _holder: Option<Holder>,
    _secret: Option<SharedSecret>,
}

impl Holding {
    /// Starts what is to be started here, and lets the ranks know.
    pub fn start(&self, job: &mut Job) -> Result<Held, Failure> {
        match (&self.holders, &self.run_secret_file) {
            (Some(holders), Some(secret)) => self.start_named(holders, secret, job),
            (None, Some(_)) => {
                let message = "--run-secret-file is for several machines, and this is one";
                Err(Failure::usage(message)
                    .hint("add --holders, or --rdzv-backend and --rdzv-endpoint"))
            }
            _ if job.num_nodes == 1 => Ok(self.start_alone(job)),
            // Holders that other machines do not know would be of no use to them.
            _ => Ok(Held::default()),
        }
    }

    /// The file with the run's secret, if one was named.
    pub fn secret_file(&self) -> Option<&Path> {
        self.run_secret_file.as_deref()
    }

    /// Starts this machine's holder where machines come and go; the ranks learn of each other's when they meet.
    pub fn start_elastic(&self, host: &str, secret: &Path, job: &mut Job) -> Result<Held, Failure> {
        if self.holders.is_some() {
            let message = "--holders names machines, but with this --rdzv-backend they come and go";
            return Err(Failure::usage(message).hint("leave it out: every agent has a holder"));
        }
        let key = Secret::read(secret).map_err(Failure::usage)?;
        let address = match host.contains(':') {
            true => format!("[{host}]:0"),
            false => format!("{host}:0"),
        };
        let holder = Holder::start(&address, self.capacity(), key).map_err(Failure::new)?;
        job.env.extend([
            (HOLDER.into(), holder.address().to_string().into()),
            (SECRET_FILE.into(), secret.into()),
        ]);
        Ok(Held {
            _holder: Some(holder),
            _secret: None,
        })
    }

    fn start_named(&self, holders: &str, secret: &Path, job: &mut Job) -> Result<Held, Failure> {
        let neighbourhood = Neighbourhood::parse(holders, job.node_rank)
            .map_err(|error| Failure::usage(format!("--holders: {error}")))?;
        let num_holders = neighbourhood.holders().len();
        if num_holders != job.num_nodes {
            let message = format!(
                "--holders names {num_holders} for {} machines",
                job.num_nodes
            );
            return Err(Failure::usage(message).hint("name one per machine, in their order"));
        }
        let key = Secret::read(secret).map_err(Failure::usage)?;
        let holder = (!self.external_holders)
            .then(|| Holder::start(neighbourhood.own_holder(), self.capacity(), key))
            .transpose();
        let holder = holder.map_err(|error| {
            let hint = "if `trainyard holder` runs there, add --external-holders";
            Failure::new(error).hint(hint)
        })?;
        tell(job, holders, job.node_rank, secret);
        Ok(Held {
            _holder: holder,
            _secret: None,
        })
    }

    /// A holder of one machine's own. Without it a job runs as well, so nothing here ends it.
    fn start_alone(&self, job: &mut Job) -> Held {
        let made = Secret::generate().map_err(|error| error.to_string());
        let started = made.and_then(|secret| {
            let holder = Holder::start("127.0.0.1:0", self.capacity(), secret.secret.clone());
            Ok((holder.map_err(|error| error.to_string())?, secret))
        });
        match started {
            Ok((holder, secret)) => {
                tell(job, &holder.address().to_string(), 0, &secret.path);
                Held {
                    _holder: Some(holder),
                    _secret: Some(secret),
                }
            }
            Err(error) => {
                tracing::warn!("no copies in memory: {error}");
                Held::default()
            }
        }
    }

    fn capacity(&self) -> u64 {
        self.holder_bytes.unwrap_or_else(half_of_memory)
    }
}

fn tell(job: &mut Job, holders: &str, own: usize, secret: &Path) {
    job.env.extend([
        (HOLDERS.into(), holders.into()),
        (HOLDER_INDEX.into(), own.to_string().into()),
        (SECRET_FILE.into(), secret.into()),
    ]);
}

/// Half of this machine's memory.
pub fn half_of_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    total_memory(&text).map_or(MODEST, |total| total / 2)
}

fn total_memory(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        holding: Holding,
    }

    fn holding(line: &str) -> Result<Holding, clap::Error> {
        let words = ["run"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.holding)
    }

    fn variables(job: &Job) -> Vec<String> {
        let names = job.env.iter().map(|(name, _)| name.clone());
        names.map(|name| name.into_string().unwrap()).collect()
    }

    #[test]
    fn one_machine_has_a_holder_unasked() {
        let mut job = Job::new("p", 1);
        let _held = holding("").unwrap().start(&mut job).unwrap();
        assert_eq!(variables(&job), [HOLDERS, HOLDER_INDEX, SECRET_FILE]);
    }

    #[test]
    fn several_machines_have_those_that_are_named() {
        let mut job = Job::new("p", 1);
        job.num_nodes = 2;
        let _held = holding("").unwrap().start(&mut job).unwrap();
        assert_eq!(variables(&job), [""; 0]);
        assert!(holding("--holders a:1,b:2").is_err(), "no secret");
        assert!(holding("--external-holders").is_err(), "no holders");
        let alone = holding("--run-secret-file s").unwrap();
        assert!(alone.start(&mut Job::new("p", 1)).is_err(), "no holders");
        let secret = Secret::generate().unwrap();
        let secret = secret.path.display();
        let line = format!("--external-holders --run-secret-file {secret} --holders");
        for (list, is_right) in [("a:1,b:2", true), ("a:1", false), ("a,b", false)] {
            let holding = holding(&format!("{line} {list}")).unwrap();
            assert_eq!(holding.start(&mut job).is_ok(), is_right, "{list}");
        }
    }

    #[test]
    fn memory_is_read_from_the_kernels_words() {
        assert_eq!(total_memory("MemTotal:  2 kB\nMemFree: 1 kB\n"), Some(2048));
        assert_eq!(total_memory("MemTotal: lots\n"), None);
        assert!(half_of_memory() > 0);
    }
}
