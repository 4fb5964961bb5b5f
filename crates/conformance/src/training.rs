//! Trains a config step by step and keeps everything that can be compared.

use std::collections::BTreeMap;
use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use tch::{Kind, Tensor};
use trainyard_config::{Config, Dtype};
use trainyard_cost::{CommCounts, Volume};
use trainyard_data::{Batch, Sampler, Source, step_batches};
use trainyard_mesh::Axis;
use trainyard_nn::Parameter;
use trainyard_parallel::DdpOptions;
use trainyard_torch::World;
use trainyard_trace::{Ledger, Purpose, Totals};
use trainyard_train::full_state_dict::full_parameters;
use trainyard_train::{Result, StepOutcome, Trainer, build};

use crate::{Rank, device};

/// A Llama whose step takes milliseconds, with all features of a large one. Its global batch of 24 can be divided over
/// 2, 3 and 4 ranks with 1 and with 2 micro-batches each.
pub fn debug_llama(dtype: Dtype) -> Config {
    let text = "
        [model]
        name = 'llama'
        flavor = 'tiny'
        num_hidden_layers = 2
        hidden_size = 64
        num_attention_heads = 4
        num_key_value_heads = 2
        intermediate_size = 96
        vocab_size = 128
        [training]
        local_batch_size = 24
        global_batch_size = 24
        seq_len = 32
        steps = 20
        [optimizer]
        lr = 3e-3
        [lr_scheduler]
        warmup_steps = 4
    ";
    let mut config = Config::parse(text, &[]).expect("the config above is valid");
    config.training.dtype = dtype;
    config
}

/// The same job on `num_ranks` ranks with `num_microbatches` per step.
pub fn divided(config: &Config, num_ranks: usize, num_microbatches: usize) -> Config {
    let mut config = config.clone();
    let global = config.training.global_batch_size.unwrap_or(1);
    config.training.local_batch_size = global / num_ranks / num_microbatches;
    config
}

/// A job on this rank that the caller steps.
pub struct Session {
    /// The trainer that takes the steps.
    pub trainer: Trainer,
    device: tch::Device,
    sampler: Sampler,
    source: Arc<dyn Source>,
}

impl Session {
    /// Builds the job of a config.
    pub fn new(config: &Config, world: &World) -> Result<Session> {
        Session::with_trainer(
            config,
            world,
            Trainer::new(&config.into(), world, world.device().into())?,
        )
    }

    /// The same with other DDP options.
    pub fn with_options(config: &Config, world: &World, options: DdpOptions) -> Result<Session> {
        Session::with_trainer(
            config,
            world,
            Trainer::with_options(&config.into(), world, world.device().into(), options)?,
        )
    }

    /// The same with a given trainer.
    pub fn with_trainer(config: &Config, world: &World, trainer: Trainer) -> Result<Session> {
        let batching = *trainer.batching();
        Ok(Session {
            device: world.device(),
            sampler: Sampler::new(batching.global, batching.ranks, batching.num_microbatches)?,
            source: build::source(&config.into(), build::Phase::Training)?,
            trainer,
        })
    }

    /// Takes the next step.
    pub fn step(&mut self) -> Result<StepOutcome> {
        let batches = self.batches()?;
        self.trainer.step(&batches)
    }

    /// The micro-batches of this rank in the next step.
    pub fn batches(&self) -> Result<Vec<Batch>> {
        let step = self.trainer.steps_taken();
        let rank = self.trainer.data_group().index();
        Ok(step_batches(
            &*self.source,
            &self.sampler,
            step,
            rank,
            self.device,
        )?)
    }
}

/// The result of a training run.
pub struct Trained {
    /// Mean loss over the global batch, per step.
    pub losses: Vec<f64>,
    /// Norm of the global gradient, per step.
    pub grad_norms: Vec<f64>,
    /// Every parameter after the last step.
    pub parameters: BTreeMap<String, Tensor>,
    /// What the ledger counted over all steps, without the setup.
    pub totals: Totals,
    /// Bytes sent during the steps, as counted by the kernel.
    pub wire_sent: u64,
    /// Bytes that all ranks send per step, in closed form; in a pipeline, all ranks of this stage.
    pub volume: Volume,
    /// Bytes that the ranks with the same shards send in all steps to join replicas that take steps of their own, in closed
    /// form.
    pub outer_volume: Volume,
    /// The number of pipeline stages.
    pub num_stages: usize,
}

