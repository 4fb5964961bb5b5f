//! Dumps of PyTorch's Flight Recorder and traces of its profiler.
//!
//! The files in `tests/fixtures/pytorch` were written by PyTorch 2.13 with Gloo on two ranks; the scripts that
//! wrote them are beside them. The dumps and traces of NCCL in this file are written by hand, after the source
//! code of PyTorch and Kineto.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use trainyard_trace::{
    CollectiveKind, Events, FlightRecorder, SpanKind, diagnose, read_all, summarize,
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/pytorch")
        .join(name)
}

const US: u64 = 1000;

/// An operation in a dump of NCCL, with `[1024, 512]` elements of `Float`.
fn entry(name: &str, sequence: u64, state: &str) -> Value {
    let issued = 1_000_000_000 * sequence;
    let noticed = |states: &[&str], at: u64| states.contains(&state).then_some(issued + at);
    json!({
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": name,
        "time_created_ns": issued,
        "input_sizes": [[1024, 512]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024, 512]],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": noticed(&["started", "completed"], 100),
        "time_discovered_completed_ns": noticed(&["completed"], 900),
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": false,
        "frames": [
            {"name": "all_reduce", "filename": "/venv/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "wrapper", "filename": "/venv/typing_extensions.py", "line": 3140},
            {"name": "step", "filename": "/home/user/train.py", "line": 41},
            {"name": "<module>", "filename": "/home/user/train.py", "line": 97},
        ],
    })
}

fn with(mut entry: Value, changes: Value) -> Value {
    for (key, value) in changes.as_object().unwrap() {
        entry[key] = value.clone();
    }
    entry
}

fn dump(rank: usize, entries: &[Value]) -> FlightRecorder {
    let text = json!({
        "version": "2.10",
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
            "7": {"name": "7", "desc": "pp", "ranks": "[0, 2]"},
        },
        "pg_status": {},
        "entries": entries,
    });
    FlightRecorder::parse(text.to_string().as_bytes(), Some(rank)).unwrap()
}

fn waiting() -> Vec<Value> {
    vec![
        entry("nccl:all_reduce", 40, "completed"),
        entry("nccl:all_reduce", 41, "started"),
    ]
}

#[test]
fn a_rank_that_does_not_enter_is_found() {
    let mut dumps: Vec<FlightRecorder> = [0, 2, 3].map(|rank| dump(rank, &waiting())).into();
    dumps.push(dump(1, &[entry("nccl:all_reduce", 40, "completed")]));
    let expected = "rank 1 did not enter all_reduce 41 of world [1024, 512] float32; \
                    ranks 0, 2, 3 wait at train.py:41 in step; \
                    the last one of rank 1 is all_reduce 40 at train.py:41 in step";
    assert_eq!(diagnose(&dumps), [expected]);
}

#[test]
fn members_without_a_dump_are_named() {
    let dumps = [0, 1, 2].map(|rank| dump(rank, &waiting()));
    let expected = "all_reduce 41 of world [1024, 512] float32 is not complete; \
                    ranks 0, 1, 2 wait at train.py:41 in step; there is no dump of rank 3";
    assert_eq!(diagnose(&dumps), [expected]);
}

#[test]
fn a_rank_whose_buffer_is_past_a_collective_has_entered_it() {
    let mut dumps: Vec<FlightRecorder> = [0, 1, 2].map(|rank| dump(rank, &waiting())).into();
    dumps.push(dump(3, &[entry("nccl:all_reduce", 50, "completed")]));
    assert!(
        diagnose(&dumps)[0]
            .starts_with("all_reduce 41 of world [1024, 512] float32 is not complete")
    );
}

#[test]
fn ranks_that_disagree_are_found() {
    let other = [
        json!({"profiling_name": "nccl:_all_gather_base"}),
        json!({"input_sizes": [[1024, 256]]}),
        json!({"input_dtypes": ["BFloat16"]}),
    ];
    let expected = [
        "rank 2 calls all_gather [1024, 512] float32",
        "rank 2 calls all_reduce [1024, 256] float32",
        "rank 2 calls all_reduce [1024, 512] bfloat16",
    ];
    for (changes, expected) in other.into_iter().zip(expected) {
        let mut dumps: Vec<FlightRecorder> = [0, 1, 3].map(|rank| dump(rank, &waiting())).into();
        dumps.push(dump(
            2,
            &[with(entry("nccl:all_reduce", 41, "started"), changes)],
        ));
        let findings = diagnose(&dumps);
        let expected = format!(
            "the ranks disagree on collective 41 of world: \
             ranks 0, 1, 3 call all_reduce [1024, 512] float32 at train.py:41 in step; \
             {expected} at train.py:41 in step"
        );
        assert!(findings.contains(&expected), "{findings:?}");
    }
}

