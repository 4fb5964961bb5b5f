//! What `trainyard` does itself, and what it passes to the engine.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// A directory with a config and an engine that prints its arguments.
struct Setting {
    folder: TempDir,
}

impl Setting {
    fn new(config: &str) -> Setting {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("config.toml"), config).unwrap();
        let engine = folder.path().join("engine");
        fs::write(&engine, "#!/bin/sh\necho \"$0 ran: $*\"\nexit 42\n").unwrap();
        fs::set_permissions(&engine, fs::Permissions::from_mode(0o755)).unwrap();
        Setting { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn trainyard(&self, line: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_trainyard"))
            .args(line.split_whitespace())
            .current_dir(self.folder.path())
            .env("TRAINYARD_ENGINE", self.path("engine"))
            .output()
            .unwrap()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn arguments_are_passed_to_the_engine_unchanged() {
    let setting = Setting::new("[training]\nsteps = 20\n");
    for line in [
        "train config.toml",
        "train config.toml --training.steps 100 --debug.seed=7",
        "dry-run config.toml --world 1024 --rank 3 --json",
        "dry-run --world 8 config.toml --training.steps 5",
        "dry-run config.toml --training.steps 5 --world 8",
        "verify config.toml --nproc 2 --json --shrink",
        "verify config.toml --parallelism.data_parallel_replicate_degree -1 --nproc 2",
        "bench comm --nproc 2",
        "bench comm --max-bytes 1048576 --nproc 2",
    ] {
        let output = setting.trainyard(line);
        let expected = format!("{} ran: {line}\n", setting.path("engine").display());
        assert_eq!(text(&output.stdout), expected, "{}", text(&output.stderr));
        assert_eq!(output.status.code(), Some(42), "{line}");
    }
}

#[test]
fn an_invalid_config_does_not_start_the_engine() {
    let setting = Setting::new("[training]\nstepz = 20\n");
    for line in [
        "train config.toml",
        "dry-run config.toml --world 2",
        "verify config.toml --nproc 2",
        "train no.toml",
    ] {
        let output = setting.trainyard(line);
        assert_eq!(output.status.code(), Some(1), "{line}");
        assert_eq!(text(&output.stdout), "");
        assert!(text(&output.stderr).starts_with("error: "), "{line}");
    }
    let message = setting.trainyard("train config.toml").stderr;
    assert!(text(&message).contains("steps"), "{}", text(&message));
    let setting = Setting::new("");
    let output = setting.trainyard("train config.toml --training.stepz 5");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn invalid_arguments_exit_with_code_2() {
    let setting = Setting::new("");
    for line in [
        "train",
        "dry-run config.toml",
        "dry-run config.toml --world 2 --rank 2",
        "verify config.toml --nproc 0",
        "trace",
        "no-such-command",
        "",
    ] {
        assert_eq!(setting.trainyard(line).status.code(), Some(2), "{line}");
    }
}

#[test]
fn a_missing_engine_is_explained() {
    let setting = Setting::new("");
    // In a directory of its own, so that there is no engine in it.
    let alone = setting.path("trainyard");
    fs::copy(env!("CARGO_BIN_EXE_trainyard"), &alone).unwrap();
    let output = Command::new(&alone)
        .args(["train", "config.toml"])
        .current_dir(setting.folder.path())
        .env_remove("TRAINYARD_ENGINE")
        .env("PATH", "")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(message.starts_with("error: `trainyard-engine` is neither in "));
    assert!(message.contains("\nhint: "), "{message}");
}

fn write_trace(folder: &Path) {
    let ledger = trainyard_trace::Ledger::recording(0);
    drop(ledger.enter(trainyard_trace::SpanKind::Step, "step 1"));
    let path = folder.join(trainyard_trace::chrome_file_name(0));
    ledger.write_chrome(path).unwrap();
}

#[test]
fn a_trace_is_summarized_without_the_engine() {
    let setting = Setting::new("");
    write_trace(setting.folder.path());
    let file = trainyard_trace::chrome_file_name(0);
    let output = setting.trainyard(&format!("trace {file}"));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).contains(" ran: "));
    let output = setting.trainyard(&format!("trace {file} --json"));
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(summary.is_object());

    let output = setting.trainyard("trace no-such-file.json");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no-such-file.json"));
}
