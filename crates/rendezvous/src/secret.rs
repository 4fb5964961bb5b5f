//! What the agents of a run share and nobody else knows.
//!
//! From it follow the keys of the server, of its clients, and of what is stored; each for one run only. So an
//! agent of another run, even one with the same secret, speaks with other keys.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::RendezvousError;

/// 32 bytes.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new one.
    pub fn random() -> io::Result<Secret> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        Ok(Secret(bytes))
    }

    /// Reads it from a file that holds 64 hexadecimal digits and that nobody else may read.
    pub fn read(path: &Path) -> Result<Secret, RendezvousError> {
        let refuse = |cause: String| RendezvousError::Secret {
            path: path.display().to_string(),
            cause,
        };
        let metadata = fs::metadata(path).map_err(|error| refuse(error.to_string()))?;
        if metadata.mode() & 0o077 != 0 {
            return Err(refuse("others may read or write it: chmod 600".into()));
        }
        if metadata.len() > 256 {
            return Err(refuse("64 hexadecimal digits are expected".into()));
        }
        let text = fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
        parse(text.trim()).ok_or_else(|| refuse("64 hexadecimal digits are expected".into()))
    }

    /// Reads it, or makes a new one where there is no file.
    pub fn read_or_create(path: &Path) -> Result<Secret, RendezvousError> {
        let refuse = |error: io::Error| RendezvousError::Secret {
            path: path.display().to_string(),
            cause: error.to_string(),
        };
        if path.exists() {
            return Secret::read(path);
        }
        // Whoever reads the file finds it whole, and of several who make one, the first counts.
        let draft = path.with_extension(format!("{}.new", std::process::id()));
        let made = Secret::random().and_then(|secret| secret.write(&draft));
        let placed = made.and_then(|()| fs::hard_link(&draft, path));
        let _ = fs::remove_file(&draft);
        match placed {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(refuse(error)),
            _ => Secret::read(path),
        }
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(file, "{digits}").and_then(|()| file.sync_all())
    }

    /// A key for one purpose in one run.
    pub(crate) fn key(&self, purpose: &'static str, run: &str) -> [u8; 32] {
        let mut material = self.0.to_vec();
        material.extend_from_slice(run.as_bytes());
        blake3::derive_key(purpose, &material)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn parse(digits: &str) -> Option<Secret> {
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 32];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(Secret(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_is_made_once_and_is_nobody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let made = Secret::read_or_create(&path).unwrap();
        assert_eq!(Secret::read_or_create(&path).unwrap().0, made.0);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(format!("{made:?}"), "Secret(..)");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let error = Secret::read(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
    }

    #[test]
    fn keys_differ_by_purpose_and_run() {
        let secret = Secret([7; 32]);
        let keys = [
            secret.key("a", "x"),
            secret.key("b", "x"),
            secret.key("a", "y"),
        ];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        for text in ["", "00", &"g".repeat(64), &"é".repeat(32)] {
            assert!(parse(text).is_none());
        }
        assert!(parse(&"0f".repeat(32)).is_some());
    }
}
