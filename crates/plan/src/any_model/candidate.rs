//! The strategies that are tried for a model of which nothing is known.

use serde::Serialize;

use crate::{Cluster, Degrees, Recompute};

/// The largest tensor- and pipeline-parallel degrees that are tried. Every stage of a pipeline needs its own dry run.
const MAX_DEGREE: usize = 8;

/// The most micro-batches of a step that are tried, because a dry run executes all of them.
const MAX_MICROBATCHES: usize = 256;

/// How a model and its states are divided over the ranks.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq, Serialize)]
pub struct Layout {
    /// The size of every mesh axis.
    #[serde(rename = "mesh")]
    pub degrees: Degrees,
    /// The ZeRO stage over `dp_shard`; 0 shards nothing.
    pub zero_stage: usize,
}

/// A layout and how its ranks compute their samples.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq, Serialize)]
pub struct Candidate {
    /// How the model is divided.
    #[serde(flatten)]
    pub layout: Layout,
    /// Samples in a micro-batch of one rank.
    pub micro_batch: usize,
    /// Micro-batches that a rank computes in a step.
    pub num_microbatches: usize,
    /// Which activations the backward pass recomputes: none or all.
    pub recompute: Recompute,
}

/// Every layout for a cluster. Tensor parallelism stays within a node.
pub fn layouts(cluster: &Cluster) -> Vec<Layout> {
    let world_size = cluster.world_size();
    let degrees = || {
        (0..)
            .map(|power| 1 << power)
            .take_while(|&d| d <= MAX_DEGREE)
    };
    let mut all = Vec::new();
    for pp in degrees() {
        for tp in degrees().filter(|tp| cluster.gpus_per_node.is_multiple_of(*tp)) {
            if world_size.is_multiple_of(pp * tp) {
                add_layouts(cluster, pp, tp, &mut all)
            }
        }
    }
    all
}

/// Adds the ways to use the ranks that pipeline and tensor parallelism leave for data parallelism.
fn add_layouts(cluster: &Cluster, pp: usize, tp: usize, all: &mut Vec<Layout>) {
    let num_data_ranks = cluster.world_size() / (pp * tp);
    let mut add = |zero_stage, dp_shard| {
        all.push(Layout {
            degrees: Degrees {
                pp,
                tp,
                dp_shard,
                dp_replicate: num_data_ranks / dp_shard,
                ..Degrees::ONE
            },
            zero_stage,
        });
    };
    add(0, 1);
    if num_data_ranks == 1 {
        return;
    }
    add(1, num_data_ranks);
    if pp > 1 {
        // Stages 2 and 3 would communicate in every micro-batch of the pipeline.
        return;
    }
    add(2, num_data_ranks);
    add(3, num_data_ranks);
    let in_node = cluster.gpus_per_node / tp;
    if in_node > 1 && in_node < num_data_ranks {
        add(3, in_node);
    }
}

impl Layout {
    /// The sizes of a micro-batch to try for a global batch, the largest first; none if the batch cannot be divided.
    ///
    /// The largest one that fits is the fastest, because the device does the same work in fewer kernels. In a pipeline,
    /// smaller ones keep more stages busy: there it has two, four or eight micro-batches per stage.
    pub fn micro_batches(&self, global_batch: usize) -> Vec<usize> {
        let num_data_ranks = self.degrees.data_parallel();
        if !global_batch.is_multiple_of(num_data_ranks) {
            return Vec::new();
        }
        let local_batch = global_batch / num_data_ranks;
        let counts = match self.degrees.pp {
            1 => 1..=MAX_MICROBATCHES,
            pp => 2 * pp..=8 * pp,
        };
        let mut sizes: Vec<usize> = Vec::new();
        for num_microbatches in counts.filter(|&count| local_batch.is_multiple_of(count)) {
            let size = local_batch / num_microbatches;
            if sizes.last().is_none_or(|last| size <= last / 2) {
                sizes.push(size);
            }
        }
        sizes
    }

    /// The ranks that stand for all others: the first rank of every pipeline stage.
    pub fn representatives(&self) -> Vec<usize> {
        let stage_size = self.degrees.world_size() / self.degrees.pp;
        (0..self.degrees.pp)
            .map(|stage| stage * stage_size)
            .collect()
    }
}