/// Trains for `config.training.steps` steps.
pub fn train(config: &Config, world: &World) -> Result<Trained> {
    finish(Session::new(config, world)?, config, world)
}

/// Trains a config on the ranks of a test.
pub fn train_on(rank: &Rank, config: &Config) -> Result<Trained, Box<dyn Error>> {
    let world = rank.join_config(config)?;
    Ok(train(config, &world)?)
}

/// The same job on this rank alone.
pub fn reference(config: &Config) -> Result<Trained> {
    train(&divided(config, 1, 1), &World::single_rank(Ledger::new(0))?)
}

/// Runs `body` on rank 0 only: the reference run is the same on every rank.
pub fn on_rank_0<T, E: Into<Box<dyn Error>>>(
    rank: &Rank,
    body: impl FnOnce() -> Result<T, E>,
) -> Result<Option<T>, Box<dyn Error>> {
    (rank.index() == 0)
        .then(body)
        .transpose()
        .map_err(Into::into)
}

/// The fingerprint of a run. Panics if it differs between ranks.
pub fn agreed_fingerprint(rank: &Rank, run: &Trained) -> Result<Vec<u64>, Box<dyn Error>> {
    let mut all = rank.all_gather(&run.fingerprint())?;
    assert!(
        all.iter().all(|each| *each == all[0]),
        "the result differs between ranks"
    );
    Ok(all.swap_remove(0))
}

/// Takes all steps of a session and collects the result.
pub fn finish(mut session: Session, config: &Config, world: &World) -> Result<Trained> {
    let group = world.world_group()?;
    group.barrier()?.wait()?;
    let (before, wire_before) = (world.ledger().totals(), world.wire_bytes());
    let (mut losses, mut grad_norms) = (Vec::new(), Vec::new());
    for _ in 0..config.training.steps {
        let outcome = session.step()?;
        losses.push(session.trainer.global_loss(&outcome.local_loss)?);
        grad_norms.push(f64::try_from(&outcome.grad_norm)?);
    }
    session.trainer.wait_pending()?;
    let totals = world.ledger().totals() - before;
    group.barrier()?.wait()?;
    let wire_sent = world.wire_bytes().sent - wire_before.sent;
    Ok(Trained {
        losses,
        grad_norms,
        parameters: values(&full_parameters(&session.trainer, world)?),
        totals,
        wire_sent,
        volume: session.trainer.model().volume(
            CommCounts::per_microbatch(session.trainer.batching().num_microbatches),
            world.size(),
        ),
        outer_volume: session.trainer.outer_volume(config.training.steps),
        num_stages: world.mesh().size(Axis::Pp),
    })
}

/// A copy of every parameter on the host, by name.
pub fn values(parameters: &[Parameter]) -> BTreeMap<String, Tensor> {
    parameters
        .iter()
        .map(|p| {
            (
                p.name().to_owned(),
                p.tensor().detach().to_device(tch::Device::Cpu).copy(),
            )
        })
        .collect()
}

/// The largest difference that counts as equal.
#[derive(Debug, Clone, Copy)]
pub struct Tolerance {
    /// Losses, relative.
    pub losses: f64,
    /// Gradient norms, relative.
    pub grad_norms: f64,
    /// Parameters: by largest element in fp64, by norm otherwise.
    pub parameters: f64,
}

impl Tolerance {
    /// The tolerance of a strategy that computes in this type.
    pub fn of(dtype: Dtype) -> Tolerance {
        let all = |bound| Tolerance {
            losses: bound,
            grad_norms: bound,
            parameters: bound,
        };
        match dtype {
            Dtype::Float64 => all(1e-9),
            Dtype::Float32 => all(1e-5),
            Dtype::Bfloat16 | Dtype::Float16 => all(2e-2),
        }
    }
}