#[test]
fn sends_that_wait_are_found() {
    let send = json!({"p2p_seq_id": 3, "is_p2p": true, "process_group": ["7", "pp"], "frames": []});
    let dumps = [dump(
        0,
        &[with(entry("nccl:send 0->1", 9, "started"), send)],
    )];
    let expected = "rank 0 waits in send 3 of pp [1024, 512] float32, ranks of the group 0->1";
    assert_eq!(diagnose(&dumps), [expected]);
}

#[test]
fn complete_runs_have_no_findings() {
    let complete = [entry("nccl:all_reduce", 40, "completed")];
    assert!(diagnose(&[0, 1, 2, 3].map(|rank| dump(rank, &complete))).is_empty());
    assert!(diagnose(&[]).is_empty());
}

#[test]
fn a_dump_has_times_and_volumes() {
    let measured = with(
        entry("nccl:all_reduce", 2, "completed"),
        json!({"duration_ms": 0.0005}),
    );
    let entries = [
        entry("nccl:_all_gather_base", 1, "completed"),
        measured,
        entry("nccl:all_reduce_barrier", 3, "scheduled"),
    ];
    let recorder = dump(1, &entries);
    assert_eq!(recorder.incomplete().count(), 1);
    let events = recorder.events();
    let [gather, reduce, barrier] = &events.collectives[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (gather.kind, gather.group.as_str(), gather.group_size),
        (CollectiveKind::AllGather, "world", 4)
    );
    assert_eq!(
        (gather.payload_bytes, gather.sent_bytes),
        (2 << 20, 6 << 20)
    );
    assert_eq!(
        (gather.started_ns, gather.ended_ns),
        (1_000_000_100, 1_000_000_900)
    );
    assert_eq!(
        (reduce.started_ns, reduce.ended_ns),
        (2_000_000_400, 2_000_000_900)
    );
    assert_eq!((reduce.sequence, reduce.sent_bytes), (2, 3 << 20));
    assert_eq!(
        (barrier.kind, barrier.payload_bytes),
        (CollectiveKind::Barrier, 0)
    );
    // Not complete: until the end of the dump, which is when it was issued.
    assert_eq!(
        (barrier.started_ns, barrier.ended_ns),
        (3_000_000_000, 3_000_000_000)
    );
}

#[test]
fn coalesced_operations_have_the_times_of_their_group() {
    let part = json!({"retired": false});
    let entries = [
        with(entry("nccl:_all_gather_base", 5, "scheduled"), part.clone()),
        with(entry("nccl:_all_gather_base", 5, "scheduled"), part),
        entry("nccl:coalesced", 5, "completed"),
    ];
    let recorder = dump(0, &entries);
    assert_eq!(
        (recorder.calls.len(), recorder.incomplete().count()),
        (2, 0)
    );
    assert!(
        recorder
            .calls
            .iter()
            .all(|call| call.collective.ended_ns == 5_000_000_900)
    );
}

