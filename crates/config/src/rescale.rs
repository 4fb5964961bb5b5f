//! Rescales a job to another number of ranks, as an elastic job does when nodes join or leave.
//!
//! Tensor-, context- and pipeline-parallel degrees stay, because they follow from the model and the nodes. Data parallelism
//! takes the remaining ranks. The global batch stays, and with it the sample stream and the learning rate; the
//! micro-batch is chosen to divide it.

use crate::{Config, ConfigError};

/// The value that means "all remaining ranks".
const REST: i64 = -1;

/// A config for a number of ranks, and what was changed.
#[derive(Clone, Debug)]
pub struct Rescaled {
    /// The rescaled config.
    pub config: Config,
    /// A log message that describes the result.
    pub reason: String,
}

impl Config {
    /// The same job on `num_ranks` ranks, in a run that has `full` ranks when all nodes are there.
    ///
    /// The result depends on nothing else, so all ranks of a world agree on it.
    pub fn rescale(&self, num_ranks: usize, full: usize) -> Result<Rescaled, ConfigError> {
        self.parallelism.check_degrees()?;
        let kept = self.kept_ranks();
        let left = kept.filter(|kept| num_ranks > 0 && num_ranks.is_multiple_of(*kept));
        let (Some(kept), Some(left)) = (kept, left.map(|kept| num_ranks / kept)) else {
            return Err(indivisible_ranks(num_ranks, kept));
        };
        let section = &self.parallelism;
        let outer = self.num_outer_replicas(num_ranks, full)?;
        let (replicate, shard) = divide(
            section.data_parallel_replicate_degree,
            section.data_parallel_shard_degree,
            left / outer,
        );
        let global = self.global_batch(full / kept);
        let asked = self.training.local_batch_size;
        let local = largest_share(asked, global, left).ok_or_else(|| uneven(global, left))?;

        let mut config = self.clone();
        config.parallelism.data_parallel_outer_degree = degree(outer);
        config.parallelism.data_parallel_replicate_degree = degree(replicate);
        config.parallelism.data_parallel_shard_degree = degree(shard);
        config.training.global_batch_size = Some(global);
        config.training.local_batch_size = local;
        let reason = format!(
            "{num_ranks} of {full} ranks: data parallel {replicate} x {shard} (replicas x shards), \
             other degrees unchanged; global batch size {global} = {left} data-parallel ranks x {} micro-batches x local batch size {local}",
            global / (left * local)
        );
        Ok(Rescaled { config, reason })
    }

    /// A warning if the job cannot run on one of the numbers of ranks that its run may have, with a batch size that works.
    ///
    /// The user should learn this at the start, and not when a node is lost.
    pub fn elasticity_warning(&self, sizes: &[usize], full: usize) -> Option<String> {
        let rescaled = |size: &usize| self.rescale(*size, full).err().map(|error| (*size, error));
        let (size, error) = sizes.iter().find_map(rescaled)?;
        let reason = match self.fitting_batch(sizes, full) {
            Some(fitting) => {
                format!("training.global_batch_size = {fitting} works with all of them")
            }
            None => error.to_string(),
        };
        let (least, most) = (sizes.iter().min()?, sizes.iter().max()?);
        Some(format!(
            "the run may have {least} to {most} ranks, but this job cannot continue on {size}: {reason}"
        ))
    }

    /// The next larger global batch that is divisible for all of these numbers of ranks.
    fn fitting_batch(&self, sizes: &[usize], full: usize) -> Option<usize> {
        let kept = self.kept_ranks().filter(|kept| *kept > 0)?;
        let ranks = sizes
            .iter()
            .map(|size| size.is_multiple_of(kept).then_some(size / kept));
        let common = ranks
            .into_iter()
            .try_fold(1, |common, ranks| lcm(common, ranks?))?;
        self.global_batch(full / kept)
            .checked_next_multiple_of(common)
    }

    /// The global batch of a run that has this many data-parallel ranks when all nodes are there.
    fn global_batch(&self, full: usize) -> usize {
        let of_all = || self.training.local_batch_size.saturating_mul(full.max(1));
        self.training.global_batch_size.unwrap_or_else(of_all)
    }

    /// The replicas that take steps of their own on `num_ranks` ranks: they come and go as a whole.
    fn num_outer_replicas(&self, num_ranks: usize, full: usize) -> Result<usize, ConfigError> {
        let asked = usize::try_from(self.parallelism.data_parallel_outer_degree).unwrap_or(1);
        if asked == 1 {
            return Ok(1);
        }
        let ranks_each = (full / asked).max(1);
        if num_ranks.is_multiple_of(ranks_each) {
            return Ok(num_ranks / ranks_each);
        }
        Err(ConfigError::contradiction(
            format!(
                "{num_ranks} ranks are not a multiple of {ranks_each}, the ranks of each of the \
                 parallelism.data_parallel_outer_degree = {asked} replicas"
            ),
            format!(
                "start a multiple of {ranks_each} ranks on every node, or raise MIN of --nnodes"
            ),
        ))
    }