impl Trained {
    /// Panics if this run differs from `reference` by more than the tolerance.
    pub fn assert_agrees(&self, reference: &Trained, tolerance: Tolerance) {
        assert_close("loss", &self.losses, &reference.losses, tolerance.losses);
        let (found, expected) = (&self.grad_norms, &reference.grad_norms);
        assert_close("gradient norm", found, expected, tolerance.grad_norms);
        let names = |run: &Trained| run.parameters.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(self), names(reference));
        for (name, expected) in &reference.parameters {
            let difference = distance(&self.parameters[name], expected);
            let allowed = tolerance.parameters;
            assert!(
                difference <= allowed,
                "{name} differs by {difference:e} > {allowed:e}"
            );
        }
    }

    /// Panics if the bytes of all ranks differ from the closed forms (`layer_comm_bytes` is that of the layers per step),
    /// or if the count of the kernel differs from the ledger by more than 2 %.
    pub fn assert_bytes(
        &self,
        rank: &Rank,
        layer_comm_bytes: u64,
        what: &str,
    ) -> Result<(), Box<dyn Error>> {
        let of = |purpose| self.totals.of_purpose(purpose);
        let own = [
            of(Purpose::Gradient).sent_bytes,
            of(Purpose::Parameter).sent_bytes,
            of(Purpose::Activation).sent_bytes,
            self.totals.all_collectives().sent_bytes,
            self.wire_sent,
            self.volume.gradients,
            self.volume.parameters,
        ];
        let all = rank.all_gather(&own)?;
        let sum = |index: usize| all.iter().map(|own| own[index]).sum::<u64>();
        let steps = self.losses.len() as u64;
        let reduced = of(Purpose::Gradient).payload_bytes;
        assert_eq!(reduced, steps * self.volume.reduced, "payload, {what}");
        // Every rank of a stage has the same closed form.
        let ranks_per_stage = (all.len() / self.num_stages) as u64;
        let (gradients, parameters) = (sum(5) / ranks_per_stage, sum(6) / ranks_per_stage);
        assert_eq!(sum(0), steps * gradients, "gradients, {what}");
        assert_eq!(sum(1), steps * parameters, "parameters, {what}");
        assert_eq!(sum(2), steps * layer_comm_bytes, "activations, {what}");
        let ratio = sum(4) as f64 / sum(3) as f64;
        // NCCL's bytes do not pass through sockets of this process.
        assert!(
            device().is_cuda() || (0.98..1.02).contains(&ratio),
            "{what}: the kernel counted {ratio:.4} of the ledger: {all:?}"
        );
        Ok(())
    }

    /// A digest of the run that ranks can compare bit by bit.
    pub fn fingerprint(&self) -> Vec<u64> {
        let bits = self
            .losses
            .iter()
            .chain(&self.grad_norms)
            .map(|x| x.to_bits());
        bits.chain(self.parameters.values().map(fingerprint))
            .collect()
    }
}

/// Panics if a value differs from the expected one by more than the relative tolerance.
pub fn assert_close(what: &str, found: &[f64], expected: &[f64], allowed: f64) {
    assert_eq!(found.len(), expected.len(), "number of {what}s");
    for (index, (f, e)) in found.iter().zip(expected).enumerate() {
        let difference = (f - e).abs() / e.abs().max(f64::MIN_POSITIVE);
        // A NaN is not close to anything.
        let close = difference <= allowed;
        assert!(
            close,
            "{what} {index} is {f}, not {e}: off by {difference:e} > {allowed:e}"
        );
    }
}

/// The relative distance of two tensors: by largest element in fp64, by norm otherwise.
pub fn distance(found: &Tensor, expected: &Tensor) -> f64 {
    let by_element = expected.kind() == Kind::Double;
    let size = |t: &Tensor| {
        if by_element {
            t.abs().max().double_value(&[])
        } else {
            t.norm().double_value(&[])
        }
    };
    let expected = expected.to_kind(Kind::Double);
    let difference = found.to_kind(Kind::Double) - &expected;
    size(&difference) / size(&expected).max(f64::MIN_POSITIVE)
}

/// A hash over all bits of a tensor.
pub fn fingerprint(tensor: &Tensor) -> u64 {
    let num_elements = tensor.numel();
    let mut bytes = vec![0u8; num_elements * tensor.kind().elt_size_in_bytes()];
    let tensor = tensor.to_device(tch::Device::Cpu);
    tensor.contiguous().copy_data_u8(&mut bytes, num_elements);
    let mut hasher = DefaultHasher::new();
    (tensor.size(), bytes).hash(&mut hasher);
    hasher.finish()
}
