//! `--rdzv-conf`: the timeouts of the rendezvous, and TLS and the user for etcd.

use std::fs;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use trainyard_elastic::RendezvousConfig;
use trainyard_rendezvous::etcd::{ClusterTls, ClusterUser};
use trainyard_rendezvous::{Address, Policy};

use crate::failure::Failure;

/// torchrun's keys that have no effect here.
const IGNORED: [&str; 10] = [
    "store_type",
    "etcd_prefix",
    "read_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "is_host",
    "rank",
    "tcp_store_port",
];
const KNOWN: &str = "lease, last_call_timeout, join_timeout, rejoin_timeout, stop_timeout, protocol, cacert, cert, key, \
     user, password_file";

/// Long enough that leases do not expire during a leader election in etcd.
const ETCD_LEASE: Duration = Duration::from_secs(6);

/// How etcd is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Without TLS.
    Http,
    /// With TLS.
    Https,
}

impl Protocol {
    fn parse(value: &str) -> Result<Protocol, Failure> {
        match value.to_ascii_lowercase().as_str() {
            "http" => Ok(Protocol::Http),
            "https" => Ok(Protocol::Https),
            _ => Err(
                Failure::usage(format!("--rdzv-conf protocol={value} is not a protocol"))
                    .hint("use protocol=http or protocol=https"),
            ),
        }
    }

    /// The protocol that the URLs of an endpoint name; `None` if they are plain addresses.
    pub fn of_endpoints(endpoints: &str) -> Result<Option<Protocol>, Failure> {
        let of = |endpoint: &str| {
            let (scheme, _) = endpoint.trim().split_once("://")?;
            Some(Protocol::parse(scheme))
        };
        let named = endpoints.split(',').filter_map(of);
        let named = named.collect::<Result<Vec<_>, _>>()?;
        match named.first() {
            Some(first) if named.iter().any(|other| other != first) => {
                let message = format!("--rdzv-endpoint {endpoints} mixes http and https");
                Err(Failure::usage(message).hint("write the same scheme for all"))
            }
            first => Ok(first.copied()),
        }
    }
}

/// The parsed value of `--rdzv-conf`.
#[derive(Debug, Default)]
pub struct RdzvConf {
    lease: Option<Duration>,
    last_call: Option<Duration>,
    join: Option<Duration>,
    rejoin: Option<Duration>,
    stop: Option<Duration>,
    protocol: Option<Protocol>,
    cacert: Option<String>,
    cert: Option<String>,
    key: Option<String>,
    user: Option<String>,
    password_file: Option<String>,
}

impl RdzvConf {
    /// Parses `KEY=VALUE,KEY=VALUE`.
    pub fn parse(text: &str) -> Result<RdzvConf, Failure> {
        let mut conf = RdzvConf::default();
        for pair in text
            .split(',')
            .map(str::trim)
            .filter(|pair| !pair.is_empty())
        {
            let Some((key, value)) = pair.split_once('=') else {
                let message = format!("--rdzv-conf {pair}: the value is missing");
                return Err(Failure::usage(message).hint("write KEY=VALUE,KEY=VALUE"));
            };
            conf.set(key.trim(), value.trim())?;
        }
        Ok(conf)
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), Failure> {
        match key {
            "lease" => self.lease = Some(seconds(key, value)?),
            "last_call_timeout" => self.last_call = Some(seconds(key, value)?),
            "join_timeout" | "timeout" => self.join = Some(seconds(key, value)?),
            "rejoin_timeout" => self.rejoin = Some(seconds(key, value)?),
            "stop_timeout" => self.stop = Some(seconds(key, value)?),
            "protocol" => self.protocol = Some(Protocol::parse(value)?),
            "cacert" | "ca_cert" => self.cacert = Some(value.to_owned()),
            "cert" | "ssl_cert" => self.cert = Some(value.to_owned()),
            "key" | "ssl_cert_key" => self.key = Some(value.to_owned()),
            "store_type" if value == "file" => {
                let message = "--rdzv-conf store_type=file: a store in a file is not supported";
                return Err(Failure::usage(message).hint("use store_type=tcp, the default"));
            }
            "user" => self.user = Some(value.to_owned()),
            "password_file" => self.password_file = Some(value.to_owned()),
            _ if IGNORED.contains(&key) => {}
            _ => {
                let message = format!("--rdzv-conf: `{key}` is not a known key");
                return Err(Failure::usage(message).hint(format!("the keys are {KNOWN}")));
            }
        }
        Ok(())
    }

    /// The policy of a run with these settings.
    pub fn policy(
        &self,
        nodes: &RangeInclusive<usize>,
        max_restarts: usize,
        is_etcd: bool,
    ) -> Policy {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let default = Policy::new(number(*nodes.start()), number(*nodes.end()));
        let lease = if is_etcd { ETCD_LEASE } else { default.lease };
        Policy {
            max_restarts: number(max_restarts),
            lease: self.lease.unwrap_or(lease),
            last_call_timeout: self.last_call.unwrap_or(default.last_call_timeout),
            join_timeout: self.join.unwrap_or(default.join_timeout),
            rejoin_timeout: self.rejoin.unwrap_or(default.rejoin_timeout),
            stop_timeout: self.stop.unwrap_or(default.stop_timeout),
            ..default
        }
    }

