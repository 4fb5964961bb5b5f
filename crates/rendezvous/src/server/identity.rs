//! TLS 1.3 between those who know the secret, and nobody else.
//!
//! Both sides derive both key pairs from the secret and the run, and each insists on the other's. Keys are sent raw
//! (RFC 7250): there are no certificates to issue, to keep or to parse.

use std::sync::Arc;

use tokio_rustls::rustls::client::AlwaysResolvesClientRawPublicKeys;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring, verify_tls13_signature_with_raw_key};
use tokio_rustls::rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use tokio_rustls::rustls::server::AlwaysResolvesServerRawPublicKeys;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    PeerIncompatible, ServerConfig, SignatureScheme, version,
};

use crate::Secret;

const SERVER: &str = "trainyard rendezvous 1 server";
const CLIENT: &str = "trainyard rendezvous 1 client";

/// What comes before the 32 bytes of an Ed25519 key in PKCS #8.
const PKCS8_ED25519: [u8; 16] = [
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];

/// For the server of a run.
pub fn server_config(secret: &Secret, run: &str) -> Result<Arc<ServerConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let own = key_pair(secret, SERVER, run)?;
    let peer = OnlyThisKey::new(&*key_pair(secret, CLIENT, run)?, &provider)?;
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])?
        .with_client_cert_verifier(Arc::new(peer))
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own)));
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.max_early_data_size = 0;
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

/// For those who come to it.
pub fn client_config(secret: &Secret, run: &str) -> Result<Arc<ClientConfig>, Error> {
    let provider = Arc::new(ring::default_provider());
    let own = key_pair(secret, CLIENT, run)?;
    let peer = OnlyThisKey::new(&*key_pair(secret, SERVER, run)?, &provider)?;
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&version::TLS13])?
        .dangerous() // the name rustls gives to every verifier that is not its own
        .with_custom_certificate_verifier(Arc::new(peer))
        .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(own)));
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.enable_sni = false;
    Ok(Arc::new(config))
}

fn key_pair(secret: &Secret, purpose: &'static str, run: &str) -> Result<Arc<CertifiedKey>, Error> {
    let mut pkcs8 = PKCS8_ED25519.to_vec();
    pkcs8.extend_from_slice(&secret.key(purpose, run));
    let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8))?;
    let public = key
        .public_key()
        .ok_or(Error::General("an Ed25519 key without a public key".into()))?;
    let public = CertificateDer::from(public.to_vec());
    Ok(Arc::new(CertifiedKey::new(vec![public], key)))
}

/// Accepts one public key. It is public, so comparing it need not be constant in time; what proves the other side is
/// its signature.
#[derive(Debug)]
struct OnlyThisKey {
    key: Vec<u8>,
    provider: Arc<CryptoProvider>,
}

impl OnlyThisKey {
    fn new(pair: &CertifiedKey, provider: &Arc<CryptoProvider>) -> Result<OnlyThisKey, Error> {
        Ok(OnlyThisKey {
            key: pair.end_entity_cert()?.as_ref().to_vec(),
            provider: Arc::clone(provider),
        })
    }

    fn check(&self, given: &CertificateDer<'_>) -> Result<(), Error> {
        match given.as_ref() == self.key {
            true => Ok(()),
            false => Err(Error::InvalidCertificate(
                CertificateError::ApplicationVerificationFailure,
            )),
        }
    }

    fn check_signature(
        &self,
        message: &[u8],
        given: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(given.as_ref());
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signed, algorithms)
    }
}

const TLS12: Error = Error::PeerIncompatible(PeerIncompatible::Tls13RequiredForQuic);

impl ServerCertVerifier for OnlyThisKey {
    fn verify_server_cert(
        &self,
        given: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(given).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        given: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, given, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for OnlyThisKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        given: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(given).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(TLS12)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        given: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, given, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
