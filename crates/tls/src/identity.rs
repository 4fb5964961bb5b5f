//! TLS 1.3 between processes that know the run secret.
//!
//! Both ends derive both key pairs from the secret, and each accepts only the other's. Keys are sent raw (RFC 7250):
//! there are no certificates to issue, store or parse.

use std::sync::Arc;

use rustls::client::AlwaysResolvesClientRawPublicKeys;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    PeerIncompatible, ServerConfig, SignatureScheme, version,
};

use crate::RunSecret;

/// What precedes the 32 bytes of an Ed25519 key in PKCS #8.
const PKCS8_ED25519: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// rustls has no error for "TLS 1.2 is disabled" on a verifier; it is never reached, because only 1.3 is negotiated.
const TLS12_REFUSED: Error = Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic);

/// TLS cannot be set up.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("cannot set up TLS: {0}")]
pub struct TlsError(#[from] Error);

/// A protocol of a run. Each has its own keys, so a connection to the wrong service fails its handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// The rendezvous of agents, gRPC.
    Rendezvous,
    /// Checkpoints in the memory of peers.
    PeerCheckpoint,
    /// The workers' store, which agents relay to each other.
    WorkerStore,
    /// Gradients and parameters of asynchronous training.
    ParameterServer,
}

impl Service {
    /// The purposes for which the keys of the server and of its clients are derived.
    fn purposes(self) -> [&'static str; 2] {
        match self {
            Service::Rendezvous => [
                "trainyard rendezvous 1 server",
                "trainyard rendezvous 1 client",
            ],
            Service::PeerCheckpoint => [
                "trainyard peer checkpoint 1 server",
                "trainyard peer checkpoint 1 client",
            ],
            Service::WorkerStore => [
                "trainyard worker store 1 server",
                "trainyard worker store 1 client",
            ],
            Service::ParameterServer => [
                "trainyard parameter server 1 server",
                "trainyard parameter server 1 client",
            ],
        }
    }

    /// The protocol that TLS negotiates (ALPN).
    fn protocol(self) -> &'static [u8] {
        match self {
            Service::Rendezvous => b"h2",
            Service::PeerCheckpoint => b"trainyard-peer-checkpoint/1",
            Service::WorkerStore => b"trainyard-worker-store/1",
            Service::ParameterServer => b"trainyard-parameter-server/1",
        }
    }
}

/// The keys of a service in a run: those of its server and those of its clients.
#[derive(Clone, Debug)]
pub struct Identity {
    service: Service,
    server: Arc<CertifiedKey>,
    client: Arc<CertifiedKey>,
    provider: Arc<CryptoProvider>,
}

impl Identity {
    /// Derives the keys of a service in run `run`.
    pub fn new(secret: &RunSecret, service: Service, run: &str) -> Result<Identity, TlsError> {
        let [server, client] = service.purposes();
        Ok(Identity {
            service,
            server: key_pair(&secret.derive_key(server, run))?,
            client: key_pair(&secret.derive_key(client, run))?,
            provider: Arc::new(provider()),
        })
    }

    /// The configuration of the server: TLS 1.3, and clients must prove that they know the secret.
    pub fn server_config(&self) -> Result<Arc<ServerConfig>, TlsError> {
        let verifier = PinnedKeyVerifier::new(&self.client, &self.provider)?;
        let resolver = AlwaysResolvesServerRawPublicKeys::new(Arc::clone(&self.server));
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&version::TLS13])?
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = vec![self.service.protocol().to_vec()];
        config.max_early_data_size = 0;
        config.send_tls13_tickets = 0;
        Ok(Arc::new(config))
    }

    /// The configuration of a client: TLS 1.3, and the server must prove that it knows the secret.
    pub fn client_config(&self) -> Result<Arc<ClientConfig>, TlsError> {
        let verifier = PinnedKeyVerifier::new(&self.server, &self.provider)?;
        let resolver = AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&self.client));
        let mut config = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&version::TLS13])?
            .dangerous() // rustls calls every verifier that is not its own dangerous
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = vec![self.service.protocol().to_vec()];
        config.enable_sni = false;
        Ok(Arc::new(config))
    }
}

/// The cryptography of both ends. They are builds of one version, so there is one cipher suite: the fastest one on
/// processors with AES instructions, because checkpoints of gigabytes pass through it.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![ring::cipher_suite::TLS13_AES_128_GCM_SHA256],
        ..ring::default_provider()
    }
}

