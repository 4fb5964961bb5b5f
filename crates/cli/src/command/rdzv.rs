//! torchrun's options for where machines meet, and what they mean.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use clap::Args;
use trainyard_agent::Way;
use trainyard_rendezvous::{Address, Policy};

use super::rdzv_conf::RdzvConf;
use crate::failure::Failure;

/// torchrun's ports for the server and for etcd.
const SERVER_PORT: u16 = 29400;
const ETCD_PORT: u16 = 2379;

const RESOLVE_EVERY: Duration = Duration::from_secs(2);

/// Which machines there are, and where they meet.
#[derive(Debug, Args)]
pub struct Rdzv {
    /// How many machines: N, or MIN:MAX for a run that goes on with any number in between (needs c10d or
    /// etcd)
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1")]
    nnodes: String,
    /// Which machine this is, from 0; with c10d and etcd optional, and each its own
    #[arg(long, alias = "node_rank", value_name = "N")]
    node_rank: Option<usize>,
    /// How machines find each other: `static` (by --node-rank and --master-addr), `c10d` (our own server
    /// at --rdzv-endpoint, started by the machine that has that address, or as `trainyard rendezvous`), or
    /// `etcd` (version 3; `etcd-v2` means the same), which outlives any one machine
    #[arg(
        long,
        alias = "rdzv_backend",
        value_name = "BACKEND",
        default_value = "static"
    )]
    rdzv_backend: String,
    /// Where machines find each other; of etcd several, with commas; with `static` also where the ranks
    /// meet
    #[arg(
        long,
        alias = "rdzv_endpoint",
        value_name = "HOST:PORT",
        default_value = ""
    )]
    rdzv_endpoint: String,
    /// The name of the job, the same on every machine: one per run in etcd; with c10d `none` when not given, as
    /// torchrun has it; else a new one
    #[arg(long, alias = "rdzv_id", value_name = "ID")]
    rdzv_id: Option<String>,
    /// Waits in seconds, such as `lease=3,last_call_timeout=30,join_timeout=600`; for etcd also
    /// `protocol=https,cacert=FILE,cert=FILE,key=FILE`
    #[arg(
        long,
        alias = "rdzv_conf",
        value_name = "K=V,..",
        default_value = "",
        hide_default_value = true
    )]
    rdzv_conf: String,
    /// This machine's address, for the others; by default that from which the endpoint is reached
    #[arg(long, alias = "local_addr", value_name = "HOST")]
    local_addr: Option<String>,
    /// This machine's name in the run; by default its host name and this process
    #[arg(long, alias = "node_name", value_name = "NAME")]
    node_name: Option<String>,
}

/// Where the machines of an elastic run meet.
#[derive(Debug)]
pub struct Meeting {
    /// How to get there.
    pub way: Way,
    /// What the run asks of its worlds.
    pub policy: Policy,
    /// The rank this machine asks for.
    pub node_rank: Option<u32>,
    /// This machine's name.
    pub node: String,
    /// Its address.
    pub host: String,
    /// Whether all of it is on this machine.
    pub is_local: bool,
}

impl Rdzv {
    /// The job's name, if it has one.
    pub fn id(&self, meeting: Option<&Meeting>) -> Result<Option<&str>, Failure> {
        match (self.rdzv_id.as_deref(), meeting.map(|meeting| &meeting.way)) {
            (None, Some(Way::Server(_))) => Ok(Some("none")),
            (None, Some(Way::Etcd { .. })) => {
                let message = "a run in etcd needs a name that no other run had";
                Err(Failure::usage(message).hint("add --rdzv-id NAME, the same on every machine"))
            }
            (id, _) => Ok(id),
        }
    }

    /// Where ranks meet if that is also where machines do.
    pub fn static_endpoint(&self) -> Option<&str> {
        let endpoint = self.rdzv_endpoint.as_str();
        (self.rdzv_backend == "static" && !endpoint.is_empty()).then_some(endpoint)
    }

    /// How many machines there are and which this is, where they are started by hand.
    pub fn by_hand(&self) -> Result<(usize, usize), Failure> {
        let nodes = self.nodes()?;
        let (num_nodes, node_rank) = (*nodes.end(), self.node_rank.unwrap_or(0));
        if nodes.start() != nodes.end() {
            let message = format!("--nnodes {}: machines must find each other", self.nnodes);
            let hint = "add --rdzv-backend c10d --rdzv-endpoint HOST:PORT, or name one number";
            return Err(Failure::usage(message).hint(hint));
        }
        if node_rank >= num_nodes {
            return Err(Failure::usage(format!(
                "--node-rank {node_rank} of --nnodes {}: machines are numbered from 0",
                self.nnodes
            )));
        }
        Ok((num_nodes, node_rank))
    }

