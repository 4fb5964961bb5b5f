//! The training loop: data loading, steps, metrics, validation, checkpoints, preemption.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use trainyard_checkpoint::{TrainState, step_dir};
use trainyard_config::{Batching, Config};
use trainyard_data::{Batch, Loader, LoaderOptions, Order, Placeholder, Sampler, Source};
use trainyard_heartbeat::Stage;
use trainyard_parallel::offload::Counters;
use trainyard_torch::{World, device, kernel, memory};
use trainyard_trace::{SpanKind, chrome_file_name, counted, readable_bytes};

use crate::build::{self, Phase};
use crate::checkpoint::{self, Destination, Saver};
use crate::error::{Result, TrainError};
use crate::flops::flops_per_target;
use crate::heartbeat_writer::HeartbeatWriter;
use crate::incident_policy::{self, Action, Cause};
use crate::memory_capacity::memory_capacity;
use crate::memory_check;
use crate::memory_profiler::{MemoryProfile, MemoryProfiler};
use crate::metrics::{RunSummary, Sinks, StepMetrics, ValidationMetrics};
use crate::parameter_server::{GradientServer, ServedState, Service};
use crate::peak_flops::peak_flops;
use crate::pipeline;
use crate::preemption::{PreemptionHandler, StopFlag};
use crate::rerun::{self, Verdict};
use crate::same_job;
use crate::sample_log::SampleLog;
use crate::spike::SpikeDetector;
use crate::train_spec::TrainSpec;
use crate::trainer::{StepOutcome, Trainer, data_axes};
use crate::value_guard::Incident;

/// Runs a training job on this rank until its last step, or until it is preempted.
pub fn run(spec: &TrainSpec, world: &World) -> Result<()> {
    run_with(spec, world, None)
}

/// As [`run`], on a parameter server: workers compute the gradients.
pub fn serve(spec: &TrainSpec, world: &World, service: Service<'_>) -> Result<()> {
    run_with(spec, world, Some(service))
}

fn run_with(spec: &TrainSpec, world: &World, service: Option<Service<'_>>) -> Result<()> {
    memory::observe();
    let spec = &epochs_as_steps(spec, world)?;
    same_job::check(spec, world)?;
    memory_check::check(spec, world)?;
    kernel::use_deterministic_algorithms(spec.debug.deterministic)?;
    if world.rank() == 0 {
        for key in spec.ignored_keys() {
            tracing::warn!("{key} is a torchtitan setting that Trainyard ignores");
        }
    }
    let limit = spec.training.memory_limit_bytes;
    memory::limit(world.device(), (limit > 0).then_some(limit))?;
    let (stop_flag, steps) = (StopFlag::default(), spec.training.steps);
    let heartbeat = HeartbeatWriter::from_env(world, spec);
    // Before the first step there is nothing to save, so SIGTERM keeps its default action. With peer
    // checkpoints it is handled from the start: the state may be in the memory of this node only.
    let has_peer_checkpoints = spec.checkpoint.memory_interval > 0;
    if has_peer_checkpoints {
        stop_flag.watch_sigterm().map_err(TrainError::Signals)?;
    }
    let mut job = Job::new(spec, world, heartbeat)?;
    job.replicate_resumed_state()?;
    match service {
        Some(service) => {
            let server = GradientServer::start(service, steps, &mut job.trainer, world)?;
            job.gradient_server = Some(server);
        }
        None if spec.local_updates.quorum.is_some() => {
            return Err(TrainError::ParameterServer(
                "local_updates.quorum is for workers of parameter servers: start them with `trainyard run --servers N`"
                    .to_owned(),
            ));
        }
        None => ServedState::check(job.trainer.served().as_ref(), 1)?,
    }
    if !has_peer_checkpoints {
        stop_flag.watch_sigterm().map_err(TrainError::Signals)?;
    }
    let mut preemption = PreemptionHandler::new(stop_flag, world, job.trainer.steps_taken())?;
    while job.trainer.steps_taken() < steps {
        job.step()?;
        let step = job.trainer.steps_taken();
        if step < steps && preemption.should_stop(step)? {
            job.save_and_stop()?;
            return preemption.wait_for_sigterm();
        }
    }
    job.finish()
}

