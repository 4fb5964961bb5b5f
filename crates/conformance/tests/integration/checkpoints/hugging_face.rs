//! Hugging Face models: read on any mesh, and written back.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use tch::{Kind, Tensor};
use trainyard_arch::DecoderConfig;
use trainyard_checkpoint::{Checkpoint, ExportOptions, TrainState, export, step_dir, store};
use trainyard_config::{Config, Dtype, ModelSection};
use trainyard_conformance::training::debug_llama;
use trainyard_conformance::{Outcome, Rank, programs};
use trainyard_mesh::{Axis, chunk};
use trainyard_nn::Context;
use trainyard_torch::World;
use trainyard_train::{Trainer, checkpoint};

use super::meshes::shared_folder;

const FAMILIES: [&str; 12] = [
    "llama",
    "qwen2",
    "qwen3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "gemma3_text",
    "olmo2",
    "olmo3",
    "phi3",
    "deepseek_v2",
    "deepseek_v3",
];
const TOLERANCE: f64 = 1e-4;

/// Logits equal those of `transformers` on one rank and with tensor parallelism over two; `transformers` loads what was
/// written back and computes the same.
pub fn there_and_back(rank: &Rank) -> Outcome {
    if let Some(reason) = missing() {
        eprintln!("skipped: {reason}");
        return Ok(());
    }
    let folder = shared_folder(rank)?;
    // One process makes all models and one checks them all, because importing `transformers` takes seconds.
    if rank.index() == 0 {
        transformers("make", &folder)?;
    }
    rank.barrier()?;
    for family in FAMILIES {
        let model = folder.join(family);
        let mut config = config(&model);
        if rank.index() == 0 {
            let alone = World::single_rank(trainyard_trace::Ledger::new(0))?;
            check_logits(&config, &alone, &model)?;
        }
        config.parallelism.tensor_parallel_degree = rank.size() as i64;
        if config.model.resolve()?.experts().is_some() {
            config.parallelism.expert_parallel_degree = rank.size() as i64;
        }
        let world = rank.join_config(&config)?;
        let trainer = check_logits(&config, &world, &model)?;
        let saved = folder.join(format!("{family}-saved"));
        save(&trainer, &config, &world, &saved)?;
        if rank.index() == 0 {
            let back = folder.join(format!("{family}-back"));
            written_back(&config, &saved, &back)?;
        }
        rank.barrier()?;
    }
    if rank.index() == 0 {
        transformers("check", &folder)?;
    }
    Ok(rank.barrier()?)
}

/// The reason why the comparison is not possible, if there is one.
fn missing() -> Option<String> {
    let python = match programs::python() {
        Ok(python) => python,
        Err(reason) => return Some(reason),
    };
    let imported = programs::run(Command::new(python).args(["-c", "import transformers"]));
    let hint = "transformers is not installed: pip install transformers";
    imported.err().map(|_| hint.to_owned())
}

fn config(folder: &Path) -> Config {
    let mut config = debug_llama(Dtype::Float32);
    config.model = ModelSection {
        hf_assets_path: Some(folder.to_owned()),
        ..ModelSection::default()
    };
    config
}

/// Loads the model and compares the logits of this rank.
fn check_logits(config: &Config, world: &World, folder: &Path) -> Result<Trainer, Box<dyn Error>> {
    let mut trainer = Trainer::new(&config.into(), world, world.device().into())?;
    checkpoint::load_step(store::open(folder)?, ".", &mut trainer, world)?;
    let expected = Tensor::read_safetensors(folder.join("expected.st"))?;
    let find = |name: &str| expected.iter().find(|(found, _)| found == name);
    let (_, tokens) = find("tokens").ok_or("no tokens")?;
    let (_, logits) = find("logits").ok_or("no logits")?;
    let tokens = tokens.to_device(world.device());
    let context = Context::training(0);
    let run = tch::no_grad(|| trainyard_nn::run(trainer.model(), &tokens, &context, &[]))?;
    let found = run
        .into_output()
        .to_kind(Kind::Float)
        .to_device(tch::Device::Cpu);
    let tp = world.group(Axis::Tp)?;
    let own = chunk(logits.size()[2] as usize, tp.size(), tp.index());
    let logits = logits.narrow(2, own.start as i64, own.len() as i64);
    let difference = (&found - &logits).abs().max().double_value(&[]);
    assert!(
        difference < TOLERANCE,
        "{}: logits differ by {difference:e}",
        folder.display()
    );
    Ok(trainer)
}

fn save(
    trainer: &Trainer,
    config: &Config,
    world: &World,
    folder: &Path,
) -> Result<(), Box<dyn Error>> {
    let state = TrainState {
        step: 0,
        samples_seen: 0,
        seed: 0,
        world_size: world.size(),
        config: config.to_toml()?,
        extra_state: serde_json::Value::Null,
    };
    let place = checkpoint::Destination {
        store: store::open(folder)?,
        keep: 0,
        is_async: false,
        is_durable: true,
        owner: None,
    };
    let mut saver = checkpoint::Saver::new(world)?;
    saver.save(trainer, world, state, &[place])?;
    Ok(())
}

fn written_back(config: &Config, saved: &Path, back: &Path) -> Result<(), Box<dyn Error>> {
    let checkpoint = Checkpoint::open(store::open(saved)?, &step_dir(0))?;
    let json = config.model.resolve()?;
    let json = json.decoder().and_then(DecoderConfig::to_hugging_face);
    let config = json.ok_or("not a decoder")?.to_string();
    let options = ExportOptions {
        max_bytes: 100_000,
        dtype: None,
    };
    Ok(export(&checkpoint, &store::open(back)?, &config, options)?)
}

/// Lets `transformers` make or check all families in a directory.
fn transformers(action: &str, folder: &Path) -> Result<(), Box<dyn Error>> {
    let script = "crates/conformance/tests/integration/checkpoints/transformers_model.py";
    let mut command = Command::new(programs::python()?);
    command
        .arg(programs::repository(script))
        .arg(action)
        .arg(folder)
        .args(FAMILIES)
        .env("OMP_NUM_THREADS", "1")
        .env("HF_HUB_OFFLINE", "1");
    programs::run(&mut command)?;
    Ok(())
}
