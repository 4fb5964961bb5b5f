//! Why requests to object stores fail, with advice for the user.

use std::fmt;

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
