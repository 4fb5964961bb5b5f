//! Plans for several sites: what the report says, and that its config trains what was planned.

use std::path::Path;

use trainyard_config::{Config, LocalUpdateMethod};
use trainyard_interop::{Framework, load_decoder};
use trainyard_plan::{
    Calibration, Cluster, Overheads, PlanRequest, PrecisionByStage, Software, Synchronization,
    Threshold,
};
use trainyard_plan_report::{PlanFile, Report, Style};

fn report(model: &str, cluster: &str, global_batch: usize) -> Report {
    let cluster: Cluster = cluster.parse().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    Report::of(PlanRequest {
        shape: load_decoder(&path.join(model)).unwrap(),
        calibration: Calibration::of_cluster(&cluster, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len: 8192,
        precision: PrecisionByStage::trainyard(2, 4),
        allow_fewer_nodes: false,
    })
}

const TWO_SITES: &str = "2x64xH100@10Gb/s,30ms";

#[test]
fn two_sites_are_told_to_use_diloco() {
    for (model, batch) in [("llama3-8b.toml", 1024), ("llama3-70b.toml", 512)] {
        let report = report(model, TWO_SITES, batch);
        let text = report.to_text(3, Style::Plain).replace("\n  ", " ");
        println!("{text}");
        for part in [
            "2 sites x 8 nodes x 8 GPUs; 10 Gb/s and 30 ms between sites",
            "dp_outer2",
            "parallelism.data_parallel_outer_degree = 2, local_updates.method = \"diloco\"",
            "change convergence",
        ] {
            assert!(text.contains(part), "{part}");
        }
        let json = report.to_json(3);
        assert_eq!(json["plans"][0]["mesh"]["dp_outer"], 2);
        assert_eq!(json["hardware"]["sites"]["num_sites"], 2);
        let read = PlanFile::read(&json.to_string()).unwrap();
        assert_eq!(read.plan, *report.best().unwrap());
        assert!(report.to_html(3).contains("dp_outer 2"));
    }
}

#[test]
fn one_site_is_not_told_to_use_local_updates() {
    for (model, batch) in [("llama3-8b.toml", 1024), ("llama3-70b.toml", 512)] {
        let report = report(model, "64xH100", batch);
        let text = report.to_text(3, Style::Plain);
        assert!(
            !text.contains("diloco") && !text.contains("dp_outer"),
            "{text}"
        );
        let json = report.to_json(3);
        assert!(json["hardware"]["sites"].is_null());
    }
}

#[test]
fn the_config_of_two_sites_trains_the_plan() {
    let report = report("llama3-8b.toml", TWO_SITES, 1024);
    let strategy = &report.best().unwrap().strategy;
    let shape = &report.request.shape;
    let written = Framework::Trainyard.write(shape, strategy, 128).unwrap();
    println!("{}", written.text);
    assert_eq!(written.deviations, []);
    let config = Config::parse(&written.text, &[]).unwrap();
    assert_eq!(config.local_updates.method, LocalUpdateMethod::Diloco);
    assert_eq!(config.local_updates.sync_steps, 100);
    assert_eq!(config.parallelism.data_parallel_outer_degree, 2);
    assert_eq!(config.mesh(128).unwrap().world_size(), 128);
    let read = Framework::Trainyard.read(&written.text).unwrap();
    assert_eq!(read.strategy.synchronization, strategy.synchronization);
    assert_eq!(read.strategy.degrees, strategy.degrees);
    for framework in [
        Framework::Megatron,
        Framework::Torchtitan,
        Framework::DeepSpeed,
    ] {
        let written = framework.write(shape, strategy, 128).unwrap();
        let deviations = written.deviations.iter().map(ToString::to_string);
        let deviations: Vec<_> = deviations.collect();
        let is_named = |text: &String| text.contains("diloco every 100 steps");
        assert!(
            deviations.iter().any(is_named),
            "{framework}: {deviations:?}"
        );
    }
}

#[test]
fn tables_say_from_which_bandwidth_on_methods_pay() {
    let mut report = report("llama3-8b.toml", "64xH100", 512);
    report.compare_methods();
    println!("{}", report.to_text(1, Style::Plain));
    let json = report.to_json(1);
    let tables = &report.slow_network;
    assert_eq!(tables.len(), 3);
    assert_eq!(json["slow_network"][2]["round_trip_ms"], 100.0);
    for table in tables {
        let plain = &table.methods[0];
        assert_eq!(plain.synchronization, Synchronization::PLAIN);
        assert_eq!(plain.pays, Threshold::Never);
        for method in &table.methods[1..] {
            let speedups: Vec<f64> = method.estimates.iter().map(|each| each.speedup).collect();
            let grows = speedups.windows(2).all(|pair| pair[0] >= pair[1] * 0.999);
            let is_server = matches!(
                method.synchronization,
                Synchronization::ParameterServer { .. }
            );
            assert!(
                grows || is_server,
                "{}: {speedups:?}",
                method.synchronization
            );
            // What the threshold says, the columns say.
            for (gbit_s, each) in table.gbit_s.iter().zip(&method.estimates) {
                let pays = method.pays.contains(*gbit_s);
                assert_eq!(pays, each.pays, "{} at {gbit_s}", method.synchronization);
            }
        }
    }
}
