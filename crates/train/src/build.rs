//! Builds models, data sources and strategies from a config.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_config::{
    Choice, Config, ContextMethod, Dataset, Dtype, GradientCompression, LocalUpdateMethod,
    MixtureEntry, ModelSpec, Offload, OffloadStates as OffloadKey, ParallelismSection,
    ParameterCompression, ReshardAfterForward, is_mixture, read_mixture,
};
use trainyard_data::{
    MaskedTokens, Mixture, Mnist, Source, Split, SyntheticImages, SyntheticTokens, TokenFile,
};
use trainyard_mesh::{Axis, AxisSet};
use trainyard_nn::{
    Builder, ContextParallel, ContextParallelMethod, Decoder, Device, ExpertParallel, Model,
    ParallelStyle, Parameter, SequenceParallel, SimpleCnn, SyntheticSkew, TensorParallel,
    UnitHooks, Vit, parallelize, weights,
};
use trainyard_parallel::{
    BlockQuantizer, BucketLimits, CastReduction, Codec, DataParallelWrapper, Ddp, DdpOptions,
    FullyShard, GradientHook, OffloadOptions, OffloadStates, OuterOptimizer, OuterOptions,
    PlainReduction, PowerSgd, PowerSgdOptions, Precision, RandomK, RecomputeHooks, RecomputePlan,
    Reshard, ShardOptions, SparseReduction, Stage, TopK, TwoBitTopK, TwoHopReduction, WrapPolicy,
};
use trainyard_torch::{ReduceOp, World, local_world_size};
use trainyard_trace::{Ledger, Purpose};

use crate::error::{Result, TrainError};
use crate::train_spec::{TrainSpec, WithLoss};
use crate::trainer::loss_axes;

/// The libtorch dtype of a config dtype.
pub fn kind(dtype: Dtype) -> Kind {
    match dtype {
        Dtype::Float32 => Kind::Float,
        Dtype::Float64 => Kind::Double,
        Dtype::Bfloat16 => Kind::BFloat16,
        Dtype::Float16 => Kind::Half,
    }
}

/// This rank's shard of the model with its initial weights: random from the seed, or loaded from
/// `model.initial_weights`.
pub fn model(spec: &TrainSpec, world: &World, device: Device) -> Result<Box<dyn Model>> {
    model_with(spec, world, builder(spec, world, device)?)
}

/// The full model on the meta device.
pub(crate) fn outline(spec: &TrainSpec) -> Result<Box<dyn Model>> {
    let alone = World::single_rank(Ledger::new(0))?;
    let builder = Builder::new(spec.debug.seed).device(Device::Meta);
    model_with(spec, &alone, builder)
}

/// The number of parameters of the full model.
pub(crate) fn num_parameters(spec: &TrainSpec) -> Result<u64> {
    match spec.model.resolve()?.num_parameters() {
        Some(number) => Ok(number),
        None => Ok(outline(spec)?.num_parameters()),
    }
}

/// A builder that creates this rank's shard of every parameter.
pub(crate) fn builder(config: &Config, world: &World, device: Device) -> Result<Builder> {
    let builder = Builder::new(config.debug.seed);
    let builder = if is_sharded(config, world) {
        builder.deferred()
    } else {
        builder
    };
    Ok(builder
        .device(device)
        .kind(kind(config.training.dtype))
        .compute_kind(kind(config.training.compute_dtype()))
        .with_num_loss_chunks(config.training.num_loss_chunks)
        .with_tensor_parallel(tensor_parallel(config, world)?)
        .with_context_parallel(context_parallel(config, world)?)
        .with_expert_parallel(expert_parallel(config, world)?))
}

/// Builds the model with a given builder and loads its initial weights.
pub(crate) fn model_with(
    spec: &TrainSpec,
    world: &World,
    builder: Builder,
) -> Result<Box<dyn Model>> {
    let model: Box<dyn Model> = match spec.model.resolve()? {
        ModelSpec::Decoder(decoder) => {
            Box::new(Decoder::build(&decoder, spec.training.seq_len, &builder)?)
        }
        ModelSpec::Cnn => {
            let tp = world.group(Axis::Tp)?;
            let plan = [
                ("fc1", ParallelStyle::Colwise),
                ("fc2", ParallelStyle::Rowwise),
            ];
            Box::new(parallelize(SimpleCnn::build(&builder)?, &tp, plan)?)
        }
        ModelSpec::Vit(vit) => Box::new(Vit::build(&vit, &builder)?),
        ModelSpec::Custom(name) => spec.registry().build_model(&name, spec, &builder)?,
    };
    if let Some(path) = &spec.model.initial_weights
        && !builder.is_meta()
    {
        weights::load_sharded(path, &model, world.mesh(), world.rank())?;
    }
    Ok(match spec.registry().build_loss(spec)? {
        Some(loss) => Box::new(WithLoss { model, loss }),
        None => model,
    })
}

