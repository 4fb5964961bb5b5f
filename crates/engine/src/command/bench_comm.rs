//! `trainyard bench comm`: latency and bandwidth of collectives, in the format of nccl-tests.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;
use tch::{Device, Kind, Tensor};
use trainyard_launcher::Console;
use trainyard_mesh::{Axis, Mesh};
use trainyard_torch::{Backend, Group, P2pOp, ReduceOp, Rendezvous, Result as TorchResult};
use trainyard_trace::{Ledger, Purpose};

use crate::error::{EngineError, Result};
use crate::matmuls::Matmuls;
use crate::measure::quantile;
use crate::ranks::{join_mesh, run_locally};

/// The collectives and sizes to measure.
#[derive(Debug, Clone, clap::Args)]
pub struct Range {
    /// Collectives, separated by commas; all by default
    #[arg(long, value_delimiter = ',')]
    ops: Vec<Op>,
    /// Smallest size in bytes
    #[arg(long, default_value_t = 4 << 10)]
    min_bytes: usize,
    /// Largest size in bytes
    #[arg(long, default_value_t = 64 << 20)]
    max_bytes: usize,
    /// Factor between consecutive sizes
    #[arg(long, default_value_t = 4)]
    factor: usize,
    /// Matrix products that every rank computes before each call, separated by commas. With 1 or more, the
    /// time of a call is what it adds to them, including cold caches and the wait for the slowest rank
    #[arg(long, value_delimiter = ',', default_value = "0")]
    work: Vec<usize>,
    /// Seconds to spend on each size
    #[arg(long, default_value_t = 0.3)]
    seconds: f64,
    /// Send over loopback instead of sharing memory
    #[arg(long)]
    no_shared_memory: bool,
    /// Print JSON lines
    #[arg(long)]
    json: bool,
}

/// Measure latency and bandwidth of collectives
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// Number of local ranks
    #[arg(long, default_value_t = 2)]
    nproc: usize,
    #[command(flatten)]
    range: Range,
}

/// Arguments of one rank of `bench comm`.
#[derive(Debug, clap::Args)]
pub struct RankArguments {
    #[command(flatten)]
    range: Range,
}

/// A collective to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Op {
    AllReduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    SendRecv,
    Barrier,
}

const ALL: [Op; 10] = [
    Op::AllReduce,
    Op::AllGather,
    Op::ReduceScatter,
    Op::AllToAll,
    Op::Broadcast,
    Op::Reduce,
    Op::Gather,
    Op::Scatter,
    Op::SendRecv,
    Op::Barrier,
];

/// Starts the ranks; rank 0 prints.
pub fn execute(arguments: Arguments) -> Result<ExitCode> {
    if arguments.nproc < 2 {
        return Err(EngineError::Rank(
            "`bench comm` needs at least two ranks: set --nproc 2 or more".to_owned(),
        ));
    }
    let range = &arguments.range;
    let mut args: Vec<OsString> = vec!["bench-comm-rank".into()];
    if !range.ops.is_empty() {
        let names = range.ops.iter().filter_map(|op| {
            clap::ValueEnum::to_possible_value(op).map(|value| value.get_name().to_owned())
        });
        args.extend(["--ops".into(), names.collect::<Vec<_>>().join(",").into()]);
    }
    let work: Vec<String> = range.work.iter().map(usize::to_string).collect();
    for (flag, value) in [
        ("--work", work.join(",")),
        ("--min-bytes", range.min_bytes.to_string()),
        ("--max-bytes", range.max_bytes.to_string()),
        ("--factor", range.factor.to_string()),
        ("--seconds", range.seconds.to_string()),
    ] {
        args.extend([flag.into(), value.into()]);
    }
    for (flag, is_set) in [
        ("--no-shared-memory", range.no_shared_memory),
        ("--json", range.json),
    ] {
        args.extend(is_set.then(|| flag.into()));
    }
    run_locally(arguments.nproc, &args, Console::Plain)?;
    Ok(ExitCode::SUCCESS)
}

/// One row of the table.
#[derive(Debug, Serialize)]
struct Row {
    op: Op,
    world: usize,
    bytes: usize,
    count: usize,
    work_us: f64,
    time_us: f64,
    algbw_gbps: f64,
    busbw_gbps: f64,
    repeats: usize,
}

