//! Record files that this build must not read: of other format versions, of other runs, and damaged ones.

use std::fs;

use trainyard_rendezvous::server::{Limits, serve};
use trainyard_rendezvous::{FORMAT_VERSION, RendezvousError, RunSecret, RunState};

use super::server::LOOPBACK;

/// A record as commit 0213a85 wrote it, the last one without a format version.
pub const RECORD_0213A85: &str = include_str!("../fixtures/record_0213a85.json");

/// The error of a server of the run `job` that starts with this record file. The server must not change the file.
async fn error_of(record: &str) -> RendezvousError {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("record");
    fs::write(&path, record).unwrap();
    let secret = RunSecret::random().unwrap();
    let served = serve(LOOPBACK, "job", &secret, &path, Limits::default()).await;
    assert_eq!(fs::read_to_string(&path).unwrap(), record);
    served.expect_err("the record cannot be read")
}

#[tokio::test]
async fn a_record_without_a_format_version_is_rejected() {
    let error = error_of(RECORD_0213A85).await;
    assert!(
        matches!(
            error,
            RendezvousError::FormatVersion { found: 1, supported, .. } if supported == FORMAT_VERSION
        ),
        "{error:?}"
    );
    let message = error.to_string();
    for part in [
        "run `job`",
        "format version 1",
        &format!("version {FORMAT_VERSION}"),
        "delete the record file",
    ] {
        assert!(message.contains(part), "{message}");
    }
}

#[tokio::test]
async fn a_record_of_a_newer_format_version_is_rejected() {
    let newer = FORMAT_VERSION + 1;
    let error = error_of(&format!(r#"{{"format_version":{newer},"value":{{}}}}"#)).await;
    assert!(
        matches!(error, RendezvousError::FormatVersion { found, .. } if found == newer),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_damaged_record_is_rejected() {
    for damaged in ["", "{", &RECORD_0213A85[..100], r#"{"format_version":2}"#] {
        let error = error_of(damaged).await;
        assert!(
            matches!(error, RendezvousError::Unreadable { .. }),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn a_record_of_another_run_is_rejected() {
    let other = RunState::new("other");
    let record = serde_json::json!({ "format_version": FORMAT_VERSION, "value": other });
    let error = error_of(&record.to_string()).await;
    assert!(
        matches!(&error, RendezvousError::Unreadable { cause, .. } if cause.contains("run `other`")),
        "{error:?}"
    );
}
