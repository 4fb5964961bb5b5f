//! Published values that the closed-form formulas must reproduce: Korthikanti et al., "Reducing Activation
//! Recomputation in Large Transformer Models" (arXiv 2205.05198), figures 1 and 7 and table 5, and the
//! utilization that Megatron-LM's README states for the same runs.

use trainyard_arch::{BlockKind, DecoderConfig};
use trainyard_plan::{
    BlockActivations, Degrees, Offload, PipelineLayout, Precision, Recompute, Software, States,
    Strategy, Synchronization, hardware_flops_utilization, model_flops_utilization,
};
use trainyard_schedule::{ScheduleKind, StageTime, bubble, in_flight};

struct Case {
    name: &'static str,
    hidden: usize,
    heads: usize,
    layers: usize,
    micro_batch: usize,
    pp: usize,
    chunks: usize,
    global_batch: usize,
    gpus: usize,
    states: f64,
    none: f64,
    sp_selective: f64,
    /// Activation memory in percent of that with tensor parallelism only: with sequence parallelism, with selective
    /// recomputation, with both, with full recomputation.
    percent: [f64; 4],
    seconds: f64,
    mfu: f64,
    hfu: f64,
    /// In percentage points. The paper rounds the step time from which it computed the utilization of the 22B model.
    tolerance: f64,
}

const CASES: [Case; 4] = [
    Case {
        name: "22B",
        hidden: 6144,
        heads: 64,
        layers: 48,
        micro_batch: 4,
        pp: 1,
        chunks: 1,
        global_batch: 4,
        gpus: 8,
        states: 45.5625,
        none: 59.25,
        sp_selective: 9.5625,
        percent: [66.84, 49.42, 16.18, 7.64],
        seconds: 1.1,
        mfu: 41.5,
        hfu: 43.7,
        tolerance: 0.25,
    },
    Case {
        name: "175B",
        hidden: 12_288,
        heads: 96,
        layers: 96,
        micro_batch: 1,
        pp: 8,
        chunks: 3,
        global_batch: 64,
        gpus: 64,
        states: 45.5625,
        none: 66.84375,
        sp_selective: 12.3515625,
        percent: [62.04, 56.53, 18.49, 8.71],
        seconds: 13.75,
        mfu: 51.4,
        hfu: 52.8,
        tolerance: 0.05,
    },
    Case {
        name: "530B",
        hidden: 20_480,
        heads: 128,
        layers: 105,
        micro_batch: 1,
        pp: 35,
        chunks: 3,
        global_batch: 280,
        gpus: 280,
        states: 31.640625,
        none: 114.0234375,
        sp_selective: 23.076171875,
        percent: [58.31, 62.04, 20.27, 9.42],
        seconds: 37.83,
        mfu: 56.0,
        hfu: 57.0,
        tolerance: 0.05,
    },
    Case {
        name: "1T",
        hidden: 25_600,
        heads: 160,
        layers: 128,
        micro_batch: 1,
        pp: 64,
        chunks: 1,
        global_batch: 512,
        gpus: 512,
        states: 32.958984375,
        none: 131.25,
        sp_selective: 26.5625,
        percent: [58.31, 62.04, 20.27, 9.42],
        seconds: 71.49,
        mfu: 56.3,
        hfu: 57.0,
        tolerance: 0.05,
    },
];

const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

impl Case {
    fn shape(&self) -> DecoderConfig {
        DecoderConfig::gpt(self.layers, self.hidden, self.heads, 51_200, 2048)
    }

    fn strategy(&self, sequence_parallel: bool, recompute: Recompute) -> Strategy {
        Strategy {
            degrees: Degrees {
                pp: self.pp,
                tp: 8,
                ..Degrees::ONE
            },
            zero_stage: 0,
            sequence_parallel,
            pipeline: PipelineLayout {
                schedule: match self.chunks {
                    1 => ScheduleKind::OneForwardOneBackward,
                    _ => ScheduleKind::Interleaved,
                },
                stages_per_rank: self.chunks,
            },
            global_batch: self.global_batch,
            micro_batch: self.micro_batch,
            seq_len: 2048,
            recompute,
            offload: Offload::None,
            precision: Precision::BF16,
            synchronization: Synchronization::PLAIN,
            split_points: Vec::new(),
        }
    }

