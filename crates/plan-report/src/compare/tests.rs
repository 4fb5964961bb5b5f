use trainyard_arch::DecoderConfig;
use trainyard_mesh::Axis;
use trainyard_trace::{Collective, CollectiveKind, Events, Purpose, Span, SpanKind};

use super::*;
use trainyard_plan::{Degrees, Overheads, Precision, PrecisionByStage, Software, search_mesh};

/// A plan for eight ranks with tensor parallelism of two.
fn planned() -> PlanFile {
    let cluster: Cluster = "8xH100".parse().unwrap();
    let request = PlanRequest {
        shape: DecoderConfig::gpt(24, 2048, 16, 51_200, 1024),
        calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch: 64,
        seq_len: 1024,
        precision: PrecisionByStage::same(Precision::BF16),
        allow_fewer_nodes: false,
    };
    let degrees = Degrees {
        dp_shard: 4,
        tp: 2,
        ..Degrees::ONE
    };
    let plan = search_mesh(&request, degrees).unwrap();
    PlanFile { request, plan }
}

const fn ns(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

fn span(kind: SpanKind, name: &str, start: f64, end: f64) -> Span {
    Span {
        name: name.to_owned(),
        kind,
        started_ns: ns(start),
        ended_ns: ns(end),
        thread: 0,
    }
}

fn collective(group: &str, size: usize, purpose: Purpose, sequence: u64) -> Collective {
    Collective {
        kind: CollectiveKind::AllGather,
        group: group.to_owned(),
        group_size: size,
        sequence,
        purpose,
        dtype: "bfloat16".to_owned(),
        payload_bytes: 0,
        sent_bytes: 100_000_000,
        issued_ns: 0,
        started_ns: 0,
        ended_ns: 0,
        waited: None,
    }
}

/// Steps of one second: 0.7 s forward and backward, of which the rank waits `tensor` for tensor-parallel and 0.2 s
/// for gradient communication, then 0.1 s for the optimizer; the rest is unaccounted. Loading data takes 0.05 s
/// before each step.
fn traced(rank: usize, tensor: f64, num_steps: u64) -> Events {
    let mut events = Events {
        rank,
        ..Events::default()
    };
    for step in 0..num_steps {
        let at = 1.0 + 2.0 * step as f64;
        events.spans.extend([
            span(SpanKind::Data, "data", at - 0.05, at),
            span(SpanKind::Forward, "forward", at, at + 0.2),
            span(SpanKind::Backward, "backward", at + 0.2, at + 0.7),
            span(SpanKind::Optimizer, "optimizer", at + 0.7, at + 0.8),
            span(SpanKind::Step, &format!("step {}", step + 1), at, at + 1.0),
        ]);
        let mut gathered = collective("tp", 2, Purpose::Activation, step);
        gathered.started_ns = ns(at + 0.1 - tensor);
        gathered.ended_ns = ns(at + 0.101);
        gathered.waited = Some((ns(at + 0.1), ns(at + 0.1 + tensor)));
        let mut reduced = collective("dp_shard", 4, Purpose::Gradient, step);
        reduced.started_ns = ns(at + 0.5);
        reduced.ended_ns = ns(at + 0.7);
        reduced.waited = Some((ns(at + 0.5), ns(at + 0.7)));
        events.collectives.extend([gathered, reduced]);
    }
    events
}

fn near(found: f64, wanted: f64) {
    assert!((found - wanted).abs() < 1e-6, "{found} {wanted}");
}

#[test]
fn every_moment_belongs_to_one_component() {
    let PlanFile { request, plan } = planned();
    let ranks = [traced(0, 0.05, 5), traced(1, 0.01, 5)];
    let traced = TraceBreakdown::of(&ranks, &plan.strategy.degrees, &request.cluster).unwrap();
    assert_eq!((traced.rank, traced.num_steps), (1, 2));
    near(traced.seconds(TimeComponent::Tensor), 0.01);
    near(traced.seconds(TimeComponent::Data), 0.2);
    near(traced.seconds(TimeComponent::Compute), 0.49);
    near(traced.seconds(TimeComponent::Optimizer), 0.1);
    near(traced.seconds(TimeComponent::Other), 0.2);
    near(traced.seconds(TimeComponent::DataLoading), 0.05);
    near(traced.step(), 1.05);
    // The rank that arrived last at the all-gather determines its time.
    let collective = traced
        .collectives
        .iter()
        .find(|collective| collective.axes == "tp")
        .unwrap();
    assert_eq!(collective.count, 5);
    near(collective.seconds, 0.011);
}

#[test]
fn control_waits_of_a_finished_stage_count_as_pipeline_time() {
    let control = |group: &str| collective(group, 2, Purpose::Control, 0);
    assert_eq!(
        TimeComponent::of_wait(&control("world"), true),
        TimeComponent::Pipeline
    );
    assert_eq!(
        TimeComponent::of_wait(&control("world"), false),
        TimeComponent::Control
    );
    assert_eq!(
        TimeComponent::of_wait(&control("dp_shard"), true),
        TimeComponent::Control
    );
    let message = collective("pp", 2, Purpose::Activation, 0);
    assert_eq!(
        TimeComponent::of_wait(&message, true),
        TimeComponent::Pipeline
    );
}

#[test]
fn constants_are_fitted_to_the_measurements_they_affect() {
    let file = planned();
    let PlanFile { request, plan } = &file;
    let ranks = [traced(0, 0.0, 5), traced(1, 0.01, 5)];
    let traced = TraceBreakdown::of(&ranks, &plan.strategy.degrees, &request.cluster).unwrap();
    let measured = traced.measured();
    let found = Comparison::of(&file, &measured, Some(&traced)).unwrap();
    let terms: f64 = found.terms.iter().filter_map(|row| row.measured).sum();
    near(terms, measured.seconds);
    let off = |row: &Row, value: f64| (value / row.measured.unwrap()).ln().abs();
    for rows in [&found.terms[..1], &found.collectives[..]] {
        let before: f64 = rows.iter().map(|row| off(row, row.predicted)).sum();
        let after: f64 = rows.iter().map(|row| off(row, row.refitted.unwrap())).sum();
        assert!(after < before, "{before} {after}");
    }
    let moved: Vec<&str> = found.moved().iter().map(|(name, ..)| *name).collect();
    assert!(moved.contains(&"link"), "{moved:?}");
    // There is only one node, so nothing was measured about the network.
    assert!(!moved.contains(&"network"), "{moved:?}");
    let again = with_constants(&request.cluster, &found.constants).unwrap();
    let read = Cluster::from_toml(&again.to_toml()).unwrap();
    let calibration = Calibration::of_cluster(&read, Software::MODERN);
    assert_eq!(calibration.constants, found.constants);
    let json = found.to_json();
    assert_eq!(json["terms"].as_array().unwrap().len(), found.terms.len());
}

#[test]
fn metrics_alone_change_the_step_time() {
    let file = planned();
    let measured = Measured {
        seconds: 1.5 * file.plan.time.likely,
        num_steps: 1,
        ..Measured::default()
    };
    let found = Comparison::of(&file, &measured, None).unwrap();
    assert!(found.terms.iter().all(|row| row.measured.is_none()));
    assert!(found.collectives.is_empty());
    assert!(found.refitted.time.likely > 1.1 * file.plan.time.likely);
    assert!((found.summary[0].ratio().unwrap() - 1.5).abs() < 1e-9);
}

#[test]
fn traces_of_another_plan_are_rejected() {
    let PlanFile { request, plan } = planned();
    let degrees = &plan.strategy.degrees;
    let rejected = |events: Events| {
        let rejected = TraceBreakdown::of(&[events], degrees, &request.cluster);
        rejected.unwrap_err().to_string()
    };
    assert!(rejected(Events::default()).contains("no complete step"));
    assert!(rejected(traced(8, 0.0, 1)).contains("rank 8"));
    let mut other = traced(0, 0.0, 1);
    other.collectives[0].group_size = 4;
    assert!(rejected(other).contains("tp had 4 ranks"));
    assert_eq!(degrees.mesh().unwrap().size(Axis::Tp), 2);
}
