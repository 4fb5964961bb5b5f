//! `trainyard plan` as a user runs it: real files in, text and files out.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use trainyard_trace::{Collective, CollectiveKind, Purpose, Span, SpanKind};

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_trainyard"))
        .arg("plan")
        .args(args)
        .output()
        .unwrap()
}

fn text_of(output: &Output) -> String {
    let both = [&output.stdout, &output.stderr];
    both.map(|bytes| String::from_utf8_lossy(bytes).into_owned())
        .concat()
}

fn config(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path: PathBuf = root.join("../../configs").join(name);
    path.to_str().unwrap().to_owned()
}

fn search_args<'a>(model: &'a str, cluster: &'a str) -> Vec<&'a str> {
    let mut args = vec!["--model", model, "--cluster", cluster];
    args.extend(["--global-batch", "64", "--seq-len", "8192"]);
    args
}

#[test]
fn a_closed_stdout_ends_the_command_quietly() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_trainyard"))
        .arg("plan")
        .args(search_args(&config("llama3-8b.toml"), "16xH100"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141), "{}", text_of(&output));
    assert!(
        !text_of(&output).contains("panicked"),
        "{}",
        text_of(&output)
    );
}

#[test]
fn a_plan_is_reported_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (page, job, model) = (at("plan.html"), at("job.sh"), config("llama3-8b.toml"));
    let mut args = search_args(&model, "16xH100");
    args.extend(["--html", &page, "--emit", "megatron", "--output", &job]);
    args.extend(["--compare-mesh", "tp=8"]);
    let output = plan(&args);
    let text = text_of(&output);
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("dp_shard16") && text.contains("Comparison: dp_shard2 tp8"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "colors are for terminals only");
    assert!(
        fs::read_to_string(&page)
            .unwrap()
            .starts_with("<!doctype html>")
    );
    let checked = plan(&["check", &job, "--cluster", "16xH100"]);
    let text = text_of(&checked);
    assert!(
        checked.status.success() && text.contains("no plan that is more than 1 % faster"),
        "{text}"
    );
}

#[test]
fn a_plan_is_compared_with_its_run() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, run, cluster) = (at("plan.json"), at("metrics.jsonl"), at("cluster.toml"));
    let model = config("llama3-8b.toml");
    let mut args = search_args(&model, "16xH100");
    args.push("--json");
    fs::write(&file, plan(&args).stdout).unwrap();
    fs::write(
        &run,
        "{\"step\":1,\"seconds\":4.5,\"memory_bytes\":60000000000,\"data_share\":0.01}\n",
    )
    .unwrap();
    let output = plan(&["compare", &file, &run, "--output", &cluster]);
    let text = text_of(&output);
    assert!(
        output.status.success() && text.contains("refitted"),
        "{text}"
    );
    let output = plan(&search_args(&model, &cluster));
    assert!(output.status.success(), "{}", text_of(&output));
}

/// Writes a rank's trace: steps that wait a fifth of their time for gradients.
fn write_trace(dir: &Path, rank: usize) {
    let ledger = trainyard_trace::Ledger::recording(rank);
    for step in 0..4u64 {
        let at = |seconds: f64| ((1.0 + 10.0 * step as f64 + seconds) * 1e9) as u64;
        let spans = [
            (SpanKind::Forward, 0.0, 1.0),
            (SpanKind::Backward, 1.0, 4.0),
            (SpanKind::Optimizer, 4.0, 4.5),
            (SpanKind::Step, 0.0, 5.0),
        ];
        for (kind, start, end) in spans {
            ledger.span(Span {
                name: kind.name().to_owned(),
                kind,
                started_ns: at(start),
                ended_ns: at(end),
                thread: 0,
            });
        }
        ledger.collective(Collective {
            kind: CollectiveKind::ReduceScatter,
            group: "dp_shard".to_owned(),
            group_size: 16,
            sequence: step,
            purpose: Purpose::Gradient,
            dtype: "float32".to_owned(),
            payload_bytes: 8_000_000_000,
            sent_bytes: 7_500_000_000,
            issued_ns: at(2.0),
            started_ns: at(2.0),
            ended_ns: at(4.0),
            waited: Some((at(3.0), at(4.0))),
        });
    }
    let name = trainyard_trace::chrome_file_name(rank);
    ledger.write_chrome(dir.join(name)).unwrap();
}

