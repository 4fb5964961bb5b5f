//! Checkpoints of every mesh load on every other mesh, with the same state to the bit and the same losses.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use trainyard_checkpoint::{Checkpoint, Store, TrainState, step_dir, store};
use trainyard_config::{
    Config, Dtype, GradientCompression, LocalUpdateMethod, MoeSection, ParallelismSection,
};
use trainyard_conformance::training::{Session, debug_llama, divided};
use trainyard_conformance::{Outcome, Rank, is_full_run};
use trainyard_mesh::{Axis, Mesh};
use trainyard_torch::World;
use trainyard_train::{checkpoint, data_axes};

/// The step of the save, and the number of steps after it.
const SAVED: u64 = 3;
const MORE: usize = 10;
const TOLERANCE: f64 = 1e-9;

/// A job on some of the ranks.
struct Job {
    name: &'static str,
    config: Config,
    mesh: Mesh,
}

impl Job {
    fn new(
        name: &'static str,
        num_ranks: usize,
        change: impl FnOnce(&mut ParallelismSection),
    ) -> Result<Job, Box<dyn Error>> {
        Job::of(debug_llama(Dtype::Float64), name, num_ranks, change)
    }

    /// The same with experts and an expert bias; only experts are sharded unless a ZeRO stage is given.
    fn with_experts(
        name: &'static str,
        num_ranks: usize,
        change: impl FnOnce(&mut ParallelismSection),
    ) -> Result<Job, Box<dyn Error>> {
        let mut config = debug_llama(Dtype::Float64);
        config.model.moe = Some(MoeSection {
            num_experts: Some(8),
            moe_intermediate_size: Some(24),
            n_shared_experts: Some(1),
            bias_update_rate: Some(1e-2),
            router_aux_loss_coef: Some(1e-2),
            ..MoeSection::default()
        });
        config.parallelism.data_parallel_shard_degree = -1;
        config.parallelism.zero_stage = 0;
        Job::of(config, name, num_ranks, change)
    }

    fn of(
        mut config: Config,
        name: &'static str,
        num_ranks: usize,
        change: impl FnOnce(&mut ParallelismSection),
    ) -> Result<Job, Box<dyn Error>> {
        change(&mut config.parallelism);
        let mesh = config.mesh(num_ranks)?;
        let num_microbatches = if config.parallelism.pipeline_parallel_degree > 1 {
            3
        } else {
            1
        };
        let config = divided(&config, mesh.size_of(data_axes()), num_microbatches);
        Ok(Job { name, config, mesh })
    }
}

fn savers() -> Result<Vec<Job>, Box<dyn Error>> {
    Ok(vec![
        Job::new("ddp on 4", 4, |_| ())?,
        Job::new("ZeRO 3 on 4", 4, |p| p.data_parallel_shard_degree = -1)?,
        Job::new("tp 2, dp 2", 4, |p| p.tensor_parallel_degree = 2)?,
        Job::new("pp 2, tp 2", 4, |p| {
            p.tensor_parallel_degree = 2;
            p.pipeline_parallel_degree = 2;
        })?,
        Job::new("pp 2, dp_shard 2, tp 2", 8, |p| {
            p.tensor_parallel_degree = 2;
            p.pipeline_parallel_degree = 2;
            p.data_parallel_shard_degree = -1;
        })?,
    ])
}

fn loaders() -> Result<Vec<Job>, Box<dyn Error>> {
    let mut jobs = savers()?;
    jobs.push(Job::new("one rank", 1, |_| ())?);
    jobs.push(Job::new("ZeRO 1 on 2", 2, |p| {
        p.data_parallel_shard_degree = -1;
        p.zero_stage = 1;
    })?);
    jobs.push(Job::new("ZeRO 3 on 3", 3, |p| {
        p.data_parallel_shard_degree = -1
    })?);
    jobs.push(Job::new("ZeRO 2 on 8", 8, |p| {
        p.data_parallel_shard_degree = 4;
        p.data_parallel_replicate_degree = 2;
        p.zero_stage = 2;
    })?);
    Ok(jobs)
}

pub fn any_to_any(rank: &Rank) -> Outcome {
    each_to_each(rank, &savers()?, &loaders()?)
}

