//! An etcd cluster over the network: requests go to one member, and to the next one when it fails.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use http::uri::PathAndQuery;
use prost::Message;
use tokio::sync::Mutex;
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tonic::client::Grpc;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use super::api;
use super::kv::{Change, Compare, Entry, Kv, KvError, Lease, Put, Range};
use crate::RendezvousError;

/// The timeout of a request: longer than an election of etcd's leader, shorter than a lease.
const CALL_TIMEOUT: Duration = Duration::from_millis(1500);
/// etcd closes connections that ping more often than every 5 s.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(6);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

/// The members of an etcd cluster.
#[derive(Debug)]
pub struct Cluster {
    members: Vec<(String, Channel)>,
    /// The member that the next request goes to.
    current: AtomicUsize,
    user: Option<ClusterUser>,
    /// The token that etcd has issued to the user.
    token: Mutex<Option<Token>>,
}

type Token = MetadataValue<Ascii>;

/// A user of an etcd cluster that has users.
#[derive(Clone)]
pub struct ClusterUser {
    /// The name of the user.
    pub name: String,
    /// The password of the user.
    pub password: String,
}

impl fmt::Debug for ClusterUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterUser({:?})", self.name)
    }
}

/// The TLS configuration for etcd, in PEM.
#[derive(Clone, Debug, Default)]
pub struct ClusterTls {
    /// The certificate authority of etcd's members.
    pub ca: String,
    /// This client's certificate and key, if etcd requires them.
    pub identity: Option<(String, String)>,
}

impl Cluster {
    /// A cluster of members such as `http://host:2379`, or `https://` with `tls`. Does not connect yet.
    pub fn new(members: &[String], tls: Option<&ClusterTls>) -> Result<Cluster, RendezvousError> {
        if members.is_empty() {
            return Err(RendezvousError::Unreachable {
                endpoint: "etcd".into(),
                cause: "no etcd endpoint was given".into(),
            });
        }
        let members = members
            .iter()
            .map(|member| Ok((member.clone(), open(member, tls)?)));
        Ok(Cluster {
            members: members.collect::<Result<_, RendezvousError>>()?,
            current: AtomicUsize::new(0),
            user: None,
            token: Mutex::new(None),
        })
    }

    /// The same cluster, as a user of it.
    pub fn with_user(self, user: Option<ClusterUser>) -> Cluster {
        Cluster { user, ..self }
    }

    /// Adds the token of the user to a request. etcd keeps a token while it is used.
    async fn authorize<Q>(&self, request: &mut Request<Q>) -> Result<(), KvError> {
        let Some(user) = &self.user else {
            return Ok(());
        };
        let mut token = self.token.lock().await;
        if token.is_none() {
            let login = api::AuthenticateRequest {
                name: user.name.clone(),
                password: user.password.clone(),
            };
            let response: api::AuthenticateResponse =
                self.send(api::AUTHENTICATE, Request::new(login)).await?;
            let issued = response.token.parse();
            *token = Some(issued.map_err(|_| KvError("etcd issued an invalid token".into()))?);
        }
        if let Some(token) = &*token {
            request.metadata_mut().insert("token", token.clone());
        }
        Ok(())
    }

    fn grpc(&self) -> (usize, Grpc<Channel>) {
        let at = self.current.load(Ordering::Relaxed) % self.members.len();
        (at, Grpc::new(self.members[at].1.clone()))
    }

    /// Sends the next request to the next member, and returns the error of this one.
    fn fail(&self, at: usize, cause: String) -> KvError {
        self.current
            .store((at + 1) % self.members.len(), Ordering::Relaxed);
        KvError(format!("{}: {cause}", self.members[at].0))
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A, KvError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut request = Request::new(request);
        self.authorize(&mut request).await?;
        self.send(path, request).await
    }

    async fn send<Q, A>(&self, path: &'static str, request: Request<Q>) -> Result<A, KvError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (at, mut grpc) = self.grpc();
        let response = async {
            grpc.ready()
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<Q, A>::default();
            grpc.unary(request, PathAndQuery::from_static(path), codec)
                .await
        };
        self.received(at, timeout(CALL_TIMEOUT, response).await)
    }

    /// What a member has answered. A token that it does not know is forgotten: the next request asks for another one.
    fn received<A>(
        &self,
        at: usize,
        response: Result<Result<Response<A>, Status>, Elapsed>,
    ) -> Result<A, KvError> {
        match response {
            Ok(Ok(response)) => Ok(response.into_inner()),
            Ok(Err(status)) => {
                if status.code() == Code::Unauthenticated
                    && let Ok(mut token) = self.token.try_lock()
                {
                    *token = None;
                }
                Err(self.fail(at, status.to_string()))
            }
            Err(_) => Err(self.fail(at, format!("no response within {CALL_TIMEOUT:?}"))),
        }
    }