    /// The ranks of one data-parallel replica, which do not change.
    fn kept_ranks(&self) -> Option<usize> {
        let section = &self.parallelism;
        let degrees = [
            section.pipeline_parallel_degree,
            section.context_parallel_degree,
            section.tensor_parallel_degree,
        ];
        degrees.into_iter().try_fold(1usize, |product, degree| {
            product.checked_mul(usize::try_from(degree).ok()?)
        })
    }
}

/// Replicas and shards over `left` ranks, as near as possible to the configured ones.
///
/// The shard degree stays if it divides the ranks. Otherwise a larger one is chosen, so that no rank holds more than
/// planned; if there are too few ranks for that, all ranks are shards.
fn divide(replicate: i64, shard: i64, left: usize) -> (usize, usize) {
    let as_count = |degree: i64| usize::try_from(degree).ok().filter(|count| *count > 0);
    if shard == REST {
        let fits = |replicas: &usize| left.is_multiple_of(*replicas);
        let replicas = as_count(replicate).filter(fits).unwrap_or(1);
        return (replicas, left / replicas);
    }
    let wanted = as_count(shard).unwrap_or(1);
    let shards = (wanted..=left).find(|shards| left.is_multiple_of(*shards));
    let shards = shards.unwrap_or(left);
    (left / shards, shards)
}

/// The largest micro-batch, up to `asked`, that divides the batch evenly over all ranks.
fn largest_share(asked: usize, global: usize, ranks: usize) -> Option<usize> {
    let share = (global > 0 && global.is_multiple_of(ranks)).then(|| global / ranks)?;
    (1..=asked.min(share))
        .rev()
        .find(|local| share.is_multiple_of(*local))
}

/// The least common multiple, unless it overflows.
fn lcm(a: usize, b: usize) -> Option<usize> {
    let (mut divisor, mut rest) = (a, b);
    while rest > 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a.checked_mul(b.checked_div(divisor)?)
}

