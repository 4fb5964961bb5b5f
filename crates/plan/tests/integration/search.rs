//! The search finds strategies close to published ones, and explains its choice.

use std::time::{Duration, Instant};
use trainyard_arch::DecoderConfig;

use trainyard_arch::Flavor;
use trainyard_plan::{
    Bottleneck, Calibration, Cluster, Offload, Operators, Overheads, Plan, PlanRequest, Precision,
    PrecisionByStage, Software, explain, search,
};

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

fn request(flavor: Flavor, cluster: &str, global_batch: usize) -> PlanRequest {
    let cluster: Cluster = cluster.parse().unwrap();
    PlanRequest {
        shape: DecoderConfig::from(flavor),
        calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len: 8192,
        precision: PrecisionByStage::same(Precision::BF16),
        allow_fewer_nodes: false,
    }
}

/// Meta's trainer, whose element-wise kernels are fused.
const META: Software = Software {
    operators: Operators::Fused,
    ..Software::MODERN
};

fn show(plan: &Plan) {
    let strategy = &plan.strategy;
    println!(
        "  {:?} zero {} {} x{} b{} {:?}: {:.2} s, {:.1} GiB",
        strategy.degrees,
        strategy.zero_stage,
        strategy.pipeline.schedule,
        strategy.pipeline.stages_per_rank,
        strategy.micro_batch,
        strategy.recompute,
        plan.time.likely,
        plan.memory.total() / GIB
    );
}

/// Meta trained with tp 8, pp 16, dp 128 and one block per stage. The search must find this mesh, and must not rate
/// another as faster by more than the prediction error.
#[test]
fn llama_3_405b_on_16384_h100() {
    let mut request = request(Flavor::Llama3_405b, "16384xH100", 2048);
    request.calibration = Calibration::of(&request.cluster.accelerator, META);
    let begin = Instant::now();
    let result = search(&request);
    let took = begin.elapsed();
    println!(
        "{took:?} for {} strategies, {} out of memory",
        result.num_considered, result.num_out_of_memory
    );
    result.plans.iter().take(6).for_each(show);
    assert!(took < Duration::from_secs(30));
    let published = result.plans.iter().find(|plan| {
        let degrees = plan.strategy.degrees;
        (degrees.tp, degrees.pp, degrees.cp, degrees.dp_shard) == (8, 16, 1, 128)
    });
    let published = published.expect("Meta's mesh must fit");
    show(published);
    assert!(published.strategy.pipeline.stages_per_rank == 8);
    let best = &result.plans[0];
    assert!(published.time.likely / best.time.likely - 1.0 < request.calibration.mean_error);
    assert!(best.memory.total() <= request.cluster.accelerator.memory.value);
}

#[test]
fn the_explanation_is_consistent() {
    let request = request(Flavor::Llama3_70b, "64xH100", 256);
    let result = search(&request);
    result.plans.iter().take(3).for_each(show);
    let why = explain(&request, &result).unwrap();
    println!("{:?}", why.bottleneck);
    println!(
        "{:?}",
        why.runner_up
            .as_ref()
            .map(|diff| (diff.slower_by, &diff.terms))
    );
    for sensitivity in &why.sensitivities {
        println!(
            "{:?} x {:.2}: {:?}",
            sensitivity.input, sensitivity.factor, sensitivity.chosen
        );
    }
    let Some(diff) = &why.runner_up else {
        panic!("the search must find at least two meshes")
    };
    assert!(diff.slower_by >= 0.0);
    let sum: f64 = diff.terms.iter().map(|(_, seconds)| seconds).sum();
    assert!((sum - diff.slower_by).abs() < 0.02 * result.plans[0].time.likely);
    if let Bottleneck::Memory {
        shortfall, saved, ..
    } = &why.bottleneck
    {
        assert!(*shortfall > 0.0 && *saved > 0.0);
    }
    // Changing the input by that factor must change the chosen mesh.
    for sensitivity in why.sensitivities {
        assert_ne!(sensitivity.chosen, result.plans[0].strategy.degrees);
    }
}

#[test]
fn if_nothing_fits_the_shortfall_is_reported() {
    let request = request(Flavor::Llama3_405b, "8xH100", 64);
    let result = search(&request);
    assert!(result.plans.is_empty());
    let miss = explain(&request, &result)
        .unwrap_err()
        .expect("a nearest miss must be reported");
    show(&miss.plan);
    println!("shortfall {:.1} GiB on each rank", miss.shortfall / GIB);
    assert!(miss.shortfall > 0.0);
    assert_eq!(miss.plan.strategy.offload, Offload::Cpu);
}

/// With more memory, the best plan is never slower.
#[test]
fn more_memory_is_never_slower() {
    let mut request = request(Flavor::Llama3_8b, "16xH100", 64);
    let mut before = f64::INFINITY;
    for gib in [24.0, 40.0, 80.0, 160.0, 640.0] {
        request.cluster.accelerator.memory.value = gib * GIB;
        let result = search(&request);
        let seconds = result
            .plans
            .first()
            .map_or(f64::INFINITY, |plan| plan.time.likely);
        println!("{gib} GiB: {seconds:.2} s");
        assert!(seconds <= before * 1.01);
        before = seconds;
    }
}

/// No rank can hold all experts of DeepSeek-V3, so every plan uses expert parallelism.
#[test]
fn mixtures_of_experts_use_expert_parallelism() {
    let text = r#"{"model_type":"deepseek_v3","vocab_size":129280,"hidden_size":7168,
        "intermediate_size":18432,"num_hidden_layers":61,"num_attention_heads":128,
        "num_key_value_heads":128,"n_routed_experts":256,"n_shared_experts":1,
        "num_experts_per_tok":8,"moe_intermediate_size":2048,"q_lora_rank":1536,
        "kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,
        "first_k_dense_replace":3,"moe_layer_freq":1}"#;
    let mut request = request(Flavor::Llama3_8b, "2048xH100", 15_360);
    request.shape = DecoderConfig::from_hugging_face(text).unwrap();
    request.seq_len = 4096;
    let begin = Instant::now();
    let result = search(&request);
    println!(
        "{:?} for {} strategies",
        begin.elapsed(),
        result.num_considered
    );
    result.plans.iter().take(5).for_each(show);
    assert!(result.plans.len() > 5);
    assert!(
        result
            .plans
            .iter()
            .take(5)
            .all(|plan| plan.strategy.degrees.ep > 1)
    );
    let terms = result.plans[0].time.terms();
    assert!(
        terms
            .iter()
            .all(|(_, seconds)| seconds.is_finite() && *seconds >= 0.0)
    );
}