/// The job with the number of steps that its epochs take; the last step may begin another epoch.
fn epochs_as_steps(spec: &TrainSpec, world: &World) -> Result<TrainSpec> {
    let Some(epochs) = spec.training.epochs else {
        return Ok(spec.clone());
    };
    let num_samples = build::source(spec, Phase::Training)?.len();
    let num_samples = num_samples.ok_or(TrainError::EndlessEpochs)?;
    let batching = spec.batching(world.mesh().size_of(data_axes()))?;
    let mut config = Config::clone(spec);
    config.training.epochs = None;
    config.training.steps = epochs
        .saturating_mul(num_samples)
        .div_ceil(batching.global as u64);
    config.check()?;
    Ok(spec.with_config(config))
}

/// A training job on one rank.
struct Job<'a> {
    spec: &'a TrainSpec,
    world: &'a World,
    heartbeat: HeartbeatWriter,
    trainer: Trainer,
    /// Receives the gradients of workers; `None` if this rank computes its own.
    gradient_server: Option<GradientServer>,
    loader: Loader,
    training_source: Arc<dyn Source>,
    /// Held-out data; `None` without validation.
    validation_source: Option<Arc<dyn Source>>,
    /// `None` if neither storage nor peer memory is used.
    saver: Option<Saver>,
    /// The checkpoint storage; `None` if `checkpoint.enable` is false.
    storage: Option<Destination>,
    /// Peer memory; `None` without peer checkpoints.
    memory: Option<Destination>,
    /// Whether the save in flight goes to peer memory.
    is_replicating: bool,
    /// The last step that was saved to storage.
    stored_step: Option<u64>,
    /// Whether this process has taken a step.
    is_warm: bool,
    sample_log: Option<SampleLog>,
    sinks: Sinks,
    flops_per_target: f64,
    /// `None` for an unknown GPU, and on ranks that report nothing.
    peak_flops: Option<f64>,
    memory_capacity: u64,
    /// Taken when the step to profile is reached.
    memory_profiler: Option<MemoryProfiler>,
    spikes: SpikeDetector,
    window: Window,
    summary: RunSummary,
}

