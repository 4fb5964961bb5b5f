//! The loop: data in, steps, metrics, evaluation, checkpoints.

use std::sync::Arc;
use std::time::{Duration, Instant};

use trainyard_checkpoint::{Store, TrainState, store};
use trainyard_config::{AsyncMode, Config, ModelSpec};
use trainyard_data::{Batch, Loader, LoaderOptions, Order, Sampler};
use trainyard_nn::Place;
use trainyard_parallel::offload::Counters;
use trainyard_torch::{World, kernel, memory};
use trainyard_trace::{SpanKind, Stage, chrome_file_name, readable_bytes};

use crate::build;
use crate::checkpoint::{self, Destination, Newest, Saver};
use crate::error::{Result, TrainError};
use crate::fits;
use crate::heart::Heart;
use crate::leave::{Asked, Leave};
use crate::memory_capacity::memory_capacity;
use crate::memory_report::{MemoryRecord, MemoryWatch};
use crate::metrics::{Sinks, StepMetrics};
use crate::sample_log::SampleLog;
use crate::trainer::{StepOutcome, Trainer};

/// Trains as the config says, on this rank, to the end.
pub fn run(config: &Config, world: &World, place: Place) -> Result<()> {
    memory::observe();
    fits::check(config, world)?;
    kernel::use_deterministic_algorithms(config.debug.deterministic)?;
    if world.rank() == 0 {
        for key in config.without_effect() {
            tracing::warn!("{key} is torchtitan's and has no effect here");
        }
    }
    let limit = config.training.memory_limit_bytes;
    memory::limit((limit > 0).then_some(limit));
    let (asked, steps) = (Asked::default(), config.training.steps);
    let heart = Heart::from_env(world, steps);
    // Before the first step there is nothing to save, and SIGTERM does what it always does; unless the state
    // comes from memory that leaves with this rank's machine.
    let is_copied = config.checkpoint.memory_interval > 0;
    if is_copied {
        asked.listen().map_err(TrainError::Signals)?;
    }
    let mut job = Job::new(config, world, place, heart)?;
    job.copy_at_once()?;
    if !is_copied {
        asked.listen().map_err(TrainError::Signals)?;
    }
    let mut leave = Leave::new(asked, world, job.trainer.steps_taken())?;
    while job.trainer.steps_taken() < steps {
        job.step()?;
        let step = job.trainer.steps_taken();
        if step < steps && leave.is_agreed(step)? {
            job.leave()?;
            return leave.wait_until_told();
        }
    }
    job.finish()
}

/// A training job on one rank.
struct Job<'a> {
    config: &'a Config,
    world: &'a World,
    heart: Heart,
    trainer: Trainer,
    loader: Loader,
    /// None where nothing is saved.
    saver: Option<Saver>,
    /// None where nothing is saved there.
    storage: Option<Destination>,
    /// The memory of peers; none where no copies go there.
    memory: Option<Destination>,
    /// Whether the save under way goes there.
    is_copying: bool,
    /// The last step that was saved in storage.
    stored: Option<u64>,
    /// Whether this process has taken a step.
    is_warm: bool,
    sample_log: Option<SampleLog>,
    sinks: Sinks,
    flops_per_target: f64,
    memory_capacity: u64,
    /// Until the step it waits for.
    memory_watch: Option<MemoryWatch>,
    window: Window,
}

/// What happened since the last report.
struct Window {
    began: Instant,
    data: Duration,
    num_steps: u64,
    num_targets: i64,
}

impl Window {
    fn begin() -> Window {
        Window {
            began: Instant::now(),
            data: Duration::ZERO,
            num_steps: 0,
            num_targets: 0,
        }
    }
}

