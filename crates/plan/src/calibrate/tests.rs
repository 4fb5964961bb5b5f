use proptest::prelude::*;

use super::*;

/// The output of nccl-tests on `nodes` times eight ranks with this latency and bus bandwidth.
fn output(name: &str, nodes: usize, latency: f64, bus: f64) -> String {
    let ranks = nodes * 8;
    let mut text =
        format!("# Collective test starting: {name}_perf\n# nThread 1 nGpus 1 minBytes 8\n");
    for rank in 0..ranks {
        let host = rank / 8;
        text += &format!(
            "#  Rank {rank:2} Group  0 Pid {rank} on node{host} device {} [0x07] H100\n",
            rank % 8
        );
    }
    text += "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n";
    text += "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)\n";
    let n = ranks as f64;
    let factor = match name {
        "all_reduce" => 2.0 * (n - 1.0) / n,
        "sendrecv" => 1.0,
        _ => (n - 1.0) / n,
    };
    for power in 10..30 {
        let bytes = f64::from(1u32 << power);
        let us = (latency + factor * bytes / bus) * 1e6;
        text += &format!(
            "{bytes:>12} {:>12} float sum -1 {us:.3} 0.0 0.0 0 {us:.3} 0.0 0.0 N/A\n",
            bytes / 4.0
        );
    }
    text + "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 123.4\n"
}

#[test]
fn calibration_recovers_the_figures() {
    let mut tables = read_tables("a.txt", &output("all_reduce", 1, 6e-5, 370e9)).unwrap();
    tables.extend(read_tables("b", &output("all_gather", 1, 3e-5, 370e9)).unwrap());
    tables.extend(read_tables("c", &output("all_reduce", 4, 1.4e-4, 8.0 * 40e9)).unwrap());
    tables.extend(read_tables("d", &output("sendrecv", 1, 1e-5, 185e9)).unwrap());
    let cluster: Cluster = "32xH100".parse().unwrap();
    let text = "m,n,k,tflops\n4096,4096,4096,500\n8192,8192,8192,640\n512,512,4096,60\n2048,8192,512,300\n";
    let matmuls = read_matmuls("sweep.csv", text).unwrap();
    let found = calibrate(&cluster, &tables, &matmuls).unwrap();
    let near =
        |value: f64, wanted: f64| assert!((value / wanted - 1.0).abs() < 0.01, "{value} {wanted}");
    near(found.cluster.accelerator.link.value, 370e9);
    near(found.cluster.accelerator.network.value, 40e9);
    let constant = |name: &str| found.cluster.constants[name];
    near(constant("link_latency"), 2e-5);
    near(constant("network_latency"), 4e-5);
    near(constant("peer"), 0.5);
    assert!(constant("matmul") > 0.6 && constant("matmul") < 0.9);
    assert_eq!(found.notes.len(), 5);
    let again = Cluster::from_toml(&found.cluster.to_toml()).unwrap();
    near(again.constants["network_latency"], 4e-5);
    near(again.accelerator.link.value, 370e9);
}

#[test]
fn errors_name_the_line() {
    let good = output("all_reduce", 1, 6e-5, 370e9);
    let error = |text: &str| read_tables("x", text).unwrap_err().to_string();
    assert!(error("").contains("no nccl-tests table"));
    assert!(error("1024 256 float sum -1 abc 0 0 0 1 0 0 0").contains("line 1: abc"));
    assert!(error("1024 256 float").contains("complete row"));
    assert!(error(&good.replace("all_reduce", "mystery")).contains("the collective is unknown"));
    let no_ranks = good.replace("Rank", "rnk").replace("nGpus", "ngps");
    assert!(error(&no_ranks).contains("the number of ranks"));
    // Headers and one row, which has two times.
    let few: Vec<&str> = good.lines().take(13).collect();
    let table = read_tables("x", &few.join("\n")).unwrap().remove(0);
    let rejected = table.line().unwrap_err().to_string();
    assert!(rejected.contains("2 rows are too few"), "{rejected}");
    for wrong in [
        "",
        "m,n,k\n1,2,3",
        "m,n,k,tflops\n1,2,x,4",
        "m,n,k,tflops\n1,2,3",
        "m,n,k,tflops\n1,2,-3,4",
    ] {
        assert!(read_matmuls("x", wrong).is_err(), "{wrong}");
    }
}

proptest! {
    /// Truncated, duplicated or corrupted text is parsed or rejected, without panics or absurd values.
    #[test]
    fn corrupted_text_is_parsed_or_rejected(
        start in 0usize..4000,
        length in 0usize..200,
        inserted in "[ -~\\n]{0,40}",
    ) {
        let text = output("all_reduce", 1, 6e-5, 370e9);
        let begin = start.min(text.len());
        let end = (begin + length).min(text.len());
        let corrupted = format!("{}{inserted}{}", &text[..begin], &text[end..]);
        let cluster: Cluster = "8xH100".parse().unwrap();
        let tables = read_tables("all_reduce", &corrupted);
        let found = tables.and_then(|tables| calibrate(&cluster, &tables, &[]));
        if let Ok(found) = found {
            let link = found.cluster.accelerator.link.value;
            prop_assert!(link.is_finite() && link > 0.0);
        }
        let _ = read_matmuls("x", &inserted);
        let _ = read_matmuls("x", &format!("m,n,k,seconds\n{inserted}"));
    }
}
