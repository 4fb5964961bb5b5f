//! Reports hold what they promise: JSON that is read again, and a page that asks the network for nothing.

use std::path::Path;
use std::process::{Command, Stdio};

use trainyard_config::{Flavor, LlamaConfig};
use trainyard_plan::report::{Counted, DryRun, PlanFile, RankBytes, Report, Style};
use trainyard_plan::{
    Calibration, Cluster, Held, Overheads, Precision, Question, RankClass, Shape, Software,
};

fn report(flavor: Flavor, cluster: &str, global_batch: usize) -> Report {
    let cluster: Cluster = cluster.parse().unwrap();
    Report::of(Question {
        shape: Shape {
            name: "<llama> & co".to_owned(),
            ..Shape::from(&LlamaConfig::of(flavor))
        },
        calibration: Calibration::of_cluster(&cluster, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len: 8192,
        held: Held::same(Precision::BF16),
        fewer_machines: false,
    })
}

#[test]
fn a_plan_that_was_written_is_read() {
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
    let third = PlanFile::read_place(&json.to_string(), 3).unwrap();
    assert_eq!(&third.plan.strategy, &report.found.plans[2].strategy);
    for place in [0, 4] {
        assert!(PlanFile::read_place(&json.to_string(), place).is_err());
    }
    for wrong in ["", "{}", r#"{"plans":[],"inputs":{}}"#] {
        assert!(PlanFile::read(wrong).is_err());
    }
}

#[test]
fn where_nothing_fits_every_form_says_how_much_is_missing() {
    let report = report(Flavor::Llama3_405b, "8xH100", 64);
    let text = report.to_text(5, Style::Plain);
    assert!(
        text.contains("Nothing fits") && text.contains("lacks 128.8 GiB"),
        "{text}"
    );
    assert!(!text.contains('\x1b'));
    assert!(
        report.to_json(5)["nearest_miss"]["missing_bytes_per_rank"]
            .as_f64()
            .unwrap()
            > 1e11
    );
    assert!(report.to_html(5).contains("Nothing fits"));
}

#[test]
fn the_code_has_the_last_word() {
    let mut report = report(Flavor::Llama3_8b, "16xH100", 64);
    let run = |gib: f64| {
        let counted = |formula: f64, code: f64| Counted {
            formula: formula * 1024f64.powi(3),
            code: code * 1024f64.powi(3),
        };
        let rank = RankBytes {
            class: RankClass::Only,
            states: counted(8.0, 8.0),
            peak: counted(40.0, gib),
        };
        DryRun {
            routing_skew: None,
            losses: Vec::new(),
            ranks: vec![rank],
        }
    };
    report.dry_runs = vec![Ok(run(100.0)), Err("<odd>".to_owned()), Ok(run(50.0))];
    let text = report.to_text(5, Style::Plain);
    let sentences = report.sentences().join(" ");
    assert!(sentences.contains("plan 3 is the first"), "{sentences}");
    assert!(
        text.contains("+150.0%") && text.contains("not followed: <odd>"),
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
fn the_page_names_no_other() {
    let page = report(Flavor::Llama3_70b, "64xH100", 256).to_html(5);
    for word in [
        "http:", "https:", "src=", "href=", "url(", "@import", "<script", "<llama>",
    ] {
        assert!(!page.contains(word), "{word}");
    }
    for word in [
        "&lt;llama&gt;",
        "prefers-color-scheme: dark",
        "What fills the memory",
        "Where the time goes",
    ] {
        assert!(page.contains(word), "{word}");
    }
}

/// A browser without network draws the page and holds its words.
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
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("plan.html");
    std::fs::write(&path, report(Flavor::Llama3_70b, "64xH100", 256).to_html(5)).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .arg("--proxy-server=127.0.0.1:9")
        .arg(format!(
            "--user-data-dir={}",
            Path::new(folder.path()).join("profile").display()
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
    assert!(dom.contains("Where the time goes") && dom.contains("</svg>"));
}
