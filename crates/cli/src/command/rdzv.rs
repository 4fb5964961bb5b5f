//! torchrun's rendezvous options: how many nodes there are, and how they discover each other.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use clap::Args;
use trainyard_elastic::RendezvousConfig;
use trainyard_rendezvous::{Address, Policy};

use super::rdzv_conf::{Protocol, RdzvConf};
use crate::failure::Failure;

/// The default ports: torchrun's for the server, and that of etcd.
const SERVER_PORT: u16 = 29400;
const ETCD_PORT: u16 = 2379;

const RESOLVE_INTERVAL: Duration = Duration::from_secs(2);

/// The rendezvous options.
#[derive(Debug, Args)]
pub struct RdzvArgs {
    /// Number of nodes: N, or MIN:MAX for an elastic run (needs the backend `server` or `etcd`)
    #[arg(long, value_name = "N|MIN:MAX", default_value = "1")]
    nnodes: String,
    /// Rank of this node, from 0. Optional with the backends `server` and `etcd`, which assign ranks
    #[arg(long, value_name = "N")]
    node_rank: Option<usize>,
    /// How nodes discover each other: `static` (fixed --node-rank and --master-addr), `server` (Trainyard's own
    /// rendezvous server at --rdzv-endpoint; the node with that address starts it, unless `trainyard rendezvous` runs
    /// there; `c10d` is accepted as an alias), or `etcd` (version 3; `etcd-v2` is accepted as an alias), which
    /// survives the loss of any node
    #[arg(long, value_name = "BACKEND", default_value = "static")]
    rdzv_backend: String,
    /// Address of the rendezvous; for etcd a comma-separated list of its members; with `static` it is the address of
    /// the ranks' store (MASTER_ADDR and MASTER_PORT)
    #[arg(long, value_name = "HOST:PORT", default_value = "")]
    rdzv_endpoint: String,
    /// Name of the run, the same on every node. Required with etcd, where it must be new for every run; `none` by
    /// default with `server`, as in torchrun; otherwise generated
    #[arg(long, value_name = "ID")]
    rdzv_id: Option<String>,
    /// Rendezvous settings: timeouts in seconds, such as `lease=3,last_call_timeout=30,join_timeout=600`, and for
    /// etcd `protocol=https,cacert=FILE,cert=FILE,key=FILE`
    #[arg(
        long,
        value_name = "K=V,..",
        default_value = "",
        hide_default_value = true
    )]
    rdzv_conf: String,
    /// Address of this node, at which other nodes reach it. By default the address of the network interface from
    /// which the endpoint is reached
    #[arg(long, value_name = "HOST")]
    local_addr: Option<String>,
    /// Name of this node in the run, unique in it. By default the host name and the process id
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
}

/// The arguments of an elastic run.
#[derive(Debug)]
pub struct ElasticArgs {
    /// The rendezvous backend.
    pub rendezvous: RendezvousConfig,
    /// The size and the timeouts of the run.
    pub policy: Policy,
    /// The node rank to request.
    pub node_rank: Option<u32>,
    /// The name of this node.
    pub node_name: String,
    /// The address of this node.
    pub host: String,
    /// Whether the whole run is on this node.
    pub is_local: bool,
}

impl RdzvArgs {
    /// The name of the run, if it was given or has a default.
    pub fn id(&self, elastic: Option<&ElasticArgs>) -> Result<Option<&str>, Failure> {
        match (
            self.rdzv_id.as_deref(),
            elastic.map(|elastic| &elastic.rendezvous),
        ) {
            (None, Some(RendezvousConfig::Server(_))) => Ok(Some("none")),
            (None, Some(RendezvousConfig::Etcd { .. })) => {
                let message = "a run in etcd needs a name that no earlier run had";
                Err(Failure::usage(message).hint("add --rdzv-id NAME, the same on every node"))
            }
            (id, _) => Ok(id),
        }
    }

    /// The address of the ranks' store, if `--rdzv-endpoint` names it.
    pub fn static_endpoint(&self) -> Option<&str> {
        let endpoint = self.rdzv_endpoint.as_str();
        (self.rdzv_backend == "static" && !endpoint.is_empty()).then_some(endpoint)
    }

    /// The number of nodes and the rank of this node, without a rendezvous.
    pub fn static_nodes(&self) -> Result<(usize, usize), Failure> {
        let nodes = self.nodes()?;
        let (num_nodes, node_rank) = (*nodes.end(), self.node_rank.unwrap_or(0));
        if nodes.start() != nodes.end() {
            let message = format!("--nnodes {} needs a rendezvous", self.nnodes);
            let hint = "add --rdzv-backend server --rdzv-endpoint HOST:PORT, or use a fixed number of nodes";
            return Err(Failure::usage(message).hint(hint));
        }
        if node_rank >= num_nodes {
            return Err(Failure::usage(format!(
                "--node-rank {node_rank} is not less than --nnodes {}: node ranks start at 0",
                self.nnodes
            )));
        }
        Ok((num_nodes, node_rank))
    }

