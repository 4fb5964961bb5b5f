//! The error bound of block quantization, which does not grow with the number of ranks.

use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_conformance::{Outcome, Rank, device};
use trainyard_parallel::{BlockQuantizer, GradientBucket, GradientHook, TwoHopReduction};
use trainyard_torch::ReduceOp;
use trainyard_trace::Purpose;

/// Elements, so that neither ranks nor blocks divide it.
const LENGTH: i64 = 12_345;
/// Elements of a block.
const BLOCK: i64 = 256;

/// The gradients of a rank, with magnitudes that differ between blocks.
fn gradients(rank: usize) -> Tensor {
    tch::manual_seed(rank as i64);
    let options = (Kind::Float, tch::Device::Cpu);
    let scales = Tensor::randn([LENGTH / 100 + 1], options).exp();
    let scales = scales.repeat_interleave_self_int(100, 0, None);
    Tensor::randn([LENGTH], options) * scales.narrow(0, 0, LENGTH)
}

/// The largest magnitude in the block of every element, for a tensor that is divided into one row per rank.
fn block_maxima(x: &Tensor, num_ranks: i64) -> Tensor {
    let row = (LENGTH + num_ranks - 1) / num_ranks;
    let padded_row = (row + BLOCK - 1) / BLOCK * BLOCK;
    let rows = x
        .constant_pad_nd([0, row * num_ranks - LENGTH])
        .view([num_ranks, row]);
    let blocks = rows
        .constant_pad_nd([0, padded_row - row])
        .view([num_ranks, -1, BLOCK]);
    let maxima = blocks.abs().amax([-1i64], true).expand_as(&blocks);
    let maxima = maxima.reshape([num_ranks, padded_row]).narrow(1, 0, row);
    maxima.reshape(-1).narrow(0, 0, LENGTH)
}

/// Half a step of the own block on every rank, and half a step of the sum's block.
pub fn two_roundings(rank: &Rank) -> Outcome {
    let world = rank.world()?;
    let group = world.world_group()?;
    let num_ranks = rank.size() as i64;
    let all: Vec<Tensor> = (0..rank.size()).map(gradients).collect();
    let half_step = |x: &Tensor| block_maxima(x, num_ranks).to_kind(Kind::Double) * (0.5 / 127.0);
    let zeros = || Tensor::zeros([LENGTH], (Kind::Double, tch::Device::Cpu));
    let exact = all.iter().fold(zeros(), |sum, x| sum + x);
    let first = all.iter().fold(zeros(), |sum, x| sum + half_step(x));
    // The second rounding is of the sum of what has been rounded before.
    let second = half_step(&exact) + block_maxima(&first, num_ranks) * (0.5 / 127.0);
    let own = all[rank.index()].to_device(device());
    let hook = TwoHopReduction::new(Arc::new(BlockQuantizer::Int8));
    let bucket = GradientBucket {
        index: 0,
        step: 0,
        purpose: Purpose::Gradient,
        flat: &own,
        members: Vec::new(),
        error: None,
    };
    hook.reduce(&group, &bucket, ReduceOp::Sum)?.finish()?;
    let off = own.to_device(tch::Device::Cpu).to_kind(Kind::Double) - exact;
    let bound = (first + second) * 1.0001;
    let excess = (off.abs() - bound).max().double_value(&[]);
    assert!(
        excess <= 0.0,
        "a sum is off by {excess:e} more than the bound"
    );
    Ok(())
}
