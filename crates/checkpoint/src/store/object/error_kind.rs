//! Classification of object-store errors.

use std::error::Error as _;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

use crate::store::RemoteErrorKind;

pub(super) fn classify(error: &Error) -> RemoteErrorKind {
    let text = error.to_string();
    // Without credentials in the environment the client requests them from the host's metadata service.
    let is_metadata_request = ["/latest/api/token", "/latest/meta-data/"]
        .iter()
        .any(|path| text.contains(path));
    match error {
        _ if is_metadata_request => RemoteErrorKind::NoCredentials,
        _ if text.contains("NoSuchBucket") => RemoteErrorKind::NoBucket,
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => RemoteErrorKind::Denied,
        Error::NotFound { .. } => RemoteErrorKind::NoFile,
        _ if is_unreachable(error) => RemoteErrorKind::Unreachable,
        _ => RemoteErrorKind::Other,
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