#[test]
fn a_dump_needs_its_rank() {
    let error = FlightRecorder::parse(br#"{"pg_config": {}}"#, None).unwrap_err();
    assert!(
        error.to_string().contains("does not have its rank"),
        "{error}"
    );
    let with_rank = FlightRecorder::parse(br#"{"pg_config": {}, "rank": 3}"#, None).unwrap();
    assert_eq!((with_rank.rank, with_rank.calls.len()), (3, 0));
}

#[test]
fn dumps_of_gloo_tell_which_rank_is_missing() {
    let of = |names: [&str; 2]| summarize(names.map(fixture)).unwrap();
    let pickles = of(["dump_0", "dump_1"]);
    let [finding] = &pickles.findings[..] else {
        panic!("{:?}", pickles.findings)
    };
    let expected =
        "rank 1 did not enter all_reduce 4 of world [64, 8] float32; rank 0 waits at hang.py:";
    assert!(finding.starts_with(expected), "{finding}");
    assert!(
        finding.ends_with("in run") && finding.contains("is barrier 3 at hang.py"),
        "{finding}"
    );
    assert!(pickles.to_string().contains(finding));
    assert_eq!(pickles.kinds[&CollectiveKind::AllReduce].count, 3);
    assert_eq!(
        pickles.kinds[&CollectiveKind::AllReduce].sent_bytes,
        3 * 64 * 8 * 4
    );

    // JSON has the same except for the stacks.
    let json = of(["dump_0.json", "dump_1.json"]);
    assert_eq!(json.ranks, pickles.ranks);
    assert!(json.findings[0].starts_with("rank 1 did not enter all_reduce 4 of world"));
}

#[test]
fn every_damage_of_a_dump_is_an_error_and_no_panic() {
    let bytes = std::fs::read(fixture("dump_0")).unwrap();
    for length in 0..bytes.len() {
        assert!(FlightRecorder::parse(&bytes[..length], Some(0)).is_err());
    }
    for position in 0..bytes.len() {
        for value in [0x00, 0x28, 0x2e, 0x5d, 0x68, 0xff] {
            let mut damaged = bytes.clone();
            damaged[position] = value;
            let _ = FlightRecorder::parse(&damaged, Some(0));
        }
    }
}

#[test]
fn a_profile_of_ddp_on_cpus_has_steps_compute_and_gloo() {
    let ranks = read_all(["ddp_0.json", "ddp_1.pt.trace.json.gz"].map(fixture)).unwrap();
    assert_eq!(
        ranks.iter().map(|rank| rank.rank).collect::<Vec<_>>(),
        [0, 1]
    );
    for events in &ranks {
        let steps: Vec<&str> = names(events, SpanKind::Step);
        assert_eq!(steps, ["step 2"]);
        assert!(!names(events, SpanKind::Compute).is_empty());
        // The gradients in one bucket, and the loss.
        let bytes: Vec<u64> = events
            .collectives
            .iter()
            .map(|each| each.payload_bytes)
            .collect();
        assert_eq!(bytes, [4 * (64 * 64 + 64 + 64 * 8 + 8), 4]);
        assert!(
            events
                .collectives
                .iter()
                .all(|each| each.kind == CollectiveKind::AllReduce)
        );
        assert!(
            events
                .collectives
                .iter()
                .all(|each| each.group_size == 2 && each.dtype == "float32")
        );
    }
    let summary = summarize(["ddp_0.json", "ddp_1.pt.trace.json.gz"].map(fixture)).unwrap();
    assert!(summary.findings.is_empty());
    for rank in &summary.ranks {
        assert_eq!(rank.num_steps, 1);
        assert!(0 < rank.compute_ns && rank.compute_ns < rank.wall_ns);
        assert!(0 < rank.communication_ns && rank.communication_ns < rank.wall_ns);
    }
}

fn names(events: &Events, kind: SpanKind) -> Vec<&str> {
    let spans = events.spans.iter().filter(|span| span.kind == kind);
    spans.map(|span| span.name.as_str()).collect()
}

fn event(cat: &str, name: &str, (ts, dur): (f64, f64), args: Value) -> Value {
    json!({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args})
}

/// ```text
/// us         0    10   20   30   40   50   60
/// gemm            |---------|         |----|
/// all_reduce           |--------------|
/// ```
fn gpu_trace() -> Value {
    let about = json!({
        "External id": 12, "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 1024,
        "Out msg nelems": 1024, "Group size": 4, "Process Group Name": "3",
        "Process Group Description": "mesh_dp", "Process Group Ranks": "[0, 1, 2, 3]", "Seq": 17,
    });
    json!({
        "schemaVersion": 1,
        "baseTimeNanoseconds": 1_000_000_000u64,
        "distributedInfo": {"backend": "nccl", "rank": 2, "world_size": 8},
        "traceEvents": [
            event("user_annotation", "ProfilerStep#5", (0.0, 60.0), json!({})),
            event("gpu_user_annotation", "ProfilerStep#5", (10.0, 50.0), json!({})),
            event("cpu_op", "aten::mm", (1.0, 3.0), json!({"External id": 11})),
            event("cpu_op", "record_param_comms", (5.0, 2.0), about),
            event("kernel", "ampere_bf16_gemm", (10.0, 20.0), json!({"External id": 11, "correlation": 1})),
            event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", (20.0, 30.0),
                json!({"External id": 12, "correlation": 2})),
            event("kernel", "ampere_bf16_gemm", (50.0, 10.0), json!({"External id": 13, "correlation": 3})),
            {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "pid": "Traces", "ts": 0.0},
        ],
    })
}

#[test]
fn a_profile_of_a_gpu_has_kernels_and_nccl() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("host_1.1790857026000.pt.trace.json");
    std::fs::write(&file, gpu_trace().to_string()).unwrap();
    let ranks = read_all([dir.path()]).unwrap();
    let [events] = &ranks[..] else {
        panic!("{ranks:?}")
    };
    assert_eq!(names(events, SpanKind::Step), ["step 5"]);
    let [reduce] = &events.collectives[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (reduce.kind, reduce.group.as_str(), reduce.group_size),
        (CollectiveKind::AllReduce, "mesh_dp", 4)
    );
    assert_eq!((reduce.sequence, reduce.dtype.as_str()), (17, "bfloat16"));
    assert_eq!((reduce.payload_bytes, reduce.sent_bytes), (2048, 3072));
    let relative =
        [reduce.issued_ns, reduce.started_ns, reduce.ended_ns].map(|ns| ns - 1_000_000_000);
    assert_eq!(relative, [5 * US, 20 * US, 50 * US]);

    let summary = summarize([&file]).unwrap();
    let rank = &summary.ranks[0];
    assert_eq!(
        (rank.rank, rank.wall_ns, rank.compute_ns),
        (2, 60 * US, 30 * US)
    );
    assert_eq!(
        (rank.communication_ns, rank.hidden_ns, rank.exposed_ns),
        (30 * US, 10 * US, 20 * US)
    );
}

