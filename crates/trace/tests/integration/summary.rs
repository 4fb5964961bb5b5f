//! Compute, hidden and exposed communication of hand-made timelines.

use trainyard_trace::{
    Collective, CollectiveKind, Events, Purpose, Span, SpanKind, Summary, TraceError,
    chrome_file_name, summarize, write_chrome,
};

const MS: u64 = 1_000_000;

fn span(kind: SpanKind, start: u64, end: u64) -> Span {
    Span {
        name: kind.name().to_owned(),
        kind,
        started_ns: start * MS,
        ended_ns: end * MS,
        thread: 0,
    }
}

fn collective(
    kind: CollectiveKind,
    (start, end): (u64, u64),
    waited: Option<(u64, u64)>,
) -> Collective {
    Collective {
        kind,
        group: "world".to_owned(),
        group_size: 2,
        sequence: 0,
        purpose: Purpose::Gradient,
        dtype: "float32".to_owned(),
        payload_bytes: 1 << 20,
        sent_bytes: 1 << 19,
        issued_ns: start * MS,
        started_ns: start * MS,
        ended_ns: end * MS,
        waited: waited.map(|(began, ended)| (began * MS, ended * MS)),
    }
}

/// ```text
/// ms          0    10    20    30    40    50    60    70    80
/// step        |-----------------------------------------------|
/// forward     |-----------|
/// backward                |-----------|
/// optimizer                                       |-----|
/// all_reduce                    |-----------|
/// all_reduce                          |-----------|
/// waiting                           |-------------|
/// all_gather                                                |-|  (76 to 80, without compute)
/// ```
fn timeline(rank: usize) -> Events {
    Events {
        rank,
        spans: vec![
            span(SpanKind::Step, 0, 80),
            span(SpanKind::Forward, 0, 20),
            span(SpanKind::Unit, 0, 10),
            span(SpanKind::Backward, 20, 40),
            span(SpanKind::Optimizer, 60, 70),
        ],
        collectives: vec![
            collective(CollectiveKind::AllReduce, (30, 50), Some((36, 50))),
            collective(CollectiveKind::AllReduce, (40, 60), Some((50, 60))),
            collective(CollectiveKind::AllGather, (76, 80), None),
        ],
        ..Events::default()
    }
}

#[test]
fn communication_is_hidden_behind_compute_without_waits() {
    let summary = Summary::of(&[timeline(0)]);
    let rank = &summary.ranks[0];
    assert_eq!(rank.num_steps, 1);
    assert_eq!(rank.wall_ns, 80 * MS);
    assert_eq!(rank.compute_ns, 50 * MS);
    assert_eq!(rank.busy_ns, 46 * MS);
    assert_eq!(rank.communication_ns, 34 * MS);
    assert_eq!(rank.hidden_ns, 6 * MS);
    assert_eq!(rank.exposed_ns, 28 * MS);

    let reduce = rank.kinds[&CollectiveKind::AllReduce];
    assert_eq!(
        (reduce.count, reduce.payload_bytes, reduce.sent_bytes),
        (2, 2 << 20, 1 << 20)
    );
    assert_eq!(reduce.communication_ns, 30 * MS);
    assert_eq!((reduce.hidden_ns, reduce.exposed_ns), (6 * MS, 24 * MS));
    let gather = rank.kinds[&CollectiveKind::AllGather];
    assert_eq!((gather.hidden_ns, gather.exposed_ns), (0, 4 * MS));
}

#[test]
fn the_slowest_rank_is_the_one_with_the_most_busy_time() {
    let mut slow = timeline(1);
    // Its backward pass takes longer, so it waits less.
    slow.spans[3] = span(SpanKind::Backward, 20, 49);
    slow.collectives[0].waited = Some((49 * MS, 50 * MS));
    let summary = Summary::of(&[slow, timeline(0)]);
    assert_eq!(
        summary
            .ranks
            .iter()
            .map(|rank| rank.rank)
            .collect::<Vec<_>>(),
        [0, 1]
    );
    assert_eq!(summary.slowest_rank, Some(1));
    assert_eq!(summary.kinds[&CollectiveKind::AllReduce].count, 4);
    assert!(
        summary
            .to_string()
            .contains("slowest rank: 1 (busy 59.000 ms, 1.28 times the median)")
    );
}

#[test]
fn without_compute_there_is_no_slowest_rank() {
    assert_eq!(Summary::of(&[Events::default()]).slowest_rank, None);
    assert_eq!(Summary::of(&[]), Summary::default());
}

#[test]
fn the_table_has_the_expected_layout() {
    let expected = "
 rank  steps       wall    compute communication     hidden    exposed hidden %
    0      1  80.000 ms  50.000 ms     34.000 ms   6.000 ms  28.000 ms     17.6

all ranks         count     payload        sent communication     hidden    exposed hidden %
all_reduce            2    2.00 MiB    1.00 MiB     30.000 ms   6.000 ms  24.000 ms     20.0
all_gather            1    1.00 MiB  512.00 KiB      4.000 ms          0   4.000 ms      0.0

slowest rank: 0 (busy 46.000 ms, 1.00 times the median)
";
    assert_eq!(format!("\n{}", Summary::of(&[timeline(0)])), expected);
}

#[test]
fn files_and_directories_give_the_same_summary() {
    let dir = tempfile::tempdir().unwrap();
    let ranks: Vec<Events> = [0, 2, 10].map(timeline).into();
    for events in &ranks {
        let path = dir.path().join(chrome_file_name(events.rank));
        write_chrome(path, std::slice::from_ref(events)).unwrap();
    }
    std::fs::write(dir.path().join("metrics.json"), "not a trace").unwrap();
    let expected = Summary::of(&ranks);
    assert_eq!(summarize([dir.path()]).unwrap(), expected);

    let files = [0, 2, 10].map(|rank| dir.path().join(chrome_file_name(rank)));
    assert_eq!(summarize(&files).unwrap(), expected);

    let merged = dir.path().join("merged.json");
    write_chrome(&merged, &ranks).unwrap();
    assert_eq!(summarize([&merged]).unwrap(), expected);

    let error = summarize([&merged, &files[1]]).unwrap_err().to_string();
    assert!(error.starts_with("rank 2 is in"), "{error}");
}

#[test]
fn empty_traces_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(
        summarize([dir.path()]),
        Err(TraceError::Empty { .. })
    ));
    let file = dir.path().join("empty.json");
    write_chrome(&file, &[]).unwrap();
    assert!(matches!(summarize([&file]), Err(TraceError::Empty { .. })));
}

#[test]
fn json_has_the_columns_of_the_table() {
    let json = serde_json::to_value(Summary::of(&[timeline(0)])).unwrap();
    assert_eq!(json["ranks"][0]["exposed_ns"], 28 * MS);
    assert_eq!(json["kinds"]["all_reduce"]["hidden_ns"], 6 * MS);
    assert_eq!(json["slowest_rank"], 0);
}
