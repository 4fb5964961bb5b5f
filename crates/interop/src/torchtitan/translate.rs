//! Translates torchtitan's TOML key by key to Trainyard's. Most keys are the same.

use super::super::{Framework, FrameworkError, Outcome, TranslateOptions, Translation};
use super::flavors::Flavor;
use super::keys::Keys;
use super::model;
use super::read::read_flavor;

const FRAMEWORK: Framework = Framework::Torchtitan;

/// Keys with the same name and meaning.
const SAME: [&str; 37] = [
    "job.dump_folder",
    "job.description",
    "profiling.enable_profiling",
    "profiling.save_traces_folder",
    "metrics.log_freq",
    "metrics.enable_tensorboard",
    "metrics.save_tb_folder",
    "metrics.disable_color_printing",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.implementation",
    "lr_scheduler.decay_ratio",
    "lr_scheduler.min_lr_factor",
    "training.dataset_path",
    "training.seq_len",
    "training.max_norm",
    "training.steps",
    "training.dtype",
    "training.mixed_precision_param",
    "training.mixed_precision_reduce",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.tensor_parallel_degree",
    "parallelism.enable_async_tensor_parallel",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.context_parallel_degree",
    "parallelism.expert_parallel_degree",
    "checkpoint.enable",
    "checkpoint.folder",
    "checkpoint.interval",
    "checkpoint.initial_load_path",
    "checkpoint.keep_latest_k",
];

/// The same in sections that may be off.
const SAME_IF_ON: [&str; 6] = [
    "validation.enable",
    "validation.freq",
    "validation.dataset_path",
    "comm.init_timeout_seconds",
    "comm.train_timeout_seconds",
    "debug.deterministic",
];

/// torchtitan's defaults that change the result or the layout, and are not ours.
const DEFAULTS: [(&str, &str); 11] = [
    ("model.flavor", "debugmodel"),
    ("optimizer.lr", "0.0008"),
    ("lr_scheduler.warmup_steps", "200"),
    ("lr_scheduler.decay_type", "linear"),
    ("training.dataset", "c4_test"),
    ("training.local_batch_size", "8"),
    ("training.mixed_precision_param", "bfloat16"),
    ("parallelism.data_parallel_replicate_degree", "1"),
    ("parallelism.data_parallel_shard_degree", "-1"),
    ("activation_checkpoint.mode", "selective"),
    ("activation_checkpoint.selective_ac_option", "2"),
];

/// Keys that change neither the result nor what is trained, by their beginnings.
const WITHOUT_EFFECT: [(&str, &str); 22] = [
    (
        "job.",
        "it is about torchtitan's config; `--print-config` prints ours",
    ),
    (
        "profiling.",
        "a trace contains all steps, and profiling.memory draws memory",
    ),
    (
        "metrics.",
        "metrics go to the log, metrics.enable_tensorboard and metrics.enable_jsonl",
    ),
    (
        "model.hf_assets_path",
        "it is the tokenizer, which `trainyard data prepare` takes",
    ),
    (
        "model.tokenizer_path",
        "it is the tokenizer, which `trainyard data prepare` takes",
    ),
    ("model.print_after_conversion", "it is a log message"),
    ("optimizer.early_step_in_backward", "it changes memory only"),
    ("training.gc_", "there is no garbage collector"),
    ("training.dataloader.", "Trainyard loads ahead by itself"),
    (
        "parallelism.disable_loss_parallel",
        "it changes memory only; the loss is parallel",
    ),
    (
        "parallelism.pipeline_parallel_",
        "stages are balanced by cost; parallelism.pipeline_parallel_split_points sets them",
    ),
    (
        "parallelism.module_fqns_per_model_part",
        "stages are balanced by cost; parallelism.pipeline_parallel_split_points sets them",
    ),
    (
        "parallelism.context_parallel_",
        "ring attention balances its load by itself",
    ),
    (
        "parallelism.expert_tensor_parallel_degree",
        "experts are not split over tp",
    ),
    (
        "parallelism.expert_parallel_comm_backend",
        "there is one dispatcher",
    ),
    (
        "checkpoint.",
        "checkpoints are complete, sharded ones; `trainyard ckpt` exports them",
    ),
    ("activation_checkpoint.", "it changes speed and memory only"),
    ("compile.", "Trainyard does not compile models"),
    ("quantize.", "no converter of model.converters uses it"),
    (
        "comm.",
        "the last collective of every group is always recorded",
    ),
    ("memory_estimation.", "`trainyard dry-run` estimates memory"),
    ("validation.dataloader.", "Trainyard loads ahead by itself"),
];