fn key_pair(seed: &[u8; 32]) -> Result<Arc<CertifiedKey>, Error> {
    let mut pkcs8 = PKCS8_ED25519.to_vec();
    pkcs8.extend_from_slice(seed);
    let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8))?;
    let public = key
        .public_key()
        .ok_or(Error::General("an Ed25519 key without a public key".into()))?;
    let public = CertificateDer::from(public.to_vec());
    Ok(Arc::new(CertifiedKey::new(vec![public], key)))
}

/// A TLS verifier that accepts one public key.
///
/// The key is public, so comparing it need not take constant time; the peer's signature is what authenticates it.
#[derive(Debug)]
pub struct PinnedKeyVerifier {
    key: Vec<u8>,
    provider: Arc<CryptoProvider>,
}

impl PinnedKeyVerifier {
    fn new(
        pair: &CertifiedKey,
        provider: &Arc<CryptoProvider>,
    ) -> Result<PinnedKeyVerifier, Error> {
        Ok(PinnedKeyVerifier {
            key: pair.end_entity_cert()?.as_ref().to_vec(),
            provider: Arc::clone(provider),
        })
    }

    fn check(&self, key: &CertificateDer<'_>) -> Result<(), Error> {
        if key.as_ref() == self.key {
            Ok(())
        } else {
            Err(Error::InvalidCertificate(
                CertificateError::ApplicationVerificationFailure,
            ))
        }
    }

    fn check_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
    }
}

impl ServerCertVerifier for PinnedKeyVerifier {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(key).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(TLS12_REFUSED)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for PinnedKeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(key).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(TLS12_REFUSED)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use rustls::{AlertDescription, ClientConnection, ServerConnection};

    use super::*;

    /// Runs a handshake in memory; the errors of the client and of the server.
    fn handshake(client: &Identity, server: &Identity) -> [Option<Error>; 2] {
        let name = ServerName::try_from("trainyard").unwrap();
        let mut client = ClientConnection::new(client.client_config().unwrap(), name).unwrap();
        let mut server = ServerConnection::new(server.server_config().unwrap()).unwrap();
        for _ in 0..4 {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            server.read_tls(&mut &bytes[..]).unwrap();
            let server_error = server.process_new_packets().err();
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            client.read_tls(&mut &bytes[..]).unwrap();
            let client_error = client.process_new_packets().err();
            if client_error.is_some() || server_error.is_some() {
                // The end that fails tells the other one by an alert.
                let mut bytes = Vec::new();
                while client.wants_write() {
                    client.write_tls(&mut bytes).unwrap();
                }
                let _ = server.read_tls(&mut &bytes[..]);
                let server_error = server_error.or(server.process_new_packets().err());
                return [client_error, server_error];
            }
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        [None, None]
    }

    #[test]
    fn both_ends_must_have_the_same_secret_service_and_run() {
        let secret = RunSecret::random().unwrap();
        let other = RunSecret::random().unwrap();
        let identity =
            |secret: &RunSecret, service, run| Identity::new(secret, service, run).unwrap();
        let own = identity(&secret, Service::Rendezvous, "job");
        let again = identity(&secret, Service::Rendezvous, "job");
        assert_eq!(handshake(&own, &again), [None, None]);
        for stranger in [
            identity(&other, Service::Rendezvous, "job"),
            identity(&secret, Service::Rendezvous, "another job"),
        ] {
            let [client, server] = handshake(&stranger, &own);
            let expected =
                Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
            assert_eq!(client, Some(expected));
            assert_eq!(
                server,
                Some(Error::AlertReceived(AlertDescription::AccessDenied))
            );
        }
        let [_, server] = handshake(&identity(&secret, Service::PeerCheckpoint, "job"), &own);
        assert_eq!(server, Some(Error::NoApplicationProtocol));
    }

    /// A client that ignores the server's key still has to prove its own.
    #[test]
    fn a_server_checks_the_key_of_its_clients() {
        let secret = RunSecret::random().unwrap();
        let own = Identity::new(&secret, Service::PeerCheckpoint, "").unwrap();
        let stranger =
            Identity::new(&RunSecret::random().unwrap(), Service::PeerCheckpoint, "").unwrap();
        let lenient = Identity {
            server: Arc::clone(&own.server),
            ..stranger
        };
        let [_, server] = handshake(&lenient, &own);
        let expected = Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
        assert_eq!(server, Some(expected));
    }
}