/// The tensor parallel group and its settings.
fn tensor_parallel(config: &Config, world: &World) -> Result<TensorParallel> {
    let parallelism = &config.parallelism;
    let sequence = match parallelism.enable_sequence_parallel {
        false => SequenceParallel::Disabled,
        true if parallelism.sequence_parallel_regather => SequenceParallel::Regather,
        true => SequenceParallel::SaveGathered,
    };
    let tp = TensorParallel::new(&world.group(Axis::Tp)?, sequence);
    Ok(tp.overlap(parallelism.enable_async_tensor_parallel))
}

/// The context parallel group and its settings.
pub fn context_parallel(config: &Config, world: &World) -> Result<ContextParallel> {
    let method = match config.parallelism.context_parallel_method {
        ContextMethod::Ring => ContextParallelMethod::Ring,
        ContextMethod::Ulysses => ContextParallelMethod::Ulysses,
    };
    Ok(ContextParallel::new(&world.group(Axis::Cp)?, method))
}

/// The expert parallel group and its settings; a group of one for a model without experts.
fn expert_parallel(config: &Config, world: &World) -> Result<ExpertParallel> {
    if config.model.resolve()?.experts().is_none() {
        return Ok(ExpertParallel::disabled());
    }
    let sharers = world.group(AxisSet::of([Axis::Cp, Axis::Tp]))?;
    let skew = config.debug.routing_skew;
    let ep = ExpertParallel::new(&world.group(Axis::Ep)?, &sharers)
        .with_synthetic_skew(SyntheticSkew { skew });
    Ok(match ep_ranks_per_node(config, world)? {
        Some(length) => {
            let (within, across) = world.subgroups(Axis::Ep, length)?;
            ep.hierarchical(&within, &across)
        }
        None => ep,
    })
}

/// The number of expert parallel ranks per node, if they span several nodes: from the config, or from the
/// launcher if all ranks report the same local world size.
fn ep_ranks_per_node(config: &Config, world: &World) -> Result<Option<usize>> {
    let configured = config.parallelism.expert_parallel_local_degree;
    if configured > 0 {
        return Ok(world.mesh().ep_ranks_per_node(configured));
    }
    if world.is_fake() || world.mesh().ep() == 1 {
        return Ok(None);
    }
    let own = local_world_size().unwrap_or(0) as i64;
    // The maximum of both is the maximum and the negated minimum over all ranks.
    let bounds = Tensor::from_slice(&[own, -own]);
    world
        .group(Axis::Ep)?
        .all_reduce(&bounds, ReduceOp::Max, Purpose::Control)?
        .wait()?;
    let bounds = Vec::<i64>::try_from(&bounds)?;
    let is_same = bounds[0] == -bounds[1];
    let length = usize::try_from(own).unwrap_or(0);
    Ok(world.mesh().ep_ranks_per_node(length).filter(|_| is_same))
}

/// What samples are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The samples that the model learns from.
    Training,
    /// Held-out samples that the model is evaluated on.
    Validation,
}

/// Opens the training or validation dataset. Validation uses the dataset and path of training where it has none of
/// its own.
pub fn source(spec: &TrainSpec, phase: Phase) -> Result<Arc<dyn Source>> {
    let (training, validation) = (&spec.training, &spec.validation);
    let is_validation = phase == Phase::Validation;
    let own_dataset = validation.dataset.as_ref().filter(|_| is_validation);
    let dataset = match own_dataset.unwrap_or(&training.dataset) {
        Choice::Builtin(dataset) => *dataset,
        Choice::Custom(name) => return spec.registry().open_dataset(name, spec, phase),
    };
    let own_path = validation.dataset_path.as_ref().filter(|_| is_validation);
    let path = || {
        let path = own_path.or(training.dataset_path.as_ref());
        path.ok_or_else(|| {
            let key = match own_dataset {
                Some(_) => "validation.dataset_path",
                None => "training.dataset_path",
            };
            TrainError::Dataset(format!(
                "{key} is not set: set it to the file or directory of the dataset"
            ))
        })
    };
    let seq_len = training.seq_len;
    // Synthetic validation data has another seed, so that it differs from the training data.
    let seed = spec.debug.seed + u64::from(is_validation);
    let model = spec.model.resolve()?;
    let vocab_size = match &model {
        ModelSpec::Decoder(sizes) => Some(sizes.vocab_size),
        ModelSpec::Cnn | ModelSpec::Vit(_) => None,
        ModelSpec::Custom(_) => spec.model.vocab_size,
    };
    let source: Arc<dyn Source> = match (dataset, vocab_size) {
        (Dataset::Synthetic, Some(size)) => Arc::new(SyntheticTokens::new(seq_len, size, seed)?),
        (Dataset::Synthetic, None) => Arc::new(SyntheticImages::new(seed)),
        (Dataset::Tokens, Some(size)) => tokens(path()?, seq_len, size, seed)?,
        (Dataset::Tokens, None) => {
            return Err(TrainError::Dataset(
                "dataset \"tokens\" needs a model with a vocabulary".into(),
            ));
        }
        (Dataset::Mnist, _) => {
            let split = if is_validation {
                Split::Test
            } else {
                Split::Train
            };
            Arc::new(Mnist::open(path()?, split)?)
        }
    };
    Ok(match model.decoder() {
        // The last token of the vocabulary stands for a masked one.
        Some(encoder) if !encoder.is_causal => {
            let mask_token_id = encoder.vocab_size as i64 - 1;
            Arc::new(MaskedTokens::new(source, mask_token_id, seed))
        }
        _ => source,
    })
}

