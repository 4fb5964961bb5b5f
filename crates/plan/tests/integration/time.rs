//! Properties of predicted step times that hold for any calibration constants.

use proptest::prelude::*;
use proptest::strategy::Strategy as _;
use trainyard_arch::DecoderConfig;
use trainyard_plan::{
    Calibration, Cluster, Degrees, Offload, PipelineLayout, Precision, Recompute, Software,
    Strategy, Synchronization, time, time_simulated,
};
use trainyard_schedule::ScheduleKind;

fn shape() -> DecoderConfig {
    DecoderConfig::gpt(48, 4096, 32, 51_200, 2048)
}

fn make_strategy(
    degrees: Degrees,
    kind: ScheduleKind,
    stages_per_rank: usize,
    micro_batch: usize,
) -> Strategy {
    Strategy {
        degrees,
        zero_stage: 1,
        sequence_parallel: degrees.tp > 1,
        pipeline: PipelineLayout {
            schedule: kind,
            stages_per_rank,
        },
        global_batch: 1024,
        micro_batch,
        seq_len: 2048,
        recompute: Recompute::None,
        offload: Offload::None,
        precision: Precision::BF16,
        synchronization: Synchronization::PLAIN,
        split_points: Vec::new(),
    }
}

fn degrees() -> impl proptest::strategy::Strategy<Value = Degrees> {
    (0u32..5, 0u32..4, 0u32..4).prop_map(|(pp, dp, tp)| Degrees {
        pp: 1 << pp,
        dp_shard: 1 << dp,
        tp: 1 << tp,
        ..Degrees::ONE
    })
}

fn schedules() -> impl proptest::strategy::Strategy<Value = (ScheduleKind, usize)> {
    prop_oneof![
        Just((ScheduleKind::OneForwardOneBackward, 1)),
        Just((ScheduleKind::GPipe, 1)),
        Just((ScheduleKind::ZeroBubbleH1, 1)),
        Just((ScheduleKind::Interleaved, 3)),
    ]
}

fn inputs(strategy: &Strategy) -> (Cluster, Calibration) {
    let cluster: Cluster = "4096xH100".parse().unwrap();
    let calibration = Calibration::of(&cluster.accelerator, Software::MODERN);
    assert!(strategy.num_microbatches() >= 2 * strategy.degrees.pp);
    (cluster, calibration)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn terms_sum_and_stay_in_range(degrees in degrees(), (kind, v) in schedules(), b in 0u32..3) {
        let strategy = make_strategy(degrees, kind, v, 1 << b);
        let (cluster, calibration) = inputs(&strategy);
        let time = time(&shape(), &strategy, &cluster, &calibration);
        let sum: f64 = time.terms().iter().map(|(_, seconds)| seconds).sum();
        prop_assert!((sum / time.likely - 1.0).abs() < 1e-9);
        prop_assert!(time.terms().iter().all(|(_, seconds)| *seconds >= 0.0));
        prop_assert!(time.low <= time.likely && time.likely <= time.high);
    }

    /// Embedding and head make the stages unequal, so the closed form may deviate a little from the simulation.
    #[test]
    fn closed_forms_agree_with_the_simulation(
        degrees in degrees(), (kind, v) in schedules(), b in 0u32..3
    ) {
        let strategy = make_strategy(degrees, kind, v, 1 << b);
        let (cluster, calibration) = inputs(&strategy);
        let closed = time(&shape(), &strategy, &cluster, &calibration).likely;
        let simulated = time_simulated(&shape(), &strategy, &cluster, &calibration).unwrap().likely;
        prop_assert!((closed / simulated - 1.0).abs() < 0.02, "{closed} {simulated} {strategy:?}");
    }

    #[test]
    fn a_little_more_work_takes_a_little_longer(degrees in degrees(), (kind, v) in schedules()) {
        let strategy = make_strategy(degrees, kind, v, 1);
        let (cluster, calibration) = inputs(&strategy);
        let longer = Strategy { seq_len: 2064, ..strategy.clone() };
        let before = time(&shape(), &strategy, &cluster, &calibration).likely;
        let after = time(&shape(), &longer, &cluster, &calibration).likely;
        prop_assert!(after > before && after < 1.02 * before, "{before} {after}");
    }

    #[test]
    fn faster_links_are_never_slower(degrees in degrees(), (kind, v) in schedules(), more in 1.0f64..8.0) {
        let strategy = make_strategy(degrees, kind, v, 2);
        let (mut cluster, calibration) = inputs(&strategy);
        let before = time(&shape(), &strategy, &cluster, &calibration).likely;
        cluster.accelerator.network.value *= more;
        cluster.accelerator.link.value *= more;
        cluster.accelerator.link_per_peer.value *= more;
        let after = time(&shape(), &strategy, &cluster, &calibration).likely;
        prop_assert!(after <= before * (1.0 + 1e-12));
    }
}