    /// Where machines meet, unless they are started by hand.
    pub fn meeting(&self, max_restarts: usize) -> Result<Option<Meeting>, Failure> {
        let nodes = self.nodes()?;
        let backend = self.rdzv_backend.as_str();
        let (is_etcd, port) = match backend {
            "static" => return Ok(None),
            "c10d" => (false, SERVER_PORT),
            "etcd" | "etcd-v2" => (true, ETCD_PORT),
            _ => {
                let message = format!("--rdzv-backend {backend} is not known");
                return Err(Failure::usage(message).hint("use c10d, etcd or static"));
            }
        };
        let endpoints = self.endpoints(port)?;
        let is_open = endpoints.iter().any(|endpoint| endpoint.port == 0) || endpoints.is_empty();
        if is_open && !is_etcd && *nodes.end() == 1 {
            // torchrun's way to say: one machine, any port.
            return Ok(None);
        }
        if is_open {
            let message = format!("--rdzv-backend {backend} needs a place that all machines know");
            return Err(Failure::usage(message).hint("add --rdzv-endpoint HOST:PORT"));
        }
        let conf = RdzvConf::parse(&self.rdzv_conf)?;
        let local = |address: &Address| is_loopback(address);
        let policy = conf.policy(&nodes, max_restarts, is_etcd);
        let host = self.host(&endpoints[0], policy.join_timeout)?;
        Ok(Some(Meeting {
            policy,
            is_local: endpoints.iter().all(local) && is_loopback(&address(&host, 0)),
            way: match is_etcd {
                true => conf.etcd(&endpoints)?,
                false => Way::Server(endpoints[0].clone()),
            },
            node_rank: self.node_rank.and_then(|rank| u32::try_from(rank).ok()),
            node: self.node_name.clone().unwrap_or_else(node_name),
            host,
        }))
    }

    fn nodes(&self) -> Result<RangeInclusive<usize>, Failure> {
        let (min, max) = match self.nnodes.split_once(':') {
            Some((min, max)) => (min.parse(), max.parse()),
            None => (self.nnodes.parse(), self.nnodes.parse()),
        };
        match (min, max) {
            (Ok(min), Ok(max)) if 1 <= min && min <= max => Ok(min..=max),
            _ => Err(
                Failure::usage(format!("--nnodes {} is no number of machines", self.nnodes))
                    .hint("write N, or MIN:MAX with 1 <= MIN <= MAX"),
            ),
        }
    }

    fn endpoints(&self, port: u16) -> Result<Vec<Address>, Failure> {
        let named = self.rdzv_endpoint.split(',').map(str::trim);
        named
            .filter(|endpoint| !endpoint.is_empty())
            .map(|endpoint| parse_endpoint(endpoint, port))
            .collect()
    }

    /// This machine's address: the one it was given, or that from which the endpoint is reached.
    fn host(&self, endpoint: &Address, patience: Duration) -> Result<String, Failure> {
        if let Some(host) = &self.local_addr {
            return Ok(host.clone());
        }
        let target = resolve(endpoint, patience)?;
        let own = reached_from(target).map_err(|error| {
            Failure::new(format!("--rdzv-endpoint {endpoint}: {error}"))
                .hint("check the network, or name this machine's address with --local-addr")
        })?;
        let is_named = endpoint.host != "localhost" && endpoint.host.parse::<IpAddr>().is_err();
        if own.is_loopback() && is_named {
            tracing::warn!(
                "on this machine `{}` means {}, where no other machine can come: if there are others, name the \
                 address itself, or correct /etc/hosts",
                endpoint.host,
                target.ip()
            );
        }
        Ok(own.to_string())
    }
}

/// The address of a name; where the first machine is only being started, the name may come after this one.
fn resolve(endpoint: &Address, patience: Duration) -> Result<SocketAddr, Failure> {
    let began = Instant::now();
    loop {
        let found = (endpoint.host.as_str(), endpoint.port).to_socket_addrs();
        let error = match found.map(|mut all| all.next()) {
            Ok(Some(address)) => return Ok(address),
            Ok(None) => "it has no address".to_owned(),
            Err(error) => error.to_string(),
        };
        if began.elapsed() >= patience {
            let message = format!("--rdzv-endpoint {endpoint}: {error}");
            return Err(Failure::new(message).hint("check the name, or give an address instead"));
        }
        tracing::warn!("--rdzv-endpoint {endpoint}: {error}; trying again, for {patience:?}");
        std::thread::sleep(RESOLVE_EVERY);
    }
}