/// Counters since the last metrics report.
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
    fn new(spec: &'a TrainSpec, world: &'a World, heartbeat: HeartbeatWriter) -> Result<Job<'a>> {
        let mut trainer = Trainer::new(spec, world, world.device().into())?;
        let storage = checkpoint::storage(spec, world)?;
        let memory = checkpoint::memory(spec, world)?;
        checkpoint::resume(spec, &mut trainer, world, memory.as_ref())?;
        let open = |phase| source_of(spec, phase, trainer.reads_samples());
        let training_source = open(Phase::Training)?;
        let loader = loader(
            spec,
            world,
            trainer.batching(),
            Arc::clone(&training_source),
            Phase::Training,
            (trainer.samples_seen(), trainer.data_group().index()),
        )?;
        // Opened now, so that a wrong path is found before the first step.
        let validation_source = || open(Phase::Validation);
        let validation_source = spec.validation.enable.then(validation_source).transpose()?;
        if world.rank() == 0 {
            if let Some(warning) = pipeline::bubble_warning(spec, world)? {
                tracing::warn!("{warning}");
            }
            let batching = trainer.batching();
            tracing::info!(
                "mesh {}; model size: {} parameters; global batch size {} = {} x {} x local batch size {}",
                world.mesh(),
                build::num_parameters(spec)?,
                batching.global,
                counted(batching.ranks as u64, "data-parallel rank"),
                counted(batching.num_microbatches as u64, "micro-batch"),
                batching.local,
            );
        }
        Ok(Job {
            sinks: Sinks::open(spec, world.rank(), trainer.steps_taken())?,
            flops_per_target: flops_per_target(spec)?,
            peak_flops: if world.rank() == 0 {
                peak_flops(&spec.metrics, world.device())
            } else {
                None
            },
            memory_capacity: memory_capacity(world.device())?,
            memory_profiler: MemoryProfiler::from_config(spec, world.rank(), trainer.steps_taken()),
            spikes: SpikeDetector::new(
                spec.value_guard.spike_threshold,
                spec.value_guard.spike_window,
            ),
            window: Window::begin(),
            summary: RunSummary::begin(trainer.steps_taken()),
            saver: if storage.is_some() || memory.is_some() {
                Some(Saver::new(world)?)
            } else {
                None
            },
            storage,
            memory,
            is_replicating: false,
            stored_step: None,
            is_warm: false,
            sample_log: SampleLog::from_config(spec, world, trainer.steps_taken())?,
            spec,
            world,
            heartbeat,
            trainer,
            gradient_server: None,
            loader,
            training_source,
            validation_source,
        })
    }

    /// Replicates the resumed state to the peers of this world before the next step: a new node has no
    /// replica yet, and the only node that has one may fail next.
    fn replicate_resumed_state(&mut self) -> Result<()> {
        let memory = self.memory.clone();
        let memory = memory.filter(|_| self.trainer.steps_taken() > 0);
        self.is_replicating = memory.is_some();
        self.save(memory.as_slice())
    }

    /// One training step, then metrics, checkpoints and validation if they are due.
    fn step(&mut self) -> Result<()> {
        let next = self.trainer.steps_taken() + 1;
        self.heartbeat.enter(Stage::Stepping, next);
        let batches = self.next_batches()?;
        self.window.num_steps += 1;
        // Positions without a target cost as much as those with one.
        self.window.num_targets += batches
            .iter()
            .map(|b| b.targets.numel() as i64)
            .sum::<i64>();
        let (outcome, memory) = self.take_step(&batches)?;
        if let Some(log) = &mut self.sample_log {
            log.write(self.trainer.steps_taken(), &batches)?;
        }
        // A step is reported only after the previous one is replicated in peer memory, so that a failure
        // loses at most the last reported step.
        let is_replicating = std::mem::take(&mut self.is_replicating);
        if let Some(saver) = self.saver.as_mut().filter(|_| is_replicating) {
            saver.wait_for_first();
        }
        if !std::mem::replace(&mut self.is_warm, true) {
            let timeout = self.spec.comm.train_timeout_seconds;
            self.world.set_timeout(Duration::from_secs(timeout))?;
        }
        let step = self.trainer.steps_taken();
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let last = step == self.spec.training.steps;
        let is_stored = due(self.spec.checkpoint.interval) || last;
        let spike = if self.sinks.is_due(step) || last {
            self.report(&outcome)?
        } else {
            None
        };
        if let Some(block) = self.spec.debug.guard_cost_block {
            // After the report, so that the step time of a block is that of steps which are all guarded, or none.
            let number = step.checked_div(block).unwrap_or(0);
            self.trainer.set_guarded(number.is_multiple_of(2));
        }
        let mut causes = self.find_causes(outcome.has_incident, is_stored)?;
        causes.extend(spike);
        if self.has_rolled_back(&causes)? {
            return Ok(());
        }
        if let Some(memory) = memory {
            self.heartbeat.enter(Stage::Between, step);
            memory.write()?;
            // The time spent here does not count as step time.
            self.window = Window::begin();
        }
        self.sinks.advance(step);
        self.save_if_due(is_stored)?;
        // Saved before: an evaluation that fails loses no step.
        match self.validation_source.clone() {
            Some(source) if due(self.spec.validation.freq) => self.validate(source),
            _ => Ok(()),
        }
    }

    /// Saves the step to peer memory if it is due, and to storage if it is to be stored there.
    fn save_if_due(&mut self, is_stored: bool) -> Result<()> {
        let step = self.trainer.steps_taken();
        let every = self.spec.checkpoint.memory_interval;
        let is_replicated = every > 0 && step.is_multiple_of(every);
        // Peer memory first, because it is faster than storage.
        let memory = self.memory.clone().filter(|_| is_replicated);
        self.is_replicating = memory.is_some();
        let storage = self.storage.clone().filter(|_| is_stored);
        self.stored_step = storage.as_ref().map_or(self.stored_step, |_| Some(step));
        let destinations: Vec<Destination> = memory.into_iter().chain(storage).collect();
        self.save(&destinations)
    }

    /// What is wrong with the values of steps up to this one. Ranks agree on values that are not finite if one of them
    /// has seen some, and always before the state is saved; replicas are compared at an interval, and before that too.
    fn find_causes(&mut self, has_incident: bool, is_stored: bool) -> Result<Vec<Cause>> {
        let section = &self.spec.value_guard;
        let mut causes = Vec::new();
        if !self.trainer.is_guarded() {
            return Ok(causes);
        }
        if has_incident || is_stored {
            for incident in self.trainer.incidents()? {
                let verdict = section.rerun.then(|| self.rerun(&incident)).transpose()?;
                causes.push(Cause::NotFinite(incident, verdict));
            }
        }
        let (step, every) = (self.trainer.steps_taken(), section.digest_interval);
        if every > 0 && (step.is_multiple_of(every) || is_stored) {
            let drift = self.trainer.compare_replicas()?;
            causes.extend(drift.map(|drift| Cause::Drift { step, drift }));
        }
        Ok(causes)
    }

    /// Computes the samples of a step again, without changing anything, to find out why its values were not finite.
    fn rerun(&self, incident: &Incident) -> Result<Verdict> {
        let group = self.trainer.data_group();
        let own = self.rerun_share(incident, group.index())?;
        let next = (group.index() + 1) % group.size();
        let other = if group.size() > 1 {
            Some(self.rerun_share(incident, next)?)
        } else {
            None
        };
        Ok(rerun::verdict(&own, other.as_deref()))
    }

    /// Which shares of a step's batch have a loss that is not finite, if this replica computes `share`.
    fn rerun_share(&self, incident: &Incident, share: usize) -> Result<Vec<bool>> {
        let source = Arc::clone(&self.training_source);
        let first = incident.samples.start;
        let num = self.trainer.batching().num_microbatches;
        let batches = self.load(source, Phase::Training, (first, share), num)?;
        self.trainer.rerun(&batches, first, share)
    }

    /// Loads micro-batches of one share beside those of training, starting at a sample of the stream.
    fn load(
        &self,
        source: Arc<dyn Source>,
        phase: Phase,
        start: (u64, usize),
        num: usize,
    ) -> Result<Vec<Batch>> {
        let batching = self.trainer.batching();
        let loader = loader(self.spec, self.world, batching, source, phase, start)?;
        Ok(loader.take(num).collect::<Result<_, _>>()?)
    }

    /// Acts on values that cannot be used, as `value_guard.policy` says. Whether the job went back to a checkpoint.
    fn has_rolled_back(&mut self, causes: &[Cause]) -> Result<bool> {
        let section = &self.spec.value_guard;
        for cause in causes {
            let guard = self.trainer.guard_state();
            guard.num_incidents += 1;
            let action = incident_policy::decide(section, cause, guard.num_incidents);
            let num_incidents = guard.num_incidents;
            if self.world.rank() == 0 && action != Action::Stop {
                tracing::warn!(
                    "{cause}; incident {num_incidents} of at most {}",
                    section.max_incidents
                );
            }
            match action {
                Action::Continue => {}
                Action::Rollback => {
                    let samples = causes.iter().map(Cause::samples);
                    self.roll_back(samples.collect())?;
                    return Ok(true);
                }
                Action::Stop => return Err(self.bad_values(cause)),
            }
        }
        Ok(false)
    }

    /// Loads the newest checkpoint, and leaves out these samples from now on.
    fn roll_back(&mut self, samples: Vec<Range<u64>>) -> Result<()> {
        if let Some(saver) = &mut self.saver {
            saver.finish();
        }
        let mut guard = self.trainer.guard_state().clone();
        guard
            .skipped_samples
            .extend(samples.into_iter().filter(|range| !range.is_empty()));
        let is_loaded = checkpoint::load_latest(
            self.spec,
            &mut self.trainer,
            self.world,
            self.memory.as_ref(),
        )?;
        if !is_loaded && self.world.rank() == 0 {
            tracing::warn!(
                "there is no checkpoint to go back to: the job goes on with the current parameters"
            );
        }
        *self.trainer.guard_state() = guard;
        self.load_from(self.trainer.samples_seen())?;
        self.window = Window::begin();
        Ok(())
    }

    /// The error of a job that ends because of values that it cannot use.
    fn bad_values(&self, cause: &Cause) -> TrainError {
        TrainError::BadValues {
            what: cause.to_string(),
            consequence: if cause.has_updated() {
                "Parameters have changed, and nothing after that was saved"
            } else {
                "The step has not changed any parameter, and nothing after it was saved"
            },
            advice: cause.advice(),
        }
    }

    /// Reads samples from position `first` of the stream on.
    fn load_from(&mut self, first: u64) -> Result<()> {
        self.loader = loader(
            self.spec,
            self.world,
            self.trainer.batching(),
            Arc::clone(&self.training_source),
            Phase::Training,
            (first, self.trainer.data_group().index()),
        )?;
        Ok(())
    }

    /// Takes the step, under the memory profiler if it is the step to profile.
    fn take_step(&mut self, batches: &[Batch]) -> Result<(StepOutcome, Option<MemoryProfile>)> {
        if let Some(server) = &mut self.gradient_server {
            return Ok((server.step(&mut self.trainer, self.world)?, None));
        }
        let number = self.trainer.steps_taken() + 1;
        let due = |profiler: &mut MemoryProfiler| profiler.step() == number;
        match self.memory_profiler.take_if(due) {
            Some(profiler) => {
                let ledger = self.world.ledger();
                let (outcome, memory) = profiler.profile(ledger, || self.trainer.step(batches))?;
                Ok((outcome, Some(memory)))
            }
            None => Ok((self.trainer.step(batches)?, None)),
        }
    }

    /// The micro-batches of the next step; none if workers compute its gradients.
    fn next_batches(&mut self) -> Result<Vec<Batch>> {
        if self.gradient_server.is_some() {
            let num_targets = self.trainer.nominal_targets() / self.world.size() as f64;
            self.window.num_targets += num_targets as i64;
            return Ok(Vec::new());
        }
        let began = Instant::now();
        let _span = self.world.ledger().enter(SpanKind::Data, "data");
        let position = self.trainer.samples_seen();
        let next = self.trainer.guard_state().next_sample(position);
        if next != position {
            self.trainer.resume_at(self.trainer.steps_taken(), next);
            self.load_from(next)?;
        }
        let num = self.trainer.batching().num_microbatches;
        let batches = self
            .loader
            .by_ref()
            .take(num)
            .collect::<Result<Vec<_>, _>>()?;
        self.window.data += began.elapsed();
        Ok(batches)
    }

    /// Reads the metrics of the step from the device, which waits for them, and writes them to all sinks. Returns the
    /// loss if it is a spike.
    fn report(&mut self, outcome: &StepOutcome) -> Result<Option<Cause>> {
        let loss = self.trainer.global_loss(&outcome.local_loss)?;
        let window = std::mem::replace(&mut self.window, Window::begin());
        let elapsed = window.began.elapsed().as_secs_f64();
        // Per rank, as torchtitan counts: the ranks of a tensor, context or pipeline parallel group process the
        // same batch, so its targets are divided among them.
        let num_shares = self.trainer.data_group().size();
        let (sharers, num_tokens) = (self.world.size() / num_shares, window.num_targets as f64);
        let tps = num_tokens / sharers as f64 / elapsed;
        let memory_bytes = peak_memory(self.world)?;
        let mfu = self
            .peak_flops
            .map(|peak| tps * self.flops_per_target / peak);
        self.summary
            .add(num_tokens * num_shares as f64, loss, elapsed, mfu);
        let step = self.trainer.steps_taken();
        let expert_loads = self.trainer.expert_loads()?;
        let metrics = StepMetrics {
            expert_loads,
            expert_traffic: self.trainer.expert_traffic()?,
            step,
            loss,
            grad_norm: f64::try_from(&outcome.grad_norm)?,
            lr: outcome.learning_rate,
            tps,
            tflops: tps * self.flops_per_target / 1e12,
            mfu,
            memory_bytes,
            memory_share: memory_bytes as f64 / self.memory_capacity.max(1) as f64,
            seconds: elapsed / window.num_steps.max(1) as f64,
            data_share: window.data.as_secs_f64() / elapsed,
            samples_seen: self.trainer.samples_seen(),
        };
        self.heartbeat.report(&metrics);
        self.sinks.write(&metrics);
        let end = self.trainer.samples_seen();
        let samples = end - self.trainer.batching().global as u64..end;
        Ok(self.spikes.observe(loss).map(|score| Cause::Spike {
            step,
            samples,
            loss,
            score,
        }))
    }

    fn validate(&mut self, source: Arc<dyn Source>) -> Result<()> {
        let step = self.trainer.steps_taken();
        self.heartbeat.enter(Stage::Between, step);
        let num = self.spec.validation.steps as usize * self.trainer.batching().num_microbatches;
        let start = (0, self.trainer.data_group().index());
        let batches = self.load(source, Phase::Validation, start, num)?;
        let validation_loss = self.trainer.evaluate(&batches)?;
        self.sinks.write_validation(&ValidationMetrics {
            step,
            validation_loss,
        });
        // The time spent here does not count as step time.
        self.window = Window::begin();
        Ok(())
    }

    fn save(&mut self, destinations: &[Destination]) -> Result<()> {
        let Some(saver) = self.saver.as_mut().filter(|_| !destinations.is_empty()) else {
            return Ok(());
        };
        let ledger = self.world.ledger();
        let _span = ledger.enter(SpanKind::Checkpoint, "checkpoint");
        let step = self.trainer.steps_taken();
        self.heartbeat.enter(Stage::Between, step);
        let state = TrainState {
            step,
            samples_seen: self.trainer.samples_seen(),
            seed: self.spec.debug.seed,
            world_size: self.world.size(),
            config: self.spec.to_toml()?,
            extra_state: self.trainer.extra_state()?,
        };
        let saved = saver.save(&self.trainer, self.world, state, destinations)?;
        if destinations.iter().any(|each| each.is_durable) {
            self.heartbeat.saved(step, saved.pause);
        }
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

    /// Saves the current step to every destination that does not have it, and ends the job early.
    fn save_and_stop(mut self) -> Result<()> {
        let step = self.trainer.steps_taken();
        if self.world.rank() == 0 {
            tracing::info!("preempted by SIGTERM: stopping after step {step}");
            if self.storage.is_none() {
                tracing::warn!("no checkpoint is written to storage: checkpoint.enable is false");
            }
        }
        let causes = self.find_causes(true, true)?;
        if self.has_rolled_back(&causes)? {
            return self.finish();
        }
        let storage = self
            .storage
            .clone()
            .filter(|_| self.stored_step != Some(step));
        let destinations: Vec<Destination> =
            self.memory.clone().into_iter().chain(storage).collect();
        self.save(&destinations)?;
        self.stored_step = self.storage.as_ref().map(|_| step);
        self.finish()
    }

    /// Logs what this run has done, and how to go on.
    fn log_summary(&self) {
        let step = self.trainer.steps_taken();
        let has_failed = self
            .saver
            .as_ref()
            .is_some_and(|saver| saver.has_failed(step));
        let saved = self
            .storage
            .as_ref()
            .zip(self.stored_step.filter(|_| !has_failed));
        let place = saved.map(|(storage, step)| storage.store.describe(&step_dir(step)));
        let num_steps = self.spec.training.steps;
        tracing::info!("{}", self.summary.line(step, num_steps, place.as_deref()));
    }

    fn finish(mut self) -> Result<()> {
        let step = self.trainer.steps_taken();
        self.heartbeat.enter(Stage::Between, step);
        if let Some(saver) = &mut self.saver {
            saver.finish();
        }
        self.sinks.finish();
        if let Some(server) = &self.gradient_server {
            server.finish();
        }
        if self.world.rank() == 0 {
            self.log_summary();
            report_offload(&self.trainer.model().offload_counters());
        }
        if self.spec.profiling.enable_profiling {
            write_trace(self.spec, self.world)?;
        }
        // Rank 0 may host the TCPStore: no rank exits before all are done.
        self.world.world_group()?.barrier()?.wait()?;
        self.heartbeat.enter(Stage::Ended, step);
        match &self.saver {
            Some(saver) if saver.has_failed(step) => Err(TrainError::NotSaved { step }),
            _ => Ok(()),
        }
    }
}