/// Opens a tokenized dataset, or a mixture of several.
fn tokens(path: &Path, seq_len: usize, vocab_size: usize, seed: u64) -> Result<Arc<dyn Source>> {
    if !is_mixture(path) {
        return Ok(Arc::new(TokenFile::open(path, seq_len, vocab_size)?));
    }
    let open = |entry: MixtureEntry| -> Result<(Arc<dyn Source>, f64)> {
        let text = TokenFile::open(&entry.path, seq_len, vocab_size)?;
        Ok((Arc::new(text), entry.weight))
    };
    let sources = read_mixture(path)?.into_iter().map(open);
    Ok(Arc::new(Mixture::new(
        sources.collect::<Result<_>>()?,
        seed,
    )?))
}

/// Wraps the model in DDP or FSDP (ZeRO), depending on the parallelism degrees.
pub fn strategy(
    config: &Config,
    model: Rc<dyn Model>,
    world: &World,
    plan: &RecomputePlan,
) -> Result<Box<dyn DataParallelWrapper>> {
    let mut unit_hooks: Vec<Rc<dyn UnitHooks>> = Vec::new();
    if !plan.is_empty() {
        unit_hooks.push(Rc::new(RecomputeHooks::new(
            Rc::clone(&model),
            plan.clone(),
        )));
    }
    if !is_sharded(config, world) {
        let options = DdpOptions {
            unit_hooks,
            ..ddp_options(config)
        };
        return Ok(Box::new(replicated(model, world, options)?));
    }
    let options = ShardOptions {
        unit_hooks,
        offload: offload_options(config, world),
        ..shard_options(config)
    };
    Ok(Box::new(FullyShard::new(model, world, options)?))
}

/// Whether the model's states are sharded over data-parallel ranks, or offloaded, which shards them over one.
pub fn is_sharded(config: &Config, world: &World) -> bool {
    let is_split = world.mesh().size(Axis::DpShard) > 1 && config.parallelism.zero_stage > 0;
    is_split || config.parallelism.offload != Offload::None
}

/// Wraps the model in DDP: parameters are not sharded over data-parallel ranks.
pub(crate) fn replicated<M: Model>(model: M, world: &World, options: DdpOptions) -> Result<Ddp<M>> {
    let group = world.group(loss_axes())?;
    let has_experts = |p: &Parameter| p.layout().is_expert();
    // Gradients of experts are reduced over the ranks that hold the same experts.
    let experts = if model.parameters().iter().any(has_experts) {
        world.group(AxisSet::of([Axis::DpReplicate, Axis::Efsdp]))?
    } else {
        group.clone()
    };
    Ok(Ddp::with_experts(model, &group, &experts, options)?)
}

/// Where states are offloaded to. `cpu` uses `/dev/shm`: host memory outside of the libtorch allocator.
fn offload_options(config: &Config, world: &World) -> Option<OffloadOptions> {
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
        states: match config.parallelism.offload_states {
            OffloadKey::All => OffloadStates::All,
            OffloadKey::Optimizer => OffloadStates::Optimizer,
        },
        folder,
        rank: world.rank(),
        device: world.device(),
        num_buffers: 3,
    })
}

/// FSDP options of a config.
pub fn shard_options(config: &Config) -> ShardOptions {
    let parallelism = &config.parallelism;
    ShardOptions {
        stage: Stage::numbered(parallelism.zero_stage).unwrap_or_default(),
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
        shard_experts: parallelism.shard_experts,
        wrap_policy: match parallelism.reduce_bucket_size {
            Some(bytes) => WrapPolicy::MaxBytes(bytes),
            None => WrapPolicy::EveryUnit,
        },
        overlap: parallelism.overlap,
        gradient_codec: codec(parallelism.gradient_compression),
        parameter_codec: parameter_codec(config),
        secondary_shards: parallelism.fsdp_secondary_shards,
        offload: None,
        ..ShardOptions::default()
    }
}

