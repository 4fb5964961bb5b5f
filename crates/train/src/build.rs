//! From the words of a config to the things they name: a model, a source of data, a strategy.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_config::{
    Config, ContextMethod, Dataset, Dtype, GradientCompression, Ingredient, ModelSpec, Offload,
    ReshardAfterForward, ScoringFunc, is_mixture, read_mixture,
};
use trainyard_data::{Mixture, Mnist, Source, Split, SyntheticImages, SyntheticTokens, TokenFile};
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{
    Builder, ContextParallel, ExpertParallel, Gpt2, Gpt2Config, Intercept, Llama, LlamaConfig,
    Method, Model, MoeConfig, Parameter, Place, RopeScaling, Scoring, Sequence, SimpleCnn, Spread,
    TensorParallel, weights,
};
use trainyard_parallel::{
    Bf16Compression, BucketLimits, Ddp, DdpOptions, FullyShard, GradientHook, OffloadOptions,
    PlainReduction, Precision, RecomputePlan, Recomputing, Reshard, ShardOptions, Stage, Strategy,
};
use trainyard_torch::{ReduceOp, World, ranks_on_this_machine};
use trainyard_trace::Purpose;

use crate::error::{Result, TrainError};
use crate::trainer::loss_axes;

/// libtorch's type of a config's.
pub fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Float32 => Kind::Float,
        Dtype::Float64 => Kind::Double,
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float16 => Kind::Half,
    }
}

/// The sizes of a config's Llama, as the model takes them.
pub fn llama_shape(shape: &trainyard_config::LlamaConfig) -> LlamaConfig {
    LlamaConfig {
        vocab_size: shape.vocab_size,
        hidden_size: shape.hidden_size,
        intermediate_size: shape.intermediate_size,
        num_hidden_layers: shape.num_hidden_layers,
        num_attention_heads: shape.num_attention_heads,
        num_key_value_heads: shape.num_key_value_heads,
        head_dim: shape.head_dim,
        rope_theta: shape.rope_theta,
        rope_scaling: shape.rope_scaling.map(|scaling| RopeScaling {
            factor: scaling.factor,
            low_freq_factor: scaling.low_freq_factor,
            high_freq_factor: scaling.high_freq_factor,
            original_max_position_embeddings: scaling.original_max_position_embeddings,
        }),
        rms_norm_eps: shape.rms_norm_eps,
        tie_word_embeddings: shape.tie_word_embeddings,
        attention_bias: shape.attention_bias,
        qk_norm: shape.qk_norm,
        resid_pdrop: shape.resid_pdrop,
        moe: shape.moe.as_ref().map(moe_shape),
    }
}

/// The experts of a config's model, as the model takes them.
fn moe_shape(shape: &trainyard_config::MoeConfig) -> MoeConfig {
    MoeConfig {
        num_experts: shape.num_experts,
        num_experts_per_tok: shape.num_experts_per_tok,
        moe_intermediate_size: shape.moe_intermediate_size,
        n_shared_experts: shape.n_shared_experts,
        first_k_dense_replace: shape.first_k_dense_replace,
        scoring_func: match shape.scoring_func {
            ScoringFunc::Softmax => Scoring::Softmax,
            ScoringFunc::Sigmoid => Scoring::Sigmoid,
        },
        norm_topk_prob: shape.norm_topk_prob,
        routed_scaling_factor: shape.routed_scaling_factor,
        router_aux_loss_coef: shape.router_aux_loss_coef,
        router_z_loss_coef: shape.router_z_loss_coef,
        bias_update_rate: shape.bias_update_rate,
        capacity_factor: shape.capacity_factor,
    }
}

/// The sizes of a config's GPT-2, as the model takes them.
fn gpt2_shape(shape: &trainyard_config::Gpt2Config) -> Gpt2Config {
    Gpt2Config {
        vocab_size: shape.vocab_size,
        hidden_size: shape.hidden_size,
        intermediate_size: shape.intermediate_size,
        num_hidden_layers: shape.num_hidden_layers,
        num_attention_heads: shape.num_attention_heads,
        max_position_embeddings: shape.max_position_embeddings,
        layer_norm_epsilon: shape.layer_norm_epsilon,
        tie_word_embeddings: shape.tie_word_embeddings,
        resid_pdrop: shape.resid_pdrop,
    }
}

/// What this rank holds of the model, with its initial weights: by formula, or from the file the
/// config names.
pub fn model(config: &Config, world: &World, place: Place) -> Result<Box<dyn Model>> {
    model_with(config, world, builder(config, world, place)?)
}

/// Makes what a rank holds of every parameter.
pub(crate) fn builder(config: &Config, world: &World, place: Place) -> Result<Builder> {
    Ok(Builder::new(config.debug.seed)
        .place(place)
        .kind(kind(config.training.dtype))
        .compute_kind(kind(config.training.compute_dtype()))
        .with_tensor_parallel(tensor_parallel(config, world)?)
        .with_context_parallel(context_parallel(config, world)?)
        .with_expert_parallel(expert_parallel(config, world)?))
}