    /// Opens a stream. etcd ends it when the member has lost its leader, so that no agent keeps watching a member
    /// that is partitioned from the cluster.
    async fn stream<Q, A>(
        &self,
        path: &'static str,
        requests: Vec<Q>,
        keep_open: bool,
    ) -> Result<Streaming<A>, KvError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let (at, mut grpc) = self.grpc();
        let requests = stream::iter(requests);
        let requests: BoxStream<'static, Q> = if keep_open {
            requests.chain(stream::pending()).boxed()
        } else {
            requests.boxed()
        };
        let mut request = Request::new(requests);
        request
            .metadata_mut()
            .insert("hasleader", MetadataValue::from_static("true"));
        self.authorize(&mut request).await?;
        let response = async {
            grpc.ready()
                .await
                .map_err(|error| Status::unavailable(error.to_string()))?;
            let codec = ProstCodec::<Q, A>::default();
            grpc.streaming(request, PathAndQuery::from_static(path), codec)
                .await
        };
        self.received(at, timeout(CALL_TIMEOUT, response).await)
    }
}

fn open(member: &str, tls: Option<&ClusterTls>) -> Result<Channel, RendezvousError> {
    let failed = |cause: String| RendezvousError::Unreachable {
        endpoint: member.to_owned(),
        cause,
    };
    let endpoint =
        Endpoint::from_shared(member.to_owned()).map_err(|error| failed(error.to_string()))?;
    let mut endpoint = endpoint
        .connect_timeout(CALL_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .tcp_nodelay(true);
    if let Some(ClusterTls { ca, identity }) = tls {
        let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca));
        if let Some((certificate, key)) = identity {
            config = config.identity(Identity::from_pem(certificate, key));
        }
        endpoint = endpoint
            .tls_config(config)
            .map_err(|error| failed(error.to_string()))?;
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
        // etcd counts whole seconds; round up, so that the lease is never shorter than requested.
        let ttl = length.as_millis().div_ceil(1000) as i64;
        let request = api::LeaseGrantRequest { ttl };
        let granted: api::LeaseGrantResponse = self.call(api::LEASE_GRANT, request).await?;
        if granted.error.is_empty() {
            Ok(Lease(granted.id))
        } else {
            Err(KvError(granted.error))
        }
    }

    async fn keep_alive(&self, lease: Lease) -> Result<bool, KvError> {
        let request = api::LeaseKeepAliveRequest { id: lease.0 };
        let mut responses: Streaming<api::LeaseKeepAliveResponse> = self
            .stream(api::LEASE_KEEP_ALIVE, vec![request], false)
            .await?;
        let at = self.current.load(Ordering::Relaxed);
        match timeout(CALL_TIMEOUT, responses.message()).await {
            Ok(Ok(Some(response))) => Ok(response.ttl > 0),
            Ok(Ok(None)) => Err(self.fail(at, "no response".into())),
            Ok(Err(status)) => Err(self.fail(at, status.to_string())),
            Err(_) => Err(self.fail(at, format!("no response within {CALL_TIMEOUT:?}"))),
        }
    }

    async fn revoke(&self, lease: Lease) -> Result<(), KvError> {
        let request = api::LeaseRevokeRequest { id: lease.0 };
        let revoked: Result<api::LeaseRevokeResponse, KvError> =
            self.call(api::LEASE_REVOKE, request).await;
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
        let request = api::TxnRequest {
            compare: compare.into_iter().map(comparison).collect(),
            success: puts.into_iter().map(operation).collect(),
        };
        let done: api::TxnResponse = self.call(api::TXN, request).await?;
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
        let requests = ranges.iter().map(create).collect();
        let responses: Streaming<api::WatchResponse> =
            self.stream(api::WATCH, requests, true).await?;
        Ok(responses.map(changes).boxed())
    }
}

fn changes(response: Result<api::WatchResponse, Status>) -> Result<Vec<Change>, KvError> {
    let response = response.map_err(|status| KvError(status.to_string()))?;
    if response.canceled {
        return Err(KvError(format!(
            "etcd canceled the watch: {}",
            response.cancel_reason
        )));
    }
    let change = |event: api::Event| {
        let kv = event.kv?;
        if event.kind == api::EventType::Put as i32 {
            entry(kv).map(Change::Put)
        } else {
            String::from_utf8(kv.key)
                .ok()
                .map(|key| Change::Deleted { key })
        }
    };
    Ok(response.events.into_iter().filter_map(change).collect())
}

/// Converts an entry; `None` if its key is not text, because then this program did not write it.
fn entry(kv: api::KeyValue) -> Option<Entry> {
    Some(Entry {
        key: String::from_utf8(kv.key).ok()?,
        value: kv.value,
        create_revision: kv.create_revision,
        mod_revision: kv.mod_revision,
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
        Compare::ModRevision(key, at) => (
            api::CompareTarget::Mod,
            key,
            api::CompareWith::ModRevision(at),
        ),
        Compare::CreateRevision(key, at) => (
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