/// How numbers are encoded with this compression, if each of them is.
fn codec(compression: GradientCompression) -> Option<Arc<dyn Codec>> {
    match compression {
        GradientCompression::Int8 => Some(Arc::new(BlockQuantizer::Int8)),
        GradientCompression::Fp8 => Some(Arc::new(BlockQuantizer::Fp8)),
        _ => None,
    }
}

/// How parameters are encoded when they are unsharded.
fn parameter_codec(config: &Config) -> Option<Arc<dyn Codec>> {
    match config.parallelism.parameter_compression {
        ParameterCompression::None => None,
        ParameterCompression::Int8 => Some(Arc::new(BlockQuantizer::Int8)),
        ParameterCompression::Fp8 => Some(Arc::new(BlockQuantizer::Fp8)),
    }
}

/// The communication hook that reduces gradients as a config asks for.
fn gradient_hook(config: &Config) -> Box<dyn GradientHook> {
    let section = &config.parallelism;
    let reduce = config.reduce_dtype();
    let compression = section.gradient_compression;
    match compressing_hook(compression, section.gradient_compression_ratio, section) {
        Some(hook) => hook,
        None if reduce == config.training.dtype => Box::new(PlainReduction),
        None => Box::new(CastReduction(kind(reduce))),
    }
}

/// The hook of a compression; none for those that only change the type.
fn compressing_hook(
    compression: GradientCompression,
    share: f64,
    section: &ParallelismSection,
) -> Option<Box<dyn GradientHook>> {
    Some(match compression {
        GradientCompression::None | GradientCompression::Bf16 | GradientCompression::Fp16 => {
            return None;
        }
        GradientCompression::Int8 | GradientCompression::Fp8 => {
            Box::new(TwoHopReduction::new(codec(compression)?))
        }
        GradientCompression::TopK => Box::new(SparseReduction::new(TopK::new(share))),
        GradientCompression::RandomK => Box::new(RandomK::new(share)),
        GradientCompression::PowerSgd => Box::new(PowerSgd::new(PowerSgdOptions {
            rank: section.power_sgd_rank,
            start_step: section.power_sgd_start_step,
            ..PowerSgdOptions::default()
        })),
    })
}

/// The outer loop of a config, if replicas take steps of their own.
pub fn outer_options(config: &Config) -> Option<OuterOptions> {
    let section = &config.local_updates;
    if section.method == LocalUpdateMethod::None {
        return None;
    }
    let (lr, momentum) = section.outer_optimizer();
    Some(OuterOptions {
        sync_steps: section.sync_steps,
        start_step: section.start_step,
        last_step: config.training.steps,
        num_fragments: section.num_fragments,
        sync_delay: section.fragment_sync_delay,
        update_alpha: section.fragment_update_alpha,
        optimizer: OuterOptimizer {
            lr,
            momentum,
            nesterov: section.outer_nesterov,
        },
        hook: outer_hook(config).into(),
        error_decay: section.error_decay,
    })
}

/// The communication hook that reduces outer gradients.
fn outer_hook(config: &Config) -> Box<dyn GradientHook> {
    let section = &config.local_updates;
    let share = section.compression_ratio;
    if section.method == LocalUpdateMethod::SparseLoco {
        return Box::new(SparseReduction::new(TwoBitTopK::new(share)));
    }
    match section.compression {
        GradientCompression::Bf16 => Box::new(CastReduction(Kind::BFloat16)),
        GradientCompression::Fp16 => Box::new(CastReduction(Kind::Half)),
        compression => compressing_hook(compression, share, &config.parallelism)
            .unwrap_or_else(|| Box::new(PlainReduction)),
    }
}

/// DDP options of a config. Losses are divided by the global target count, so gradients are summed, not
/// averaged.
pub fn ddp_options(config: &Config) -> DdpOptions {
    let mib = |megabytes: f64| (megabytes * f64::from(1 << 20)) as u64;
    DdpOptions {
        op: ReduceOp::Sum,
        buckets: BucketLimits {
            first: mib(config.parallelism.first_bucket_mb),
            rest: mib(config.parallelism.bucket_cap_mb),
        },
        overlap: config.parallelism.overlap,
        find_unused_parameters: config.parallelism.find_unused_parameters,
        hook: gradient_hook(config),
        ..DdpOptions::default()
    }
}
