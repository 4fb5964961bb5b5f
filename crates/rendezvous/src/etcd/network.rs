//! etcd over the network: any of its members, and the next when one does not answer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use http::uri::PathAndQuery;
use prost::Message;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::api;
use super::kv::{Change, Compare, Entry, Kv, KvError, Lease, Put, Range};
use crate::RendezvousError;

/// Longer than an election, shorter than a lease.
const CALL_WITHIN: Duration = Duration::from_millis(1500);
/// etcd cuts off who asks more often than every 5 s.
const PING_EVERY: Duration = Duration::from_secs(6);
const PONG_WITHIN: Duration = Duration::from_secs(3);

/// The members of an etcd cluster.
#[derive(Debug)]
pub struct Cluster {
    members: Vec<(String, Channel)>,
    /// The one that answered last.
    current: AtomicUsize,
}

/// What TLS with etcd needs, in PEM.
#[derive(Clone, Debug, Default)]
pub struct ClusterTls {
    /// Who vouches for etcd's members.
    pub ca: String,
    /// This client's certificate and key, if etcd asks for them.
    pub identity: Option<(String, String)>,
}

impl Cluster {
    /// Members as `http://host:2379`, or `https://` with `tls`. Connects to nothing yet.
    pub fn new(members: &[String], tls: Option<&ClusterTls>) -> Result<Cluster, RendezvousError> {
        if members.is_empty() {
            return Err(RendezvousError::Unreachable {
                endpoint: "etcd".into(),
                cause: "no member is named".into(),
            });
        }
        let members = members
            .iter()
            .map(|member| Ok((member.clone(), open(member, tls)?)));
        Ok(Cluster {
            members: members.collect::<Result<_, RendezvousError>>()?,
            current: AtomicUsize::new(0),
        })
    }

    fn grpc(&self) -> (usize, Grpc<Channel>) {
        let at = self.current.load(Ordering::Relaxed) % self.members.len();
        (at, Grpc::new(self.members[at].1.clone()))
    }

    /// Whatever went wrong, the next call goes to the next member.
    fn fail(&self, at: usize, cause: String) -> KvError {
        self.current
            .store((at + 1) % self.members.len(), Ordering::Relaxed);
        KvError(format!("{}: {cause}", self.members[at].0))
    }

    async fn call<Q, A>(&self, path: &'static str, question: Q) -> Result<A, KvError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (at, mut grpc) = self.grpc();
        let answer = async {
            grpc.ready()
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<Q, A>::default();
            grpc.unary(
                Request::new(question),
                PathAndQuery::from_static(path),
                codec,
            )
            .await
        };
        match timeout(CALL_WITHIN, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.fail(at, status.to_string())),
            Err(_) => Err(self.fail(at, format!("no answer within {CALL_WITHIN:?}"))),
        }
    }

    /// A question that etcd answers with a stream. It ends when the member has lost its leader, so that nobody
    /// listens to a member that is cut off.
    async fn stream<Q, A>(
        &self,
        path: &'static str,
        questions: Vec<Q>,
        stay: bool,
    ) -> Result<Streaming<A>, KvError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (at, mut grpc) = self.grpc();
        let questions = stream::iter(questions);
        let questions: BoxStream<'static, Q> = match stay {
            true => questions.chain(stream::pending()).boxed(),
            false => questions.boxed(),
        };
        let mut request = Request::new(questions);
        request
            .metadata_mut()
            .insert("hasleader", MetadataValue::from_static("true"));
        let answer = async {
            grpc.ready()
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<Q, A>::default();
            grpc.streaming(request, PathAndQuery::from_static(path), codec)
                .await
        };
        match timeout(CALL_WITHIN, answer).await {
            Ok(Ok(answer)) => Ok(answer.into_inner()),
            Ok(Err(status)) => Err(self.fail(at, status.to_string())),
            Err(_) => Err(self.fail(at, format!("no answer within {CALL_WITHIN:?}"))),
        }
    }
}

fn open(member: &str, tls: Option<&ClusterTls>) -> Result<Channel, RendezvousError> {
    let refuse = |cause: String| RendezvousError::Unreachable {
        endpoint: member.to_owned(),
        cause,
    };
    let endpoint =
        Endpoint::from_shared(member.to_owned()).map_err(|error| refuse(error.to_string()))?;
    let mut endpoint = endpoint
        .connect_timeout(CALL_WITHIN)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PONG_WITHIN)
        .tcp_nodelay(true);
    if let Some(ClusterTls { ca, identity }) = tls {
        let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
        if let Some((certificate, key)) = identity {
            config = config.identity(Identity::from_pem(certificate, key));
        }
        endpoint = endpoint
            .tls_config(config)
            .map_err(|error| refuse(error.to_string()))?;
    }
    Ok(endpoint.connect_lazy())
}

#[async_trait]
impl Kv for Cluster {
    fn describe(&self) -> String {
        let names: Vec<&str> = self.members.iter().map(|(name, _)| name.as_str()).collect();
        names.join(",")
    }