fn degree(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn indivisible_ranks(num_ranks: usize, kept: Option<usize>) -> ConfigError {
    let Some(kept) = kept.filter(|kept| *kept > 0) else {
        return ConfigError::contradiction(
            "the degrees of [parallelism] are too large: their product overflows",
            "use smaller degrees",
        );
    };
    ConfigError::contradiction(
        format!(
            "{num_ranks} ranks are not a multiple of {kept}, the product of the tensor-, context- and \
             pipeline-parallel degrees, which stay when nodes join or leave"
        ),
        format!("start a multiple of {kept} ranks on every node, or raise MIN of --nnodes"),
    )
}

fn uneven(global: usize, ranks: usize) -> ConfigError {
    ConfigError::contradiction(
        format!("a global batch of {global} is not divisible by {ranks} data-parallel ranks"),
        format!(
            "use a training.global_batch_size that is divisible for every number of nodes, such as {}",
            lcm(global.max(1), ranks).unwrap_or(usize::MAX)
        ),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use trainyard_mesh::Axis;

    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(text, &[]).unwrap()
    }

    /// Replicas that take steps of their own are lost as a whole.
    #[test]
    fn outer_replicas_come_and_go() {
        let mut config = Config::default();
        config.local_updates.method = crate::LocalUpdateMethod::Diloco;
        config.parallelism.data_parallel_outer_degree = 4;
        config.parallelism.data_parallel_shard_degree = 2;
        config.training.global_batch_size = Some(24);
        config.training.local_batch_size = 4;
        let mesh = |num_ranks| {
            let rescaled = config.rescale(num_ranks, 8)?.config;
            rescaled.check()?;
            rescaled.mesh(num_ranks).map(|mesh| mesh.to_string())
        };
        assert_eq!(mesh(8).unwrap(), "dp_outer4 x dp_shard2");
        assert_eq!(mesh(6).unwrap(), "dp_outer3 x dp_shard2");
        assert_eq!(mesh(2).unwrap(), "dp_shard2");
        let error = mesh(5).unwrap_err().to_string();
        assert!(error.contains("5 ranks are not a multiple of 2"), "{error}");
    }

    #[test]
    fn replicas_follow_the_ranks_and_the_global_batch_stays() {
        let asked = config("training.local_batch_size = 4");
        for (ranks, local, times) in [(3, 4, 1), (2, 3, 2), (1, 4, 3)] {
            let rescaled = asked.rescale(ranks, 3).unwrap();
            let batching = rescaled.config.batching(ranks).unwrap();
            assert_eq!(batching.global, 12);
            assert_eq!((batching.local, batching.num_microbatches), (local, times));
            let mesh = rescaled.config.mesh(ranks).unwrap();
            assert_eq!(mesh.size(Axis::DpReplicate), ranks);
        }
        let reason = asked.rescale(2, 3).unwrap().reason;
        assert!(
            reason.starts_with("2 of 3 ranks: data parallel 2 x 1"),
            "{reason}"
        );
        assert!(
            reason.ends_with("12 = 2 data-parallel ranks x 2 micro-batches x local batch size 3"),
            "{reason}"
        );
    }

    #[test]
    fn model_parallel_degrees_stay() {
        let asked = config(
            "[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = 4\n\
             [training]\nlocal_batch_size = 3\nglobal_batch_size = 12",
        );
        let mesh = asked.rescale(6, 8).unwrap().config.mesh(6).unwrap();
        assert_eq!(mesh.size(Axis::Tp), 2);
        assert_eq!(mesh.size(Axis::DpShard), 3);
        let message = asked.rescale(5, 8).unwrap_err().to_string();
        assert!(message.contains("not a multiple of 2"), "{message}");
    }

    #[test]
    fn shards_grow_rather_than_fill_the_memory() {
        assert_eq!(divide(2, 4, 8), (2, 4));
        assert_eq!(divide(2, 4, 4), (1, 4));
        assert_eq!(divide(2, 4, 6), (1, 6));
        assert_eq!(divide(-1, 4, 10), (2, 5));
        assert_eq!(divide(2, 4, 3), (1, 3));
        assert_eq!(divide(3, 1, 5), (5, 1));
        assert_eq!(divide(2, -1, 6), (2, 3));
        assert_eq!(divide(2, -1, 5), (1, 5));
    }

    #[test]
    fn an_indivisible_batch_is_explained() {
        let asked = config("training.global_batch_size = 8\ntraining.local_batch_size = 4");
        let message = asked.rescale(3, 4).unwrap_err().to_string();
        assert!(message.contains("8 is not divisible by 3"), "{message}");
        assert!(message.contains("such as 24"), "{message}");
    }

    #[test]
    fn an_unsupported_number_of_nodes_is_reported_at_the_start() {
        let asked = config("training.local_batch_size = 4");
        let warning = asked.elasticity_warning(&[16, 24, 32], 32).unwrap();
        assert_eq!(
            warning,
            "the run may have 16 to 32 ranks, but this job cannot continue on 24: \
             training.global_batch_size = 192 works with all of them"
        );
        let larger = config("training.local_batch_size = 4\ntraining.global_batch_size = 192");
        assert_eq!(larger.elasticity_warning(&[16, 24, 32], 32), None);
        let whole = config("[parallelism]\ntensor_parallel_degree = 4");
        let warning = whole.elasticity_warning(&[2, 4], 4).unwrap();
        assert!(
            warning.contains("on 2: 2 ranks are not a multiple of 4"),
            "{warning}"
        );
    }

    proptest! {
        /// A suggested batch works, and is suggested only if the configured one does not.
        #[test]
        fn a_suggested_batch_works(per_machine in 1usize..9, least in 1usize..5, more in 0usize..5, local in 1usize..9) {
            let most = least + more;
            let sizes: Vec<usize> = (least..=most).map(|machines| machines * per_machine).collect();
            let full = most * per_machine;
            let mut asked = Config::default();
            asked.training.local_batch_size = local;
            let fits = |config: &Config| sizes.iter().all(|size| config.rescale(*size, full).is_ok());
            prop_assert_eq!(asked.elasticity_warning(&sizes, full).is_none(), fits(&asked));
            asked.training.global_batch_size = asked.fitting_batch(&sizes, full);
            prop_assert!(fits(&asked));
        }

        /// The result is valid, and has the same global batch in every world of the run.
        #[test]
        fn a_rescaled_config_has_a_mesh_and_a_batch(
            degrees in prop::array::uniform3(1i64..4), shard in prop::sample::select(vec![-1i64, 1, 2, 3, 4]),
            local in 1usize..7, ranks in 1usize..40, full in 1usize..40,
        ) {
            let mut asked = Config::default();
            [
                asked.parallelism.pipeline_parallel_degree,
                asked.parallelism.context_parallel_degree,
                asked.parallelism.tensor_parallel_degree,
            ] = degrees;
            asked.parallelism.data_parallel_shard_degree = shard;
            asked.training.local_batch_size = local;
            if let Ok(rescaled) = asked.rescale(ranks, full) {
                let mesh = rescaled.config.mesh(ranks).unwrap();
                prop_assert_eq!(mesh.world_size(), ranks);
                let data = mesh.size(Axis::DpReplicate) * mesh.size(Axis::DpShard);
                let batching = rescaled.config.batching(data).unwrap();
                let kept = degrees.iter().product::<i64>() as usize;
                prop_assert_eq!(batching.global, local * (full / kept).max(1));
                prop_assert!(batching.local <= local);
            }
        }

        #[test]
        fn never_panics(degrees in prop::array::uniform5(any::<i64>()), ranks: usize, full: usize) {
            let mut asked = Config::default();
            [
                asked.parallelism.pipeline_parallel_degree,
                asked.parallelism.context_parallel_degree,
                asked.parallelism.tensor_parallel_degree,
                asked.parallelism.data_parallel_shard_degree,
                asked.parallelism.data_parallel_replicate_degree,
            ] = degrees;
            let _ = asked.rescale(ranks % 5000, full);
        }
    }
}