impl<'a> Job<'a> {
    fn new(config: &'a Config, world: &'a World, place: Place, heart: Heart) -> Result<Job<'a>> {
        let mut trainer = Trainer::new(config, world, place)?;
        let (storage, memory) = (storage(config)?, memory(config, world)?);
        resume(config, &mut trainer, world, memory.as_ref())?;
        let loader = loader(config, &trainer, false, trainer.samples_seen())?;
        let spec = config.model.resolve()?;
        if world.rank() == 0 {
            let batching = trainer.batching();
            tracing::info!(
                "mesh {}; model of {} parameters; global batch {} = {} ranks x {} micro-batches x {}",
                world.mesh(),
                spec.num_parameters(),
                batching.global,
                batching.ranks,
                batching.num_microbatches,
                batching.local,
            );
        }
        Ok(Job {
            sinks: Sinks::open(config, world.rank(), trainer.steps_taken())?,
            flops_per_target: flops_per_target(&spec, config.training.seq_len),
            memory_capacity: memory_capacity()?,
            memory_watch: MemoryWatch::from_config(config, world.rank(), trainer.steps_taken()),
            window: Window::begin(),
            saver: match storage.is_some() || memory.is_some() {
                true => Some(Saver::new(world)?),
                false => None,
            },
            storage,
            memory,
            is_copying: false,
            stored: None,
            is_warm: false,
            sample_log: SampleLog::from_config(config, world, trainer.steps_taken())?,
            config,
            world,
            heart,
            trainer,
            loader,
        })
    }

    /// Copies what was resumed from into the memory of this world's machines, before the next step: a machine
    /// that is new has nothing of it, and the one that has may be the next to go.
    fn copy_at_once(&mut self) -> Result<()> {
        let memory = self.memory.clone();
        let memory = memory.filter(|_| self.trainer.steps_taken() > 0);
        self.is_copying = memory.is_some();
        self.save(memory.as_slice())
    }

    /// One step and whatever is due after it.
    fn step(&mut self) -> Result<()> {
        let next = self.trainer.steps_taken() + 1;
        self.heart.enter(Stage::Stepping, next);
        let batches = self.next_batches()?;
        self.window.num_steps += 1;
        self.window.num_targets += batches.iter().map(|b| b.num_targets).sum::<i64>();
        let (outcome, memory) = self.take_step(&batches)?;
        if let Some(log) = &mut self.sample_log {
            log.write(self.trainer.steps_taken(), &batches)?;
        }
        // A step is told when the one before is in memory: a fault costs no more than the last one told.
        let is_copying = std::mem::take(&mut self.is_copying);
        if let Some(saver) = self.saver.as_mut().filter(|_| is_copying) {
            saver.wait_for_first();
        }
        if !std::mem::replace(&mut self.is_warm, true) {
            let timeout = self.config.comm.train_timeout_seconds;
            self.world.set_timeout(Duration::from_secs(timeout))?;
        }
        let step = self.trainer.steps_taken();
        if self.sinks.is_due(step) || step == self.config.training.steps {
            self.report(&outcome)?;
        }
        if let Some(memory) = memory {
            self.heart.enter(Stage::Between, step);
            memory.write()?;
            // Time spent here is not the steps' own.
            self.window = Window::begin();
        }
        self.sinks.advance(step);
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        if self.config.validation.enable && due(self.config.validation.freq) {
            self.validate()?;
        }
        let last = step == self.config.training.steps;
        let stored = due(self.config.checkpoint.interval) || last;
        let copied = due(self.config.checkpoint.memory_interval);
        // Memory first: it is there sooner.
        let memory = self.memory.clone().filter(|_| copied);
        self.is_copying = memory.is_some();
        let storage = self.storage.clone().filter(|_| stored);
        self.stored = storage.as_ref().map_or(self.stored, |_| Some(step));
        let places: Vec<Destination> = memory.into_iter().chain(storage).collect();
        self.save(&places)
    }

    /// The step itself, watched if its memory is to be reported.
    fn take_step(&mut self, batches: &[Batch]) -> Result<(StepOutcome, Option<MemoryRecord>)> {
        let number = self.trainer.steps_taken() + 1;
        let due = |watch: &mut MemoryWatch| watch.step() == number;
        match self.memory_watch.take_if(due) {
            Some(watch) => {
                let ledger = self.world.ledger();
                let (outcome, memory) = watch.watch(ledger, || self.trainer.step(batches))?;
                Ok((outcome, Some(memory)))
            }
            None => Ok((self.trainer.step(batches)?, None)),
        }
    }

    fn next_batches(&mut self) -> Result<Vec<Batch>> {
        let began = Instant::now();
        let _span = self.world.ledger().enter(SpanKind::Data, "data");
        let num = self.trainer.batching().num_microbatches;
        let batches = self
            .loader
            .by_ref()
            .take(num)
            .collect::<Result<Vec<_>, _>>()?;
        self.window.data += began.elapsed();
        Ok(batches)
    }

    /// Reads the step's numbers, which waits for them, and writes them where the config says.
    fn report(&mut self, outcome: &StepOutcome) -> Result<()> {
        let loss = self.trainer.global_loss(&outcome.loss_part)?;
        let window = std::mem::replace(&mut self.window, Window::begin());
        let elapsed = window.began.elapsed().as_secs_f64();
        // Per rank, as torchtitan has it: ranks that share a batch share its targets.
        let sharers = self.world.size() / self.trainer.data_group().size();
        let tps = window.num_targets as f64 / sharers as f64 / elapsed;
        let memory_bytes = memory::report()?.peak;
        let step = self.trainer.steps_taken();
        let expert_loads = self.trainer.expert_loads()?;
        self.heart.report(loss, tps, memory_bytes);
        self.sinks.write(&StepMetrics {
            expert_loads,
            expert_traffic: self.trainer.expert_traffic()?,
            step,
            loss,
            grad_norm: f64::try_from(&outcome.grad_norm)?,
            lr: outcome.learning_rate,
            tps,
            tflops: tps * self.flops_per_target / 1e12,
            mfu: None,
            memory_bytes,
            memory_share: memory_bytes as f64 / self.memory_capacity.max(1) as f64,
            seconds: elapsed / window.num_steps.max(1) as f64,
            data_share: window.data.as_secs_f64() / elapsed,
            samples_seen: self.trainer.samples_seen(),
        })
    }

    fn validate(&mut self) -> Result<()> {
        self.heart.enter(Stage::Between, self.trainer.steps_taken());
        let num = self.config.validation.steps as usize * self.trainer.batching().num_microbatches;
        let batches = loader(self.config, &self.trainer, true, 0)?
            .take(num)
            .collect::<Result<Vec<_>, _>>()?;
        let loss = self.trainer.evaluate(&batches)?;
        if self.world.rank() == 0 {
            tracing::info!(
                "step: {}  validation loss: {loss:8.5}",
                self.trainer.steps_taken()
            );
        }
        // Time spent here is not the steps' own.
        self.window = Window::begin();
        Ok(())
    }

    fn save(&mut self, places: &[Destination]) -> Result<()> {
        let Some(saver) = self.saver.as_mut().filter(|_| !places.is_empty()) else {
            return Ok(());
        };
        let ledger = self.world.ledger();
        let _span = ledger.enter(SpanKind::Checkpoint, "checkpoint");
        let step = self.trainer.steps_taken();
        self.heart.enter(Stage::Between, step);
        let state = TrainState {
            step,
            samples_seen: self.trainer.samples_seen(),
            seed: self.config.debug.seed,
            world_size: self.world.size(),
            config: self.config.to_toml()?,
            schedule: self.trainer.paces(),
        };
        let saved = saver.save(&self.trainer, self.world, state, places)?;
        if self.world.rank() == 0 {
            tracing::info!(
                "checkpoint of step {step}: training paused for {:.1} ms, {} of staging memory",
                1e3 * saved.pause.as_secs_f64(),
                readable_bytes(saved.staging_bytes)
            );
        }
        self.window = Window::begin();
        Ok(())
    }

    /// Saves what was not saved yet, everywhere, and ends before the last step.
    fn leave(mut self) -> Result<()> {
        let step = self.trainer.steps_taken();
        if self.world.rank() == 0 {
            tracing::info!("told to end: leaving after step {step}");
            if self.storage.is_none() {
                tracing::warn!("nothing is saved in files: checkpoint.enable is off");
            }
        }
        let storage = self.storage.clone().filter(|_| self.stored != Some(step));
        let places: Vec<Destination> = self.memory.clone().into_iter().chain(storage).collect();
        self.save(&places)?;
        self.finish()
    }

    fn finish(mut self) -> Result<()> {
        let step = self.trainer.steps_taken();
        self.heart.enter(Stage::Between, step);
        if let Some(saver) = &mut self.saver {
            saver.finish();
        }
        self.sinks.finish();
        if self.world.rank() == 0 {
            report_offload(&self.trainer.model().offload_counters());
        }
        if self.config.profiling.enable_profiling {
            write_trace(self.config, self.world)?;
        }
        // Rank 0 serves the store: nobody leaves before all are done.
        self.world.everyone()?.barrier()?.wait()?;
        self.heart.enter(Stage::Ended, step);
        match &self.saver {
            Some(saver) if saver.has_lost(step) => Err(TrainError::NotSaved { step }),
            _ => Ok(()),
        }
    }
}