/// The peak memory of this rank: what a GPU's allocator reserved, or the tensors on CPU.
fn peak_memory(world: &World) -> Result<u64> {
    match device::memory(world.device())? {
        Some(memory) => Ok(memory.peak_reserved),
        None => Ok(memory::report()?.peak),
    }
}

/// Logs the bytes that were offloaded and how much of the transfer time overlapped with computation.
fn report_offload(files: &[Counters]) {
    let sum = |of: fn(&Counters) -> f64| files.iter().map(of).sum::<f64>();
    let (busy, waited) = (
        sum(|file| file.busy.as_secs_f64()),
        sum(|file| file.waited.as_secs_f64()),
    );
    if busy > 0.0 {
        tracing::info!(
            "offload: {} read, {} written in {busy:.2} s, {:.0} % of it overlapped with computation",
            readable_bytes(sum(|file| file.bytes_read as f64) as u64),
            readable_bytes(sum(|file| file.bytes_written as f64) as u64),
            100.0 * (1.0 - waited / busy).max(0.0),
        );
    }
}

/// The samples of a phase, or placeholders for a rank that needs only their shapes.
fn source_of(spec: &TrainSpec, phase: Phase, reads_samples: bool) -> Result<Arc<dyn Source>> {
    let source = build::source(spec, phase)?;
    if reads_samples || source.is_empty() {
        return Ok(source);
    }
    Ok(Arc::new(Placeholder::new(&source)?))
}