/// PyTorch joins the arguments of a kernel with those of its call.
#[test]
fn kernels_may_have_the_description_themselves_and_keys_twice() {
    let kernel = r#"{"ph": "X", "cat": "kernel", "name": "ncclDevKernel_Generic_1", "pid": 0, "tid": 7, "ts": 5.0,
        "dur": 2.5, "args": {"External id": 3, "stream": 20, "Collective name": "all_to_allv", "dtype": "Half",
        "In msg nelems": "100", "Group size": 2, "Process Group Name": "4", "Seq": 6, "External id": 3}}"#;
    let trace = format!(
        r#"{{"schemaVersion": 1, "distributedInfo": {{"rank": 1}}, "traceEvents": [{kernel}]}}"#
    );
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.json");
    std::fs::write(&file, trace).unwrap();
    let events = read_all([file]).unwrap().remove(0);
    let [each] = &events.collectives[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        (each.kind, each.group.as_str(), each.sequence),
        (CollectiveKind::AllToAll, "group 4", 6)
    );
    assert_eq!((each.payload_bytes, each.sent_bytes), (200, 100));
    assert_eq!((each.started_ns, each.ended_ns), (5000, 7500));
}

#[test]
fn the_content_decides_about_the_format() {
    let dir = tempfile::tempdir().unwrap();
    let copies = [("dump_0", "a7"), ("dump_1.json", "b1"), ("ddp_0.json", "c")];
    let files = copies.map(|(from, to)| {
        let path = dir.path().join(to);
        std::fs::copy(fixture(from), &path).unwrap();
        path
    });
    assert_eq!(
        read_all(&files)
            .unwrap()
            .iter()
            .map(|each| each.rank)
            .collect::<Vec<_>>(),
        [0, 1, 7]
    );

    // Of a directory, only the files with a rank in their name are read, and of those only traces.
    std::fs::write(dir.path().join("checkpoint_9"), "no trace").unwrap();
    std::fs::create_dir(dir.path().join("step_3")).unwrap();
    assert_eq!(
        read_all([dir.path()])
            .unwrap()
            .iter()
            .map(|each| each.rank)
            .collect::<Vec<_>>(),
        [1, 7]
    );

    let error = read_all([dir.path().join("checkpoint_9")])
        .unwrap_err()
        .to_string();
    for format in ["Trainyard", "profiler", "Flight Recorder"] {
        assert!(error.contains(format), "{error}");
    }
}