/// This machine's address on the way there.
fn reached_from(target: SocketAddr) -> std::io::Result<IpAddr> {
    let socket = match target.ip() {
        IpAddr::V4(_) => UdpSocket::bind("0.0.0.0:0")?,
        IpAddr::V6(_) => UdpSocket::bind("[::]:0")?,
    };
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

fn parse_endpoint(endpoint: &str, port: u16) -> Result<Address, Failure> {
    let scheme = |text: &'static str| endpoint.strip_prefix(text);
    let bare = scheme("http://").or_else(|| scheme("https://"));
    let bare = bare.unwrap_or(endpoint).trim_end_matches('/');
    match bare.rsplit_once(':') {
        None => Ok(address(bare, port)),
        Some((host, port)) => match port.parse() {
            Ok(port) if !host.is_empty() => Ok(address(host, port)),
            _ => Err(
                Failure::usage(format!("--rdzv-endpoint {endpoint}: `{port}` is no port"))
                    .hint("write HOST:PORT"),
            ),
        },
    }
}

fn address(host: &str, port: u16) -> Address {
    let host = host
        .trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned();
    Address { host, port }
}

fn is_loopback(address: &Address) -> bool {
    let resolved = (address.host.as_str(), address.port).to_socket_addrs();
    resolved.is_ok_and(|mut all| all.all(|address| address.ip().is_loopback()))
}

/// The host's name and this process: no other agent's, on this machine or another.
fn node_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "._-".contains(*c);
    let host: String = host.trim().chars().filter(is_plain).take(100).collect();
    match host.is_empty() {
        true => format!("node-{}", std::process::id()),
        false => format!("{host}-{}", std::process::id()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        rdzv: Rdzv,
    }

    fn meeting(line: &str) -> Result<Option<Meeting>, String> {
        let words = ["run"].into_iter().chain(line.split_whitespace());
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        cli.rdzv.meeting(3).map_err(|failure| failure.to_string())
    }

    #[test]
    fn one_machine_needs_no_meeting() {
        for line in [
            "",
            "--rdzv-backend c10d",
            "--rdzv_backend=c10d --rdzv_endpoint=localhost:0",
            "--rdzv-endpoint h:6",
            "--nnodes 2 --rdzv-endpoint h:6",
        ] {
            assert!(meeting(line).unwrap().is_none(), "{line}");
        }
    }

    #[test]
    fn several_meet_at_our_server_or_in_etcd() {
        let line = "--nnodes=1:3 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:7 --node-rank 2";
        let server = meeting(line).unwrap().unwrap();
        assert!(matches!(&server.way, Way::Server(at) if at.to_string() == "127.0.0.1:7"));
        assert_eq!((server.policy.min_nodes, server.policy.max_nodes), (1, 3));
        assert_eq!((server.node_rank, server.policy.max_restarts), (Some(2), 3));
        assert_eq!((server.host.as_str(), server.is_local), ("127.0.0.1", true));

        let line =
            "--nnodes=2 --rdzv-backend=etcd-v2 --rdzv-endpoint=127.0.0.1,http://127.0.0.1:9/";
        let etcd = meeting(line).unwrap().unwrap();
        let expected = ["http://127.0.0.1:2379", "http://127.0.0.1:9"];
        assert!(matches!(&etcd.way, Way::Etcd { members, .. } if *members == expected));
        assert!(etcd.policy.lease > server.policy.lease);
    }

    #[test]
    fn an_address_of_another_machine_is_not_local() {
        let line =
            "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:7 --local-addr 10.9.8.7";
        assert!(!meeting(line).unwrap().unwrap().is_local);
    }

    #[test]
    fn machines_that_meet_have_one_name() {
        let id = |line: &str| {
            let words = ["run"].into_iter().chain(line.split_whitespace());
            let rdzv = Cli::try_parse_from(words).unwrap().rdzv;
            let meeting = rdzv.meeting(3).map_err(|failure| failure.to_string())?;
            let id = rdzv.id(meeting.as_ref());
            id.map(|id| id.map(str::to_owned))
                .map_err(|failure| failure.to_string())
        };
        let server = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:7";
        assert_eq!(id(server).unwrap().as_deref(), Some("none"));
        let named = format!("{server} --rdzv-id x");
        assert_eq!(id(&named).unwrap().as_deref(), Some("x"));
        assert_eq!(id("").unwrap(), None);
        let etcd = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint 127.0.0.1:7";
        assert!(id(etcd).unwrap_err().contains("--rdzv-id"));
    }

    #[test]
    fn a_name_that_nobody_knows_is_told_in_the_end() {
        let line = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint no-such-machine.invalid:7 \
                    --rdzv-conf join_timeout=1";
        let error = meeting(line).unwrap_err();
        assert!(error.contains("no-such-machine.invalid:7"), "{error}");
    }

    #[test]
    fn what_cannot_be_meant_is_explained() {
        for (line, reason) in [
            ("--nnodes 0", "is no number of machines"),
            ("--nnodes 3:2", "is no number of machines"),
            (
                "--nnodes 2 --rdzv-backend c10d",
                "--rdzv-endpoint HOST:PORT",
            ),
            ("--rdzv-backend etcd", "--rdzv-endpoint HOST:PORT"),
            ("--rdzv-backend zeus", "is not known"),
            ("--rdzv-backend c10d --rdzv-endpoint h:x", "is no port"),
            (
                "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:1 --rdzv-conf leese=3",
                "`leese`",
            ),
        ] {
            let error = meeting(line).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
