//! GPT-2: biases, learned positions, and a vocabulary that no number of ranks divides evenly.

use trainyard_config::{Config, Dtype, ModelName, ModelSection, OptimizerName};
use trainyard_conformance::training::Tolerance;
use trainyard_conformance::{Outcome, Rank};

use super::bytes::check;
use super::equality::{
    METHODS, SEQUENCES, SequenceParallel, context_parallel, equal_one_rank, equal_within, job,
    recomputation_changes_no_bit, tensor_parallel,
};
use super::pipeline::piped;

fn gpt2(dtype: Dtype) -> Config {
    let mut config = job(dtype);
    // At the learning rate of the other model, gradients triple within five steps, and rounding errors with them.
    config.optimizer.lr = 1e-3;
    config.model = ModelSection {
        name: ModelName::Gpt2.into(),
        vocab_size: Some(127),
        hidden_size: Some(64),
        intermediate_size: Some(96),
        num_hidden_layers: Some(4),
        num_attention_heads: Some(4),
        max_position_embeddings: Some(40),
        ..ModelSection::default()
    };
    config
}

/// Every strategy, over all ranks.
fn variants(rank: &Rank, config: &Config) -> Vec<Config> {
    let shared = SEQUENCES.map(|sequence| tensor_parallel(config, rank.size(), sequence));
    let cut = METHODS.map(|method| context_parallel(config, rank.size(), method));
    let sharded = [1, 3].map(|zero_stage| {
        let mut config = config.clone();
        config.parallelism.data_parallel_shard_degree = -1;
        config.parallelism.zero_stage = zero_stage;
        config
    });
    [&shared[..], &cut, &sharded].concat()
}

pub fn fp64(rank: &Rank) -> Outcome {
    let config = gpt2(Dtype::Float64);
    let mut all = variants(rank, &config);
    if rank.size() == 4 {
        let halves = tensor_parallel(&config, 2, SequenceParallel::SaveGathered);
        all.push(context_parallel(&halves, 2, METHODS[0]));
        all.push(halves);
    }
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

/// With SGD: a bias of keys shifts all scores of a query equally, so its gradient is pure rounding error, which Adam
/// would scale to steps of full size.
pub fn bf16(rank: &Rank) -> Outcome {
    let mut config = gpt2(Dtype::Float32);
    config.optimizer.name = OptimizerName::Sgd.into();
    config.optimizer.lr = 0.1;
    config.training.mixed_precision_param = Some(Dtype::Bfloat16);
    // Biases start at zero, so they consist of rounded gradients only.
    let tolerance = Tolerance {
        parameters: 4e-2,
        ..Tolerance::of(Dtype::Bfloat16)
    };
    equal_within(rank, &config, tolerance, &variants(rank, &config))
}

/// With a separate head, and with a tied one, whose gradient is the sum of those of two stages.
pub fn pipelines(rank: &Rank) -> Outcome {
    for is_tied in [false, true] {
        let mut config = gpt2(Dtype::Float64);
        config.model.tie_word_embeddings = Some(is_tied);
        let all = ["1f1b", "zb-h1"].map(|schedule| piped(&config, rank.size(), schedule));
        equal_one_rank(rank, &config, Dtype::Float64, &all)?;
    }
    Ok(())
}

pub fn recomputation(rank: &Rank) -> Outcome {
    let config = tensor_parallel(
        &gpt2(Dtype::Float32),
        rank.size(),
        SequenceParallel::SaveGathered,
    );
    recomputation_changes_no_bit(rank, &config)
}

pub fn bytes(rank: &Rank) -> Outcome {
    let config = gpt2(Dtype::Float32);
    let mut all = variants(rank, &config).into_iter();
    all.try_for_each(|config| check(rank, &config))
}
