//! Tests with the output formats of different nccl-tests versions.

use super::*;

/// Times of a 300 GB/s ring with 30 us latency, formatted as nccl-tests prints them.
fn time(factor: f64, bytes: u64) -> String {
    let us = 30.0 + factor * bytes as f64 / 300e3;
    match us {
        us if us < 1e4 => format!("{us:.2}"),
        us if us < 1e6 => format!("{us:.0}"),
        us => format!("{us:.1e}"),
    }
}

/// The rows of a table; `row` formats bytes and the printed time.
fn rows(factor: f64, row: impl Fn(u64, &str) -> String) -> String {
    let sizes = (10..=32).step_by(2).map(|power| 1u64 << power);
    sizes
        .map(|bytes| row(bytes, &time(factor, bytes)) + "\n")
        .collect()
}

fn devices(num: usize, line: impl Fn(usize) -> String) -> String {
    (0..num).map(|rank| line(rank) + "\n").collect()
}

/// Checks the fitted bandwidth and latency, and the numbers of ranks and nodes.
fn check(text: &str, collective: Collective, num_ranks: usize, num_nodes: usize) {
    let tables = read_tables("run.log", text).unwrap();
    let [table] = tables.as_slice() else {
        panic!("{} tables in {text}", tables.len());
    };
    assert_eq!(table.collective, collective);
    assert_eq!((table.num_ranks, table.num_nodes), (num_ranks, num_nodes));
    let line = table.line().unwrap();
    assert!(
        (line.bytes_per_second / 300e9 - 1.0).abs() < 0.03,
        "{line:?}"
    );
    assert!((line.latency / 30e-6 - 1.0).abs() < 0.03, "{line:?}");
}

/// Before 2.13: no root, no group, `error` instead of `#wrong`.
#[test]
fn without_a_root() {
    let mut text = "$ ./build/all_reduce_perf -b 1K -e 4G -f 4 -g 8\n\
         # nThread 1 nGpus 8 minBytes 1024 maxBytes 4294967296 step: 4(factor) warmup iters: 5 iters: 20 validation: 1\n\
         #\n# Using devices\n"
        .to_owned();
    text += &devices(8, |rank| {
        format!(
            "#   Rank {rank:2} Pid  71327 on 51e6e7896958 device {rank:2} [0x1a] Tesla V100-SXM3-32GB"
        )
    });
    text += "#\n\
         #                                                       out-of-place                       in-place\n\
         #       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error\n\
         #        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)\n";
    text += &rows(1.75, |bytes, us| {
        format!(
            "{bytes:12}  {:12}     float     sum  {us:>7}  1.00    1.75  1e-07  {us:>7}  1.00    1.75  1e-07",
            bytes / 4
        )
    });
    text += "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 40.1 \n#\n";
    check(&text, Collective::AllReduce, 8, 1);
}

/// All-gather tables of that version have no operation column either.
#[test]
fn without_an_operation() {
    let mut text = "mpirun -np 16 ./build/all_gather_perf -b 1K -e 4G -f 4\n\
         # nThread 1 nGpus 1 minBytes 1024 maxBytes 4294967296 step: 4(factor) warmup iters: 5 iters: 20 validation: 1\n"
        .to_owned();
    text += &devices(16, |rank| {
        format!(
            "#   Rank {rank:2} Pid  {} on    server{} device {:2} [0xe7] Tesla V100-SXM2-16GB",
            100 + rank,
            rank / 8,
            rank % 8
        )
    });
    text += "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error\n";
    text += &rows(15.0 / 16.0, |bytes, us| {
        format!(
            "{bytes:12}  {:12}   float  {us:>7}    1.26    1.10  0e+00  {us:>7}    1.31    1.14  0e+00",
            bytes / 64
        )
    });
    check(&text, Collective::AllGather, 16, 2);
}