/// Says what went to files and came back, and how much of that nobody waited for.
fn report_offload(files: &[Counters]) {
    let sum = |of: fn(&Counters) -> f64| files.iter().map(of).sum::<f64>();
    let (busy, waited) = (
        sum(|file| file.busy.as_secs_f64()),
        sum(|file| file.waited.as_secs_f64()),
    );
    if busy > 0.0 {
        tracing::info!(
            "offload: {} read, {} written in {busy:.2} s, of which {:.0} % were hidden",
            readable_bytes(sum(|file| file.bytes_read as f64) as u64),
            readable_bytes(sum(|file| file.bytes_written as f64) as u64),
            100.0 * (1.0 - waited / busy).max(0.0),
        );
    }
}

/// Micro-batches of this rank from a sample of the stream on, whatever batches came before.
fn loader(config: &Config, trainer: &Trainer, validation: bool, first: u64) -> Result<Loader> {
    let batching = trainer.batching();
    let sampler = Sampler::new(batching.global, batching.ranks, batching.num_microbatches)?;
    let sampler = sampler.starting_at(first);
    let source = build::source(config, validation)?;
    let order = match source.len() {
        Some(_) if !validation => Order::Shuffled {
            seed: config.debug.seed,
        },
        _ => Order::Sequential,
    };
    let options = LoaderOptions {
        order,
        ..LoaderOptions::default()
    };
    Ok(Loader::new(
        source,
        sampler,
        trainer.data_group().index(),
        options,
    )?)
}

