//! `trainyard plan` as a user starts it: real files in, words and files out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trainyard"))
        .arg("plan")
        .args(args)
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    let both = [&output.stdout, &output.stderr];
    both.map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat()
}

fn config(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path: PathBuf = root.join("../../configs").join(name);
    path.to_str().unwrap().to_owned()
}

fn ask<'a>(model: &'a str, cluster: &'a str) -> Vec<&'a str> {
    let mut args = vec!["--model", model, "--cluster", cluster];
    args.extend(["--global-batch", "64", "--seq-len", "8192"]);
    args
}

#[test]
fn a_question_is_answered_in_every_form() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (page, job, model) = (at("plan.html"), at("job.sh"), config("llama3-8b.toml"));
    let mut args = ask(&model, "16xH100");
    args.extend(["--html", &page, "--emit", "megatron", "--output", &job]);
    args.extend(["--compare-mesh", "tp=8"]);
    let output = plan(&args);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("dp_shard16") && text.contains("Compared: dp_shard2 tp8"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "colour is for terminals");
    assert!(
        fs::read_to_string(&page)
            .unwrap()
            .starts_with("<!doctype html>")
    );
    let checked = plan(&["check", &job, "--cluster", "16xH100"]);
    let text = said(&checked);
    assert!(
        checked.status.success() && text.contains("nothing that is more than 1 % faster"),
        "{text}"
    );
}

#[test]
fn a_plan_is_set_beside_its_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (file, run, cluster) = (at("plan.json"), at("metrics.jsonl"), at("cluster.toml"));
    let model = config("llama3-8b.toml");
    let mut args = ask(&model, "16xH100");
    args.push("--json");
    fs::write(&file, plan(&args).stdout).unwrap();
    fs::write(
        &run,
        "{\"step\":1,\"seconds\":4.5,\"memory_bytes\":60000000000,\"data_share\":0.01}\n",
    )
    .unwrap();
    let output = plan(&["compare", &file, &run, "--output", &cluster]);
    let text = said(&output);
    assert!(
        output.status.success() && text.contains("refitted"),
        "{text}"
    );
    let output = plan(&ask(&model, &cluster));
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn measurements_become_a_cluster() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (table, cluster) = (at("all_reduce_perf.txt"), at("cluster.toml"));
    let mut text = "# nThread 1 nGpus 8 minBytes 1024\n".to_owned();
    for power in 10..32 {
        let bytes = 1u64 << power;
        let us = 60.0 + 1.75 * bytes as f64 / 360e3;
        text += &format!(
            "{bytes} {} float sum -1 {us:.2} 0 0 0 {us:.2} 0 0 0\n",
            bytes / 4
        );
    }
    fs::write(&table, text).unwrap();
    let output = plan(&[
        "calibrate",
        "--cluster",
        "16xH100",
        &table,
        "--output",
        &cluster,
    ]);
    assert!(output.status.success(), "{}", said(&output));
    let written = fs::read_to_string(&cluster).unwrap();
    assert!(written.contains("[measured]\nlink_gb_s = 360"), "{written}");
    fs::write(&table, "1024 256 float sum -1 oops 0 0 0 1 0 0 0\n").unwrap();
    let refused = plan(&["calibrate", "--cluster", "16xH100", &table]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        said(&refused).contains("line 1: oops"),
        "{}",
        said(&refused)
    );
}

#[test]
fn what_cannot_be_is_refused_with_a_remedy() {
    let model = config("llama3-8b.toml");
    for (args, words) in [
        (ask("nowhere.json", "16xH100"), "config.json"),
        (ask(&model, "16xTeapot"), "64xH100"),
        (ask(&config("cnn.toml"), "16xH100"), "no decoder"),
        (vec!["check", &model, "--cluster", "0xH100"], "use 1 to"),
        (vec![], "Usage"),
    ] {
        let output = plan(&args);
        assert!(!output.status.success(), "{args:?}");
        assert!(said(&output).contains(words), "{args:?}: {}", said(&output));
    }
    let large = config("llama3-405b.toml");
    let output = plan(&ask(&large, "8xH100"));
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("Nothing fits"));
}