/// Keys that change the result unless they have one of these values.
const RESULT: [(&str, &[&str], &str, &str); 9] = [
    (
        "model.converters",
        &["[]"],
        "8-bit types are not implemented",
        "remove it",
    ),
    (
        "checkpoint.initial_load_in_hf",
        &["false"],
        "checkpoint.initial_load_path takes Trainyard's checkpoints",
        "use model.hf_assets_path and model.initial_weights",
    ),
    (
        "checkpoint.load_step",
        &["-1"],
        "a job resumes from the newest checkpoint",
        "use checkpoint.initial_load_path",
    ),
    (
        "checkpoint.exclude_from_loading",
        &["[]"],
        "checkpoints are loaded as wholes",
        "remove it",
    ),
    (
        "fault_tolerance.enable",
        &["false"],
        "replicas of torchft update by themselves",
        "remove it; `trainyard run --nnodes MIN:MAX` is elastic",
    ),
    (
        "fault_tolerance.semi_sync_method",
        &[""],
        "all replicas synchronize in every step",
        "remove it",
    ),
    (
        "experimental.custom_import",
        &[""],
        "it is Python code",
        "write a crate with your model (`trainyard new`)",
    ),
    (
        "experimental.custom_args_module",
        &[""],
        "it is Python code",
        "write a crate with your model (`trainyard new`)",
    ),
    (
        "debug.moe_force_load_balance",
        &["false"],
        "the router decides",
        "remove it",
    ),
];

/// The datasets that torchtitan registers: text of the C4 corpus.
pub(in super::super) const DATASETS: [&str; 3] = ["c4", "c4_test", "c4_validation"];

pub(super) fn translate(
    text: &str,
    options: &TranslateOptions,
) -> Result<Translation, FrameworkError> {
    let mut keys = Keys::from_toml(text)?;
    let defaults: Vec<&str> = if options.has_model {
        Vec::new()
    } else {
        let absent = DEFAULTS.into_iter();
        absent
            .filter(|(key, value)| keys.set_default(key, value))
            .map(|(key, _)| key)
            .collect()
    };
    let context = Context {
        keys: &keys,
        flavor: read_flavor(&keys)?,
        options,
    };
    let mut translation = Translation::default();
    for (key, value) in keys.iter() {
        let outcome = context.outcome(key, value)?;
        let shown = if defaults.contains(&key) {
            format!("{value} (torchtitan's default)")
        } else {
            value.to_owned()
        };
        translation.push(key, shown, outcome);
    }
    Ok(translation)
}

struct Context<'a> {
    keys: &'a Keys,
    flavor: Option<&'static Flavor>,
    options: &'a TranslateOptions,
}

