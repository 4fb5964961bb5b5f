//! The step time of a candidate from the dry runs of its ranks.

use std::collections::BTreeMap;

use serde::Deserialize;
use trainyard_schedule::{ScheduleError, ScheduleKind};
use trainyard_trace::{CollectiveKind, Purpose};

use super::{AnyModelRequest, Candidate, kernel};
use crate::block::smooth_max;
use crate::cost_model::{CollectiveCalls, DryRun, is_of_optimizer, pipeline_bubble};
use crate::time::exposed;
use crate::{ComputeModel, Group, NetworkModel, Recompute, Time};

/// Kernels in the forward pass of a Llama block, about. The calibration knows the host time of a block; per kernel it is this
/// fraction of it.
const KERNELS_PER_BLOCK: f64 = 40.0;

/// What `trainyard dry-run --json` counts on one rank.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct RankRun {
    /// Parameters of the whole model.
    pub num_parameters: u64,
    /// Peak memory of tensors.
    pub peak_bytes: u64,
    /// The peak memory by kind.
    pub bytes_by_kind: BTreeMap<String, u64>,
    /// Floating-point operations of a step.
    pub flops: u64,
    /// What takes time.
    #[serde(flatten)]
    pub work: DryRun,
}

/// The seconds of one rank's step.
#[derive(Copy, Clone, Default)]
struct RankTime {
    compute: f64,
    launch: f64,
    optimizer: f64,
    tensor: f64,
    pipeline: f64,
    /// Data-parallel communication once per step.
    once: f64,
    /// Data-parallel communication of every micro-batch.
    steady: f64,
    /// Small collectives that nothing overlaps.
    control: f64,
}

impl RankTime {
    fn busy(&self) -> f64 {
        self.compute + self.launch + self.tensor
    }
}

/// The step time of a candidate; `ranks` are the dry runs of its representatives.
pub(super) fn price(
    request: &AnyModelRequest,
    candidate: &Candidate,
    ranks: &[RankRun],
) -> Result<Time, ScheduleError> {
    let each: Vec<RankTime> = ranks
        .iter()
        .map(|run| rank_time(request, candidate, &run.work))
        .collect();
    let by_busy = |a: &&RankTime, b: &&RankTime| a.busy().total_cmp(&b.busy());
    let slowest = each.iter().max_by(by_busy).copied().unwrap_or_default();
    let forwards = match candidate.recompute {
        Recompute::None => 1.0,
        _ => 2.0,
    };
    let m = candidate.num_microbatches;
    let bubble = match ranks.len() {
        0 | 1 => 0.0,
        pp => {
            let schedule = ScheduleKind::OneForwardOneBackward.build(pp, m, 1)?;
            let busy: Vec<f64> = each.iter().map(RankTime::busy).collect();
            pipeline_bubble(&schedule, &busy, forwards)?
        }
    };
    // What is sent once per step overlaps only with the last backward pass, the rest with all compute.
    let last_backward = slowest.busy() / m as f64 * (1.0 + forwards) / (2.0 + forwards);
    let data = exposed(slowest.once, last_backward) + exposed(slowest.steady, slowest.busy());
    // Sends overlap with compute except while the pipeline fills.
    let filling = slowest.pipeline / m as f64;
    let overlapped = slowest.once + slowest.steady - data + slowest.pipeline - filling;
    Ok(Time {
        compute: slowest.compute,
        launch: slowest.launch,
        tensor: slowest.tensor,
        pipeline: filling,
        data: data + slowest.control,
        bubble,
        optimizer: slowest.optimizer,
        ..Time::default()
    }
    .with_range(overlapped, request.mean_error()))
}

