//! `--rdzv-conf`: how long to wait for what, and how to reach etcd.

use std::fs;
use std::ops::RangeInclusive;
use std::time::Duration;

use trainyard_agent::Way;
use trainyard_rendezvous::etcd::ClusterTls;
use trainyard_rendezvous::{Address, Policy};

use crate::failure::Failure;

/// torchrun's keys that make no difference here.
const IDLE: [&str; 8] = [
    "read_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "is_host",
    "rank",
    "tcp_store_port",
];
const KNOWN: &str = "lease, last_call_timeout, join_timeout, regather_timeout, stop_timeout, protocol, cacert, cert, key";

/// So that an election in etcd does not make leases lapse.
const ETCD_LEASE: Duration = Duration::from_secs(6);

/// What was said in `--rdzv-conf`.
#[derive(Debug, Default)]
pub struct RdzvConf {
    lease: Option<Duration>,
    last_call: Option<Duration>,
    join: Option<Duration>,
    regather: Option<Duration>,
    stop: Option<Duration>,
    is_https: bool,
    cacert: Option<String>,
    cert: Option<String>,
    key: Option<String>,
}

impl RdzvConf {
    /// Reads `KEY=VALUE,KEY=VALUE`.
    pub fn parse(text: &str) -> Result<RdzvConf, Failure> {
        let mut conf = RdzvConf::default();
        for pair in text
            .split(',')
            .map(str::trim)
            .filter(|pair| !pair.is_empty())
        {
            let Some((key, value)) = pair.split_once('=') else {
                let message = format!("--rdzv-conf {pair}: no value");
                return Err(Failure::usage(message).hint("write KEY=VALUE,KEY=VALUE"));
            };
            conf.take(key.trim(), value.trim())?;
        }
        Ok(conf)
    }

    fn take(&mut self, key: &str, value: &str) -> Result<(), Failure> {
        match key {
            "lease" => self.lease = Some(seconds(key, value)?),
            "last_call_timeout" => self.last_call = Some(seconds(key, value)?),
            "join_timeout" | "timeout" => self.join = Some(seconds(key, value)?),
            "regather_timeout" => self.regather = Some(seconds(key, value)?),
            "stop_timeout" => self.stop = Some(seconds(key, value)?),
            "protocol" => self.is_https = value == "https",
            "cacert" => self.cacert = Some(value.to_owned()),
            "cert" => self.cert = Some(value.to_owned()),
            "key" => self.key = Some(value.to_owned()),
            _ if IDLE.contains(&key) => {}
            _ => {
                let message = format!("--rdzv-conf: there is no `{key}`");
                return Err(Failure::usage(message).hint(format!("there are {KNOWN}")));
            }
        }
        Ok(())
    }

    /// What the run asks of its worlds.
    pub fn policy(
        &self,
        nodes: &RangeInclusive<usize>,
        max_restarts: usize,
        is_etcd: bool,
    ) -> Policy {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let usual = Policy::new(number(*nodes.start()), number(*nodes.end()));
        let lease = if is_etcd { ETCD_LEASE } else { usual.lease };
        Policy {
            max_restarts: number(max_restarts),
            lease: self.lease.unwrap_or(lease),
            last_call: self.last_call.unwrap_or(usual.last_call),
            join_timeout: self.join.unwrap_or(usual.join_timeout),
            regather: self.regather.unwrap_or(usual.regather),
            stop_within: self.stop.unwrap_or(usual.stop_within),
            ..usual
        }
    }

    /// The way to etcd.
    pub fn etcd(&self, endpoints: &[Address]) -> Result<Way, Failure> {
        let scheme = if self.is_https { "https" } else { "http" };
        let tls = match (&self.cacert, self.is_https) {
            (_, false) => None,
            (None, true) => {
                let message = "--rdzv-conf protocol=https needs to know whom to trust";
                return Err(Failure::usage(message).hint("add cacert=FILE"));
            }
            (Some(ca), true) => Some(ClusterTls {
                ca: read(ca)?,
                identity: match (&self.cert, &self.key) {
                    (Some(cert), Some(key)) => Some((read(cert)?, read(key)?)),
                    _ => None,
                },
            }),
        };
        Ok(Way::Etcd {
            members: endpoints
                .iter()
                .map(|endpoint| format!("{scheme}://{endpoint}"))
                .collect(),
            tls,
        })
    }
}

fn read(path: &str) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| Failure::usage(format!("{path}: {error}")))
}

fn seconds(key: &str, value: &str) -> Result<Duration, Failure> {
    let seconds = value.parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| {
        Failure::usage(format!("--rdzv-conf {key}={value}: not a time"))
            .hint(format!("write seconds, such as {key}=3"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_in_seconds_and_torchruns_keys_are_known() {
        let text = "lease=1.5, last_call_timeout=2,timeout=9,read_timeout=60";
        let policy = RdzvConf::parse(text).unwrap().policy(&(1..=2), 0, false);
        assert_eq!(policy.lease, Duration::from_millis(1500));
        assert_eq!(policy.last_call, Duration::from_secs(2));
        assert_eq!(policy.join_timeout, Duration::from_secs(9));
        for bad in ["lease", "lease=x", "lease=-1", "lease=nan", "lese=1"] {
            assert!(RdzvConf::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn tls_needs_somebody_to_trust() {
        assert!(
            RdzvConf::parse("protocol=https")
                .unwrap()
                .etcd(&[])
                .is_err()
        );
    }
}
