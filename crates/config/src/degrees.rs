//! The mesh of the parallel degrees on a number of ranks.
//!
//! Each degree is the size of one mesh axis. A data-parallel degree of -1 takes all remaining ranks. If both are -1,
//! sharding takes them.

use trainyard_mesh::{Axis, Mesh};

use crate::{Config, ConfigError, LocalUpdateMethod, ParallelismSection};

/// The value that means "all remaining ranks".
const REST: i64 = -1;

impl Config {
    /// The mesh of these degrees on `world_size` ranks.
    pub fn mesh(&self, world_size: usize) -> Result<Mesh, ConfigError> {
        self.parallelism.check_degrees()?;
        let sizes = self.parallelism.sizes(world_size)?;
        let ep = usize::try_from(self.parallelism.expert_parallel_degree).unwrap_or(1);
        Ok(Mesh::new(&sizes)?.with_ep(ep)?)
    }

    /// The same job on one rank: the reference of every strategy.
    pub fn on_one_rank(&self) -> Config {
        let mut config = self.clone();
        let section = &mut config.parallelism;
        for degree in [
            &mut section.data_parallel_outer_degree,
            &mut section.data_parallel_replicate_degree,
            &mut section.data_parallel_shard_degree,
            &mut section.pipeline_parallel_degree,
            &mut section.context_parallel_degree,
            &mut section.tensor_parallel_degree,
            &mut section.expert_parallel_degree,
        ] {
            *degree = 1;
        }
        config.local_updates.method = LocalUpdateMethod::None;
        config
    }
}

impl ParallelismSection {
    fn degrees(&self) -> [(Axis, i64); Axis::COUNT] {
        let replicate = match self.data_parallel_shard_degree {
            REST => self.data_parallel_replicate_degree.abs(),
            _ => self.data_parallel_replicate_degree,
        };
        [
            (Axis::DpOuter, self.data_parallel_outer_degree),
            (Axis::Pp, self.pipeline_parallel_degree),
            (Axis::DpReplicate, replicate),
            (Axis::DpShard, self.data_parallel_shard_degree),
            (Axis::Cp, self.context_parallel_degree),
            (Axis::Tp, self.tensor_parallel_degree),
        ]
    }

    /// Rejects degrees that no number of ranks satisfies.
    pub(crate) fn check_degrees(&self) -> Result<(), ConfigError> {
        let expert = ("expert_parallel_degree", self.expert_parallel_degree);
        let keys = self.degrees().map(|(axis, degree)| (key_of(axis), degree));
        for (key, degree) in keys.into_iter().chain([expert]) {
            let may_take_rest = key.starts_with("data_parallel") && key != key_of(Axis::DpOuter);
            if degree < 1 && !(may_take_rest && degree == REST) {
                return Err(ConfigError::contradiction(
                    format!("parallelism.{key} = {degree} is not a number of ranks"),
                    if may_take_rest {
                        "use -1 for all remaining ranks, or a positive number"
                    } else {
                        "use 1 or more"
                    },
                ));
            }
        }
        Ok(())
    }

    /// The size of every axis, with -1 resolved. Expects validated degrees.
    fn sizes(&self, world_size: usize) -> Result<[(Axis, usize); Axis::COUNT], ConfigError> {
        let degrees = self.degrees();
        let fixed = degrees
            .iter()
            .filter(|(_, degree)| *degree != REST)
            .try_fold(1usize, |product, (_, degree)| {
                product.checked_mul(usize::try_from(*degree).ok()?)
            })
            .filter(|&product| product > 0);
        let takes_rest = degrees.iter().any(|(_, degree)| *degree == REST);
        let fits = fixed.is_some_and(|fixed| {
            if takes_rest {
                world_size > 0 && world_size.is_multiple_of(fixed)
            } else {
                world_size == fixed
            }
        });
        match fixed {
            Some(fixed) if fits => Ok(degrees.map(|(axis, degree)| {
                let size = usize::try_from(degree).unwrap_or(world_size / fixed);
                (axis, size)
            })),
            _ => Err(elasticity_warning(fixed, takes_rest, world_size)),
        }
    }
}