impl Context<'_> {
    fn outcome(&self, key: &str, value: &str) -> Result<Outcome, FrameworkError> {
        if key.starts_with("validation.") && !self.keys.flag("validation.enable", false)? {
            return Ok(Outcome::ignored("validation.enable is false"));
        }
        if key.starts_with("fault_tolerance.")
            && !self.keys.flag("fault_tolerance.enable", false)?
        {
            return Ok(Outcome::ignored("fault_tolerance.enable is false"));
        }
        if let Some(outcome) = self.special(key, value)? {
            return Ok(outcome);
        }
        if SAME.contains(&key) || SAME_IF_ON.contains(&key) {
            return Ok(Outcome::set(key, value));
        }
        if let Some((_, harmless, reason, remedy)) = RESULT.iter().find(|row| row.0 == key) {
            let is_harmless = harmless.contains(&value);
            return Ok(if is_harmless {
                Outcome::left("the same here")
            } else {
                Outcome::rejected(*reason, *remedy)
            });
        }
        let row = WITHOUT_EFFECT
            .iter()
            .find(|(start, _)| key.starts_with(start));
        Ok(match row {
            Some((_, reason)) => Outcome::ignored(*reason),
            None => Outcome::rejected("Trainyard has nothing like it", "remove it"),
        })
    }

    /// Keys whose names, values or meanings differ.
    fn special(&self, key: &str, value: &str) -> Result<Option<Outcome>, FrameworkError> {
        Ok(Some(match key {
            "model.name" => Outcome::left("model.flavor describes the model"),
            "model.flavor" => self.model(value)?,
            "optimizer.name" => match value {
                "AdamW" => Outcome::set(key, value),
                _ => Outcome::rejected("weight decay is decoupled from the gradient", "use AdamW"),
            },
            "lr_scheduler.warmup_steps" => self.warmup()?,
            "lr_scheduler.decay_type" => match value {
                "linear" | "cosine" => Outcome::set(key, value),
                _ => Outcome::rejected("Trainyard has no such decay", "use linear or cosine"),
            },
            "lr_scheduler.total_steps" if self.keys.get("training.steps") == Some(value) => {
                Outcome::left("the schedule ends with training.steps")
            }
            "lr_scheduler.total_steps" => {
                Outcome::rejected("the schedule ends with training.steps", "remove it")
            }
            "training.dataset" | "validation.dataset" => dataset(key, value),
            "training.local_batch_size" => self.local_batch()?,
            "training.global_batch_size" => match value {
                "-1" => Outcome::left("one micro-batch per data-parallel rank, as here"),
                value => Outcome::set(key, value),
            },
            "training.enable_cpu_offload" => {
                if self.keys.flag(key, false)? {
                    Outcome::set_all([
                        ("parallelism.offload", "cpu".to_owned()),
                        ("parallelism.offload_states", "all".to_owned()),
                    ])
                } else {
                    Outcome::set("parallelism.offload", "none")
                }
            }
            "parallelism.pipeline_parallel_schedule_csv" if value.is_empty() => {
                Outcome::left("no file")
            }
            "parallelism.pipeline_parallel_schedule_csv" => Outcome::set(key, value),
            "parallelism.pipeline_parallel_microbatch_size" => {
                Outcome::left("part of training.local_batch_size")
            }
            "checkpoint.async_mode" => match value {
                "async_with_pinned_mem" => Outcome::set(key, "async"),
                value => Outcome::set(key, value),
            },
            "activation_checkpoint.mode" => self.recompute(value),
            "activation_checkpoint.selective_ac_option" => {
                Outcome::left("part of activation_checkpoint.mode")
            }
            "debug.seed" => Outcome::set(key, value),
            "validation.steps" if value == "-1" => Outcome::rejected(
                "an evaluation has a number of batches",
                "give validation.steps",
            ),
            "validation.steps" => Outcome::set(key, value),
            _ => return Ok(None),
        }))
    }

    fn model(&self, value: &str) -> Result<Outcome, FrameworkError> {
        if self.options.has_model {
            return Ok(Outcome::left("CONFIG.toml describes the model"));
        }
        let seq_len = self.keys.count("training.seq_len", 2048)?;
        Ok(match self.flavor {
            Some(flavor) => Outcome::set_all(model::settings(flavor, seq_len)),
            None => {
                let name = self.keys.get("model.name").unwrap_or("llama3");
                Outcome::rejected(
                    format!("{name} {value} is not a model that Trainyard knows"),
                    format!("use one of {}", model::names()),
                )
            }
        })
    }

    /// torchtitan shortens a warm-up that is longer than the job.
    fn warmup(&self) -> Result<Outcome, FrameworkError> {
        let key = "lr_scheduler.warmup_steps";
        let (warmup, steps) = (
            self.keys.count(key, 200)?,
            self.keys.count("training.steps", 10_000)?,
        );
        let outcome = Outcome::set(key, warmup.min(steps));
        Ok(if warmup > steps {
            outcome.with_note("not longer than the job, as in torchtitan")
        } else {
            outcome
        })
    }

    /// With a pipeline, torchtitan splits the local batch into micro-batches.
    fn local_batch(&self) -> Result<Outcome, FrameworkError> {
        let keys = self.keys;
        let key = "training.local_batch_size";
        let local = keys.count(key, 8)?;
        let degree = |name: &str| keys.count(&format!("parallelism.{name}"), 1);
        let pp = degree("pipeline_parallel_degree")?;
        if pp <= 1 {
            return Ok(Outcome::set(key, local));
        }
        let micro = keys.count("parallelism.pipeline_parallel_microbatch_size", 1)?;
        let global = keys.rest("training.global_batch_size", None)?;
        let global = match global {
            Some(global) => global,
            None => {
                let replicate = degree("data_parallel_replicate_degree")?;
                let (cp, tp) = (
                    degree("context_parallel_degree")?,
                    degree("tensor_parallel_degree")?,
                );
                let taken = [pp, cp, tp, replicate];
                let shard = match keys.rest("parallelism.data_parallel_shard_degree", None)? {
                    Some(shard) => shard,
                    None => FRAMEWORK.left_of(self.options.world, &taken)?,
                };
                local.saturating_mul(replicate).saturating_mul(shard)
            }
        };
        Ok(Outcome::set_all([
            (key, micro.to_string()),
            ("training.global_batch_size", global.to_string()),
        ])
        .with_note("a pipeline splits the local batch into micro-batches"))
    }

    fn recompute(&self, mode: &str) -> Outcome {
        let key = "activation_checkpoint.mode";
        let option = "activation_checkpoint.selective_ac_option";
        match (mode, self.keys.get(option).unwrap_or("2")) {
            ("none" | "full", _) => Outcome::set(key, mode),
            ("selective", number) if number.parse::<usize>().is_ok() => Outcome::set_all([
                (key, "selective".to_owned()),
                (option, number.to_owned()),
            ]),
            _ => Outcome::set(key, "full").with_note(
                "Trainyard does not choose operators to recompute; blocks need less memory and more time",
            ),
        }
    }
}

fn dataset(key: &str, value: &str) -> Outcome {
    if DATASETS.contains(&value) {
        return Outcome::set(key, "tokens").with_note(format!(
            "text of Hugging Face's C4: prepare it with `trainyard data prepare`, and give the folder as \
             --{key}_path"
        ));
    }
    Outcome::rejected(
        "Trainyard reads token files",
        format!(
            "use c4 or c4_test, prepare the text with `trainyard data prepare`, and give --{key}_path"
        ),
    )
}