    /// The arguments of an elastic run; `None` without a rendezvous.
    pub fn elastic_args(&self, max_restarts: usize) -> Result<Option<ElasticArgs>, Failure> {
        let nodes = self.nodes()?;
        let backend = self.rdzv_backend.as_str();
        let (is_etcd, port) = match backend {
            "static" => return Ok(None),
            "server" | "c10d" => (false, SERVER_PORT),
            "etcd" | "etcd-v2" => (true, ETCD_PORT),
            _ => {
                let message = format!("--rdzv-backend {backend} is not a known backend");
                return Err(Failure::usage(message).hint("use static, server or etcd"));
            }
        };
        let endpoints = self.endpoints(port)?;
        let is_open = endpoints.iter().any(|endpoint| endpoint.port == 0) || endpoints.is_empty();
        if is_open && !is_etcd && *nodes.end() == 1 {
            // With torchrun this means: one node, any port.
            return Ok(None);
        }
        if is_open {
            let message =
                format!("--rdzv-backend {backend} needs an address that all nodes can reach");
            return Err(Failure::usage(message).hint("add --rdzv-endpoint HOST:PORT"));
        }
        let conf = RdzvConf::parse(&self.rdzv_conf)?;
        let local = |address: &Address| is_loopback(address);
        let policy = conf.policy(&nodes, max_restarts, is_etcd);
        let host = self.host(&endpoints[0], policy.join_timeout)?;
        Ok(Some(ElasticArgs {
            policy,
            is_local: endpoints.iter().all(local) && is_loopback(&address(&host, 0)),
            rendezvous: if is_etcd {
                conf.etcd(&endpoints, Protocol::of_endpoints(&self.rdzv_endpoint)?)?
            } else {
                RendezvousConfig::Server(endpoints[0].clone())
            },
            node_rank: self.node_rank.and_then(|rank| u32::try_from(rank).ok()),
            node_name: self.node_name.clone().unwrap_or_else(node_name),
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
            _ => Err(Failure::usage(format!(
                "--nnodes {} is not a valid number of nodes",
                self.nnodes
            ))
            .hint("write N, or MIN:MAX with 1 <= MIN <= MAX")),
        }
    }

    fn endpoints(&self, port: u16) -> Result<Vec<Address>, Failure> {
        let named = self.rdzv_endpoint.split(',').map(str::trim);
        named
            .filter(|endpoint| !endpoint.is_empty())
            .map(|endpoint| parse_endpoint(endpoint, port))
            .collect()
    }

    /// The address of this node: the one that was given, or the one from which the endpoint is reached.
    fn host(&self, endpoint: &Address, timeout: Duration) -> Result<String, Failure> {
        if let Some(host) = &self.local_addr {
            return Ok(host.clone());
        }
        let target = resolve(endpoint, timeout)?;
        let own = source_address(target).map_err(|error| {
            Failure::new(format!("cannot reach --rdzv-endpoint {endpoint}: {error}"))
                .hint("check the network, or set the address of this node with --local-addr")
        })?;
        let is_named = endpoint.host != "localhost" && endpoint.host.parse::<IpAddr>().is_err();
        if own.is_loopback() && is_named {
            tracing::warn!(
                "on this node `{}` resolves to {}, which no other node can reach: if there are other nodes, use an IP \
                 address, or correct /etc/hosts",
                endpoint.host,
                target.ip()
            );
        }
        Ok(own.to_string())
    }
}

/// Resolves the endpoint. Retries, because its node may start later than this one and have no DNS entry yet.
fn resolve(endpoint: &Address, timeout: Duration) -> Result<SocketAddr, Failure> {
    let began = Instant::now();
    loop {
        let found = (endpoint.host.as_str(), endpoint.port).to_socket_addrs();
        let error = match found.map(|mut all| all.next()) {
            Ok(Some(address)) => return Ok(address),
            Ok(None) => "the name has no address".to_owned(),
            Err(error) => error.to_string(),
        };
        if began.elapsed() >= timeout {
            let message = format!("cannot resolve --rdzv-endpoint {endpoint}: {error}");
            return Err(Failure::new(message).hint("check the host name, or use an IP address"));
        }
        tracing::warn!(
            "cannot resolve --rdzv-endpoint {endpoint}: {error}; retrying for up to {timeout:?}"
        );
        std::thread::sleep(RESOLVE_INTERVAL);
    }
}

/// The address of this node from which it reaches `target`.
fn source_address(target: SocketAddr) -> std::io::Result<IpAddr> {
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
            _ => Err(Failure::usage(format!(
                "--rdzv-endpoint {endpoint}: `{port}` is not a valid port"
            ))
            .hint("write HOST:PORT")),
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

/// The host name and the process id, which identify an agent on any node.
fn node_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || "._-".contains(*c);
    let host: String = host.trim().chars().filter(is_plain).take(100).collect();
    if host.is_empty() {
        format!("node-{}", std::process::id())
    } else {
        format!("{host}-{}", std::process::id())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        rdzv: RdzvArgs,
    }

    fn elastic_args(line: &str) -> Result<Option<ElasticArgs>, String> {
        let args = ["run"].into_iter().chain(line.split_whitespace());
        let cli = Cli::try_parse_from(args).map_err(|error| error.to_string())?;
        cli.rdzv
            .elastic_args(3)
            .map_err(|failure| failure.to_string())
    }

    #[test]
    fn one_node_needs_no_rendezvous() {
        for line in [
            "",
            "--rdzv-backend c10d",
            "--rdzv-backend server",
            "--rdzv-backend=c10d --rdzv-endpoint=localhost:0",
            "--rdzv-endpoint h:6",
            "--nnodes 2 --rdzv-endpoint h:6",
        ] {
            assert!(elastic_args(line).unwrap().is_none(), "{line}");
        }
    }

    #[test]
    fn several_nodes_meet_at_our_server_or_in_etcd() {
        let line = "--nnodes=1:3 --rdzv-backend=server --rdzv-endpoint=127.0.0.1:7 --node-rank 2";
        let server = elastic_args(line).unwrap().unwrap();
        assert!(
            matches!(&server.rendezvous, RendezvousConfig::Server(at) if at.to_string() == "127.0.0.1:7")
        );
        assert_eq!((server.policy.min_nodes, server.policy.max_nodes), (1, 3));
        assert_eq!((server.node_rank, server.policy.max_restarts), (Some(2), 3));
        assert_eq!((server.host.as_str(), server.is_local), ("127.0.0.1", true));

        let line =
            "--nnodes=2 --rdzv-backend=etcd-v2 --rdzv-endpoint=127.0.0.1,http://127.0.0.1:9/";
        let etcd = elastic_args(line).unwrap().unwrap();
        let expected = ["http://127.0.0.1:2379", "http://127.0.0.1:9"];
        assert!(
            matches!(&etcd.rendezvous, RendezvousConfig::Etcd { members, .. } if *members == expected)
        );
        assert!(etcd.policy.lease > server.policy.lease);
    }

    #[test]
    fn an_address_of_another_node_is_not_local() {
        let line =
            "--nnodes=2 --rdzv-backend=server --rdzv-endpoint=127.0.0.1:7 --local-addr 10.9.8.7";
        assert!(!elastic_args(line).unwrap().unwrap().is_local);
    }

    #[test]
    fn elastic_runs_have_a_name() {
        let id = |line: &str| {
            let args = ["run"].into_iter().chain(line.split_whitespace());
            let rdzv = Cli::try_parse_from(args).unwrap().rdzv;
            let elastic = rdzv
                .elastic_args(3)
                .map_err(|failure| failure.to_string())?;
            let id = rdzv.id(elastic.as_ref());
            id.map(|id| id.map(str::to_owned))
                .map_err(|failure| failure.to_string())
        };
        let server = "--nnodes 2 --rdzv-backend server --rdzv-endpoint 127.0.0.1:7";
        assert_eq!(id(server).unwrap().as_deref(), Some("none"));
        let named = format!("{server} --rdzv-id x");
        assert_eq!(id(&named).unwrap().as_deref(), Some("x"));
        assert_eq!(id("").unwrap(), None);
        let etcd = "--nnodes 2 --rdzv-backend etcd --rdzv-endpoint 127.0.0.1:7";
        assert!(id(etcd).unwrap_err().contains("--rdzv-id"));
    }

    #[test]
    fn an_unknown_host_name_is_reported_after_the_join_timeout() {
        let line = "--nnodes 2 --rdzv-backend server --rdzv-endpoint no-such-node.invalid:7 \
                    --rdzv-conf join_timeout=1";
        let error = elastic_args(line).unwrap_err();
        assert!(error.contains("no-such-node.invalid:7"), "{error}");
    }

    #[test]
    fn invalid_arguments_are_explained() {
        for (line, reason) in [
            ("--nnodes 0", "is not a valid number of nodes"),
            ("--nnodes 3:2", "is not a valid number of nodes"),
            (
                "--nnodes 2 --rdzv-backend server",
                "--rdzv-endpoint HOST:PORT",
            ),
            ("--rdzv-backend etcd", "--rdzv-endpoint HOST:PORT"),
            ("--rdzv-backend zeus", "is not a known backend"),
            (
                "--rdzv-backend server --rdzv-endpoint h:x",
                "is not a valid port",
            ),
            (
                "--rdzv-backend server --rdzv-endpoint 127.0.0.1:1 --rdzv-conf leese=3",
                "`leese`",
            ),
        ] {
            let error = elastic_args(line).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
        }
    }
}