/// Loads the micro-batches of one share of every batch, starting at sample `first` of the stream. The batch size may
/// differ from that of the run before.
fn loader(
    spec: &TrainSpec,
    world: &World,
    batching: &Batching,
    source: Arc<dyn Source>,
    phase: Phase,
    (first, share): (u64, usize),
) -> Result<Loader> {
    let sampler = Sampler::new(batching.global, batching.ranks, batching.num_microbatches)?;
    let sampler = sampler.starting_at(first);
    let options = LoaderOptions {
        order: order(spec, phase, &*source),
        device: world.device(),
        num_threads: spec.training.num_loader_threads,
        ..LoaderOptions::default()
    };
    Ok(Loader::new(source, sampler, share, options)?)
}

/// The order in which a phase reads its samples.
pub(crate) fn order(spec: &TrainSpec, phase: Phase, source: &dyn Source) -> Order {
    match source.len() {
        Some(_) if phase == Phase::Training => Order::Shuffled {
            seed: spec.debug.seed,
        },
        _ => Order::Sequential,
    }
}

fn write_trace(spec: &TrainSpec, world: &World) -> Result<()> {
    let folder = spec
        .job
        .dump_folder
        .join(&spec.profiling.save_traces_folder);
    std::fs::create_dir_all(&folder).map_err(TrainError::io(&folder))?;
    let path = folder.join(chrome_file_name(world.rank()));
    world
        .ledger()
        .write_chrome(&path)
        .map_err(|e| TrainError::Trace(e.to_string()))?;
    if world.rank() == 0 {
        tracing::info!("traces of all ranks written to {}", folder.display());
    }
    Ok(())
}
