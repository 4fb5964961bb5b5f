//! Activation memory of a block, counted by the allocator.

use trainyard_config::{Config, Dtype};
use trainyard_conformance::training::{Session, divided};
use trainyard_conformance::{Outcome, Rank};
use trainyard_nn::{Context, run};
use trainyard_schedule::{Costs, ScheduleKind, simulate};
use trainyard_torch::memory;
use trainyard_trace::MemoryKind;
use trainyard_train::build;

use super::equality::{SEQUENCES, SequenceParallel, job, tensor_parallel};
use super::pipeline::{even, piped};

/// A model under measurement.
struct Sizes {
    num_heads: u64,
    num_kv_heads: u64,
}

/// Tokens of a batch and dimensions of every model here.
const TOKENS: u64 = 24 * 32;
const WIDTH: u64 = 64;
const INNER: u64 = 96;

impl Sizes {
    /// Bytes of a block with `t` ranks, in single precision; see `docs/src/tensor-parallel.md`.
    fn closed_form(&self, t: u64, sequence: SequenceParallel) -> u64 {
        let whole = TOKENS * WIDTH;
        let (between, gathered) = match sequence {
            SequenceParallel::Disabled => (whole, whole),
            SequenceParallel::SaveGathered => (whole / t, whole),
            SequenceParallel::Regather => (whole / t, whole / t),
        };
        // Inputs of both norms with one number per row, and their outputs.
        let norms = 2 * (between + between / WIDTH) + 2 * gathered;
        // Queries, keys, values, the output, and the log-sum-exp per query and head.
        let head_dim = WIDTH / self.num_heads;
        let queries = TOKENS * WIDTH / t;
        let keys = if self.num_kv_heads <= t {
            TOKENS * head_dim
        } else {
            queries
        };
        let attention = 2 * queries + 2 * keys + TOKENS * self.num_heads / t;
        // Gate, its activation, up, and their product.
        let mlp = 4 * TOKENS * INNER / t;
        4 * (norms + attention + mlp)
    }
}

/// The difference between models of three and of two blocks, after forward.
pub fn activations(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("memory by kind is counted on the host only") {
        return Ok(());
    }
    memory::observe();
    for (num_heads, num_kv_heads) in [(4, 2), (16, 8)] {
        let sizes = Sizes {
            num_heads,
            num_kv_heads,
        };
        for sequence in SEQUENCES {
            let mut config = tensor_parallel(&job(Dtype::Float32), rank.size(), sequence);
            config.model.num_attention_heads = Some(num_heads as usize);
            config.model.num_key_value_heads = Some(num_kv_heads as usize);
            let (two, three) = (kept(rank, &config, 2)?, kept(rank, &config, 3)?);
            let expected = sizes.closed_form(rank.size() as u64, sequence);
            let what = format!("{num_heads} heads, {sequence:?} on {} ranks", rank.size());
            assert_eq!(three - two, expected, "{what}");
        }
    }
    Ok(())
}

/// Bytes of activations that a forward pass leaves allocated.
fn kept(
    rank: &Rank,
    config: &Config,
    num_layers: usize,
) -> Result<u64, Box<dyn std::error::Error>> {
    let mut config = divided(config, 1, 1);
    config.model.num_hidden_layers = Some(num_layers);
    let world = rank.join_config(&config)?;
    let model = build::model(&(&config).into(), &world, world.device().into())?;
    let tokens = tch::Tensor::zeros([24, 32], (tch::Kind::Int64, world.device()));
    let held = || -> Result<u64, Box<dyn std::error::Error>> { Ok(memory::report()?.total) };
    let before = held()?;
    let pass = memory::scope(MemoryKind::Activation, || {
        run(&model, &tokens, &Context::training(0), &[])
    })?;
    let after = held()?;
    drop(pass);
    Ok(after - before)
}

/// In a pipeline a rank holds the activations of exactly as many micro-batches as the schedule has in flight.
pub fn in_flight(rank: &Rank) -> Outcome {
    if rank.skips_on_gpu("memory by kind is counted on the host only") {
        return Ok(());
    }
    memory::observe();
    let (one, two) = (peak(rank, "gpipe", 1)?.0, peak(rank, "gpipe", 2)?.0);
    for (name, kind) in [
        ("gpipe", ScheduleKind::GPipe),
        ("1f1b", ScheduleKind::OneForwardOneBackward),
    ] {
        let num_microbatches = 6;
        let schedule = kind.build(rank.size(), num_microbatches, 1)?;
        let predicted = simulate(&schedule, &Costs::uniform(1.0, 1.0, 1.0))?.max_in_flight();
        let (peak, gradients) = peak(rank, name, num_microbatches)?;
        // GPipe's activations peak before the first gradient; with 1F1B the gradients exist at the peak.
        let gradients = if kind == ScheduleKind::GPipe {
            0
        } else {
            gradients
        };
        let found = 1.0 + (peak as f64 - gradients as f64 - one as f64) / (two - one) as f64;
        // Messages between stages are small compared with the activations of a stage.
        let off = (found - predicted[rank.index()] as f64).abs();
        assert!(off < 0.25, "{name}: {found:.3}, not {predicted:?}");
    }
    Ok(())
}

/// Peak bytes of a step beyond the memory between steps, with micro-batches of two samples, and the bytes of gradients
/// among them.
fn peak(
    rank: &Rank,
    schedule: &str,
    num_microbatches: usize,
) -> Result<(u64, u64), Box<dyn std::error::Error>> {
    let mut config = piped(&even(Dtype::Float32), rank.size(), schedule);
    config.training.local_batch_size = 2;
    config.training.global_batch_size = Some(2 * num_microbatches);
    let world = rank.join_config(&config)?;
    let mut session = Session::new(&config, &world)?;
    // The first step allocates what stays.
    session.step()?;
    let before = memory::report()?.total;
    memory::reset_peak();
    session.step()?;
    let peak = memory::report()?.peak.saturating_sub(before);
    let parameters = session.trainer.parameters().iter();
    let gradients = parameters.map(|p| 4 * p.tensor().numel() as u64).sum();
    Ok((peak, gradients))
}