/// The model a builder makes, with its initial weights.
pub(crate) fn model_with(
    config: &Config,
    world: &World,
    builder: Builder,
) -> Result<Box<dyn Model>> {
    let model: Box<dyn Model> = match config.model.resolve()? {
        ModelSpec::Llama(shape) => {
            let shape = llama_shape(&shape);
            Box::new(Llama::build(&shape, config.training.seq_len, &builder)?)
        }
        ModelSpec::Gpt2(shape) => {
            let shape = gpt2_shape(&shape);
            Box::new(Gpt2::build(&shape, config.training.seq_len, &builder)?)
        }
        ModelSpec::Cnn => Box::new(SimpleCnn::build(&builder)?),
    };
    if let Some(path) = &config.model.initial_weights
        && !builder.is_meta()
    {
        weights::load_part(path, &model, world.mesh(), world.rank())?;
    }
    Ok(model)
}

/// The ranks that share every matrix.
fn tensor_parallel(config: &Config, world: &World) -> Result<TensorParallel> {
    let parallelism = &config.parallelism;
    let sequence = match parallelism.enable_sequence_parallel {
        false => Sequence::Whole,
        true if parallelism.sequence_parallel_regather => Sequence::Regathered,
        true => Sequence::Kept,
    };
    let tp = TensorParallel::new(&world.group(Axis::Tp)?, sequence);
    Ok(tp.overlap(parallelism.enable_async_tensor_parallel))
}

/// The ranks that share every sequence.
pub fn context_parallel(config: &Config, world: &World) -> Result<ContextParallel> {
    let method = match config.parallelism.context_parallel_method {
        ContextMethod::Ring => Method::Ring,
        ContextMethod::Ulysses => Method::Ulysses,
    };
    Ok(ContextParallel::new(&world.group(Axis::Cp)?, method))
}

/// The ranks that have different experts; none where the model has no experts.
fn expert_parallel(config: &Config, world: &World) -> Result<ExpertParallel> {
    if config.model.resolve()?.experts().is_none() {
        return Ok(ExpertParallel::alone());
    }
    let sharers = world.group(AxisSet::of([Axis::Cp, Axis::Tp]))?;
    let skew = config.debug.routing_skew;
    let ep = ExpertParallel::new(&world.group(Axis::Ep)?, &sharers).with_spread(Spread { skew });
    Ok(match experts_on_machine(config, world)? {
        Some(length) => {
            let (within, across) = world.pieces(Axis::Ep, length)?;
            ep.on_machines(&within, &across)
        }
        None => ep,
    })
}

/// How many ranks that share experts are on one machine, where they are on several: as the config says, or
/// the launcher, of whom all ranks must have heard the same.
fn experts_on_machine(config: &Config, world: &World) -> Result<Option<usize>> {
    let told = config.parallelism.expert_parallel_local_degree;
    if told > 0 {
        return Ok(world.mesh().experts_on_machine(told));
    }
    if world.is_fake() || world.mesh().ep() == 1 {
        return Ok(None);
    }
    let own = ranks_on_this_machine().unwrap_or(0) as i64;
    let both = Tensor::from_slice(&[own, -own]);
    world
        .group(Axis::Ep)?
        .all_reduce(&both, ReduceOp::Max, Purpose::Control)?
        .wait()?;
    let both = Vec::<i64>::try_from(&both)?;
    let is_same = both[0] == -both[1];
    let length = usize::try_from(own).unwrap_or(0);
    Ok(world.mesh().experts_on_machine(length).filter(|_| is_same))
}

/// Where samples come from.
pub fn source(config: &Config, validation: bool) -> Result<Arc<dyn Source>> {
    let (dataset, path) = match validation {
        true => (
            config.validation.dataset.unwrap_or(config.training.dataset),
            config.validation.dataset_path.as_ref(),
        ),
        false => (
            config.training.dataset,
            config.training.dataset_path.as_ref(),
        ),
    };
    let path = || {
        path.ok_or_else(|| {
            TrainError::Dataset("training.dataset_path is not set: name the file or folder".into())
        })
    };
    let seq_len = config.training.seq_len;
    // Synthetic validation data comes from another seed, so that it was not trained on.
    let seed = config.debug.seed + u64::from(validation);
    Ok(match (dataset, config.model.resolve()?.decoder()) {
        (Dataset::Synthetic, Some(sizes)) => {
            Arc::new(SyntheticTokens::new(seq_len, sizes.vocab_size, seed)?)
        }
        (Dataset::Synthetic, None) => Arc::new(SyntheticImages::new(seed)),
        (Dataset::Mnist, None) => {
            let split = if validation {
                Split::Test
            } else {
                Split::Train
            };
            Arc::new(Mnist::open(path()?, split)?)
        }
        (Dataset::Tokens, Some(sizes)) => tokens(path()?, seq_len, sizes.vocab_size, seed)?,
        (Dataset::Mnist, Some(_)) => {
            return Err(TrainError::Dataset(
                "mnist is for model.name = \"cnn\"".into(),
            ));
        }
        (Dataset::Tokens, None) => {
            return Err(TrainError::Dataset(
                "tokens are for model.name = \"llama\" or \"gpt2\"".into(),
            ));
        }
    })
}

