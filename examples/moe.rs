//! A mixture of experts with a loop of one's own: ranks share the batch, and each has some of the
//! experts of every layer; tokens travel to them and back.
//!
//! ```text
//! trainyard run --standalone --nproc-per-node 2 -- target/release/examples/moe
//! ```
//!
//! Losses are the same on any number of ranks. A bias per expert keeps all of them busy, though a few
//! words make up most of the text.

use trainyard::data::Batch;
use trainyard::nn::{ExpertParallel, MoeConfig, Router, Scoring};
use trainyard::parallel::{Ddp, DdpOptions, Strategy, Sync};
use trainyard::train::optimizer;
use trainyard::{
    Axis, AxisSet, Builder, Context, Group, Kind, Llama, LlamaConfig, Model, Module, Purpose,
    ReduceOp, Result, Tensor,
};

const STEPS: u64 = 200;
const SEQ_LEN: i64 = 64;
const GLOBAL_BATCH: i64 = 16;
const NUM_EXPERTS: usize = 8;
// Routers that learn faster than their bias moves would run away from it.
const LEARNING_RATE: f64 = 1e-3;

fn main() -> Result<()> {
    let num_ranks = std::env::var("WORLD_SIZE").map_or(1, |n| n.parse().unwrap_or(1));
    // All ranks share the batch, and all share the experts: `ep` counts the same ranks.
    let world = trainyard::init_mesh(&[(Axis::DpShard, num_ranks), (Axis::Ep, num_ranks)])?;
    let everyone = world.everyone()?;
    let sharers = world.group(AxisSet::of([Axis::Cp, Axis::Tp]))?;
    let experts = ExpertParallel::new(&world.group(Axis::Ep)?, &sharers);

    let config = LlamaConfig {
        moe: Some(mixture()),
        ..LlamaConfig::little()
    };
    // In double precision, in which losses on several ranks are those on one to the last digit printed.
    let builder = Builder::new(1)
        .kind(Kind::Double)
        .with_expert_parallel(experts);
    let model = Llama::build(&config, SEQ_LEN as usize, &builder)?;
    // Gradients of experts are added up over the ranks that have the same ones: here each has its own.
    let same_experts = world.group(Axis::Efsdp)?;
    let options = DdpOptions {
        op: ReduceOp::Sum,
        ..DdpOptions::default()
    };
    let model = Ddp::with_experts(model, &everyone, &same_experts, options)?;
    let mut optimizer = optimizer::build(&Default::default(), model.parameters());

    let num_tokens = (GLOBAL_BATCH * SEQ_LEN) as f64;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let batch = skewed_text(step, config.vocab_size as i64, &everyone);
        let context = Context::training(step).with_loss_weight(1.0 / num_tokens);
        let run = model.forward(&batch.inputs, &context)?;
        let loss = model.loss(run.output(), &batch.targets)? / num_tokens;
        model.backward(run, &loss, Sync::Reduce)?;
        optimizer.step(LEARNING_RATE, None)?;
        model.zero_grad()?;
        let busiest = rebalance(&model, &everyone)?;

        let total = loss.detach();
        everyone
            .all_reduce(&total, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        losses.push(f64::try_from(&total)?);
        if world.rank() == 0 && (step % 20 == 0 || step + 1 == STEPS) {
            let loss = losses[losses.len() - 1];
            println!("step {step}  busiest expert: {busiest:.2} equal loads  loss {loss:.4}");
        }
    }
    if losses[losses.len() - 1] > 0.8 * losses[0] {
        eprintln!("the loss did not fall: {losses:?}");
        std::process::exit(1);
    }
    Ok(())
}

/// Each token goes to two of eight experts and through one that all share, as DeepSeek-V3 routes.
fn mixture() -> MoeConfig {
    MoeConfig {
        num_experts: NUM_EXPERTS,
        num_experts_per_tok: 2,
        moe_intermediate_size: 64,
        n_shared_experts: 1,
        first_k_dense_replace: 0,
        scoring_func: Scoring::Sigmoid,
        norm_topk_prob: true,
        routed_scaling_factor: 1.0,
        router_aux_loss_coef: 0.0,
        router_z_loss_coef: 0.0,
        bias_update_rate: Some(2e-3),
        capacity_factor: None,
    }
}

/// Moves every router's bias by the loads of all ranks, and tells how many times an equal load the busiest
/// expert had.
fn rebalance(model: &dyn Model, everyone: &Group) -> Result<f64> {
    let units = model.units();
    let routers = units.iter().filter_map(|unit| unit.router());
    let mut busiest = 0.0f64;
    for router in routers {
        let Some(rows) = router.load().of_step()? else {
            continue;
        };
        everyone
            .all_reduce(&rows, ReduceOp::Sum, Purpose::Control)?
            .wait()?;
        Router::rebalance(router, &rows)?;
        let rows = rows.to_kind(Kind::Double);
        let share = rows.max() / rows.mean(Kind::Double);
        busiest = busiest.max(f64::try_from(&share)?);
    }
    Ok(busiest)
}

/// This rank's sequences of a step. Every word follows from the one before by a rule, or begins anew with a
/// word of which the first are the most frequent.
fn skewed_text(step: u64, num_words: i64, everyone: &Group) -> Batch {
    let rows = GLOBAL_BATCH / everyone.size() as i64;
    let first = step as i64 * GLOBAL_BATCH + everyone.index() as i64 * rows;
    let mut words = Vec::new();
    for sequence in first..first + rows {
        let mut state = sequence as u64 + 1;
        let mut chance = || {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as f64 / (1u64 << 31) as f64
        };
        let mut word = 0;
        for _ in 0..=SEQ_LEN {
            word = match chance() < 0.3 {
                true => (chance().powi(4) * num_words as f64) as i64,
                false => (word * 5 + 7) % (num_words / 8),
            };
            words.push(word);
        }
    }
    let words = Tensor::from_slice(&words).view([rows, SEQ_LEN + 1]);
    Batch {
        inputs: words.narrow(1, 0, SEQ_LEN).contiguous(),
        targets: words.narrow(1, 1, SEQ_LEN).contiguous(),
        num_targets: rows * SEQ_LEN,
        samples: Vec::new(),
    }
}
