//! A mixture-of-experts model with expert parallelism and a custom training loop: the batch is divided over
//! all ranks, each rank has some of the experts of every layer, and tokens are dispatched by all-to-all.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/moe
//! ```
//!
//! Losses are the same on any number of ranks. A router bias per expert balances their load, although a few
//! tokens make up most of the text.

use trainyard::arch::{MoeConfig, ScoringFunc};
use trainyard::data::Batch;
use trainyard::nn::{ExpertParallel, Router};
use trainyard::optim::{AdamW, AdamWConfig, Optimizer};
use trainyard::parallel::{DataParallelWrapper, Ddp, DdpOptions, GradSync, Strategy};
use trainyard::{
    Axis, AxisSet, Builder, Context, Decoder, DecoderConfig, Group, Kind, Model, Module, Purpose,
    ReduceOp, Result, Tensor,
};

const STEPS: u64 = 200;
const SEQ_LEN: i64 = 64;
const GLOBAL_BATCH: i64 = 16;
const NUM_EXPERTS: usize = 8;
// With a higher rate the routers would change faster than their bias can balance them.
const LEARNING_RATE: f64 = 1e-3;

fn main() -> Result<()> {
    let num_ranks = std::env::var("WORLD_SIZE").map_or(1, |n| n.parse().unwrap_or(1));
    // The axis `ep` consists of the same ranks as `dp_shard`.
    let world = trainyard::init_mesh(&[(Axis::DpShard, num_ranks), (Axis::Ep, num_ranks)])?;
    let world_group = world.world_group()?;
    let sharers = world.group(AxisSet::of([Axis::Cp, Axis::Tp]))?;
    let experts = ExpertParallel::new(&world.group(Axis::Ep)?, &sharers);

    let config = DecoderConfig {
        moe: Some(mixture()),
        ..DecoderConfig::debug()
    };
    // In float64 the printed losses on several ranks equal those on one rank in every digit.
    let builder = Builder::new(1)
        .kind(Kind::Double)
        .with_expert_parallel(experts);
    let model = Decoder::build(&config, SEQ_LEN as usize, &builder)?;
    // Gradients of experts are reduced over the ranks that have the same experts; here every rank has others.
    let same_experts = world.group(Axis::Efsdp)?;
    let options = DdpOptions {
        op: ReduceOp::Sum,
        ..DdpOptions::default()
    };
    let model = Ddp::with_experts(model, &world_group, &same_experts, options)?;
    let mut optimizer = AdamW::new(model.parameters(), AdamWConfig::default());

    let num_tokens = (GLOBAL_BATCH * SEQ_LEN) as f64;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch = skewed_text(step, config.vocab_size as i64, &world_group);
        let context = Context::training(step).with_loss_weight(1.0 / num_tokens);
        let run = model.forward(&batch.inputs, &context)?;
        let loss = model.loss(run.output(), &batch.targets)? / num_tokens;
        model.backward(run, &loss, GradSync::Full)?;
        optimizer.step(LEARNING_RATE)?;
        model.zero_grad()?;
        let imbalance = rebalance(&model, &world_group)?;

        let total = loss.detach();
        world_group
            .all_reduce(&total, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        losses.push(f64::try_from(&total)?);
        if world.rank() == 0 && (step % 20 == 0 || step + 1 == STEPS) {
            let loss = losses[losses.len() - 1];
            println!("step {step}  max/mean expert load: {imbalance:.2}  loss {loss:.6}");
        }
    }
    if losses[losses.len() - 1] > 0.8 * losses[0] {
        eprintln!("the loss did not decrease: {losses:?}");
        std::process::exit(1);
    }
    Ok(())
}

/// Each token is routed to two of eight experts and to one shared expert, as in DeepSeek-V3.
fn mixture() -> MoeConfig {
    MoeConfig {
        n_shared_experts: 1,
        scoring_func: ScoringFunc::Sigmoid,
        bias_update_rate: Some(2e-3),
        ..MoeConfig::plain(NUM_EXPERTS, 2, 64)
    }
}

/// Updates the bias of every router from the loads of all ranks. Returns the largest expert load divided by
/// the mean load.
fn rebalance(model: &dyn Model, world_group: &Group) -> Result<f64> {
    let units = model.units();
    let routers = units.iter().filter_map(|unit| unit.router());
    let mut imbalance = 0.0f64;
    for router in routers {
        let Some(rows) = router.load().step_counts()? else {
            continue;
        };
        world_group
            .all_reduce(&rows, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        Router::update_bias(router, &rows)?;
        let rows = rows.to_kind(Kind::Double);
        let share = rows.max() / rows.mean(Kind::Double);
        imbalance = imbalance.max(f64::try_from(&share)?);
    }
    Ok(imbalance)
}

/// This rank's sequences of a step. Every token follows from the previous one by a rule, or is drawn from a
/// skewed distribution in which low token ids are the most frequent.
fn skewed_text(step: u64, vocab_size: i64, world_group: &Group) -> Batch {
    let rows = GLOBAL_BATCH / world_group.size() as i64;
    let first = step as i64 * GLOBAL_BATCH + world_group.index() as i64 * rows;
    let mut tokens = Vec::new();
    for sequence in first..first + rows {
        let mut state = sequence as u64 + 1;
        let mut uniform = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as f64 / (1u64 << 31) as f64
        };
        let mut token = 0;
        for _ in 0..=SEQ_LEN {
            token = if uniform() < 0.3 {
                (uniform().powi(4) * vocab_size as f64) as i64
            } else {
                (token * 5 + 7) % (vocab_size / 8)
            };
            tokens.push(token);
        }
    }
    let tokens = Tensor::from_slice(&tokens).view([rows, SEQ_LEN + 1]);
    Batch::new(
        tokens.narrow(1, 0, SEQ_LEN).contiguous(),
        tokens.narrow(1, 1, SEQ_LEN).contiguous(),
        rows * SEQ_LEN,
    )
}
