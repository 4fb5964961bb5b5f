//! The planner recommends what practitioners expect: one test per rule of docs/src/which-strategy.md, with the files
//! and numbers of the command there.

use std::path::{Path, PathBuf};

use trainyard_interop::load_decoder;
use trainyard_plan::{
    Calibration, Cluster, Degrees, Operators, Overheads, Plan, PlanRequest, Precision,
    PrecisionByStage, Software, search,
};
use trainyard_plan_report::Report;

fn config(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("../../configs").join(name)
}

fn request(model: &str, cluster: &str, global_batch: usize, seq_len: usize) -> PlanRequest {
    let cluster = if cluster.ends_with(".toml") {
        Cluster::named(config(cluster).to_str().unwrap()).unwrap()
    } else {
        cluster.parse().unwrap()
    };
    PlanRequest {
        shape: load_decoder(&config(model)).unwrap(),
        calibration: Calibration::of_cluster(&cluster, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len,
        precision: PrecisionByStage::same(Precision::BF16),
        allow_fewer_nodes: false,
    }
}

/// The four best plans.
fn plans(model: &str, cluster: &str, global_batch: usize, seq_len: usize) -> Vec<Plan> {
    let mut found = search(&request(model, cluster, global_batch, seq_len)).plans;
    found.truncate(4);
    for plan in &found {
        println!(
            "{model} on {cluster}: {} ZeRO {} {:.2} s",
            plan.strategy.degrees, plan.strategy.zero_stage, plan.time.likely
        );
    }
    found
}

fn best(model: &str, cluster: &str, global_batch: usize, seq_len: usize) -> (Degrees, usize) {
    let best = plans(model, cluster, global_batch, seq_len).remove(0);
    (best.strategy.degrees, best.strategy.zero_stage)
}

#[test]
fn a_small_model_with_much_data_is_data_parallel() {
    let (degrees, zero_stage) = best("llama3-8b.toml", "64xH100", 512, 8192);
    assert_eq!(
        (degrees.data_parallel(), degrees.pp, degrees.tp),
        (64, 1, 1)
    );
    assert!(zero_stage < 3, "there is no need to shard the parameters");
}

#[test]
fn layers_too_wide_for_a_gpu_are_tensor_parallel() {
    let first = plans("plan/wide.json", "8xH100", 64, 2048);
    assert!(first.iter().all(|plan| plan.strategy.degrees.tp > 1));
}

#[test]
fn a_deep_model_on_a_slow_network_is_pipeline_parallel() {
    let (fast, zero_stage) = best("plan/deep.json", "64xH100", 512, 2048);
    assert_eq!((fast.pp, zero_stage), (1, 3));
    let first = plans("plan/deep.json", "plan/slow-network.toml", 512, 2048);
    assert!(first.iter().all(|plan| plan.strategy.degrees.pp > 1));
}

#[test]
fn a_mixture_is_expert_parallel() {
    let first = plans("plan/mixtral-8x7b.json", "64xH100", 512, 4096);
    assert!(first.iter().all(|plan| plan.strategy.degrees.ep > 1));
}

#[test]
fn a_slow_network_keeps_frequent_communication_within_the_node() {
    let (fast, zero_stage) = best("llama3-70b.toml", "64xH100", 512, 8192);
    assert!(zero_stage == 3 && fast.dp_shard * fast.cp * fast.tp > 8);
    let (slow, _) = best("llama3-70b.toml", "plan/slow-network.toml", 512, 8192);
    assert!(slow.pp > 1);
    assert!(
        slow.dp_shard * slow.cp * slow.tp <= 8,
        "only pipeline communication crosses nodes"
    );
    let (fast, _) = best("plan/mixtral-8x7b.json", "64xH100", 512, 4096);
    let (slow, _) = best(
        "plan/mixtral-8x7b.json",
        "plan/slow-network.toml",
        512,
        4096,
    );
    assert!(slow.ep < fast.ep && slow.pp > fast.pp);
}

#[test]
fn long_sequences_are_context_parallel() {
    let (short, _) = best("llama3-8b.toml", "64xH100", 512, 8192);
    let (long, _) = best("llama3-8b.toml", "64xH100", 64, 131_072);
    assert!(short.cp == 1 && long.cp > 1);
}

#[test]
fn more_ranks_than_samples_use_model_parallelism() {
    let (degrees, _) = best("llama3-8b.toml", "512xH100", 64, 8192);
    assert!(degrees.data_parallel() <= 64 && degrees.cp * degrees.tp * degrees.pp >= 8);
}

/// Meta's mesh compared with the best plan: its position, and the terms that explain the difference.
#[test]
fn the_published_mesh_of_llama_3_is_explained() {
    let mut request = request("llama3-405b.toml", "16384xH100", 2048, 8192);
    // The element-wise kernels of Meta's trainer are fused.
    let software = Software {
        operators: Operators::Fused,
        ..Software::MODERN
    };
    request.calibration = Calibration::of_cluster(&request.cluster, software);
    let mut report = Report::of(request);
    report.compare_mesh(Degrees {
        pp: 16,
        dp_shard: 128,
        tp: 8,
        ..Degrees::ONE
    });
    let compared = report.compared.clone().unwrap();
    println!("{}", report.sentences().last().unwrap());
    let position = compared.position.unwrap();
    let sum: f64 = compared.diff.terms.iter().map(|(_, seconds)| seconds).sum();
    assert!(
        position <= 3 || (sum - compared.diff.slower_by).abs() < 0.01 * compared.diff.slower_by
    );
    assert!(
        compared.diff.slower_by / report.best().unwrap().time.likely
            < report.request.calibration.mean_error
    );
}