fn key_of(axis: Axis) -> &'static str {
    match axis {
        Axis::DpOuter => "data_parallel_outer_degree",
        Axis::Pp => "pipeline_parallel_degree",
        Axis::DpReplicate => "data_parallel_replicate_degree",
        Axis::DpShard => "data_parallel_shard_degree",
        Axis::Cp => "context_parallel_degree",
        Axis::Tp => "tensor_parallel_degree",
        Axis::Efsdp | Axis::Ep => "expert_parallel_degree",
    }
}

fn elasticity_warning(fixed: Option<usize>, takes_rest: bool, world_size: usize) -> ConfigError {
    let Some(fixed) = fixed else {
        return ConfigError::contradiction(
            "the degrees of [parallelism] are too large: their product overflows",
            "use smaller degrees",
        );
    };
    let nearest = if takes_rest {
        fixed * (world_size / fixed).max(1)
    } else {
        fixed
    };
    let relation = if takes_rest {
        "a multiple of"
    } else {
        "exactly"
    };
    ConfigError::contradiction(
        format!(
            "the degrees of [parallelism] need a world size of {relation} {fixed}, not {world_size}"
        ),
        format!(
            "use a world size of {nearest}, or parallelism.data_parallel_replicate_degree = -1"
        ),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn replicate(degree: i64) -> Config {
        let mut config = Config::default();
        config.parallelism.data_parallel_replicate_degree = degree;
        config
    }

    #[test]
    fn by_default_all_ranks_are_replicas() {
        for world in [1, 2, 3, 16_384] {
            let mesh = Config::default().mesh(world).unwrap();
            assert_eq!(mesh.size(Axis::DpReplicate), world);
            assert_eq!(mesh.world_size(), world);
        }
    }

    #[test]
    fn fixed_degrees_must_match_the_ranks() {
        assert!(replicate(4).mesh(4).is_ok());
        let message = replicate(4).mesh(6).unwrap_err().to_string();
        assert!(
            message.contains("a world size of exactly 4, not 6"),
            "{message}"
        );
        assert!(message.contains("use a world size of 4"), "{message}");
    }

    #[test]
    fn every_job_has_a_reference_on_one_rank() {
        let mut config = replicate(2);
        config.parallelism.tensor_parallel_degree = 2;
        config.parallelism.context_parallel_degree = 2;
        assert_eq!(config.mesh(8).unwrap().world_size(), 8);
        assert_eq!(config.on_one_rank().mesh(1).unwrap().world_size(), 1);
    }

    #[test]
    fn only_one_degree_takes_the_rest() {
        let mut config = replicate(-1);
        config.parallelism.data_parallel_shard_degree = -1;
        assert_eq!(config.mesh(6).unwrap().size(Axis::DpShard), 6);
        config.parallelism.data_parallel_shard_degree = 3;
        let mesh = config.mesh(6).unwrap();
        assert_eq!(mesh.size(Axis::DpReplicate), 2);
        config.parallelism.data_parallel_shard_degree = 1;
        config.parallelism.tensor_parallel_degree = -1;
        assert!(config.mesh(2).is_err());
    }

    proptest! {
        #[test]
        fn sizes_multiply_to_the_world(degrees in prop::array::uniform4(1i64..5), rest in 1usize..9) {
            let [pp, shard, cp, tp] = degrees;
            let section = ParallelismSection {
                pipeline_parallel_degree: pp,
                data_parallel_shard_degree: shard,
                context_parallel_degree: cp,
                tensor_parallel_degree: tp,
                ..ParallelismSection::default()
            };
            let world = (pp * shard * cp * tp) as usize * rest;
            let sizes = section.sizes(world).unwrap();
            prop_assert_eq!(sizes.iter().map(|(_, size)| size).product::<usize>(), world);
        }

        #[test]
        fn never_panics(degrees in prop::array::uniform6(any::<i64>()), world: usize) {
            let mut config = Config::default();
            config.parallelism = ParallelismSection {
                pipeline_parallel_degree: degrees[0],
                data_parallel_replicate_degree: degrees[1],
                data_parallel_shard_degree: degrees[2],
                context_parallel_degree: degrees[3],
                tensor_parallel_degree: degrees[4],
                expert_parallel_degree: degrees[5],
                ..config.parallelism
            };
            let _ = config.parallelism.sizes(world);
            let _ = config.mesh(world);
        }
    }
}