/// Jobs with experts, with and without sharding.
pub fn experts(rank: &Rank) -> Outcome {
    let savers = || -> Result<Vec<Job>, Box<dyn Error>> {
        Ok(vec![
            Job::with_experts("ep 4", 4, |p| p.expert_parallel_degree = 4)?,
            Job::with_experts("ep 2, ZeRO 3 on 4", 4, |p| {
                p.expert_parallel_degree = 2;
                p.zero_stage = 3;
            })?,
            Job::with_experts("pp 2, ep 4 over tp 2 and dp_shard 2", 8, |p| {
                p.pipeline_parallel_degree = 2;
                p.tensor_parallel_degree = 2;
                p.expert_parallel_degree = 4;
                p.zero_stage = 1;
            })?,
        ])
    };
    let mut loaders = savers()?;
    loaders.push(Job::with_experts("one rank", 1, |_| ())?);
    loaders.push(Job::with_experts("ep 8", 8, |p| {
        p.expert_parallel_degree = 8
    })?);
    each_to_each(rank, &savers()?, &loaders)
}

/// What a compressor has not sent yet is saved as a sum over ranks, and divided over those that load it.
pub fn gradient_errors(rank: &Rank) -> Outcome {
    let compressed = |name, num_ranks, compression| {
        Job::of(debug_llama(Dtype::Float32), name, num_ranks, |p| {
            p.gradient_compression = compression;
            p.power_sgd_start_step = 0;
        })
    };
    let folder = shared_folder(rank)?;
    for compression in [GradientCompression::TopK, GradientCompression::PowerSgd] {
        let saver = compressed("2 ranks", 2, compression)?;
        let saved = folder.join(compression.name());
        trained_and_saved(rank, &saver, &saved)?;
        let loader = compressed("4 ranks", 4, compression)?;
        let again = folder.join(format!("{}-again", compression.name()));
        loaded_and_trained(rank, &loader, &saved, &again)?;
        if rank.index() == 0 {
            assert_same_state(&saved, &again, compression.name())?;
            let saved = Checkpoint::open(store::open(&saved)?, &step_dir(SAVED))?;
            let names = saved.manifest().tensors.keys();
            let mut errors = names.filter(|name| name.contains("gradient_error"));
            let has_values =
                |name: &String| saved.read_tensor(name).map(|t| t.iter().any(|&b| b != 0));
            assert!(errors.any(|name| has_values(name).unwrap_or(false)));
        }
        // A job without compression ignores the errors.
        let plain = compressed("plain", 4, GradientCompression::None)?;
        let again = folder.join(format!("{}-plain", compression.name()));
        loaded_and_trained(rank, &plain, &saved, &again)?;
    }
    Ok(())
}

/// Replicas that take steps of their own are saved between two outer steps: their mean, and what the outer loop remembers.
pub fn local_updates(rank: &Rank) -> Outcome {
    let job = |name, num_ranks, num_replicas, method, shards: bool| {
        let mut config = debug_llama(Dtype::Float32);
        config.local_updates.method = method;
        config.local_updates.sync_steps = SAVED + 2;
        Job::of(config, name, num_ranks, |p| {
            p.data_parallel_outer_degree = num_replicas;
            if shards {
                p.data_parallel_shard_degree = -1;
            }
        })
    };
    use LocalUpdateMethod::{Diloco, None, SparseLoco};
    let folder = shared_folder(rank)?;
    for method in [Diloco, SparseLoco] {
        let name = format!("{method:?}");
        let saved = folder.join(&name);
        trained_and_saved(rank, &job("two of two", 4, 2, method, false)?, &saved)?;
        let loaders = [
            job("four of one", 4, 4, method, false)?,
            job("two of two, sharded", 4, 2, method, true)?,
            job("one of two", 2, 1, method, false)?,
            job("synchronous", 4, 1, None, false)?,
        ];
        for loader in &loaders {
            let again = folder.join(format!("{name}-{}", loader.name));
            loaded_and_trained(rank, loader, &saved, &again)?;
            // A single replica keeps no errors, and a synchronous job no outer parameters.
            let has_all = loader.mesh.size(Axis::DpOuter) > 1;
            if rank.index() == 0 && has_all {
                assert_same_state(&saved, &again, loader.name)?;
            }
        }
    }
    Ok(())
}

/// Every loader loads what its own mesh or the one before it has saved; in a full CI run, what every mesh has saved.
fn each_to_each(rank: &Rank, savers: &[Job], loaders: &[Job]) -> Outcome {
    let folder = shared_folder(rank)?;
    for (number, saver) in savers.iter().enumerate() {
        let saved = folder.join(format!("saved-{number}"));
        let expected = trained_and_saved(rank, saver, &saved)?;
        for (other, loader) in loaders.iter().enumerate() {
            let distance = (other + savers.len() - number) % savers.len();
            if distance > 1 && !is_full_run() {
                continue;
            }
            let again = folder.join(format!("again-{number}-{other}"));
            let found = loaded_and_trained(rank, loader, &saved, &again)?;
            let what = format!("saved by {}, loaded by {}", saver.name, loader.name);
            if rank.index() == 0 {
                assert_same_state(&saved, &again, &what)?;
                if saver.name == loader.name {
                    assert_eq!(expected, found, "{what}")
                } else {
                    assert_close(&expected, &found, &what)
                }
            }
        }
    }
    Ok(())
}

