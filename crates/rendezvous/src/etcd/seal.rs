//! Values that only those who know the secret can have written, for the key they are under.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Secret;

const PURPOSE: &str = "trainyard rendezvous 1 etcd values";
/// etcd itself takes no more than 1.5 MiB unless told to.
const LONGEST: usize = 8 << 20;

/// Seals and opens the values of one run.
#[derive(Clone)]
pub struct Seal {
    key: [u8; 32],
}

impl Seal {
    pub fn new(secret: &Secret, run: &str) -> Seal {
        Seal {
            key: secret.key(PURPOSE, run),
        }
    }

    /// The digest in hexadecimal, a line break, and the value as JSON.
    pub fn close<T: Serialize>(&self, key: &str, value: &T) -> Vec<u8> {
        let json = serde_json::to_vec(value).unwrap_or_default();
        let mut sealed = self.digest(key, &json).to_hex().as_bytes().to_vec();
        sealed.push(b'\n');
        sealed.extend_from_slice(&json);
        sealed
    }

    pub fn open<T: DeserializeOwned>(&self, key: &str, sealed: &[u8]) -> Result<T, String> {
        if sealed.len() > LONGEST {
            return Err(format!("{} bytes are too many", sealed.len()));
        }
        let (digest, json) = sealed.split_at_checked(64).ok_or("too short")?;
        let json = json.strip_prefix(b"\n").ok_or("not sealed")?;
        let digest = blake3::Hash::from_hex(digest).map_err(|_| "not sealed")?;
        // Constant in time, as blake3 compares.
        if digest != self.digest(key, json) {
            return Err("not written by anybody who knows the run's secret".into());
        }
        serde_json::from_slice(json).map_err(|error| error.to_string())
    }

    /// The key is part of it, so that a value cannot be moved; its length too, so that no two pairs run together.
    fn digest(&self, key: &str, json: &[u8]) -> blake3::Hash {
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

    #[test]
    fn what_others_wrote_is_not_read() {
        let secret = Secret::random().unwrap();
        let seal = Seal::new(&secret, "job");
        let sealed = seal.close("k", &7u32);
        assert_eq!(seal.open::<u32>("k", &sealed), Ok(7));
        assert!(
            seal.open::<u32>("other", &sealed).is_err(),
            "under another key"
        );
        assert!(
            Seal::new(&secret, "run").open::<u32>("k", &sealed).is_err(),
            "of another run"
        );
        let other = Seal::new(&Secret::random().unwrap(), "job");
        assert!(
            other.open::<u32>("k", &sealed).is_err(),
            "with another secret"
        );
        for at in 0..sealed.len() {
            let mut bent = sealed.clone();
            bent[at] ^= 1;
            assert!(
                seal.open::<u32>("k", &bent).is_err(),
                "with a bit flipped at {at}"
            );
            assert!(seal.open::<u32>("k", &sealed[..at]).is_err(), "cut at {at}");
        }
    }
}