/// Whether the planner chooses the value of a config key, so that a user cannot.
pub fn is_chosen(key: &str) -> bool {
    // A sharded pipeline has all the keys that candidates have.
    let with_all_keys = Candidate {
        layout: Layout {
            degrees: Degrees {
                pp: 2,
                ..Degrees::ONE
            },
            zero_stage: 1,
        },
        micro_batch: 1,
        num_microbatches: 1,
        recompute: Recompute::None,
    };
    let mut keys = with_all_keys.keys().into_iter();
    key.ends_with("_degree") || keys.any(|(chosen, _)| chosen == key)
}

impl Candidate {
    /// Samples in a step, over all ranks.
    pub const fn global_batch(&self) -> usize {
        self.micro_batch * self.num_microbatches * self.layout.degrees.data_parallel()
    }

    /// The config keys of the candidate, as overrides on a command line.
    pub fn overrides(&self) -> Vec<String> {
        let keys = self.keys().into_iter();
        keys.map(|(key, value)| format!("--{key}={value}"))
            .collect()
    }

    /// The config keys of the candidate and their values.
    fn keys(&self) -> Vec<(&'static str, String)> {
        let Layout {
            degrees,
            zero_stage,
        } = self.layout;
        let batch = [
            ("training.global_batch_size", self.global_batch()),
            ("training.local_batch_size", self.micro_batch),
        ];
        // Axes that are not tried have size 1, whatever the config says.
        let mesh = [
            (
                "parallelism.data_parallel_replicate_degree",
                degrees.dp_replicate,
            ),
            ("parallelism.data_parallel_shard_degree", degrees.dp_shard),
            ("parallelism.tensor_parallel_degree", degrees.tp),
            ("parallelism.pipeline_parallel_degree", degrees.pp),
            ("parallelism.context_parallel_degree", degrees.cp),
            ("parallelism.expert_parallel_degree", degrees.ep),
        ];
        let sizes = batch.into_iter().chain(mesh);
        let mut keys: Vec<(&'static str, String)> =
            sizes.map(|(key, size)| (key, size.to_string())).collect();
        keys.push(("activation_checkpoint.mode", self.recompute.to_string()));
        if zero_stage > 0 {
            keys.push(("parallelism.zero_stage", zero_stage.to_string()));
        }
        if degrees.pp > 1 {
            keys.push(("parallelism.pipeline_parallel_schedule", "1F1B".to_owned()));
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_node_has_every_kind_of_layout() {
        let all = layouts(&"8xH100".parse().unwrap());
        let has = |text: &str, zero_stage| {
            all.iter()
                .any(|one| one.degrees.to_string() == text && one.zero_stage == zero_stage)
        };
        assert!(has("dp_replicate8", 0));
        for stage in 1..=3 {
            assert!(has("dp_shard8", stage));
        }
        assert!(has("pp8", 0) && has("tp8", 0) && has("pp2 dp_shard2 tp2", 1));
    }

    #[test]
    fn several_nodes_shard_within_a_node_too() {
        let all = layouts(&"16xH100".parse().unwrap());
        let hybrid = |one: &Layout| one.degrees.dp_replicate == 2 && one.degrees.dp_shard == 8;
        assert!(all.iter().any(|one| hybrid(one) && one.zero_stage == 3));
    }

    #[test]
    fn keys_of_candidates_are_chosen_by_the_planner() {
        for key in [
            "training.local_batch_size",
            "training.global_batch_size",
            "activation_checkpoint.mode",
            "parallelism.zero_stage",
            "parallelism.tensor_parallel_degree",
            "parallelism.pipeline_parallel_schedule",
        ] {
            assert!(is_chosen(key), "{key}");
        }
        assert!(!is_chosen("training.mixed_precision_param"));
    }

    #[test]
    fn a_pipeline_has_at_least_two_micro_batches_per_stage() {
        let layout = Layout {
            degrees: Degrees {
                pp: 2,
                ..Degrees::ONE
            },
            zero_stage: 0,
        };
        assert_eq!(layout.micro_batches(64), [16, 8, 4]);
        assert!(layout.micro_batches(3).is_empty());
    }

    proptest! {
        #[test]
        fn layouts_fill_the_cluster_and_micro_batches_the_batch(
            nodes in 1usize..5, gpus in 1usize..9, global_batch in 1usize..300,
        ) {
            let accelerator = crate::Accelerator::named("H100").unwrap();
            let cluster = Cluster::new(accelerator, nodes, gpus).unwrap();
            for layout in layouts(&cluster) {
                prop_assert_eq!(layout.degrees.world_size(), nodes * gpus);
                let samples = global_batch / layout.degrees.data_parallel();
                for size in layout.micro_batches(global_batch) {
                    prop_assert!(samples.is_multiple_of(size));
                }
            }
        }
    }
}