/// A directory of rank 0 that all ranks use.
pub fn shared_folder(rank: &Rank) -> Result<PathBuf, Box<dyn Error>> {
    let own = match rank.index() {
        0 => tempfile::tempdir()?.keep(),
        _ => PathBuf::new(),
    };
    Ok(rank.all_gather(&own)?.swap_remove(0))
}

/// Trains, saves, and continues. Returns the losses after the save.
fn trained_and_saved(rank: &Rank, job: &Job, folder: &Path) -> Result<Vec<f64>, Box<dyn Error>> {
    let Some(world) = rank.join_subset(job.mesh.clone())? else {
        rank.barrier()?;
        return Ok(Vec::new());
    };
    let mut session = Session::new(&job.config, &world)?;
    for _ in 0..SAVED {
        session.step()?;
    }
    save(&session, &world, folder)?;
    let losses = losses(&mut session)?;
    rank.barrier()?;
    Ok(losses)
}

/// Loads a checkpoint, saves it again at once, and continues.
fn loaded_and_trained(
    rank: &Rank,
    job: &Job,
    saved: &Path,
    again: &Path,
) -> Result<Vec<f64>, Box<dyn Error>> {
    let Some(world) = rank.join_subset(job.mesh.clone())? else {
        rank.barrier()?;
        return Ok(Vec::new());
    };
    let mut session = Session::new(&job.config, &world)?;
    let store = store::open(saved)?;
    let newest = checkpoint::latest(&*store, &world)?.ok_or("nothing was saved")?;
    checkpoint::load_step(store, &newest, &mut session.trainer, &world)?;
    session.trainer.resume_at(SAVED, 0);
    save(&session, &world, again)?;
    let losses = losses(&mut session)?;
    rank.barrier()?;
    Ok(losses)
}

fn save(session: &Session, world: &World, folder: &Path) -> Result<(), Box<dyn Error>> {
    let state = TrainState {
        step: SAVED,
        samples_seen: 0,
        seed: 0,
        world_size: world.size(),
        config: String::new(),
        extra_state: serde_json::Value::Null,
    };
    let place = checkpoint::Destination {
        store: store::open(folder)?,
        keep: 0,
        is_async: true,
        is_durable: true,
        owner: None,
    };
    let mut saver = checkpoint::Saver::new(world)?;
    saver.save(&session.trainer, world, state, &[place])?;
    saver.finish();
    world.world_group()?.barrier()?.wait()?;
    Ok(())
}

fn losses(session: &mut Session) -> Result<Vec<f64>, Box<dyn Error>> {
    let mut losses = Vec::new();
    for _ in 0..MORE {
        let outcome = session.step()?;
        losses.push(session.trainer.global_loss(&outcome.local_loss)?);
    }
    session.trainer.wait_pending()?;
    Ok(losses)
}

fn assert_close(expected: &[f64], found: &[f64], what: &str) {
    for (step, (expected, found)) in expected.iter().zip(found).enumerate() {
        let off = ((expected - found) / expected).abs();
        assert!(
            off <= TOLERANCE,
            "{what}: loss {step} is {found}, not {expected}"
        );
    }
    assert_eq!(expected.len(), MORE, "{what}");
}

/// Asserts that both contain the same tensors to the bit, however they are sharded.
fn assert_same_state(first: &Path, second: &Path, what: &str) -> Result<(), Box<dyn Error>> {
    let open = |folder: &Path| -> Result<Checkpoint, Box<dyn Error>> {
        let store: Arc<dyn Store> = store::open(folder)?;
        Ok(Checkpoint::open(store, &step_dir(SAVED))?)
    };
    let (first, second) = (open(first)?, open(second)?);
    let names: Vec<&String> = first.manifest().tensors.keys().collect();
    assert!(
        names.iter().any(|name| name.starts_with("optimizer/")),
        "{what}"
    );
    assert_eq!(
        names,
        second.manifest().tensors.keys().collect::<Vec<_>>(),
        "{what}"
    );
    for name in names {
        assert_eq!(
            first.read_tensor(name)?,
            second.read_tensor(name)?,
            "{what}: {name}"
        );
    }
    Ok(())
}
