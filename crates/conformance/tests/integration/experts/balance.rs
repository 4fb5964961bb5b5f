//! Load balancing on skewed data: a few frequent tokens send most of the work to a few experts.

use std::error::Error;

use tch::Tensor;
use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{Session, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_data::Batch;
use trainyard_train::ExpertLoad;

use super::chance::Chance;
use super::job::{deepseek, laid_out, with};

const NUM_STEPS: u64 = 200;

/// Loads are averaged over this many steps, because those of a single step are noisy.
const WINDOW: usize = 10;

/// The limit of the largest load, relative to an equal one.
const BALANCED: f64 = 1.3;

/// The expert bias balances the loads within 200 steps; without it they stay unequal.
pub fn by_bias(rank: &Rank) -> Outcome {
    let with_rate = |rate| {
        let mut config = with(&deepseek(Dtype::Float32), |moe| {
            moe.num_experts_per_tok = Some(2);
            moe.router_aux_loss_coef = None;
            moe.router_z_loss_coef = None;
            moe.bias_update_rate = rate;
        });
        config.training.seq_len = 64;
        // The bias cannot balance routers that learn faster than it changes.
        config.optimizer.lr = 3e-4;
        let size = rank.size() as i64;
        divided(&laid_out(&config, size, size, 1, 0), rank.size(), 1)
    };
    let left_alone = loads(rank, &with_rate(None))?;
    let balanced = loads(rank, &with_rate(Some(2e-3)))?;
    rank.note(format!(
        "busiest expert of any layer over {WINDOW} steps, in equal loads:"
    ));
    for (name, found) in [("no bias", &left_alone), ("bias", &balanced)] {
        let upto =
            |step: usize| format!("step {step} {:.2}", imbalance(&found[step - WINDOW..step]));
        let text = [10, 25, 50, 100, 150, 200].map(upto).join(", ");
        rank.note(format!("{name}: {text}"));
    }
    let last = |found: &[Vec<ExpertLoad>]| imbalance(&found[found.len() - WINDOW..]);
    assert!(last(&left_alone) > BALANCED, "the data are not skewed");
    assert!(last(&balanced) < BALANCED, "the bias does not balance");
    Ok(())
}

/// The loads of all steps.
fn loads(rank: &Rank, config: &Config) -> Result<Vec<Vec<ExpertLoad>>, Box<dyn Error>> {
    let world = rank.join_config(config)?;
    let mut session = Session::new(config, &world)?;
    let mut found = Vec::new();
    for _ in 0..NUM_STEPS {
        let batch = skewed(config, rank, session.trainer.steps_taken());
        session.trainer.step(&[batch])?;
        found.push(session.trainer.expert_loads()?);
    }
    Ok(found)
}

/// The load of the busiest expert over some steps, relative to an equal load, in the layer where it is largest.
fn imbalance(steps: &[Vec<ExpertLoad>]) -> f64 {
    let mut summed = steps[0].clone();
    for step in &steps[1..] {
        for (sum, more) in summed.iter_mut().zip(step) {
            sum.rows
                .iter_mut()
                .zip(&more.rows)
                .for_each(|(sum, more)| *sum += more);
        }
    }
    summed.iter().map(ExpertLoad::imbalance).fold(0.0, f64::max)
}

/// The sequences of this rank in a step. A token follows from the previous one by a rule, or is drawn anew with a
/// probability proportional to 1/n for token `n`.
fn skewed(config: &Config, rank: &Rank, step: u64) -> Batch {
    let num_words = config.model.vocab_size.unwrap_or(1);
    let total: f64 = (1..=num_words).map(|n| 1.0 / n as f64).sum();
    let mut chance = Chance::new(step * rank.size() as u64 + rank.index() as u64);
    let mut last = 0;
    let mut word = || {
        if chance.share() < 0.5 {
            last = (last * 5 + 7) % num_words as i64;
            return last;
        }
        let mut left = chance.share() * total;
        let found = (1..num_words).find(|&n| {
            left -= 1.0 / n as f64;
            left < 0.0
        });
        last = found.unwrap_or(num_words) as i64 - 1;
        last
    };
    let (rows, length) = (config.training.local_batch_size, config.training.seq_len);
    let words: Vec<i64> = (0..rows * (length + 1)).map(|_| word()).collect();
    let words = Tensor::from_slice(&words).view([rows as i64, length as i64 + 1]);
    let length = length as i64;
    Batch::new(
        words.narrow(1, 0, length).contiguous(),
        words.narrow(1, 1, length).contiguous(),
        rows as i64 * length,
    )
}
