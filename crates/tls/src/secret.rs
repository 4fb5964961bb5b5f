//! The secret that the processes of a run share.

use std::fmt::{self, Display};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{MemfdFlags, memfd_create};

/// More bytes than this are some other file.
const MAX_FILE_BYTES: u64 = 256;

/// A file with a run secret cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot use the run secret {path}: {cause}", path = path.display())]
pub struct SecretError {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it.
    pub cause: String,
}

/// The secret of a run: 32 random bytes that only its processes know.
///
/// A process never sends the secret. It derives keys from it, one per purpose and run, so a key that leaks or is used
/// for another purpose says nothing about the others.
#[derive(Clone)]
pub struct RunSecret([u8; 32]);

/// A random secret in an anonymous file, for the processes that one launcher starts.
///
/// The file is readable through its path while this value lives, and vanishes with it.
#[derive(Debug)]
pub struct SecretFile {
    /// The secret in the file.
    pub secret: RunSecret,
    /// Where processes of the same user on the same host can read it.
    pub path: PathBuf,
    _memory: File,
}

impl RunSecret {
    /// Generates a random secret.
    pub fn random() -> io::Result<RunSecret> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        Ok(RunSecret(bytes))
    }

    /// Reads a secret from a file of 64 hexadecimal digits that only its owner can access.
    pub fn read(path: &Path) -> Result<RunSecret, SecretError> {
        let file = File::open(path).map_err(failed(path))?;
        let mode = file.metadata().map_err(failed(path))?.permissions().mode();
        if mode & 0o077 != 0 {
            return Err(failed(path)("other users can access it: chmod 600"));
        }
        let mut text = Vec::new();
        let read = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut text);
        read.map_err(failed(path))?;
        let text = String::from_utf8(text).unwrap_or_default();
        let secret = parse(text.trim()).filter(|_| text.len() as u64 <= MAX_FILE_BYTES);
        secret.ok_or_else(|| {
            failed(path)("it must contain 64 hexadecimal digits: openssl rand -hex 32 > FILE")
        })
    }

    /// Reads a secret from a file, and generates one if the file does not exist.
    pub fn read_or_create(path: &Path) -> Result<RunSecret, SecretError> {
        if path.exists() {
            return RunSecret::read(path);
        }
        // A hard link appears with its contents complete, and if several processes create the file at once, the
        // first one wins.
        let draft = path.with_extension(format!("{}.new", std::process::id()));
        let written = RunSecret::random().and_then(|secret| secret.write(&draft));
        let linked = written.and_then(|()| fs::hard_link(&draft, path));
        let _ = fs::remove_file(&draft);
        match linked {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(path)(error)),
            _ => RunSecret::read(path),
        }
    }

    /// Derives a key for one purpose in one run. Purposes are hard-coded, and unique among all programs.
    pub fn derive_key(&self, purpose: &'static str, run: &str) -> [u8; 32] {
        let mut material = self.0.to_vec();
        material.extend_from_slice(run.as_bytes());
        blake3::derive_key(purpose, &material)
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        writeln!(file, "{}", self.to_hex()).and_then(|()| file.sync_all())
    }

    fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl SecretFile {
    /// Generates a random secret in memory.
    pub fn random() -> io::Result<SecretFile> {
        let secret = RunSecret::random()?;
        let memory = memfd_create("trainyard-secret", MemfdFlags::CLOEXEC)?;
        let mut memory = File::from(memory);
        memory.set_permissions(Permissions::from_mode(0o600))?;
        writeln!(memory, "{}", secret.to_hex())?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        Ok(SecretFile {
            secret,
            path: path.into(),
            _memory: memory,
        })
    }
}

impl fmt::Debug for RunSecret {
    /// Keeps the secret out of logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RunSecret(..)")
    }
}

fn parse(digits: &str) -> Option<RunSecret> {
    if digits.len() != 64 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut bytes = [0; 32];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(RunSecret(bytes))
}

fn failed<C: Display>(path: &Path) -> impl Fn(C) -> SecretError {
    move |cause| SecretError {
        path: path.to_owned(),
        cause: cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_secret_is_created_once_and_only_its_owner_can_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let created = RunSecret::read_or_create(&path).unwrap();
        assert_eq!(RunSecret::read_or_create(&path).unwrap().0, created.0);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(format!("{created:?}"), "RunSecret(..)");
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let error = RunSecret::read(&path).unwrap_err().to_string();
        assert!(error.contains("chmod 600"), "{error}");
    }

    #[test]
    fn an_anonymous_secret_is_readable_through_its_path() {
        let file = SecretFile::random().unwrap();
        assert_eq!(RunSecret::read(&file.path).unwrap().0, file.secret.0);
        assert_eq!(format!("{file:?}").matches("RunSecret(..)").count(), 1);
        let (path, secret) = (file.path.clone(), file.secret.0);
        drop(file);
        // Another file of this process may have the same descriptor by now.
        let found = RunSecret::read(&path).ok();
        assert!(found.is_none_or(|found| found.0 != secret));
    }

    #[test]
    fn keys_differ_by_purpose_and_run() {
        let secret = RunSecret([7; 32]);
        let keys = [
            secret.derive_key("a", "x"),
            secret.derive_key("b", "x"),
            secret.derive_key("a", "y"),
        ];
        assert!(keys[0] != keys[1] && keys[0] != keys[2] && keys[1] != keys[2]);
    }

    #[test]
    fn malformed_secrets_are_rejected() {
        for text in ["", "00", &"g".repeat(64), &"é".repeat(32)] {
            assert!(parse(text).is_none());
        }
        assert!(parse(&"0f".repeat(32)).is_some());
    }

    #[test]
    fn files_of_another_format_are_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        let write = |bytes: &[u8], mode| {
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            RunSecret::read(&path)
        };
        let digits = "0f".repeat(32);
        assert!(write(format!("{digits}\n").as_bytes(), 0o600).is_ok());
        assert!(write(digits.as_bytes(), 0o640).is_err());
        let padded = format!("{digits}{}", " ".repeat(1000));
        for bytes in [
            &b""[..],
            &[7; 32],
            &[0xff; 64],
            &digits.as_bytes()[1..],
            padded.as_bytes(),
        ] {
            let error = write(bytes, 0o600).unwrap_err().to_string();
            assert!(error.contains("64 hexadecimal digits"), "{error}");
        }
    }
}
