//! Authenticates the values in etcd: a MAC proves that the writer knows the run secret and meant this key.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::RunSecret;
use crate::format::{self, FormatError};

const PURPOSE: &str = "trainyard rendezvous 1 etcd values";
/// More than any value needs. etcd itself rejects values above 1.5 MiB by default.
const MAX_VALUE_BYTES: usize = 8 << 20;
const MAC_DIGITS: usize = 64;

/// Signs and verifies the values of one run with keyed BLAKE3.
#[derive(Clone)]
pub struct Authenticator {
    key: [u8; 32],
}

/// Why a value is not used.
#[derive(Debug, PartialEq, Eq)]
pub enum ValueError {
    /// The writer does not know the run secret, or the value was damaged or moved.
    Unauthenticated(String),
    /// The value is authentic but cannot be decoded.
    Format(FormatError),
}

impl std::fmt::Display for ValueError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ValueError::Unauthenticated(cause) => f.write_str(cause),
            ValueError::Format(error) => error.fmt(f),
        }
    }
}

impl Authenticator {
    pub fn new(secret: &RunSecret, run: &str) -> Authenticator {
        Authenticator {
            key: secret.derive_key(PURPOSE, run),
        }
    }

    /// The bytes to store under a key: the MAC in hexadecimal, a line break, and the value in the stored format.
    pub fn sign<T: Serialize>(&self, key: &str, value: &T) -> Vec<u8> {
        let json = format::encode(value).unwrap_or_default();
        let mut signed = self.mac(key, &json).to_hex().as_bytes().to_vec();
        signed.push(b'\n');
        signed.extend_from_slice(&json);
        signed
    }

    /// The value stored under a key, if it is authentic.
    pub fn verify<T: DeserializeOwned>(&self, key: &str, signed: &[u8]) -> Result<T, ValueError> {
        let json = self
            .authenticate(key, signed)
            .map_err(ValueError::Unauthenticated)?;
        format::decode(json).map_err(ValueError::Format)
    }

    fn authenticate<'a>(&self, key: &str, signed: &'a [u8]) -> Result<&'a [u8], String> {
        if signed.len() > MAX_VALUE_BYTES {
            return Err(format!(
                "{} bytes are too many for a value; the maximum is {MAX_VALUE_BYTES}",
                signed.len()
            ));
        }
        let (mac, json) = signed
            .split_at_checked(MAC_DIGITS)
            .ok_or("the value is too short for a MAC")?;
        let json = json.strip_prefix(b"\n").ok_or("the value has no MAC")?;
        let mac = blake3::Hash::from_hex(mac).map_err(|_| "the value has no MAC")?;
        // blake3 compares hashes in constant time.
        if mac == self.mac(key, json) {
            Ok(json)
        } else {
            Err("the writer of the value does not know the run secret".into())
        }
    }

    /// Includes the key, so that a value cannot be moved, and its length, so that key and value cannot run together.
    fn mac(&self, key: &str, json: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&(key.len() as u64).to_le_bytes());
        hasher.update(key.as_bytes());
        hasher.update(json);
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_rejected(authenticator: &Authenticator, key: &str, signed: &[u8]) -> bool {
        let verified = authenticator.verify::<u32>(key, signed);
        matches!(verified, Err(ValueError::Unauthenticated(_)))
    }

    #[test]
    fn values_of_other_writers_are_rejected() {
        let secret = RunSecret::random().unwrap();
        let authenticator = Authenticator::new(&secret, "job");
        let signed = authenticator.sign("k", &7u32);
        assert_eq!(authenticator.verify::<u32>("k", &signed), Ok(7));
        assert!(
            is_rejected(&authenticator, "other", &signed),
            "the value was moved to another key"
        );
        let other_run = Authenticator::new(&secret, "run");
        assert!(
            is_rejected(&other_run, "k", &signed),
            "the value is of another run"
        );
        let other_secret = Authenticator::new(&RunSecret::random().unwrap(), "job");
        assert!(
            is_rejected(&other_secret, "k", &signed),
            "the writer knows another secret"
        );
        for at in 0..signed.len() {
            let mut damaged = signed.clone();
            damaged[at] ^= 1;
            assert!(
                is_rejected(&authenticator, "k", &damaged),
                "a bit was flipped at {at}"
            );
            assert!(
                is_rejected(&authenticator, "k", &signed[..at]),
                "the value was truncated at {at}"
            );
        }
    }
}