/// Measures on this rank; rank 0 prints.
pub fn execute_rank(arguments: RankArguments) -> Result<ExitCode> {
    let at = Rendezvous::from_env(Duration::from_secs(60))?;
    let mesh = Mesh::new(&[(Axis::DpReplicate, at.world_size)])?;
    let mut world = join_mesh(mesh, Backend::Gloo, &at, Ledger::new)?;
    if arguments.range.no_shared_memory {
        world = world.without_shared_memory();
    }
    let group = world.world_group()?;
    let range = arguments.range;
    let ops = if range.ops.is_empty() {
        ALL.to_vec()
    } else {
        range.ops.clone()
    };
    if at.rank == 0 && !range.json {
        println!(
            "# {} ranks, gloo, float32; sizes and bus bandwidth as defined by nccl-tests",
            at.world_size
        );
        println!(
            "{:<15} {:>11} {:>11} {:>11} {:>12} {:>12}",
            "collective", "size (B)", "count", "time (us)", "algbw (GB/s)", "busbw (GB/s)"
        );
    }
    for op in ops {
        let mut bytes = range.min_bytes.max(4 * at.world_size);
        loop {
            for row in measure(op, bytes, &group, &range)? {
                if at.rank == 0 {
                    print(&row, range.json);
                }
            }
            bytes *= range.factor.max(2);
            if bytes > range.max_bytes || op == Op::Barrier {
                break;
            }
        }
    }
    group.barrier()?.wait()?;
    Ok(ExitCode::SUCCESS)
}

fn print(row: &Row, json: bool) {
    if json {
        println!("{}", serde_json::to_string(row).unwrap_or_default());
        return;
    }
    let name = serde_json::to_value(row.op).unwrap_or_default();
    println!(
        "{:<15} {:>11} {:>11} {:>11.1} {:>12.3} {:>12.3}",
        name.as_str().unwrap_or_default(),
        row.bytes,
        row.count,
        row.time_us,
        row.algbw_gbps,
        row.busbw_gbps
    );
}

/// Measures one size, for each amount of computation before the call.
fn measure(op: Op, bytes: usize, group: &Group, range: &Range) -> Result<Vec<Row>> {
    let case = Case::new(op, bytes, group);
    for _ in 0..3 {
        case.call(group)?;
    }
    // A ping-pong is two messages.
    let messages = if op == Op::SendRecv { 2.0 } else { 1.0 };
    let row = |timed: Timed| {
        let one = timed.seconds / messages;
        let algbw = if op == Op::Barrier {
            0.0
        } else {
            bytes as f64 / one / 1e9
        };
        Row {
            op,
            world: group.size(),
            bytes: if op == Op::Barrier { 0 } else { bytes },
            count: bytes / 4,
            work_us: timed.work * 1e6,
            time_us: one * 1e6,
            algbw_gbps: algbw,
            busbw_gbps: algbw * bus_factor(op, group.size() as f64),
            repeats: timed.repeats,
        }
    };
    let each = range.work.iter().map(|&work| match work {
        0 => case.back_to_back(group, range.seconds),
        _ => case.after_computation(work, group, range.seconds),
    });
    each.map(|timed| timed.map(row)).collect()
}

/// Bus bandwidth divided by algorithm bandwidth, as nccl-tests defines it.
fn bus_factor(op: Op, ranks: f64) -> f64 {
    match op {
        Op::AllReduce => 2.0 * (ranks - 1.0) / ranks,
        Op::AllGather | Op::ReduceScatter | Op::AllToAll | Op::Gather | Op::Scatter => {
            (ranks - 1.0) / ranks
        }
        Op::Broadcast | Op::Reduce | Op::SendRecv => 1.0,
        Op::Barrier => 0.0,
    }
}

/// The time of a call.
struct Timed {
    /// Seconds of computation before the call.
    work: f64,
    seconds: f64,
    repeats: usize,
}

fn average(group: &Group, times: &[f64]) -> Result<Vec<f64>> {
    let sums = over_ranks(group, times, ReduceOp::Sum)?;
    Ok(sums.iter().map(|sum| sum / group.size() as f64).collect())
}

fn slowest(group: &Group, times: &[f64]) -> Result<Vec<f64>> {
    over_ranks(group, times, ReduceOp::Max)
}

fn over_ranks(group: &Group, times: &[f64], op: ReduceOp) -> Result<Vec<f64>> {
    let all = Tensor::from_slice(times);
    group.all_reduce(&all, op, Purpose::Control)?.wait()?;
    Ok(Vec::<f64>::try_from(&all)?)
}

/// Buffers of one measurement: `full` has the measured size, `shard` is one rank's part of it.
struct Case {
    op: Op,
    full: Tensor,
    other: Tensor,
    shard: Tensor,
    shards: Vec<Tensor>,
    splits: Vec<i64>,
}