    async fn grant(&self, length: Duration) -> Result<Lease, KvError> {
        // Whole seconds, and never shorter than asked for.
        let ttl = length.as_millis().div_ceil(1000) as i64;
        let question = api::LeaseGrantRequest { ttl };
        let granted: api::LeaseGrantResponse = self.call(api::LEASE_GRANT, question).await?;
        match granted.error.is_empty() {
            true => Ok(Lease(granted.id)),
            false => Err(KvError(granted.error)),
        }
    }

    async fn keep_alive(&self, lease: Lease) -> Result<bool, KvError> {
        let question = api::LeaseKeepAliveRequest { id: lease.0 };
        let mut answers: Streaming<api::LeaseKeepAliveResponse> = self
            .stream(api::LEASE_KEEP_ALIVE, vec![question], false)
            .await?;
        let at = self.current.load(Ordering::Relaxed);
        match timeout(CALL_WITHIN, answers.message()).await {
            Ok(Ok(Some(answer))) => Ok(answer.ttl > 0),
            Ok(Ok(None)) => Err(self.fail(at, "no answer".into())),
            Ok(Err(status)) => Err(self.fail(at, status.to_string())),
            Err(_) => Err(self.fail(at, format!("no answer within {CALL_WITHIN:?}"))),
        }
    }

    async fn revoke(&self, lease: Lease) -> Result<(), KvError> {
        let question = api::LeaseRevokeRequest { id: lease.0 };
        let revoked: Result<api::LeaseRevokeResponse, KvError> =
            self.call(api::LEASE_REVOKE, question).await;
        revoked.map(|_| ())
    }

    async fn get(&self, range: Range) -> Result<(Vec<Entry>, i64), KvError> {
        let (key, range_end) = bounds(&range);
        let found: api::RangeResponse = self
            .call(api::RANGE, api::RangeRequest { key, range_end })
            .await?;
        let entries = found.kvs.into_iter().filter_map(entry).collect();
        Ok((entries, revision(found.header)))
    }

    async fn put_if(&self, compare: Vec<Compare>, puts: Vec<Put>) -> Result<Option<i64>, KvError> {
        let question = api::TxnRequest {
            compare: compare.into_iter().map(comparison).collect(),
            success: puts.into_iter().map(operation).collect(),
        };
        let done: api::TxnResponse = self.call(api::TXN, question).await?;
        Ok(done.succeeded.then(|| revision(done.header)))
    }

    async fn watch(
        &self,
        ranges: Vec<Range>,
        from: i64,
    ) -> Result<BoxStream<'static, Result<Vec<Change>, KvError>>, KvError> {
        let create = |range: &Range| {
            let (key, range_end) = bounds(range);
            let request = api::WatchRequestKind::Create(api::WatchCreateRequest {
                key,
                range_end,
                start_revision: from,
            });
            api::WatchRequest {
                request: Some(request),
            }
        };
        let questions = ranges.iter().map(create).collect();
        let answers: Streaming<api::WatchResponse> =
            self.stream(api::WATCH, questions, true).await?;
        Ok(answers.map(changes).boxed())
    }
}

fn changes(answer: Result<api::WatchResponse, Status>) -> Result<Vec<Change>, KvError> {
    let answer = answer.map_err(|status| KvError(status.to_string()))?;
    if answer.canceled {
        return Err(KvError(format!(
            "the watch was ended: {}",
            answer.cancel_reason
        )));
    }
    let change = |event: api::Event| {
        let kv = event.kv?;
        match event.kind == api::EventType::Put as i32 {
            true => entry(kv).map(Change::Put),
            false => String::from_utf8(kv.key)
                .ok()
                .map(|key| Change::Gone { key }),
        }
    };
    Ok(answer.events.into_iter().filter_map(change).collect())
}

/// Keys that are no text are nobody's of ours.
fn entry(kv: api::KeyValue) -> Option<Entry> {
    Some(Entry {
        key: String::from_utf8(kv.key).ok()?,
        value: kv.value,
        created: kv.create_revision,
        modified: kv.mod_revision,
        lease: (kv.lease != 0).then_some(Lease(kv.lease)),
    })
}

fn revision(header: Option<api::ResponseHeader>) -> i64 {
    header.map_or(0, |header| header.revision)
}

fn bounds(range: &Range) -> (Vec<u8>, Vec<u8>) {
    match range {
        Range::Key(key) => (key.clone().into_bytes(), Vec::new()),
        Range::Prefix(prefix) => {
            let mut end = prefix.clone().into_bytes();
            if let Some(last) = end.last_mut() {
                *last += 1; // prefixes end in `/`
            }
            (prefix.clone().into_bytes(), end)
        }
    }
}

fn comparison(compare: Compare) -> api::Compare {
    let (target, key, with) = match compare {
        Compare::Modified(key, at) => (
            api::CompareTarget::Mod,
            key,
            api::CompareWith::ModRevision(at),
        ),
        Compare::Created(key, at) => (
            api::CompareTarget::Create,
            key,
            api::CompareWith::CreateRevision(at),
        ),
    };
    api::Compare {
        target: target as i32,
        key: key.into_bytes(),
        with: Some(with),
    }
}

fn operation(put: Put) -> api::RequestOp {
    let put = api::PutRequest {
        key: put.key.into_bytes(),
        value: put.value,
        lease: put.lease.map_or(0, |lease| lease.0),
    };
    api::RequestOp {
        request: Some(api::RequestOpKind::Put(put)),
    }
}
