//! What differs between the job that saved a checkpoint and the job that resumes from it. A change that would silently
//! train something else needs the user's word: `checkpoint.allow`.

use trainyard_checkpoint::TrainState;
use trainyard_config::{Config, Names, ResumeChange};

use crate::error::{Result, TrainError};
use crate::trainer::data_axes;

/// A difference between two jobs.
#[derive(Debug, PartialEq)]
struct Difference {
    change: ResumeChange,
    /// The keys and values that differ.
    what: String,
    /// What the change costs.
    cost: &'static str,
}

/// Compares this job with the one that saved `state`: returns an error for a change that is not allowed, and what is
/// allowed as text to log.
pub(crate) fn check(config: &Config, num_ranks: usize, state: &TrainState) -> Result<Vec<String>> {
    let saved = Config::parse_with(&state.config, &[], &Names::any())?;
    let differences = differences((&saved, state.world_size), (config, num_ranks), state.step)?;
    let allowed = config.checkpoint.allowed_changes()?;
    let (allowed, rejected): (Vec<_>, Vec<_>) = differences
        .into_iter()
        .partition(|difference| allowed.contains(&difference.change));
    if !rejected.is_empty() {
        return Err(TrainError::ResumeChanged {
            step: state.step,
            changes: rejected.iter().map(describe).collect(),
            allow: joined(rejected.iter().map(|difference| difference.change)),
        });
    }
    Ok(allowed.iter().map(describe).collect())
}

fn describe(difference: &Difference) -> String {
    format!("{}: {}", difference.what, difference.cost)
}

fn joined(changes: impl Iterator<Item = ResumeChange>) -> String {
    let mut names: Vec<&str> = changes.map(ResumeChange::name).collect();
    names.dedup();
    names.join(",")
}

fn differences(
    (saved, saved_ranks): (&Config, usize),
    (now, num_ranks): (&Config, usize),
    step: u64,
) -> Result<Vec<Difference>> {
    let mut found = Vec::new();
    let mut compare = |change, key: &str, before: String, after: String, cost| {
        if before != after {
            found.push(Difference {
                change,
                what: format!("{key} was {before} and is {after}"),
                cost,
            });
        }
    };
    compare(
        ResumeChange::Seed,
        "debug.seed",
        saved.debug.seed.to_string(),
        now.debug.seed.to_string(),
        "samples come in another order, so some of the epoch are seen twice and others never; dropout differs",
    );
    let dataset = |config: &Config| {
        let training = &config.training;
        let path = training.dataset_path.as_deref();
        let path = path.map_or("none".into(), |path| path.display().to_string());
        let name = training.dataset.custom().unwrap_or_default();
        let keys = config.custom.0.get(name);
        let keys = keys.map_or(String::new(), |keys| format!(", keys {keys:?}"));
        format!(
            "{:?} at {path} with seq_len {}{keys}",
            training.dataset, training.seq_len
        )
    };
    compare(
        ResumeChange::Dataset,
        "training.dataset",
        dataset(saved),
        dataset(now),
        "the position in the data counts samples of the other dataset",
    );
    compare(
        ResumeChange::Optimizer,
        "optimizer.name",
        format!("{:?}", saved.optimizer.name),
        format!("{:?}", now.optimizer.name),
        "moments that the new optimizer does not have are dropped, and others start from zero",
    );
    compare(
        ResumeChange::Batch,
        "the global batch size",
        global_batch(saved, saved_ranks)?.to_string(),
        global_batch(now, num_ranks)?.to_string(),
        "steps have another size, and the learning rate was chosen for the other one",
    );
    if now.training.steps < step {
        found.push(Difference {
            change: ResumeChange::Steps,
            what: format!(
                "training.steps is {}, and the checkpoint is of step {step}",
                now.training.steps
            ),
            cost: "there is nothing left to train",
        });
    }
    Ok(found)
}

/// The samples of a step on all ranks.
fn global_batch(config: &Config, num_ranks: usize) -> Result<usize> {
    let mesh = config.mesh(num_ranks)?;
    Ok(config.batching(mesh.size_of(data_axes()))?.global)
}

#[cfg(test)]
mod tests {
    use trainyard_config::OptimizerName;

    use super::*;

    fn changes(change: impl Fn(&mut Config), num_ranks: usize) -> Vec<ResumeChange> {
        let mut saved = Config::default();
        saved.training.steps = 100;
        let mut now = saved.clone();
        change(&mut now);
        let found = differences((&saved, 2), (&now, num_ranks), 50).unwrap();
        found.iter().map(|difference| difference.change).collect()
    }

    #[test]
    fn every_change_that_trains_something_else_is_found() {
        assert_eq!(changes(|_| (), 2), []);
        assert_eq!(changes(|c| c.debug.seed += 1, 2), [ResumeChange::Seed]);
        assert_eq!(
            changes(|c| c.training.seq_len += 1, 2),
            [ResumeChange::Dataset]
        );
        let sgd = |c: &mut Config| c.optimizer.name = OptimizerName::Sgd.into();
        assert_eq!(changes(sgd, 2), [ResumeChange::Optimizer]);
        assert_eq!(changes(|_| (), 4), [ResumeChange::Batch]);
        assert_eq!(changes(|c| c.training.steps = 49, 2), [ResumeChange::Steps]);
    }

    #[test]
    fn what_a_user_may_change_is_not() {
        let harmless = |c: &mut Config| {
            c.optimizer.lr *= 2.0;
            c.training.steps = 200;
            c.metrics.log_freq = 1;
            c.checkpoint.interval = 7;
        };
        assert_eq!(changes(harmless, 2), []);
    }
}