#[test]
fn a_profiled_run_is_compared_term_by_term() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, job, model) = (at("plan.json"), at("job"), config("llama3-8b.toml"));
    let mut args = search_args(&model, "16xH100");
    args.push("--json");
    fs::write(&file, plan(&args).stdout).unwrap();
    let traces = Path::new(&job).join("profile_traces");
    fs::create_dir_all(&traces).unwrap();
    for rank in [0, 1] {
        write_trace(&traces, rank);
    }
    let metrics = Path::new(&job).join("metrics.jsonl");
    fs::write(metrics, "{\"step\":1,\"seconds\":5.1}\n").unwrap();
    let output = plan(&["compare", &file, &job]);
    let text = text_of(&output);
    assert!(output.status.success(), "{text}");
    for expected in [
        "compute, recomputation and kernel launch",
        "dp_shard reduce_scatter",
        "not measured",
        "changed constants",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let output = plan(&["compare", &file, &job, "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let term = |index: usize| &found["terms"][index];
    assert_eq!(term(0)["measured"], 3.0);
    assert!(term(0)["predicted"].as_f64().unwrap() > 0.0);
    assert_eq!(found["summary"][0]["measured"], 5.1);
    let nothing = plan(&["compare", &file, dir.path().to_str().unwrap()]);
    assert!(
        text_of(&nothing).contains("no metrics or traces found"),
        "{}",
        text_of(&nothing)
    );
}

/// A fake engine that reports the same memory for every rank and rejects pipelines.
fn engine(dir: &Path) -> PathBuf {
    let path = dir.join("engine");
    let script = "#!/bin/sh\n\
        if grep -q 'pipeline_parallel_degree = [^1]' \"$2\"; then echo 'no pipeline here' >&2; exit 3; fi\n\
        echo '{\"peak_bytes\": 42949672960, \"states\": {\"parameters\": 1073741824, \"optimizer\": 2147483648}}'\n";
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn the_best_plans_are_checked_by_a_dry_run() {
    let dir = tempfile::tempdir().unwrap();
    let page = dir.path().join("plan.html");
    let model = config("llama3-8b.toml");
    let dry_run = |more: &[&str]| {
        let mut args = search_args(&model, "16xH100");
        args.extend(more);
        let output = Command::new(env!("CARGO_BIN_EXE_trainyard"))
            .arg("plan")
            .args(args)
            .env("TRAINYARD_ENGINE", engine(dir.path()))
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text_of(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let text = dry_run(&["--dry-run", "--html", page.to_str().unwrap()]);
    assert!(
        text.contains("needs 42.5 GiB per GPU, which fits"),
        "{text}"
    );
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("Formula and dry run") && page.contains("by dry run"));
    let json: serde_json::Value =
        serde_json::from_str(&dry_run(&["--json", "--dry-run=2", "--top", "4"])).unwrap();
    let run = |index: usize| &json["plans"][index]["dry_run"];
    assert_eq!(run(0)["ranks"][0]["states"]["dry_run"], 3221225472.0);
    assert!(run(0)["ranks"][0]["peak"]["formula"].as_f64().unwrap() > 1e9);
    assert!(!run(1).is_null() && run(2).is_null());
    let all = dry_run(&["--dry-run=20", "--top", "20"]);
    assert!(
        all.contains("no dry run: the dry run of rank 0 failed: no pipeline here"),
        "{all}"
    );
}

#[test]
fn measurements_become_a_cluster_file() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
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
    assert!(output.status.success(), "{}", text_of(&output));
    let written = fs::read_to_string(&cluster).unwrap();
    assert!(written.contains("[measured]\nlink_gb_s = 360"), "{written}");
    fs::write(&table, "1024 256 float sum -1 oops 0 0 0 1 0 0 0\n").unwrap();
    let rejected = plan(&["calibrate", "--cluster", "16xH100", &table]);
    assert_eq!(rejected.status.code(), Some(1));
    assert!(
        text_of(&rejected).contains("line 1: oops"),
        "{}",
        text_of(&rejected)
    );
}

#[test]
fn invalid_arguments_are_rejected_with_a_remedy() {
    let (model, cnn) = (config("llama3-8b.toml"), config("cnn.toml"));
    for (args, expected) in [
        (search_args("nowhere.json", "16xH100"), "config.json"),
        (search_args(&model, "16xTeapot"), "64xH100"),
        (
            [&search_args(&cnn, "16xH100")[..], &["--html", "x"]].concat(),
            "--html is only for decoders",
        ),
        (
            [&search_args(&model, "16xH100")[..], &["--training.steps=3"]].concat(),
            "--training.steps=3 has no effect",
        ),
        (
            vec![
                "--model",
                &model,
                "--cluster",
                "8xH100",
                "--global-batch",
                "8",
            ],
            "--seq-len is missing",
        ),
        (vec!["check", &model, "--cluster", "0xH100"], "use 1 to"),
        (vec![], "Usage"),
    ] {
        let output = plan(&args);
        assert!(!output.status.success(), "{args:?}");
        assert!(
            text_of(&output).contains(expected),
            "{args:?}: {}",
            text_of(&output)
        );
    }
    let large = config("llama3-405b.toml");
    let output = plan(&search_args(&large, "8xH100"));
    assert_eq!(output.status.code(), Some(1));
    assert!(text_of(&output).contains("Nothing fits"));
}
