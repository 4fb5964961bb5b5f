//! The presets that are no decoders, under every strategy: the CNN, the encoder and the vision transformer.

use trainyard_config::{
    ActivationCheckpointMode, Config, ContextMethod, Dtype, ModelName, ModelSection, OptimizerName,
};
use trainyard_conformance::training::{
    Tolerance, agreed_fingerprint, assert_close, divided, on_rank_0, reference, train_on,
};
use trainyard_conformance::{Outcome, Rank};

use super::equality::{
    SEQUENCES, SequenceParallel, context_parallel, equal_one_rank, equal_within, job,
    num_data_ranks, tensor_parallel,
};
use super::pipeline::piped;

fn preset(name: ModelName, dtype: Dtype) -> Config {
    let mut config = job(dtype);
    config.training.steps = 4;
    config.optimizer.lr = 1e-3;
    let plain = ModelSection {
        name: name.into(),
        ..ModelSection::default()
    };
    config.model = match name {
        ModelName::Encoder => ModelSection {
            vocab_size: Some(127),
            hidden_size: Some(64),
            intermediate_size: Some(96),
            num_hidden_layers: Some(4),
            num_attention_heads: Some(4),
            max_position_embeddings: Some(40),
            ..plain
        },
        _ => plain,
    };
    config
}

/// Data parallelism, every stage of ZeRO, tensor parallelism, a pipeline and recomputation, over all ranks.
fn variants(rank: &Rank, config: &Config) -> Vec<Config> {
    let replicated = {
        let mut config = config.clone();
        config.parallelism.data_parallel_replicate_degree = rank.size() as i64;
        config
    };
    let sharded = [1, 2, 3].map(|zero_stage| {
        let mut config = config.clone();
        config.parallelism.data_parallel_shard_degree = -1;
        config.parallelism.zero_stage = zero_stage;
        config
    });
    let mut recomputed = replicated.clone();
    recomputed.activation_checkpoint.mode = ActivationCheckpointMode::Full;
    let piped = piped(config, rank.size(), "1f1b");
    let sharded_layers = tensor_parallel(config, rank.size(), SequenceParallel::Disabled);
    let mut all = vec![replicated, recomputed, piped, sharded_layers];
    all.extend(sharded);
    all
}

fn fp64(rank: &Rank, name: ModelName) -> Outcome {
    let config = preset(name, Dtype::Float64);
    let mut all = variants(rank, &config);
    if name == ModelName::Encoder {
        all.extend(SEQUENCES.map(|sequence| tensor_parallel(&config, rank.size(), sequence)));
        all.push(context_parallel(
            &config,
            rank.size(),
            ContextMethod::Ulysses,
        ));
    }
    equal_one_rank(rank, &config, Dtype::Float64, &all)
}

pub fn cnn(rank: &Rank) -> Outcome {
    fp64(rank, ModelName::Cnn)
}

pub fn encoder(rank: &Rank) -> Outcome {
    fp64(rank, ModelName::Encoder)
}

pub fn vit(rank: &Rank) -> Outcome {
    fp64(rank, ModelName::Vit)
}

/// The jobs of half precision. With SGD, as for GPT-2: Adam would scale gradients of pure rounding error to steps of full size.
fn halves(dtype: Dtype) -> [Config; 3] {
    [ModelName::Cnn, ModelName::Encoder, ModelName::Vit].map(|name| {
        let mut config = preset(name, Dtype::Float32);
        config.optimizer.name = OptimizerName::Sgd.into();
        config.optimizer.lr = 0.01;
        config.training.mixed_precision_param = Some(dtype);
        // Convolutions in half precision are slow on a CPU.
        config.training.steps = 2;
        config.training.global_batch_size = Some(4);
        config
    })
}

pub fn bf16(rank: &Rank) -> Outcome {
    // Biases start at zero, so they consist of rounded gradients only.
    let tolerance = Tolerance {
        parameters: 5e-2,
        ..Tolerance::of(Dtype::Bfloat16)
    };
    for config in halves(Dtype::Bfloat16) {
        equal_within(rank, &config, tolerance, &variants(rank, &config))?;
    }
    Ok(())
}

/// Losses only: with another division of the batch, other steps overflow and are skipped until the loss scale fits.
pub fn fp16(rank: &Rank) -> Outcome {
    for config in halves(Dtype::Float16) {
        let expected = on_rank_0(rank, || reference(&config.on_one_rank()))?;
        for variant in variants(rank, &config) {
            let variant = divided(&variant, num_data_ranks(rank, &variant)?, 1);
            let run = train_on(rank, &variant)?;
            agreed_fingerprint(rank, &run)?;
            if let Some(expected) = &expected {
                assert_close("loss", &run.losses, &expected.losses, 2e-2);
            }
        }
    }
    Ok(())
}