    /// The activation memory of rank 0.
    fn activations(&self, sequence_parallel: bool, recompute: Recompute) -> f64 {
        let strategy = self.strategy(sequence_parallel, recompute);
        let (shape, software) = (self.shape(), Software::MEGATRON_2021);
        let block = BlockActivations::of(&shape, &strategy, &software, BlockKind::Dense);
        let blocks_per_stage = (self.layers / self.pp / self.chunks) as f64;
        let in_flight = match self.pp {
            1 => 1,
            pp => {
                let (kind, num_microbatches) =
                    (strategy.pipeline.schedule, strategy.num_microbatches());
                in_flight(kind, pp, num_microbatches, self.chunks, 0)
            }
        };
        blocks_per_stage * in_flight as f64 * block.saved(recompute)
    }
}

#[test]
fn activations_of_figure_1_exactly() {
    for case in &CASES {
        assert_eq!(
            case.activations(false, Recompute::None) / GIB,
            case.none,
            "{}",
            case.name
        );
        let both = case.activations(true, Recompute::Selective) / GIB;
        assert_eq!(both, case.sp_selective, "{}", case.name);
    }
}

/// The figure counts the weight matrices of the blocks only: `18 · 12 L h² / (t p)`.
#[test]
fn states_of_figure_1_exactly() {
    for case in &CASES {
        let mut shape = case.shape();
        let (hidden, layers) = (case.hidden as u64, case.layers as u64);
        shape.has_biases = false;
        shape.attention_bias = false;
        let matrices = layers * shape.block(BlockKind::Dense).sharded;
        assert_eq!(matrices, 12 * layers * hidden * hidden);
        let precision = case.strategy(true, Recompute::None).precision;
        let bytes = precision.parameter + precision.gradient + precision.optimizer;
        let each = matrices as f64 * bytes as f64 / (8 * case.pp) as f64;
        assert_eq!(each / GIB, case.states, "{}", case.name);
    }
}

#[test]
fn ratios_of_figure_7_within_1_1_percent() {
    let modes = [
        (true, Recompute::None),
        (false, Recompute::Selective),
        (true, Recompute::Selective),
        (false, Recompute::Full),
    ];
    for case in &CASES {
        let baseline = case.activations(false, Recompute::None);
        for ((sequence_parallel, recompute), published) in modes.into_iter().zip(case.percent) {
            let ours = 100.0 * case.activations(sequence_parallel, recompute) / baseline;
            // The paper prints two decimals, so allow for its rounding error.
            let off = ((ours - published).abs() - 0.005) / published;
            println!(
                "{} {sequence_parallel} {recompute:?}: {ours:.2} published {published}",
                case.name
            );
            assert!(
                off <= 0.011,
                "{} {recompute:?}: {ours} {published}",
                case.name
            );
        }
    }
}

#[test]
fn utilization_of_table_5() {
    for case in &CASES {
        let peak = case.gpus as f64 * 312e12;
        let strategy = case.strategy(true, Recompute::Selective);
        let mfu = 100.0 * model_flops_utilization(&case.shape(), &strategy, case.seconds, peak);
        let hfu = 100.0 * hardware_flops_utilization(&case.shape(), &strategy, case.seconds, peak);
        println!(
            "{}: MFU {mfu:.2} ({}) HFU {hfu:.2} ({})",
            case.name, case.mfu, case.hfu
        );
        assert!(
            (mfu - case.mfu).abs() <= case.tolerance,
            "{}: {mfu}",
            case.name
        );
        assert!(
            (hfu - case.hfu).abs() <= case.tolerance,
            "{}: {hfu}",
            case.name
        );
    }
}