impl Case {
    fn new(op: Op, bytes: usize, group: &Group) -> Case {
        let ranks = group.size() as i64;
        let share = (bytes / 4) as i64 / ranks;
        let zeros = |n: i64| Tensor::zeros([n], (Kind::Float, Device::Cpu));
        Case {
            op,
            full: zeros(share * ranks),
            other: zeros(share * ranks),
            shard: zeros(share),
            shards: (0..ranks).map(|_| zeros(share)).collect(),
            splits: vec![share; ranks as usize],
        }
    }

    /// Back-to-back calls: the median time on the slowest rank.
    fn back_to_back(&self, group: &Group, seconds: f64) -> Result<Timed> {
        let start = Instant::now();
        self.call(group)?;
        let guess = slowest(group, &[start.elapsed().as_secs_f64()])?[0];
        let repeats = ((seconds / guess.max(1e-6)) as usize).clamp(5, 1000);
        group.barrier()?.wait()?;
        let mut times = Vec::with_capacity(repeats);
        for _ in 0..repeats {
            let start = Instant::now();
            self.call(group)?;
            times.push(start.elapsed().as_secs_f64());
        }
        Ok(Timed {
            work: 0.0,
            seconds: quantile(&slowest(group, &times)?, 0.5),
            repeats,
        })
    }

    /// The time that a call adds to the computation before it. Rounds with and without calls alternate, because
    /// the speed of a host varies over time.
    fn after_computation(&self, work: usize, group: &Group, seconds: f64) -> Result<Timed> {
        const ROUNDS: usize = 7;
        let matmuls = Matmuls::new();
        let timed = |repeats: usize, calls: bool| -> Result<f64> {
            group.barrier()?.wait()?;
            let start = Instant::now();
            for _ in 0..repeats {
                matmuls.compute(work);
                if calls {
                    self.call(group)?;
                }
            }
            Ok(start.elapsed().as_secs_f64() / repeats as f64)
        };
        let guess = slowest(group, &[timed(2, true)?])?[0];
        let round = seconds / (2 * ROUNDS) as f64;
        let repeats = ((round / guess.max(1e-6)) as usize).clamp(2, 1000);
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            without.push(timed(repeats, false)?);
            with.push(timed(repeats, true)?);
        }
        let (without, with) = (average(group, &without)?, slowest(group, &with)?);
        let added: Vec<f64> = std::iter::zip(&with, &without)
            .map(|(a, b)| a - b)
            .collect();
        Ok(Timed {
            work: quantile(&without, 0.5),
            seconds: quantile(&added, 0.5),
            repeats: ROUNDS * repeats,
        })
    }

    fn call(&self, group: &Group) -> TorchResult<()> {
        const PURPOSE: Purpose = Purpose::Control;
        let at_root: &[Tensor] = if group.index() == 0 {
            &self.shards
        } else {
            &[]
        };
        match self.op {
            Op::AllReduce => group.all_reduce(&self.full, ReduceOp::Sum, PURPOSE)?.wait(),
            Op::AllGather => group.all_gather(&self.full, &self.shard, PURPOSE)?.wait(),
            Op::ReduceScatter => group
                .reduce_scatter(&self.shard, &self.full, ReduceOp::Sum, PURPOSE)?
                .wait(),
            Op::AllToAll => group
                .all_to_all(&self.other, &self.full, &self.splits, &self.splits, PURPOSE)?
                .wait(),
            Op::Broadcast => group.broadcast(&self.full, 0, PURPOSE)?.wait(),
            Op::Reduce => group.reduce(&self.full, 0, ReduceOp::Sum, PURPOSE)?.wait(),
            Op::Gather => group.gather(at_root, &self.shard, 0, PURPOSE)?.wait(),
            Op::Scatter => group.scatter(&self.shard, at_root, 0, PURPOSE)?.wait(),
            Op::SendRecv => self.ping_pong(group),
            Op::Barrier => group.barrier()?.wait(),
        }
    }

    fn ping_pong(&self, group: &Group) -> TorchResult<()> {
        const PURPOSE: Purpose = Purpose::Control;
        let send = |peer| {
            group
                .batch_send_recv(&[P2pOp::Send(&self.full, peer)], 0, PURPOSE)?
                .wait()
        };
        let recv = |peer| {
            group
                .batch_send_recv(&[P2pOp::Recv(&self.full, peer)], 0, PURPOSE)?
                .wait()
        };
        match group.index() {
            0 => send(1).and_then(|()| recv(1)),
            1 => recv(0).and_then(|()| send(0)),
            _ => Ok(()),
        }
    }
}