/// The format of 2.13, with log lines of NCCL and a launcher between the rows, from a host whose name is a number.
#[test]
fn with_a_root_and_log_lines() {
    let mut text = "NCCL version 2.21.5+cuda12.4\n\
         # nThread 1 nGpus 1 minBytes 1024 maxBytes 4294967296 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0\n\
         #\n# Using devices\n"
        .to_owned();
    text += &devices(16, |rank| {
        format!(
            "#  Rank {rank:2} Group  0 Pid 544816 on    dgx{:02} device {:2} [0x1a] NVIDIA H100 80GB HBM3",
            rank / 8,
            rank % 8
        )
    });
    text += "9f0c2d:149:157 [1] NCCL INFO NET/IB : No device found.\n\
         #                                                              out-of-place                       in-place          \n\
         #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n\
         #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n\
                   0             0     float     sum      -1     5.70    0.00    0.00      0     5.54    0.00    0.00      0\n";
    text += &rows(15.0 / 16.0, |bytes, us| {
        format!(
            "{bytes:12}  {:12}     float     sum      -1  {us:>7}  1.00    0.94      0  {us:>7}  1.00    0.94    N/A\n149:dgx01 [0] NCCL INFO comm 0x55",
            bytes / 64
        )
    });
    text += "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 745.53 \n";
    let named = text.replace(
        "# Using devices",
        "# Using devices\n+ ./reduce_scatter_perf -b 1K",
    );
    check(&named, Collective::ReduceScatter, 16, 2);
    let rejected = read_tables("run.log", &text).unwrap_err().to_string();
    assert!(rejected.contains("the collective is unknown"), "{rejected}");
    let tables = read_tables("alltoall_perf.txt", &text).unwrap();
    assert_eq!(tables[0].collective, Collective::AllToAll);
}

/// Newer versions print the test and their version; every line may be prefixed with a rank.
#[test]
fn named_and_tagged() {
    let mut text = "# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703\n\
         # Collective test starting: sendrecv_perf\n\
         # nThread 1 nGpus 1 minBytes 1024 maxBytes 4294967296 step: 4(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0\n\
         #\n# Using devices\n"
        .to_owned();
    text += &devices(2, |rank| {
        format!(
            "#  Rank {rank:2} Group  0 Pid 1666603 on spark-{rank} device  0 [000f:01:00] NVIDIA GB10"
        )
    });
    text += "#\n\
         #                                                              out-of-place                       in-place          \n\
         #       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong \n\
         #        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         \n";
    text += &rows(1.0, |bytes, us| {
        format!(
            "{bytes:12}  {:12}     float     sum      -1  {us:>7}    0.23    0.23       0  {us:>7}    0.27    0.27     N/A",
            bytes / 4
        )
    });
    text += "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 123.4 \n#\n\
             # Collective test concluded: sendrecv_perf\n#\n";
    check(&text, Collective::SendReceive, 2, 2);
    for tag in ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: ", " 0: "] {
        let tagged: String = text.lines().map(|line| format!("{tag}{line}\n")).collect();
        check(&tagged, Collective::SendReceive, 2, 2);
    }
    // Two runs in one file are two tables.
    let twice = format!("{text}{}", text.replace("sendrecv", "all_reduce"));
    assert_eq!(read_tables("run.log", &twice).unwrap().len(), 2);
}

/// Per-iteration statistics, timestamps, CPU times, and a single half.
#[test]
fn more_and_fewer_columns() {
    let head = "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 8 minBytes 1024\n";
    let wide = "# size count type redop root time algbw busbw #wrong i_min i_max i_p99 i_cv% time algbw busbw #wrong i_min i_max i_p99 i_cv% timestamp\n";
    let half = |us: &str| format!("{us} 1.0 1.75 0 1.00 2.00 2.00 3.10");
    let text = rows(1.75, |bytes, us| {
        format!(
            "{bytes} {} float sum -1 {} {} 2026-01-02 03:04:05",
            bytes / 4,
            half(us),
            half(us)
        )
    });
    check(&format!("{head}{wide}{text}"), Collective::AllReduce, 8, 1);
    let cpu =
        "# size count type redop root cputime algbw busbw #wrong cputime algbw busbw #wrong\n";
    let text = rows(1.75, |bytes, us| {
        format!("{bytes} {} float sum -1 {us} 1.0 1.75 0", bytes / 4)
    });
    check(&format!("{head}{cpu}{text}"), Collective::AllReduce, 8, 1);
}

/// With NCCL_TESTS_SPLIT_MASK, groups of one rank per node run at the same time.
#[test]
fn groups_are_counted_separately() {
    let mut text =
        "# Collective test starting: all_reduce_perf\n# nThread 1 nGpus 1 minBytes 1024\n"
            .to_owned();
    text += &devices(32, |rank| {
        format!(
            "#  Rank {rank:2} Group {:2} Pid 7 on node{} device {} [0x1a] H100",
            rank % 8,
            rank / 8,
            rank % 8
        )
    });
    text += &rows(1.5, |bytes, us| {
        format!(
            "{bytes} {} float sum -1 {us} 1 1.5 0 {us} 1 1.5 0",
            bytes / 4
        )
    });
    check(&text, Collective::AllReduce, 4, 4);
}
