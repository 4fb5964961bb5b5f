//! Reports: the JSON round-trips, and the HTML page loads nothing from the network.

use std::path::Path;
use std::process::{Command, Stdio};
use trainyard_arch::DecoderConfig;

use trainyard_arch::Flavor;
use trainyard_plan::{
    Calibration, Cluster, Overheads, PlanRequest, Precision, PrecisionByStage, RankClass, Software,
};
use trainyard_plan_report::{ByteCounts, DryRun, PlanFile, RankBytes, Report, Style};

fn report(flavor: Flavor, cluster: &str, global_batch: usize) -> Report {
    let cluster: Cluster = cluster.parse().unwrap();
    Report::of(PlanRequest {
        shape: DecoderConfig {
            name: "<llama> & co".to_owned(),
            ..DecoderConfig::from(flavor)
        },
        calibration: Calibration::of_cluster(&cluster, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len: 8192,
        precision: PrecisionByStage::same(Precision::BF16),
        allow_fewer_nodes: false,
    })
}

#[test]
fn plan_files_round_trip() {
    let report = report(Flavor::Llama3_8b, "16xH100", 64);
    let json = report.to_json(3);
    let best = &json["plans"][0];
    assert_eq!(best["mesh"]["dp_shard"], 16);
    assert!(best["step_seconds"].as_f64().unwrap() > 0.0);
    assert!(best["why"].as_str().unwrap().len() > 40);
    assert_eq!(
        json["hardware"]["network_bytes_per_second"]["basis"],
        "specified"
    );
    let read = PlanFile::read(&json.to_string()).unwrap();
    assert_eq!(&read.plan.strategy, &report.best().unwrap().strategy);
    assert_eq!(read.plan.time, report.best().unwrap().time);
    let third = PlanFile::read_number(&json.to_string(), 3).unwrap();
    assert_eq!(&third.plan.strategy, &report.result.plans[2].strategy);
    for number in [0, 4] {
        assert!(PlanFile::read_number(&json.to_string(), number).is_err());
    }
    for wrong in ["", "{}", r#"{"plans":[],"inputs":{}}"#] {
        assert!(PlanFile::read(wrong).is_err());
    }
}

#[test]
fn if_nothing_fits_every_format_states_the_shortfall() {
    let report = report(Flavor::Llama3_405b, "8xH100", 64);
    let text = report.to_text(5, Style::Plain).replace("\n  ", " ");
    assert!(
        text.contains("Nothing fits") && text.contains("GiB more than available"),
        "{text}"
    );
    assert!(!text.contains('\x1b'));
    assert!(
        report.to_json(5)["nearest_miss"]["shortfall_bytes_per_rank"]
            .as_f64()
            .unwrap()
            > 1e11
    );
    assert!(report.to_html(5).contains("Nothing fits"));
}

#[test]
fn dry_runs_overrule_the_formulas() {
    let mut report = report(Flavor::Llama3_8b, "16xH100", 64);
    let run = |gib: f64| {
        let bytes = |formula: f64, dry_run: f64| ByteCounts {
            formula: formula * 1024f64.powi(3),
            dry_run: dry_run * 1024f64.powi(3),
        };
        let rank = RankBytes {
            class: RankClass::Only,
            states: bytes(8.0, 8.0),
            peak: bytes(40.0, gib),
            allocator: None,
        };
        DryRun {
            routing_skew: None,
            deviations: Vec::new(),
            ranks: vec![rank],
        }
    };
    report.dry_runs = vec![Ok(run(100.0)), Err("<odd>".to_owned()), Ok(run(50.0))];
    let text = report.to_text(5, Style::Plain);
    let sentences = report.sentences().join(" ");
    assert!(sentences.contains("plan 3 is the first"), "{sentences}");
    assert!(
        text.contains("+150.0%") && text.contains("no dry run: <odd>"),
        "{text}"
    );
    let json = report.to_json(5);
    assert_eq!(json["plans"][1]["dry_run"]["error"], "<odd>");
    assert!(json["plans"][3]["dry_run"].is_null());
    let page = report.to_html(5);
    assert!(page.contains("&lt;odd&gt;") && page.contains("by dry run"));
    assert!(PlanFile::read(&json.to_string()).is_ok());
}

#[test]
fn the_page_references_no_other_resource() {
    let page = report(Flavor::Llama3_70b, "64xH100", 256).to_html(5);
    for word in [
        "http:", "https:", "src=", "href=", "url(", "@import", "<script", "<llama>",
    ] {
        assert!(!page.contains(word), "{word}");
    }
    for word in [
        "&lt;llama&gt;",
        "prefers-color-scheme: dark",
        "<h2>Peak memory</h2>",
        "<h2>Step time</h2>",
    ] {
        assert!(page.contains(word), "{word}");
    }
}

/// A browser without network renders the page.
#[test]
fn a_browser_opens_the_page() {
    let browsers = ["chromium", "chromium-browser", "google-chrome"];
    let runs = |name: &&&str| {
        let mut version = Command::new(name);
        version
            .arg("--version")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        version.status().is_ok_and(|status| status.success())
    };
    let Some(browser) = browsers.iter().find(runs) else {
        eprintln!("skipped: no Chromium is installed");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("plan.html");
    std::fs::write(&path, report(Flavor::Llama3_70b, "64xH100", 256).to_html(5)).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg("--proxy-server=127.0.0.1:9")
        .arg(format!(
            "--user-data-dir={}",
            Path::new(dir.path()).join("profile").display()
        ))
        .arg(format!("file://{}", path.display()))
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&output.stdout);
    if dom.is_empty() {
        eprintln!(
            "skipped: {browser} does not start here: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        return;
    }
    assert!(dom.contains("Step time") && dom.contains("</svg>"));
}
