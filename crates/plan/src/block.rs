//! How long one block takes for one micro-batch, with its messages and its launches.

use crate::activations::tokens;
use crate::collective::{Group, Wires};
use crate::operator::{Operator, Rates, block_operators, shares_again};
use crate::{Calibration, Cluster, Recompute, Shape, StageTime, Strategy};

/// The seconds of one block and one micro-batch.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct BlockTime {
    /// All of it, in the parts that schedules move.
    pub wall: StageTime,
    /// Forward and backward, without what follows.
    pub compute: f64,
    /// Computing again.
    pub recomputation: f64,
    /// Waiting for the program to launch.
    pub launch: f64,
    /// Waiting for messages of shared matrices.
    pub tensor: f64,
    /// Waiting for keys and values of other positions.
    pub context: f64,
    /// Waiting for routed tokens.
    pub expert: f64,
    /// Messages that travelled beside computation.
    pub hidden: f64,
}

/// The share of a message that is waited for even where it travels beside the product that makes it: the
/// first tile has to be there, and both use the same memory.
pub(crate) const WAITED_FOR: f64 = 0.3;

/// How sharply the slower of program and accelerator decides.
const SHARPNESS: f64 = 6.0;

/// The larger of two, rounded where they are near, so that costs have no corners.
fn larger(a: f64, b: f64) -> f64 {
    (a.powf(SHARPNESS) + b.powf(SHARPNESS)).powf(1.0 / SHARPNESS)
}

/// Seconds of messages in one direction.
#[derive(Copy, Clone, Default)]
struct Messages {
    tensor: f64,
    context: f64,
    expert: f64,
    hidden: f64,
}

impl Messages {
    const fn waited(&self) -> f64 {
        self.tensor + self.context + self.expert
    }
}

impl BlockTime {
    /// Of a block with or without experts.
    pub fn of(
        shape: &Shape,
        strategy: &Strategy,
        cluster: &Cluster,
        calibration: &Calibration,
        sparse: bool,
    ) -> BlockTime {
        let (software, constants) = (&calibration.software, &calibration.constants);
        let rates = Rates {
            accelerator: &cluster.accelerator,
            constants,
        };
        let mut own = crate::operator::Seconds::default();
        let mut attention = crate::operator::Seconds::default();
        let operators = block_operators(shape, strategy, software, sparse);
        let mut second = 0.0;
        for (operator, share) in operators.iter().zip(shares_again(shape, &operators)) {
            let seconds = rates.price(operator, software.attention);
            own += seconds;
            second += share * seconds.forward;
            if matches!(operator, Operator::Attention { .. }) {
                attention = seconds;
            }
        }
        let wires = Wires { cluster, constants };
        let forward = messages(
            shape,
            strategy,
            calibration,
            &wires,
            sparse,
            attention.forward,
        );
        let again = attention.backward_input;
        let mut backward = messages(shape, strategy, calibration, &wires, sparse, again);
        backward.context *= 2.0;
        let doublings = (strategy.degrees.tp as f64).log2();
        let kinds = if sparse && shape.experts.is_some() {
            2.0
        } else {
            1.0
        };
        let host = kinds * (constants.host_block + constants.host_rank * doublings);
        let forward_wall = larger(own.forward + forward.waited(), host);
        let backward_own = own.backward_input + own.backward_weight;
        let backward_wall = larger(backward_own + backward.waited(), 2.0 * host);
        let recomputation = match strategy.recompute {
            Recompute::None => 0.0,
            Recompute::Selective => attention.forward,
            // Sums over ranks are kept, so half of the messages go again.
            Recompute::Products => second + 0.5 * forward.tensor,
            Recompute::Full => forward_wall,
        };
        let launch = forward_wall + backward_wall
            - own.forward
            - backward_own
            - forward.waited()
            - backward.waited();
        let weight_share = own.backward_weight / backward_own.max(f64::MIN_POSITIVE);
        let backward_weight = (backward_wall - backward.waited()) * weight_share;
        BlockTime {
            wall: StageTime {
                forward: forward_wall,
                backward_input: backward_wall - backward_weight + recomputation,
                backward_weight,
            },
            compute: own.forward + backward_own,
            recomputation,
            launch,
            tensor: forward.tensor + backward.tensor,
            context: forward.context + backward.context,
            expert: forward.expert + backward.expert,
            hidden: forward.hidden + backward.hidden,
        }
    }
}

/// What a block sends in one direction, and how much of it is waited for.
fn messages(
    shape: &Shape,
    strategy: &Strategy,
    calibration: &Calibration,
    wires: &Wires<'_>,
    sparse: bool,
    attention: f64,
) -> Messages {
    let degrees = &strategy.degrees;
    let cluster = wires.cluster;
    let tokens = tokens(strategy);
    let bytes = strategy.precision.compute as f64;
    let stream = tokens * shape.hidden_size as f64 * bytes;
    let mut found = Messages::default();
    let group = Group::new(cluster, degrees.tp, 1);
    let whole = match strategy.sequence_parallel {
        true => 4.0 * wires.gather(group, stream),
        false => 2.0 * wires.all_reduce(group, stream),
    };
    found.tensor = match calibration.software.overlaps_tensor {
        true => WAITED_FOR * whole,
        false => whole,
    };
    found.hidden += whole - found.tensor;
    if degrees.cp > 1 {
        // Keys and values go round while the scores of those at hand are computed.
        let width = 2.0 * (shape.num_key_value_heads * shape.head_dim) as f64;
        let group = Group::new(cluster, degrees.cp, degrees.tp);
        let all = tokens * width / degrees.tp as f64 * bytes * degrees.cp as f64;
        let round = wires.gather(group, all);
        found.context = (round - attention).max(0.1 * round);
        found.hidden += round - found.context;
    }
    if let (Some(experts), true) = (&shape.experts, sparse && degrees.ep > 1) {
        let group = Group::new(cluster, degrees.ep, 1);
        let routed = stream / degrees.tp as f64 * experts.num_experts_per_tok as f64;
        found.expert = 2.0 * wires.all_to_all(group, routed);
    }
    found
}