    /// The configuration of the etcd backend, whose endpoints name a protocol or not. What cannot be secured as asked
    /// is rejected.
    pub fn etcd(
        &self,
        endpoints: &[Address],
        named: Option<Protocol>,
    ) -> Result<RendezvousConfig, Failure> {
        let protocol = match (self.protocol, named) {
            (Some(asked), Some(named)) if asked != named => {
                let message = "--rdzv-endpoint and --rdzv-conf protocol name different protocols";
                return Err(Failure::usage(message).hint("write the same one, or only one of them"));
            }
            (asked, named) => asked.or(named).unwrap_or(Protocol::Http),
        };
        let (scheme, tls) = match protocol {
            Protocol::Http => ("http", self.no_tls()?),
            Protocol::Https => ("https", Some(self.tls()?)),
        };
        let is_local = endpoints.iter().all(|endpoint| is_loopback(&endpoint.host));
        let user = self.user()?;
        if user.is_some() && protocol == Protocol::Http && !is_local {
            let message = "etcd would receive the password over an unencrypted connection";
            return Err(Failure::usage(message).hint("add --rdzv-conf protocol=https,cacert=FILE"));
        }
        Ok(RendezvousConfig::Etcd {
            members: endpoints
                .iter()
                .map(|endpoint| format!("{scheme}://{endpoint}"))
                .collect(),
            tls,
            user,
        })
    }
}

impl RdzvConf {
    /// Without TLS its files have no use: whoever names them expects TLS.
    fn no_tls(&self) -> Result<Option<ClusterTls>, Failure> {
        let files = [
            ("cacert", &self.cacert),
            ("cert", &self.cert),
            ("key", &self.key),
        ];
        match files.iter().find(|(_, file)| file.is_some()) {
            Some((name, _)) => {
                let message = format!("--rdzv-conf {name} has no effect without TLS");
                Err(Failure::usage(message).hint("add protocol=https"))
            }
            None => Ok(None),
        }
    }

    fn user(&self) -> Result<Option<ClusterUser>, Failure> {
        match (&self.user, &self.password_file) {
            (Some(name), Some(file)) => Ok(Some(ClusterUser {
                name: name.clone(),
                password: read(file)?.trim_end_matches('\n').to_owned(),
            })),
            (None, None) => Ok(None),
            (Some(_), None) | (None, Some(_)) => {
                let message = "--rdzv-conf user and password_file belong together";
                Err(Failure::usage(message).hint("write both or none"))
            }
        }
    }

    fn tls(&self) -> Result<ClusterTls, Failure> {
        let Some(ca) = &self.cacert else {
            let message = "etcd over https needs a CA certificate";
            return Err(Failure::usage(message).hint("add --rdzv-conf cacert=FILE"));
        };
        let identity = match (&self.cert, &self.key) {
            (Some(cert), Some(key)) => Some((read(cert)?, read(key)?)),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                let message = "--rdzv-conf cert and key belong together";
                return Err(Failure::usage(message).hint("write both or none"));
            }
        };
        Ok(ClusterTls {
            ca: read(ca)?,
            identity,
        })
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn read(path: &str) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| Failure::usage(format!("cannot read {path}: {error}")))
}

fn seconds(key: &str, value: &str) -> Result<Duration, Failure> {
    let seconds = value.parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| {
        Failure::usage(format!(
            "--rdzv-conf {key}={value}: the value is not a number of seconds"
        ))
        .hint(format!("write seconds, such as {key}=3"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_in_seconds_and_torchruns_keys_are_accepted() {
        let text = "lease=1.5, last_call_timeout=2,timeout=9,read_timeout=60";
        let policy = RdzvConf::parse(text).unwrap().policy(&(1..=2), 0, false);
        assert_eq!(policy.lease, Duration::from_millis(1500));
        assert_eq!(policy.last_call_timeout, Duration::from_secs(2));
        assert_eq!(policy.join_timeout, Duration::from_secs(9));
        for bad in ["lease", "lease=x", "lease=-1", "lease=nan", "lese=1"] {
            assert!(RdzvConf::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_cannot_be_secured_as_asked_is_rejected() {
        let etcd = |conf: &str, endpoints: &str| {
            let named = Protocol::of_endpoints(endpoints)?;
            let address = Address {
                host: "h".into(),
                port: 1,
            };
            RdzvConf::parse(conf)?.etcd(&[address], named)
        };
        let ca = tempfile::NamedTempFile::new().unwrap();
        let ca = ca.path().display().to_string();
        assert!(etcd("", "h:1").is_ok());
        assert!(etcd("", "http://h:1,http://g:1").is_ok());
        for (conf, endpoints) in [
            ("", "https://h:1"),
            ("", "http://h:1,https://g:1"),
            ("", "ftp://h:1"),
            ("protocol=https", "h:1"),
            ("protocol=HTTPS", "h:1"),
            ("protocol=tls", "h:1"),
            (&format!("protocol=http,cacert={ca}"), "h:1"),
            (&format!("cacert={ca}"), "h:1"),
            (&format!("protocol=https,cacert={ca},cert={ca}"), "h:1"),
            (&format!("protocol=https,cacert={ca},key={ca}"), "h:1"),
            (&format!("protocol=https,cacert={ca}"), "http://h:1"),
            (&format!("user=u,password_file={ca}"), "http://h:1"),
            (&format!("cacert={ca},user=u"), "https://h:1"),
            (&format!("cacert={ca},password_file={ca}"), "https://h:1"),
        ] {
            assert!(etcd(conf, endpoints).is_err(), "{conf} {endpoints}");
        }
        for (conf, endpoints) in [
            (format!("protocol=HTTPS,cacert={ca}"), "h:1"),
            (format!("cacert={ca}"), "https://h:1"),
            (
                format!("cacert={ca},user=u,password_file={ca}"),
                "https://h:1",
            ),
        ] {
            let Ok(RendezvousConfig::Etcd { tls, .. }) = etcd(&conf, endpoints) else {
                panic!("{conf} {endpoints}");
            };
            assert!(tls.is_some(), "{conf} {endpoints}");
        }
    }
}
