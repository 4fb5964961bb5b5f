//! What members of a run know and nobody else does.
//!
//! The secret never travels. From it come a proof for either side of a connection, which is good for
//! that connection alone, and a key for each direction, with which messages are signed.

use std::fmt;
use std::fs::{File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};

/// What makes keys of this program and version differ from all others of the same secret.
const CONTEXT: &str = "trainyard 2026 copies in peers' memory, version 1";

/// Fewer bytes can be guessed; more are some other file.
const SHORTEST: usize = 16;
const LONGEST: u64 = 4096;

/// Why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The system refused.
    #[error("the run's secret {path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Others can read it.
    #[error("the run's secret {path} can be read by others: chmod 600 it", path = path.display())]
    Public {
        /// The file.
        path: PathBuf,
    },
    /// It is too short, or too long to be a secret.
    #[error(
        "the run's secret {path} must have {SHORTEST} to {LONGEST} bytes: \
         head -c 32 /dev/urandom > FILE",
        path = path.display()
    )]
    Length {
        /// The file.
        path: PathBuf,
    },
}

/// A run's secret.
#[derive(Clone)]
pub struct Secret([u8; 32]);

/// A secret made up for one run, in a file that is gone when its maker is.
#[derive(Debug)]
pub struct SharedSecret {
    /// The secret.
    pub secret: Secret,
    /// Where processes of the same user read it as long as this value lives.
    pub path: PathBuf,
    _memory: File,
}

/// Which side of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Holder,
}

/// What both sides of a connection have thrown in, so that no other connection is like it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Nonces {
    pub client: [u8; 32],
    pub holder: [u8; 32],
}

impl Secret {
    /// The secret that these bytes are.
    pub fn of(bytes: &[u8]) -> Secret {
        Secret(blake3::derive_key(CONTEXT, bytes))
    }

    /// Reads a file that nobody else can read.
    pub fn read(path: &Path) -> Result<Secret, SecretError> {
        let failed = |source| SecretError::Io {
            path: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(failed)?;
        let mode = file.metadata().map_err(failed)?.permissions().mode();
        if mode & 0o077 != 0 {
            let path = path.to_owned();
            return Err(SecretError::Public { path });
        }
        let mut bytes = Vec::new();
        let read = file.take(LONGEST + 1).read_to_end(&mut bytes);
        read.map_err(failed)?;
        match (SHORTEST..=LONGEST as usize).contains(&bytes.len()) {
            true => Ok(Secret::of(&bytes)),
            false => Err(SecretError::Length {
                path: path.to_owned(),
            }),
        }
    }

    /// Makes one up.
    pub fn generate() -> io::Result<SharedSecret> {
        let bytes = nonce()?;
        let memory = memfd_create("trainyard-secret", MemfdFlags::CLOEXEC)?;
        let mut memory = File::from(memory);
        memory.set_permissions(Permissions::from_mode(0o600))?;
        memory.write_all(&bytes)?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        Ok(SharedSecret {
            secret: Secret::of(&bytes),
            path: path.into(),
            _memory: memory,
        })
    }

    /// What `side` shows to prove that it knows the secret.
    pub(crate) fn proof(&self, side: Side, nonces: &Nonces) -> blake3::Hash {
        self.keyed("proof", side, nonces)
    }

    /// With what `side` signs its messages.
    pub(crate) fn key(&self, side: Side, nonces: &Nonces) -> [u8; 32] {
        *self.keyed("key", side, nonces).as_bytes()
    }

    fn keyed(&self, purpose: &str, side: Side, nonces: &Nonces) -> blake3::Hash {
        let side = match side {
            Side::Client => "client",
            Side::Holder => "holder",
        };
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(format!("{purpose} of the {side}\n").as_bytes());
        hasher.update(&nonces.client).update(&nonces.holder);
        hasher.finalize()
    }
}

impl fmt::Debug for Secret {
    /// Not into a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// 32 bytes that nobody can foretell.
pub(crate) fn nonce() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn proofs_are_for_one_side_of_one_connection() {
        let secret = Secret::of(b"a secret of the run");
        let nonces = Nonces {
            client: [1; 32],
            holder: [2; 32],
        };
        let swapped = Nonces {
            client: [2; 32],
            holder: [1; 32],
        };
        let proof = secret.proof(Side::Client, &nonces);
        assert_eq!(proof, secret.proof(Side::Client, &nonces));
        assert_ne!(proof, secret.proof(Side::Holder, &nonces));
        assert_ne!(proof, secret.proof(Side::Client, &swapped));
        assert_ne!(proof, Secret::of(b"another").proof(Side::Client, &nonces));
        assert_ne!(*proof.as_bytes(), secret.key(Side::Client, &nonces));
    }

    #[test]
    fn a_generated_secret_is_read_through_its_path() {
        let shared = Secret::generate().unwrap();
        let read = Secret::read(&shared.path).unwrap();
        assert_eq!(read.0, shared.secret.0);
        assert_eq!(format!("{shared:?}").matches("Secret").count(), 2);
    }

    #[test]
    fn files_that_are_no_secret_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, length: usize, mode: u32| {
            let path = folder.path().join(name);
            fs::write(&path, vec![7; length]).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            Secret::read(&path)
        };
        assert!(file("good", 32, 0o600).is_ok());
        assert!(matches!(
            file("open", 32, 0o640),
            Err(SecretError::Public { .. })
        ));
        for length in [0, SHORTEST - 1, LONGEST as usize + 1] {
            let refused = file("length", length, 0o600);
            assert!(matches!(refused, Err(SecretError::Length { .. })));
        }
    }
}
