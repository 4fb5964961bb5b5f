//! The time of one transformer block per micro-batch, including communication and kernel launches.

use crate::activations::tokens;
use crate::network_model::{Group, NetworkModel};
use crate::operator::{ComputeModel, Operator, block_operators, recomputed_shares};
use crate::{Calibration, Cluster, Recompute, Strategy};
use trainyard_arch::DecoderConfig;
use trainyard_schedule::StageTime;

/// The seconds of one block for one micro-batch.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct BlockTime {
    /// The total, split into the passes that pipeline schedules move.
    pub wall: StageTime,
    /// Forward and backward compute.
    pub compute: f64,
    /// Activation recomputation.
    pub recomputation: f64,
    /// Kernel launch overhead: the device waits for the host.
    pub launch: f64,
    /// Exposed tensor-parallel communication.
    pub tensor: f64,
    /// Exposed context-parallel communication.
    pub context: f64,
    /// Exposed expert-parallel communication.
    pub expert: f64,
    /// Communication that overlaps with compute.
    pub overlapped: f64,
}

/// The fraction of tensor-parallel communication that stays exposed even if it overlaps with the matrix product
/// that produces it: the first tile must be ready, and both use the same memory.
pub(crate) const EXPOSED_SHARE: f64 = 0.3;

/// Exponent of the smooth maximum of host and device time.
const SHARPNESS: f64 = 6.0;

/// A smooth maximum: costs stay differentiable where host and device times are close.
pub(crate) fn smooth_max(a: f64, b: f64) -> f64 {
    (a.powf(SHARPNESS) + b.powf(SHARPNESS)).powf(1.0 / SHARPNESS)
}

/// Seconds of a block's communication in one direction.
#[derive(Copy, Clone, Default)]
struct BlockComm {
    tensor: f64,
    context: f64,
    expert: f64,
    overlapped: f64,
}

impl BlockComm {
    const fn exposed(&self) -> f64 {
        self.tensor + self.context + self.expert
    }
}

impl BlockTime {
    /// The time of a block, with experts if `sparse`.
    pub fn of(
        shape: &DecoderConfig,
        strategy: &Strategy,
        cluster: &Cluster,
        calibration: &Calibration,
        sparse: bool,
    ) -> BlockTime {
        let (software, constants) = (&calibration.software, &calibration.constants);
        let compute_model = ComputeModel {
            accelerator: &cluster.accelerator,
            constants,
        };
        let mut device = crate::operator::Seconds::default();
        let mut attention = crate::operator::Seconds::default();
        let operators = block_operators(shape, strategy, software, sparse);
        let mut selective_op = 0.0;
        for (operator, share) in operators.iter().zip(recomputed_shares(shape, &operators)) {
            let seconds = compute_model.estimate(operator, software.attention);
            device += seconds;
            selective_op += share * seconds.forward;
            if matches!(operator, Operator::Attention { .. }) {
                attention = seconds;
            }
        }
        let network = NetworkModel { cluster, constants };
        let forward = communication(
            shape,
            strategy,
            calibration,
            &network,
            sparse,
            attention.forward,
        );
        let backward_attention = attention.backward_input;
        let mut backward = communication(
            shape,
            strategy,
            calibration,
            &network,
            sparse,
            backward_attention,
        );
        backward.context *= 2.0;
        let doublings = (strategy.degrees.tp as f64).log2();
        let kinds = if sparse && shape.moe.is_some() {
            2.0
        } else {
            1.0
        };
        let host = kinds * (constants.host_block + constants.host_rank * doublings);
        let forward_wall = smooth_max(device.forward + forward.exposed(), host);
        let backward_device = device.backward_input + device.backward_weight;
        let backward_wall = smooth_max(backward_device + backward.exposed(), 2.0 * host);
        let recomputation = match strategy.recompute {
            Recompute::None => 0.0,
            Recompute::Selective => attention.forward,
            // The all-reduce results are saved, so only half of the communication is repeated.
            Recompute::SelectiveOp => selective_op + 0.5 * forward.tensor,
            Recompute::Full => forward_wall,
        };
        let launch = forward_wall + backward_wall
            - device.forward
            - backward_device
            - forward.exposed()
            - backward.exposed();
        let weight_share = device.backward_weight / backward_device.max(f64::MIN_POSITIVE);
        let backward_weight = (backward_wall - backward.exposed()) * weight_share;
        BlockTime {
            wall: StageTime {
                forward: forward_wall,
                backward_input: backward_wall - backward_weight + recomputation,
                backward_weight,
            },
            compute: device.forward + backward_device,
            recomputation,
            launch,
            tensor: forward.tensor + backward.tensor,
            context: forward.context + backward.context,
            expert: forward.expert + backward.expert,
            overlapped: forward.overlapped + backward.overlapped,
        }
    }
}

/// A block's communication in one direction: exposed and overlapped seconds.
fn communication(
    shape: &DecoderConfig,
    strategy: &Strategy,
    calibration: &Calibration,
    network: &NetworkModel<'_>,
    sparse: bool,
    attention: f64,
) -> BlockComm {
    let degrees = &strategy.degrees;
    let cluster = network.cluster;
    let tokens = tokens(strategy);
    let bytes = strategy.precision.compute as f64;
    let stream = tokens * shape.hidden_size as f64 * bytes;
    let mut comm = BlockComm::default();
    let group = Group::new(cluster, degrees.tp, 1);
    let total = if strategy.sequence_parallel {
        4.0 * network.gather(group, stream)
    } else {
        2.0 * network.all_reduce(group, stream)
    };
    comm.tensor = if calibration.software.overlaps_tensor {
        EXPOSED_SHARE * total
    } else {
        total
    };
    comm.overlapped += total - comm.tensor;
    if degrees.cp > 1 {
        // Keys and values circulate in the ring while attention runs on the local chunk.
        let width = 2.0 * (shape.num_key_value_heads * shape.head_dim) as f64;
        let group = Group::new(cluster, degrees.cp, degrees.tp);
        let all = tokens * width / degrees.tp as f64 * bytes * degrees.cp as f64;
        let ring = network.gather(group, all);
        comm.context = (ring - attention).max(0.1 * ring);
        comm.overlapped += ring - comm.context;
    }
    if let (Some(experts), true) = (&shape.moe, sparse && degrees.ep > 1) {
        let group = Group::new(cluster, degrees.ep, 1);
        let routed = stream / degrees.tp as f64 * experts.num_experts_per_tok as f64;
        comm.expert = 2.0 * network.all_to_all(group, routed);
    }
    comm
}
