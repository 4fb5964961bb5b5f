//! The search finds what people who tuned for weeks have found, and says why.

use std::time::{Duration, Instant};

use trainyard_config::{Flavor, LlamaConfig};
use trainyard_plan::{
    Binding, Calibration, Cluster, Held, Offload, Overheads, Plan, Precision, Question, Shape,
    Software, explain, search,
};

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

fn question(flavor: Flavor, cluster: &str, global_batch: usize) -> Question {
    let cluster: Cluster = cluster.parse().unwrap();
    Question {
        shape: Shape::from(&LlamaConfig::of(flavor)),
        calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch,
        seq_len: 8192,
        held: Held::same(Precision::BF16),
        fewer_machines: false,
    }
}

fn show(plan: &Plan) {
    let strategy = &plan.strategy;
    println!(
        "  {:?} zero {} {} x{} b{} {:?}: {:.2} s, {:.1} GiB",
        strategy.degrees,
        strategy.zero_stage,
        strategy.layers.schedule,
        strategy.layers.stages_per_rank,
        strategy.micro_batch,
        strategy.recompute,
        plan.time.likely,
        plan.memory.total() / GIB
    );
}

/// Meta ran tp 8, pp 16, dp 128 with one block per stage. The search must know that way, and must not
/// prefer another by more than its own error.
#[test]
fn llama_3_405b_on_16384_h100() {
    let question = question(Flavor::Llama3_405b, "16384xH100", 2048);
    let begin = Instant::now();
    let found = search(&question);
    let took = begin.elapsed();
    println!(
        "{took:?} for {} ways, {} too large",
        found.num_considered, found.num_too_large
    );
    found.plans.iter().take(6).for_each(show);
    assert!(took < Duration::from_secs(30));
    let metas = found.plans.iter().find(|plan| {
        let degrees = plan.strategy.degrees;
        (degrees.tp, degrees.pp, degrees.cp, degrees.dp_shard) == (8, 16, 1, 128)
    });
    let metas = metas.expect("Meta's mesh fits");
    show(metas);
    assert!(metas.strategy.layers.stages_per_rank == 8);
    let best = &found.plans[0];
    assert!(metas.time.likely / best.time.likely - 1.0 < question.calibration.spread);
    assert!(best.memory.total() <= question.cluster.accelerator.memory.value);
}

#[test]
fn reasons_are_given() {
    let question = question(Flavor::Llama3_70b, "64xH100", 256);
    let found = search(&question);
    found.plans.iter().take(3).for_each(show);
    let why = explain(&question, &found).unwrap();
    println!("{:?}", why.binding);
    println!(
        "{:?}",
        why.runner_up
            .as_ref()
            .map(|lost| (lost.slower, &lost.terms))
    );
    for flip in &why.flips {
        println!("{:?} x {:.2}: {:?}", flip.what, flip.factor, flip.chosen);
    }
    let Some(lost) = &why.runner_up else {
        panic!("there are two meshes at least")
    };
    assert!(lost.slower >= 0.0);
    let sum: f64 = lost.terms.iter().map(|(_, seconds)| seconds).sum();
    assert!((sum - lost.slower).abs() < 0.02 * found.plans[0].time.likely);
    if let Binding::Memory { missing, saved, .. } = &why.binding {
        assert!(*missing > 0.0 && *saved > 0.0);
    }
    // A flip is true: with the figure changed that much, the search chooses that mesh.
    for flip in why.flips {
        assert_ne!(flip.chosen, found.plans[0].strategy.degrees);
    }
}

#[test]
fn where_nothing_fits_the_missing_bytes_are_named() {
    let question = question(Flavor::Llama3_405b, "8xH100", 64);
    let found = search(&question);
    assert!(found.plans.is_empty());
    let miss = explain(&question, &found)
        .unwrap_err()
        .expect("something is nearest");
    show(&miss.plan);
    println!("missing {:.1} GiB on each rank", miss.missing / GIB);
    assert!(miss.missing > 0.0);
    assert_eq!(miss.plan.strategy.offload, Offload::Cpu);
}

/// More memory never makes the choice slower.
#[test]
fn memory_is_never_a_burden() {
    let mut question = question(Flavor::Llama3_8b, "16xH100", 64);
    let mut before = f64::INFINITY;
    for gib in [24.0, 40.0, 80.0, 160.0, 640.0] {
        question.cluster.accelerator.memory.value = gib * GIB;
        let found = search(&question);
        let seconds = found
            .plans
            .first()
            .map_or(f64::INFINITY, |plan| plan.time.likely);
        println!("{gib} GiB: {seconds:.2} s");
        assert!(seconds <= before * 1.01);
        before = seconds;
    }
}

/// No rank has room for all experts of DeepSeek-V3, and every way found shares them.
#[test]
fn a_mixture_shares_its_experts() {
    let text = r#"{"model_type":"deepseek_v3","vocab_size":129280,"hidden_size":7168,
        "intermediate_size":18432,"num_hidden_layers":61,"num_attention_heads":128,
        "num_key_value_heads":128,"n_routed_experts":256,"n_shared_experts":1,
        "num_experts_per_tok":8,"moe_intermediate_size":2048,"q_lora_rank":1536,
        "kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128,
        "first_k_dense_replace":3,"moe_layer_freq":1}"#;
    let mut question = question(Flavor::Llama3_8b, "2048xH100", 15_360);
    question.shape = Shape::from_hugging_face(text).unwrap();
    question.seq_len = 4096;
    let begin = Instant::now();
    let found = search(&question);
    println!("{:?} for {} ways", begin.elapsed(), found.num_considered);
    found.plans.iter().take(5).for_each(show);
    assert!(found.plans.len() > 5);
    assert!(
        found
            .plans
            .iter()
            .take(5)
            .all(|plan| plan.strategy.degrees.ep > 1)
    );
    let terms = found.plans[0].time.terms();
    assert!(
        terms
            .iter()
            .all(|(_, seconds)| seconds.is_finite() && *seconds >= 0.0)
    );
}
