//! Traces round-trip, and have the structure that viewers expect.

use proptest::prelude::*;
use trainyard_trace::{
    Allocation, Collective, CollectiveKind, Events, Ledger, MemoryKind, Operator, Purpose, Span,
    SpanKind, TraceError, read_chrome, write_chrome,
};

/// A day in 2026, so that times have a realistic magnitude.
const START_NS: u64 = 1_790_000_000_123_456_789;

fn times() -> impl Strategy<Value = (u64, u64)> {
    (0u64..1 << 42, 0u64..1 << 30)
        .prop_map(|(start, length)| (START_NS + start, START_NS + start + length))
}

fn collective() -> impl Strategy<Value = Collective> {
    (
        (
            prop::sample::select(&CollectiveKind::ALL[..]),
            prop::sample::select(&Purpose::ALL[..]),
        ),
        (
            "[a-z_+\"\\\\]{0,8}",
            1usize..20_000,
            any::<u64>(),
            "[a-z0-9]{1,8}",
        ),
        (0u64..1 << 50, 0u64..1 << 50),
        (times(), prop::option::of(times())),
    )
        .prop_map(
            |((kind, purpose), names, bytes, (times, waited))| Collective {
                kind,
                group: names.0,
                group_size: names.1,
                sequence: names.2,
                purpose,
                dtype: names.3,
                payload_bytes: bytes.0,
                sent_bytes: bytes.1,
                issued_ns: times.0,
                started_ns: times.0,
                ended_ns: times.1,
                waited,
            },
        )
}

fn span() -> impl Strategy<Value = Span> {
    (
        ".{0,12}",
        prop::sample::select(&SpanKind::ALL[..]),
        times(),
        0u64..9,
    )
        .prop_map(|(name, kind, (started_ns, ended_ns), thread)| Span {
            name,
            kind,
            started_ns,
            ended_ns,
            thread,
        })
}

fn operator() -> impl Strategy<Value = Operator> {
    let shapes = prop::collection::vec(prop::collection::vec(0i64..1 << 40, 0..4), 0..3);
    let bytes = (0u64..1 << 40, 0u64..1 << 40);
    (
        "aten::[a-z]{1,8}",
        shapes,
        bytes,
        times(),
        any::<u64>(),
        0u64..9,
    )
        .prop_map(
            |(name, shapes, (input_bytes, output_bytes), (started_ns, ended_ns), flops, thread)| {
                Operator {
                    name,
                    shapes,
                    input_bytes,
                    output_bytes,
                    started_ns,
                    ended_ns,
                    flops,
                    thread,
                }
            },
        )
}

fn allocation() -> impl Strategy<Value = Allocation> {
    (
        prop::sample::select(&MemoryKind::ALL[..]),
        -(1i64 << 40)..1 << 40,
        times(),
    )
        .prop_map(|(kind, bytes, (at_ns, _))| Allocation { kind, bytes, at_ns })
}

fn events(rank: usize) -> impl Strategy<Value = Events> {
    (
        prop::collection::vec(collective(), 0..6),
        prop::collection::vec(span(), 0..6),
        prop::collection::vec(operator(), 0..6),
        prop::collection::vec(allocation(), 0..6),
    )
        .prop_map(move |(collectives, spans, operators, allocations)| Events {
            rank,
            collectives,
            spans,
            operators,
            allocations,
        })
}

proptest! {
    #[test]
    fn every_event_round_trips(ranks in (events(0), events(1), events(12))) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("created/on/demand.json");
        let ranks = vec![ranks.0, ranks.1, ranks.2];
        write_chrome(&path, &ranks).unwrap();
        prop_assert_eq!(read_chrome(&path).unwrap(), ranks);
    }
}

fn overlapping() -> Ledger {
    let ledger = Ledger::recording(1);
    let one = Collective {
        kind: CollectiveKind::AllReduce,
        group: "dp_replicate".to_owned(),
        group_size: 2,
        sequence: 7,
        purpose: Purpose::Gradient,
        dtype: "bfloat16".to_owned(),
        payload_bytes: 4096,
        sent_bytes: 4096,
        issued_ns: START_NS,
        started_ns: START_NS + 1_000,
        ended_ns: START_NS + 5_000,
        waited: Some((START_NS + 4_000, START_NS + 5_000)),
    };
    ledger.collective(one.clone());
    ledger.collective(Collective {
        sequence: 8,
        started_ns: START_NS + 2_000,
        ..one
    });
    ledger.span(Span {
        name: "backward".to_owned(),
        kind: SpanKind::Backward,
        started_ns: START_NS,
        ended_ns: START_NS + 4_500,
        thread: 0,
    });
    ledger
}

#[test]
fn traces_have_processes_threads_and_arguments() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rank1.json");
    overlapping().write_chrome(&path).unwrap();
    let file: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let lines = file["traceEvents"].as_array().unwrap();
    let named = |kind: &str| -> Vec<&str> {
        lines
            .iter()
            .filter(|line| line["name"] == kind)
            .map(|line| line["args"]["name"].as_str().unwrap())
            .collect()
    };
    assert_eq!(named("process_name"), ["rank 1"]);
    assert_eq!(
        named("thread_name"),
        [
            "compute 0",
            "communication 0",
            "communication 1",
            "waiting 0",
            "waiting 1"
        ]
    );

    let slices: Vec<_> = lines
        .iter()
        .filter(|line| line["cat"] == "collective")
        .collect();
    assert_eq!(slices.len(), 2);
    assert_ne!(
        slices[0]["tid"], slices[1]["tid"],
        "overlapping collectives must be on different tracks"
    );
    assert_eq!(slices[0]["name"], "all_reduce dp_replicate #7");
    assert_eq!(slices[0]["ph"], "X");
    assert_eq!(slices[0]["dur"], 4.0);
    assert_eq!(slices[0]["args"]["purpose"], "gradient");
    assert_eq!(slices[0]["args"]["payload_bytes"], 4096);
    assert_eq!(slices[0]["args"]["sequence"], 7);
}

/// Earlier builds wrote the element type as `element`.
#[test]
fn traces_of_earlier_builds_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rank1.json");
    overlapping().write_chrome(&path).unwrap();
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains("\"dtype\""));
    std::fs::write(&path, text.replace("\"dtype\"", "\"element\"")).unwrap();
    assert!(matches!(read_chrome(&path), Err(TraceError::Format { .. })));
}

#[test]
fn events_of_other_programs_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kineto.json");
    std::fs::write(
        &path,
        r#"{"traceEvents":[{"ph":"X","cat":"cpu_op","pid":"Spans","tid":1,"ts":"1.5"},{"ph":"i"}]}"#,
    )
    .unwrap();
    assert_eq!(read_chrome(&path).unwrap(), []);
}

#[test]
fn errors_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing.json");
    assert!(matches!(
        read_chrome(&missing),
        Err(TraceError::Read { .. })
    ));
    let broken = dir.path().join("broken.json");
    std::fs::write(&broken, r#"{"traceEvents":[{"ph""#).unwrap();
    let error = read_chrome(&broken).unwrap_err().to_string();
    assert!(
        error.contains("broken.json is not a trace written by Trainyard"),
        "{error}"
    );
    assert!(matches!(
        write_chrome(dir.path(), &[]),
        Err(TraceError::Write { .. })
    ));
}
