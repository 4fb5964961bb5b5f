//! What is wrong when a bucket's server does not do what it is asked, and what to do about it.

use std::error::Error as _;
use std::fmt;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

/// What was wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// Neither the environment nor the machine has keys.
    NoCredentials,
    /// The server does not take the keys, or they may not do this.
    Denied,
    /// There is no such bucket.
    NoBucket,
    /// There is no such file.
    NoFile,
    /// Nobody answers, or not in time.
    Unreachable,
    /// Something else, which the server's words tell.
    Other,
}

impl Trouble {
    pub(super) fn of(error: &Error) -> Trouble {
        let text = error.to_string();
        // Without keys in the environment the machine is asked for its own, over HTTP.
        let is_about_keys = ["/latest/api/token", "/latest/meta-data/"]
            .iter()
            .any(|place| text.contains(place));
        match error {
            _ if is_about_keys => Trouble::NoCredentials,
            _ if text.contains("NoSuchBucket") => Trouble::NoBucket,
            Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => Trouble::Denied,
            Error::NotFound { .. } => Trouble::NoFile,
            _ if is_unreachable(error) => Trouble::Unreachable,
            _ => Trouble::Other,
        }
    }
}

/// Whether a connection was refused, broken or silent.
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

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Trouble::NoCredentials => {
                "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            }
            Trouble::Denied => {
                "not allowed: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY must be those of somebody \
                 who may list, read, write and delete there"
            }
            Trouble::NoBucket => {
                "there is no such bucket: make it, or look at AWS_REGION and AWS_ENDPOINT_URL"
            }
            Trouble::NoFile => "there is no such file",
            Trouble::Unreachable => {
                "the server cannot be reached: look at AWS_ENDPOINT_URL, AWS_REGION and the network"
            }
            Trouble::Other => "the server refused",
        })
    }
}
