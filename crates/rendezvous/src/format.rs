//! The format of everything that is stored: the record file and the values in etcd.
//!
//! A stored value is JSON under a version number. A build reads only the version that it writes: the number changes
//! with every change of the JSON below it, and a run is not moved between builds while it lasts.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of stored values that this build reads and writes. Version 1 had no version number.
pub const FORMAT_VERSION: u32 = 2;

/// Why stored bytes cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub enum FormatError {
    /// Another version wrote them.
    Version { found: u32 },
    /// They are not what this version writes.
    Malformed(String),
}

impl std::fmt::Display for FormatError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FormatError::Version { found } => {
                write!(
                    f,
                    "format version {found}, and this build reads version {FORMAT_VERSION}"
                )
            }
            FormatError::Malformed(cause) => f.write_str(cause),
        }
    }
}

#[derive(Deserialize)]
struct Header {
    #[serde(default = "unversioned")]
    format_version: u32,
}

fn unversioned() -> u32 {
    1
}

#[derive(Serialize, Deserialize)]
struct Versioned<T> {
    format_version: u32,
    value: T,
}

/// Encodes a value for storage.
pub fn encode<T: Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&Versioned {
        format_version: FORMAT_VERSION,
        value,
    })
}

/// Decodes a stored value. Checks the version before anything else, so that an old value is not reported as damaged.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, FormatError> {
    let malformed = |error: serde_json::Error| FormatError::Malformed(error.to_string());
    let header: Header = serde_json::from_slice(bytes).map_err(malformed)?;
    if header.format_version != FORMAT_VERSION {
        return Err(FormatError::Version {
            found: header.format_version,
        });
    }
    let versioned: Versioned<T> = serde_json::from_slice(bytes).map_err(malformed)?;
    Ok(versioned.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_only_by_the_version_that_wrote_it() {
        let bytes = encode(&7u32).unwrap();
        assert_eq!(decode::<u32>(&bytes), Ok(7));
        let newer = br#"{"format_version":3,"value":7}"#;
        assert_eq!(decode::<u32>(newer), Err(FormatError::Version { found: 3 }));
        let unversioned = br#"{"run":"job"}"#;
        assert_eq!(
            decode::<u32>(unversioned),
            Err(FormatError::Version { found: 1 })
        );
        for damaged in [&b"7"[..], b"{", b"[3]x", br#"{"format_version":2}"#] {
            assert!(matches!(
                decode::<u32>(damaged),
                Err(FormatError::Malformed(_))
            ));
        }
    }
}