/// Bytes of states per parameter, as documented for Megatron's distributed optimizer and in the ZeRO paper.
#[test]
fn states_by_stage() {
    let bytes = |zero_stage, ranks, (parameter, gradient, optimizer)| {
        let case = &CASES[0];
        let mut strategy = case.strategy(true, Recompute::None);
        strategy.zero_stage = zero_stage;
        strategy.degrees = Degrees {
            dp_shard: ranks,
            ..Degrees::ONE
        };
        strategy.precision = Precision {
            compute: 2,
            parameter,
            gradient,
            reduced: gradient,
            optimizer,
        };
        let shape = case.shape();
        let rank_layers = strategy.layers_by_class(&shape)[0];
        let mut states = States::of(&shape, &strategy, &rank_layers);
        states.gathered = 0.0;
        states.on_device() / shape.num_parameters() as f64
    };
    let same = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} {b}");
    for n in [1, 2, 8, 64] {
        let share = 1.0 / n as f64;
        let (megatron, bf16_gradients, fp32, zero) =
            ((2, 4, 12), (2, 2, 16), (4, 4, 8), (2, 2, 12));
        same(bytes(0, n, megatron), 18.0);
        same(bytes(1, n, megatron), 6.0 + 12.0 * share);
        same(bytes(0, n, bf16_gradients), 20.0);
        same(bytes(1, n, bf16_gradients), 4.0 + 16.0 * share);
        same(bytes(0, n, fp32), 16.0);
        same(bytes(1, n, fp32), 8.0 + 8.0 * share);
        same(bytes(0, n, zero), 16.0);
        same(bytes(1, n, zero), 4.0 + 12.0 * share);
        same(bytes(2, n, zero), 2.0 + 14.0 * share);
        same(bytes(3, n, zero), 16.0 * share);
    }
}

/// On any mesh, all ranks together hold every expert once per replica of the model.
#[test]
fn expert_states_are_sharded_over_the_remaining_ranks() {
    let text = r#"{"model_type":"mixtral","vocab_size":32000,"hidden_size":4096,
        "intermediate_size":14336,"num_hidden_layers":32,"num_attention_heads":32,
        "num_key_value_heads":8,"num_local_experts":8,"num_experts_per_tok":2}"#;
    let shape = DecoderConfig::from_hugging_face(text).unwrap();
    for (dp_shard, cp, tp, ep) in [(8, 1, 1, 8), (8, 1, 2, 4), (4, 2, 2, 8), (16, 1, 1, 1)] {
        let mut strategy = CASES[0].strategy(true, Recompute::None);
        strategy.zero_stage = 3;
        strategy.degrees = Degrees {
            dp_shard,
            cp,
            tp,
            ep,
            ..Degrees::ONE
        };
        let rank_layers = strategy.layers_by_class(&shape)[0];
        let states = States::of(&shape, &strategy, &rank_layers);
        let experts = 32 * shape.block(BlockKind::Experts).experts;
        let local = trainyard_plan::LocalParameters::of(&shape, &strategy, &rank_layers);
        assert_eq!(local.experts, experts as f64 / ep as f64);
        let own = states.optimizer / 12.0 - local.dense / (dp_shard * cp) as f64;
        let world = strategy.degrees.world_size() as f64;
        assert!((own * world / experts as f64 - 1.0).abs() < 1e-9);
    }
}

/// The bubbles as the papers of the schedules state them.
#[test]
fn bubbles_match_publications() {
    let (forward, input, weight) = (1.0, 1.0, 1.0);
    let stage = StageTime {
        forward,
        backward_input: input,
        backward_weight: weight,
    };
    let backward = input + weight;
    let (p, m) = (8, 32);
    let of = |kind, chunks| bubble(kind, p, m, chunks, stage);
    let others = (p - 1) as f64;
    assert_eq!(of(ScheduleKind::GPipe, 1), others * (forward + backward));
    assert_eq!(
        of(ScheduleKind::OneForwardOneBackward, 1),
        others * (forward + backward)
    );
    assert_eq!(
        of(ScheduleKind::Interleaved, 4),
        others * (forward + backward) / 4.0
    );
    assert_eq!(
        of(ScheduleKind::ZeroBubbleH1, 1),
        others * (forward + backward - 2.0 * weight)
    );
    // Relative to the ideal time: 7/32, as in Narayanan et al.
    let ideal = m as f64 * (forward + backward);
    assert_eq!(
        of(ScheduleKind::OneForwardOneBackward, 1) / ideal,
        7.0 / 32.0
    );
}