fn rank_time(request: &AnyModelRequest, candidate: &Candidate, work: &DryRun) -> RankTime {
    let constants = &request.calibration.constants;
    let model = ComputeModel {
        accelerator: &request.cluster.accelerator,
        constants,
    };
    let mut time = RankTime::default();
    let mut num_kernels = 0;
    for calls in &work.operators {
        let seconds = kernel::seconds(&model, calls);
        if is_of_optimizer(&calls.name) {
            time.optimizer += seconds;
        } else {
            time.compute += seconds;
            num_kernels += calls.kernel.map_or(0, |_| calls.count);
        }
    }
    time.optimizer += constants.optimizer_host;
    let host = constants.host_block / KERNELS_PER_BLOCK * num_kernels as f64
        + constants.host_microbatch * candidate.num_microbatches as f64;
    time.launch = smooth_max(time.compute, host) - time.compute;
    let network = NetworkModel {
        cluster: &request.cluster,
        constants,
    };
    for calls in &work.collectives {
        add_communication(&network, candidate, calls, &mut time);
    }
    if time.once + time.steady > 0.0 {
        time.control += constants.data_latency;
    }
    time
}

/// Adds collectives to the term of their purpose.
fn add_communication(
    network: &NetworkModel<'_>,
    candidate: &Candidate,
    calls: &CollectiveCalls,
    time: &mut RankTime,
) {
    let degrees = &candidate.layout.degrees;
    let cluster = network.cluster;
    let shard = Group::new(cluster, degrees.dp_shard, degrees.tp);
    let replicas = Group::new(cluster, degrees.dp_replicate, degrees.dp_shard * degrees.tp);
    let tensor = Group::new(cluster, degrees.tp, 1);
    match (calls.purpose, calls.kind) {
        // Receivers wait for the same bytes that their senders count.
        (_, CollectiveKind::Recv) => {}
        (_, CollectiveKind::Send) => {
            let crosses = degrees.world_size() > cluster.gpus_per_node;
            let each = calls.sent_bytes as f64 / calls.count.max(1) as f64;
            let stages = Group::new(cluster, degrees.pp, degrees.stage_size());
            let seconds = if stages.crosses_sites() {
                network.send_to_site(each, stages.num_sharing)
            } else {
                network.send(crosses, each, 1)
            };
            time.pipeline += calls.count as f64 * seconds;
        }
        (Purpose::Activation, _) if degrees.tp > 1 => {
            time.tensor += seconds(network, tensor, calls)
        }
        // Statistics of synchronized BatchNorms, tokens of experts, and buffers.
        (Purpose::Activation | Purpose::Dispatch | Purpose::Combine, _)
        | (Purpose::Parameter, CollectiveKind::Broadcast) => {
            let data = Group::new(cluster, degrees.data_parallel(), degrees.tp);
            time.control += seconds(network, data, calls);
        }
        // Without replicas, only gradients of parameters that tensor-parallel ranks share are all-reduced.
        (Purpose::Gradient, CollectiveKind::AllReduce) if degrees.dp_replicate == 1 => {
            time.once += seconds(network, tensor, calls)
        }
        (Purpose::Gradient, CollectiveKind::AllReduce) => {
            time.once += seconds(network, replicas, calls)
        }
        (Purpose::Gradient, _) if candidate.layout.zero_stage >= 2 => {
            time.steady += seconds(network, shard, calls)
        }
        (Purpose::Parameter, _) if candidate.layout.zero_stage == 3 => {
            time.steady += seconds(network, shard, calls)
        }
        (Purpose::Gradient | Purpose::Parameter, _) => time.once += seconds(network, shard, calls),
        // No layout has replicas that take steps of their own.
        (Purpose::State | Purpose::Control | Purpose::OuterGradient | Purpose::Unknown, _) => {
            let world = Group::new(cluster, degrees.world_size(), 1);
            time.control += seconds(network, world, calls);
        }
    }
}

/// Seconds of these calls in a group. The dry run counts the bytes that a ring sends.
fn seconds(network: &NetworkModel<'_>, group: Group, calls: &CollectiveCalls) -> f64 {
    if group.size < 2 {
        return 0.0;
    }
    calls.count as f64 * network.latency(group) + calls.sent_bytes as f64 / network.ring(group)
}