/// Where the job is saved, if the config wants it.
fn storage(config: &Config) -> Result<Option<Destination>> {
    let section = &config.checkpoint;
    let destination = || -> Result<Destination> {
        Ok(Destination {
            store: checkpoints(config)?,
            keep: section.keep_latest_k,
            is_async: section.async_mode == AsyncMode::Async,
            is_lasting: true,
        })
    };
    section.enable.then(destination).transpose()
}

/// The memory of peers, if the config wants copies there. The older copy goes when the newer is
/// complete, so there are never more than two.
fn memory(config: &Config, world: &World) -> Result<Option<Destination>> {
    if config.checkpoint.memory_interval == 0 {
        return Ok(None);
    }
    let Some(peers) = checkpoint::peers(world)? else {
        tracing::warn!(
            "checkpoint.memory_interval has no effect: there are no holders; start by `trainyard run`"
        );
        return Ok(None);
    };
    Ok(Some(Destination {
        store: Arc::new(peers),
        keep: 1,
        is_async: true,
        is_lasting: false,
    }))
}

/// Takes model and optimiser from the newest state, if there is one and the config wants it.
fn resume(
    config: &Config,
    trainer: &mut Trainer,
    world: &World,
    memory: Option<&Destination>,
) -> Result<()> {
    let section = &config.checkpoint;
    let own = checkpoints(config)?;
    let storage = (section.enable && section.resume).then_some(&*own);
    let memory = memory.filter(|_| section.resume).map(|place| &place.store);
    let newest = checkpoint::newest(storage, memory, world)?;
    let loaded = match (newest, &section.initial_load_path) {
        (Newest::Memory(opened), _) => checkpoint::load_opened(opened, trainer, world)?,
        (Newest::Storage(folder), _) => checkpoint::load(own, &folder, trainer, world)?,
        (Newest::Nothing, Some(path)) => checkpoint::load(store::open(path)?, ".", trainer, world)?,
        (Newest::Nothing, None) => return Ok(()),
    };
    let Some(state) = loaded.state() else {
        if world.rank() == 0 {
            tracing::info!("began with the weights in {}", loaded.path());
        }
        return Ok(());
    };
    trainer.resume_at(state.step, state.samples_seen);
    trainer.resume_paces(&state.schedule);
    if world.rank() == 0 {
        tracing::info!("resumed after step {} from {}", state.step, loaded.path());
    }
    Ok(())
}

/// Where the job's checkpoints lie.
fn checkpoints(config: &Config) -> Result<Arc<dyn Store>> {
    let store = store::open_under(&config.job.dump_folder, &config.checkpoint.folder)?;
    Ok(store)
}

fn write_trace(config: &Config, world: &World) -> Result<()> {
    let folder = config
        .job
        .dump_folder
        .join(&config.profiling.save_traces_folder);
    std::fs::create_dir_all(&folder).map_err(TrainError::io(&folder))?;
    let path = folder.join(chrome_file_name(world.rank()));
    world
        .ledger()
        .write_chrome(&path)
        .map_err(|e| TrainError::Trace(e.to_string()))?;
    if world.rank() == 0 {
        tracing::info!("trace of every rank in {}", folder.display());
    }
    Ok(())
}

/// Operations per target as torchtitan counts them: 6 per parameter that multiplies, and attention.
fn flops_per_target(spec: &ModelSpec, seq_len: usize) -> f64 {
    match spec.decoder() {
        Some(sizes) => {
            let embedding = (sizes.vocab_size * sizes.hidden_size) as u64;
            let lookups = if sizes.tie_word_embeddings {
                0
            } else {
                embedding
            };
            let multiplied = spec.num_active_parameters() - lookups;
            let attention = 12 * sizes.num_hidden_layers * sizes.query_width() * seq_len;
            6.0 * multiplied as f64 + attention as f64
        }
        None => {
            // Convolutions use each weight once per pixel.
            let convolutions = (9 * 32 + 9 * 32 * 64) * 28 * 28;
            6.0 * f64::from(convolutions + 64 * 28 * 28 * 128 + 128 * 10)
        }
    }
}