/// A text in tokens, or a mixture of several.
fn tokens(path: &Path, seq_len: usize, vocab_size: usize, seed: u64) -> Result<Arc<dyn Source>> {
    if !is_mixture(path) {
        return Ok(Arc::new(TokenFile::open(path, seq_len, vocab_size)?));
    }
    let open = |ingredient: Ingredient| -> Result<(Arc<dyn Source>, f64)> {
        let text = TokenFile::open(&ingredient.path, seq_len, vocab_size)?;
        Ok((Arc::new(text), ingredient.weight))
    };
    let sources = read_mixture(path)?.into_iter().map(open);
    Ok(Arc::new(Mixture::new(
        sources.collect::<Result<_>>()?,
        seed,
    )?))
}

/// The model, wrapped in the strategy that the degrees ask for.
pub fn strategy(
    config: &Config,
    model: Rc<dyn Model>,
    world: &World,
    plan: &RecomputePlan,
) -> Result<Box<dyn Strategy>> {
    let mut inside: Vec<Rc<dyn Intercept>> = Vec::new();
    if !plan.is_empty() {
        inside.push(Rc::new(Recomputing::new(Rc::clone(&model), plan.clone())));
    }
    let keeps_all = config.parallelism.offload == Offload::None;
    let num_sharers = world.mesh().size(Axis::DpShard);
    if (num_sharers == 1 || config.parallelism.zero_stage == 0) && keeps_all {
        let options = DdpOptions {
            inside,
            ..ddp_options(config)
        };
        return Ok(Box::new(replicated(model, world, options)?));
    }
    let options = ShardOptions {
        inside,
        offload: offload_options(config, world.rank()),
        ..shard_options(config)
    };
    Ok(Box::new(FullyShard::new(model, world, options)?))
}

/// A model of which every rank holds what its layers compute with.
pub(crate) fn replicated<M: Model>(model: M, world: &World, options: DdpOptions) -> Result<Ddp<M>> {
    let group = world.group(loss_axes())?;
    let has_experts = |p: &Parameter| p.layout().is_of_experts();
    // Experts compute with the tokens of all ranks that have the same ones.
    let experts = match model.parameters().iter().any(has_experts) {
        true => world.group(AxisSet::of([Axis::DpReplicate, Axis::Efsdp]))?,
        false => group.clone(),
    };
    Ok(Ddp::with_experts(model, &group, &experts, options)?)
}

/// Where states are kept. `cpu` means the system's memory file system: main memory, but not the
/// allocator's that layers compute in.
fn offload_options(config: &Config, rank: usize) -> Option<OffloadOptions> {
    let folder = match config.parallelism.offload {
        Offload::None => return None,
        Offload::Cpu => PathBuf::from("/dev/shm").join(format!("trainyard-{}", std::process::id())),
        Offload::Nvme => config
            .parallelism
            .offload_folder
            .clone()
            .unwrap_or_default(),
    };
    Some(OffloadOptions {
        folder,
        rank,
        num_buffers: 3,
    })
}

/// How states are sharded.
pub fn shard_options(config: &Config) -> ShardOptions {
    let parallelism = &config.parallelism;
    ShardOptions {
        stage: match parallelism.zero_stage {
            1 => Stage::OptimizerStates,
            2 => Stage::Gradients,
            _ => Stage::Parameters,
        },
        precision: Precision {
            param: Some(kind(config.training.compute_dtype())),
            reduce: Some(kind(config.reduce_dtype())),
            output: None,
        },
        op: ReduceOp::Sum,
        reshard_after_forward: match parallelism.fsdp_reshard_after_forward {
            ReshardAfterForward::Default => Reshard::Default,
            ReshardAfterForward::Always => Reshard::Always,
            ReshardAfterForward::Never => Reshard::Never,
        },
        prefetch: parallelism.fsdp_prefetch,
        overlap: parallelism.overlap,
        offload: None,
        inside: Vec::new(),
    }
}

/// How gradients are reduced. Losses are divided by the global count, so gradients are summed.
pub fn ddp_options(config: &Config) -> DdpOptions {
    let mib = |megabytes: f64| (megabytes * f64::from(1 << 20)) as u64;
    let hook: Box<dyn GradientHook> = match config.parallelism.gradient_compression {
        GradientCompression::None => Box::new(PlainReduction),
        GradientCompression::Bf16 => Box::new(Bf16Compression),
    };
    DdpOptions {
        op: ReduceOp::Sum,
        buckets: BucketLimits {
            first: mib(config.parallelism.first_bucket_mb),
            rest: mib(config.parallelism.bucket_cap_mb),
        },
        overlap: config.parallelism.overlap,
        find_unused_parameters: config.parallelism.find_unused_parameters,
        hook,
        inside: Vec::new(),
    }
}
