//! `trainyard train --from FILE`, and `plan check` of other frameworks' configs, as a user runs them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const MODEL: &str = "[model]\nflavor = \"tiny\"\n[training]\nseq_len = 128\n";

fn configs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../interop/tests/configs")
}

/// A directory with the config of a model and an engine that prints its arguments.
struct Setting {
    folder: TempDir,
}

impl Setting {
    fn new() -> Setting {
        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("model.toml"), MODEL).unwrap();
        let engine = folder.path().join("engine");
        fs::write(&engine, "#!/bin/sh\necho \"ran: $*\"\nexit 42\n").unwrap();
        fs::set_permissions(&engine, fs::Permissions::from_mode(0o755)).unwrap();
        Setting { folder }
    }

    /// Runs a command in the world of a launcher.
    fn run(&self, world: usize, line: &str) -> Output {
        let line = line.replace("CONFIGS", configs().to_str().unwrap());
        Command::new(env!("CARGO_BIN_EXE_trainyard"))
            .args(line.split_whitespace())
            .current_dir(self.folder.path())
            .env("TRAINYARD_ENGINE", self.folder.path().join("engine"))
            .env("WORLD_SIZE", world.to_string())
            .env("RANK", "0")
            .output()
            .unwrap()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn deepspeed_tutorials_train() {
    let setting = Setting::new();
    for (name, world, expected) in [
        ("zero1", 8, "--parallelism.zero_stage=1"),
        ("zero2", 8, "--parallelism.reduce_bucket_size=100000000"),
        ("zero3", 8, "--parallelism.zero_stage=3"),
        ("offload", 8, "--parallelism.offload=cpu"),
        ("moe", 8, "--parallelism.expert_parallel_degree=4"),
    ] {
        let line =
            format!("train model.toml --from CONFIGS/deepspeed/{name}.json --training.steps 3000");
        let output = setting.run(world, &line);
        let (printed, report) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(42), "{name}: {report}");
        assert!(printed.starts_with("ran: train model.toml --"), "{printed}");
        assert!(printed.contains(expected), "{name}: {printed}");
        assert!(
            printed.trim_end().ends_with("--training.steps 3000"),
            "{printed}"
        );
        assert!(report.contains("(DeepSpeed 0.19.8):\n"), "{report}");
    }
}

#[test]
fn a_key_that_changes_the_result_must_be_ignored_by_name() {
    let setting = Setting::new();
    let line = "train model.toml --from CONFIGS/deepspeed/fp16.json --training.steps 3000";
    let output = setting.run(4, line);
    let report = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(
        report.contains("--ignore scheduler.params.warmup_type"),
        "{report}"
    );
    let ignoring = format!("{line} --ignore scheduler.params.warmup_type");
    let output = setting.run(4, &ignoring);
    assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("--training.mixed_precision_param=float16"));
    let output = setting.run(4, &format!("{line} --ignore nothing"));
    assert!(text(&output.stderr).contains("has no such key"));
    let output = setting.run(1, "train model.toml --ignore x");
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn the_resulting_config_is_printed() {
    let setting = Setting::new();
    let line = "train model.toml --from CONFIGS/deepspeed/zero2.json --print-config";
    let output = setting.run(8, line);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let config = trainyard_config::Config::parse(text(&output.stdout), &[]).unwrap();
    assert_eq!(config.parallelism.zero_stage, 2);
    assert_eq!(config.training.global_batch_size, Some(64));
}

#[test]
fn a_model_is_needed() {
    let setting = Setting::new();
    let output = setting.run(8, "train --from CONFIGS/deepspeed/zero2.json");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("does not describe the model"));
    let output = setting.run(8, "train model.toml --from model.toml");
    assert!(text(&output.stderr).contains("is a Trainyard config"));
    let output = setting.run(8, "train model.toml --from nowhere.json");
    assert!(text(&output.stderr).contains("nowhere.json"));
}

#[test]
fn deepspeed_tutorials_are_checked() {
    let setting = Setting::new();
    for name in ["zero1", "zero2", "zero3", "fp16", "offload", "moe"] {
        let line = format!(
            "plan check CONFIGS/deepspeed/{name}.json --cluster 8xA100 --model model.toml --seq-len 128"
        );
        let output = setting.run(1, &line);
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        assert!(printed.contains("fits, with"), "{name}: {printed}");
        assert!(printed.contains(" -> "), "{name}: {printed}");
    }
}

#[test]
fn a_torchtitan_config_trains() {
    let setting = Setting::new();
    let line = "train CONFIGS/torchtitan/llama3_8b.toml";
    let output = setting.run(8, line);
    let report = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert!(report.contains("set training.dataset_path"), "{report}");
    let output = setting.run(8, &format!("{line} --training.dataset_path tokens"));
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
    assert!(printed.starts_with("ran: train /dev/null --"), "{printed}");
    assert!(printed.contains("--model.hidden_size=4096"), "{printed}");
    let output = setting.run(
        1,
        "plan check CONFIGS/torchtitan/llama3_8b.toml --cluster 8xH100",
    );
    assert!(text(&output.stdout).contains("training.dataset = c4 -> training.dataset = tokens"));
}

#[test]
fn accelerate_configs_train_and_are_checked() {
    let setting = Setting::new();
    for name in ["fsdp", "deepspeed"] {
        let file = format!("CONFIGS/accelerate/{name}.yaml");
        let output = setting.run(8, &format!("train model.toml --from {file}"));
        assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains("--parallelism.zero_stage=3"));
        let line = format!("plan check {file} --cluster 8xA100 --model model.toml --seq-len 128");
        let output = setting.run(1, &line);
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert!(text(&output.stdout).starts_with("Accelerate: dp_shard8"));
    }
}

#[test]
fn a_megatron_script_trains_and_is_checked() {
    let setting = Setting::new();
    let line = "train --from CONFIGS/megatron/llama.sh --training.dataset_path tokens";
    let output = setting.run(8, line);
    assert_eq!(output.status.code(), Some(42), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("--parallelism.tensor_parallel_degree=2"));
    let output = setting.run(1, "plan check CONFIGS/megatron/llama.sh --cluster 8xH100");
    assert!(
        text(&output.stdout).contains("dp_shard4 tp2"),
        "{}",
        text(&output.stderr)
    );
}
