use trainyard_mesh::Axis;
use trainyard_trace::{Collective, CollectiveKind, Events, Purpose, Span, SpanKind};

use super::*;
use crate::{Degrees, Held, Overheads, Precision, Shape, Software, search_mesh};

/// A plan of eight ranks that share matrices by two.
fn planned() -> PlanFile {
    let cluster: Cluster = "8xH100".parse().unwrap();
    let question = Question {
        shape: Shape::gpt(24, 2048, 16, 51_200, 1024),
        calibration: Calibration::of(&cluster.accelerator, Software::MODERN),
        cluster,
        overheads: Overheads::default(),
        global_batch: 64,
        seq_len: 1024,
        held: Held::same(Precision::BF16),
        fewer_machines: false,
    };
    let degrees = Degrees {
        dp_shard: 4,
        tp: 2,
        ..Degrees::ONE
    };
    let plan = search_mesh(&question, degrees).unwrap();
    PlanFile { question, plan }
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
        element: "bfloat16".to_owned(),
        payload_bytes: 0,
        sent_bytes: 100_000_000,
        issued_ns: 0,
        started_ns: 0,
        ended_ns: 0,
        waited: None,
    }
}

/// Steps of a second: half of it forward and backward, of which the rank waits `tensor` for matrices; then
/// 0.2 for gradients and 0.1 for the optimiser; the rest is nothing's. Samples take 0.05 before.
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
fn every_moment_belongs_to_one_part() {
    let PlanFile { question, plan } = planned();
    let ranks = [traced(0, 0.05, 5), traced(1, 0.01, 5)];
    let traced = Traced::of(&ranks, &plan.strategy.degrees, &question.cluster).unwrap();
    assert_eq!((traced.rank, traced.num_steps), (1, 2));
    near(traced.seconds(Part::Tensor), 0.01);
    near(traced.seconds(Part::Data), 0.2);
    near(traced.seconds(Part::Computing), 0.49);
    near(traced.seconds(Part::Optimizer), 0.1);
    near(traced.seconds(Part::Besides), 0.2);
    near(traced.seconds(Part::Samples), 0.05);
    near(traced.step(), 1.05);
    // Of the two ranks of one gather the one that came last says how long it takes.
    let wire = traced.wires.iter().find(|wire| wire.axes == "tp").unwrap();
    assert_eq!(wire.count, 5);
    near(wire.seconds, 0.011);
}

#[test]
fn a_stage_that_is_done_waits_for_the_others() {
    let control = |group: &str| collective(group, 2, Purpose::Control, 0);
    assert_eq!(Part::of_wait(&control("world"), true), Part::Stages);
    assert_eq!(Part::of_wait(&control("world"), false), Part::Agreeing);
    assert_eq!(Part::of_wait(&control("dp_shard"), true), Part::Agreeing);
    let message = collective("pp", 2, Purpose::Activation, 0);
    assert_eq!(Part::of_wait(&message, true), Part::Stages);
}

#[test]
fn constants_follow_what_speaks_about_them() {
    let file = planned();
    let PlanFile { question, plan } = &file;
    let ranks = [traced(0, 0.0, 5), traced(1, 0.01, 5)];
    let traced = Traced::of(&ranks, &plan.strategy.degrees, &question.cluster).unwrap();
    let measured = traced.measured();
    let found = Comparison::of(&file, &measured, Some(&traced)).unwrap();
    let terms: f64 = found.terms.iter().filter_map(|row| row.measured).sum();
    near(terms, measured.seconds);
    let off = |row: &Row, value: f64| (value / row.measured.unwrap()).ln().abs();
    for rows in [&found.terms[..1], &found.wires[..]] {
        let before: f64 = rows.iter().map(|row| off(row, row.predicted)).sum();
        let after: f64 = rows.iter().map(|row| off(row, row.refitted.unwrap())).sum();
        assert!(after < before, "{before} {after}");
    }
    let moved: Vec<&str> = found.moved().iter().map(|(name, ..)| *name).collect();
    assert!(moved.contains(&"link"), "{moved:?}");
    // There is no other machine, so nothing was said about the network.
    assert!(!moved.contains(&"network"), "{moved:?}");
    let again = with_constants(&question.cluster, &found.constants).unwrap();
    let read = Cluster::from_toml(&again.to_toml()).unwrap();
    let calibration = Calibration::of_cluster(&read, Software::MODERN);
    assert_eq!(calibration.constants, found.constants);
    let json = found.to_json();
    assert_eq!(json["terms"].as_array().unwrap().len(), found.terms.len());
}

#[test]
fn metrics_alone_move_the_whole() {
    let file = planned();
    let measured = Measured {
        seconds: 1.5 * file.plan.time.likely,
        num_steps: 1,
        ..Measured::default()
    };
    let found = Comparison::of(&file, &measured, None).unwrap();
    assert!(found.terms.iter().all(|row| row.measured.is_none()));
    assert!(found.wires.is_empty());
    assert!(found.refitted.time.likely > 1.1 * file.plan.time.likely);
    assert!((found.whole[0].ratio().unwrap() - 1.5).abs() < 1e-9);
}

#[test]
fn another_run_is_refused() {
    let PlanFile { question, plan } = planned();
    let degrees = &plan.strategy.degrees;
    let refused = |events: Events| {
        let refused = Traced::of(&[events], degrees, &question.cluster);
        refused.unwrap_err().to_string()
    };
    assert!(refused(Events::default()).contains("no whole step"));
    assert!(refused(traced(8, 0.0, 1)).contains("rank 8"));
    let mut other = traced(0, 0.0, 1);
    other.collectives[0].group_size = 4;
    assert!(refused(other).contains("tp had 4 ranks"));
    assert_eq!(degrees.mesh().unwrap().size(Axis::Tp), 2);
}
