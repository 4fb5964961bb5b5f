//! Classification of object-store errors, with advice for the user.

use std::error::Error as _;
use std::fmt;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

/// Why a request to an object store failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoteErrorKind {
    /// Neither the environment nor the host's metadata service provides credentials.
    NoCredentials,
    /// The server rejects the credentials, or they lack the permission.
    Denied,
    /// The bucket does not exist.
    NoBucket,
    /// The file does not exist.
    NoFile,
    /// The server cannot be reached, or does not respond in time.
    Unreachable,
    /// Any other error; the source error describes it.
    Other,
}

impl RemoteErrorKind {
    pub(super) fn of(error: &Error) -> RemoteErrorKind {
        let text = error.to_string();
        // Without credentials in the environment the client requests them from the host's metadata service.
        let is_metadata_request = ["/latest/api/token", "/latest/meta-data/"]
            .iter()
            .any(|path| text.contains(path));
        match error {
            _ if is_metadata_request => RemoteErrorKind::NoCredentials,
            _ if text.contains("NoSuchBucket") => RemoteErrorKind::NoBucket,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => {
                RemoteErrorKind::Denied
            }
            Error::NotFound { .. } => RemoteErrorKind::NoFile,
            _ if is_unreachable(error) => RemoteErrorKind::Unreachable,
            _ => RemoteErrorKind::Other,
        }
    }
}

/// Whether the connection was refused or broken, or timed out.
fn is_unreachable(error: &Error) -> bool {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            return !matches!(http.kind(), HttpErrorKind::Decode | HttpErrorKind::Unknown);
        }
        source = error.source();
    }
    false
}

impl fmt::Display for RemoteErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RemoteErrorKind::NoCredentials => {
                "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            }
            RemoteErrorKind::Denied => {
                "access denied: the identity of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY needs \
                 permission to list, read, write and delete objects there"
            }
            RemoteErrorKind::NoBucket => {
                "the bucket does not exist: create it, or check AWS_REGION and AWS_ENDPOINT_URL"
            }
            RemoteErrorKind::NoFile => "the file does not exist",
            RemoteErrorKind::Unreachable => {
                "the server cannot be reached: check AWS_ENDPOINT_URL, AWS_REGION and the network"
            }
            RemoteErrorKind::Other => "the request failed",
        })
    }
}
