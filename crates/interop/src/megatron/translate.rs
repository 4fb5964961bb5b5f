//! Translates Megatron-LM's flags one by one to Trainyard's config.

use super::super::{FrameworkError, Outcome, TranslateOptions, Translation};
use super::flags::Flags;
use super::read::{read_layers, read_stage};
use super::{FRAMEWORK, keys, model, model_keys};
use trainyard_arch::DecoderConfig;
use trainyard_plan::Degrees;

/// Megatron's defaults that change the result and are not ours.
const DEFAULTS: [(&str, &str); 8] = [
    ("--weight-decay", "0.01"),
    ("--adam-beta2", "0.999"),
    ("--lr-decay-style", "linear"),
    ("--clip-grad", "1.0"),
    ("--hidden-dropout", "0.1"),
    ("--attention-dropout", "0.1"),
    ("--seed", "1234"),
    ("--data-path", ""),
];

pub(in super::super) fn translate(
    text: &str,
    options: &TranslateOptions,
) -> Result<Translation, FrameworkError> {
    let mut flags = Flags::parse(text)?;
    let mut defaults: Vec<&str> = Vec::new();
    if !options.has_model {
        let has_data = ["--mock-data", "--train-data-path", "--data-args-path"]
            .iter()
            .any(|flag| flags.has(flag));
        for (flag, value) in DEFAULTS {
            let is_needed = !(flag == "--data-path" && has_data);
            if is_needed && flags.set_default(flag, value) {
                defaults.push(flag);
            }
        }
    }
    let context = Context {
        shape: model::read(&flags)?,
        flags: &flags,
        options,
    };
    let mut translation = Translation::default();
    for (flag, value) in flags.iter() {
        let outcome = context.outcome(flag, &value)?;
        let shown = match (defaults.contains(&flag), value.as_str()) {
            (true, "") => "(absent)".to_owned(),
            (true, value) => format!("{value} (Megatron's default)"),
            (false, value) => value.to_owned(),
        };
        translation.push(flag, shown, outcome);
    }
    if !options.has_model && context.shape.is_none() {
        let remedy = "add --num-layers, --hidden-size and --num-attention-heads, or a CONFIG.toml";
        translation.push(
            "--num-layers",
            "(absent)",
            Outcome::rejected("there is no model", remedy),
        );
    }
    Ok(translation)
}

pub(super) struct Context<'a> {
    pub flags: &'a Flags,
    shape: Option<DecoderConfig>,
    options: &'a TranslateOptions,
}

impl Context<'_> {
    fn outcome(&self, flag: &str, value: &str) -> Result<Outcome, FrameworkError> {
        if let Some(outcome) = self.model(flag, value)? {
            return Ok(outcome);
        }
        if let Some(outcome) = self.layout(flag, value)? {
            return Ok(outcome);
        }
        if let Some(outcome) = self.schedule(flag, value)? {
            return Ok(outcome);
        }
        keys::outcome(self.flags, flag, value)
    }

    /// The flags that describe the model.
    fn model(&self, flag: &str, value: &str) -> Result<Option<Outcome>, FrameworkError> {
        if !model_keys::is_flag(flag) {
            return Ok(None);
        }
        if self.options.has_model {
            return Ok(Some(Outcome::left("CONFIG.toml describes the model")));
        }
        Ok(Some(match (flag, &self.shape) {
            ("--num-layers", Some(shape)) => model_keys::outcome(self.flags, shape)?,
            ("--hidden-dropout", _) => Outcome::set("model.resid_pdrop", value),
            ("--attention-dropout", _) if value.parse() == Ok(0.0) => {
                Outcome::left("attention has no dropout here")
            }
            ("--attention-dropout", _) => {
                Outcome::rejected("attention has no dropout", "use --attention-dropout 0")
            }
            ("--init-method-std", _) if value != "0.02" => Outcome::rejected(
                "weights begin with a standard deviation of 0.02",
                "use 0.02, or model.initial_weights",
            ),
            _ => Outcome::left("part of the model, at --num-layers"),
        }))
    }

    /// Parallel degrees, sharding and pipelines.
    fn layout(&self, flag: &str, value: &str) -> Result<Option<Outcome>, FrameworkError> {
        let flags = self.flags;
        let degree = || flags.degree(flag);
        let set = |key: &str| degree().map(|degree| Outcome::set(key, degree));
        Ok(Some(match flag {
            "--tensor-model-parallel-size" => set("parallelism.tensor_parallel_degree")?,
            "--pipeline-model-parallel-size" => set("parallelism.pipeline_parallel_degree")?,
            "--context-parallel-size" => set("parallelism.context_parallel_degree")?,
            "--expert-model-parallel-size" => set("parallelism.expert_parallel_degree")?,
            "--cp-comm-type" if value == "a2a" => {
                Outcome::set("parallelism.context_parallel_method", "ulysses")
            }
            "--sequence-parallel" => Outcome::set("parallelism.enable_sequence_parallel", true),
            "--use-distributed-optimizer" | "--use-megatron-fsdp" => self.sharding()?,
            "--data-parallel-sharding-strategy" => {
                Outcome::left("the stage of --use-megatron-fsdp")
            }
            "--num-distributed-optimizer-instances" => {
                Outcome::left("the replicas of --use-distributed-optimizer")
            }
            "--num-virtual-stages-per-pipeline-rank"
            | "--num-layers-per-virtual-pipeline-stage" => self.interleaving()?,
            "--overlap-grad-reduce" => Outcome::set("parallelism.overlap", true),
            "--tp-comm-overlap" => Outcome::set("parallelism.enable_async_tensor_parallel", true),
            "--optimizer-cpu-offload" => Outcome::set_all([
                ("parallelism.offload", "cpu".to_owned()),
                ("parallelism.offload_states", "optimizer".to_owned()),
            ]),
            "--recompute-granularity" => match value {
                "full" | "selective" => Outcome::set("activation_checkpoint.mode", value),
                _ => Outcome::ignored("it changes memory and speed only"),
            },
            "--recompute-activations" => Outcome::set("activation_checkpoint.mode", "selective"),
            _ => return Ok(None),
        }))
    }

    fn sharding(&self) -> Result<Outcome, FrameworkError> {
        let stage = read_stage(self.flags)?;
        let replicas = self.flags.degree("--num-distributed-optimizer-instances")?;
        let (replicate, shard) = match stage {
            0 => ("-1".to_owned(), "1"),
            _ => (replicas.to_string(), "-1"),
        };
        let mut settings = vec![
            ("parallelism.data_parallel_replicate_degree", replicate),
            ("parallelism.data_parallel_shard_degree", shard.to_owned()),
        ];
        if stage > 0 {
            settings.push(("parallelism.zero_stage", stage.to_string()));
        }
        Ok(Outcome::set_all(settings))
    }

    fn interleaving(&self) -> Result<Outcome, FrameworkError> {
        let degrees = Degrees {
            pp: self.flags.degree("--pipeline-model-parallel-size")?.max(1),
            ..Degrees::ONE
        };
        let layout = read_layers(self.flags, &degrees, self.shape.as_ref())?;
        Ok(match layout.stages_per_rank {
            1 => Outcome::set("parallelism.pipeline_parallel_schedule", "1F1B"),
            stages => Outcome::set_all([
                (
                    "parallelism.pipeline_parallel_schedule",
                    "interleaved".to_owned(),
                ),
                (
                    "parallelism.pipeline_parallel_stages_per_rank",
                    stages.to_string(),
                ),
            ]),
        })
    }

    /// Steps, batch sizes and the learning rate.
    fn schedule(&self, flag: &str, value: &str) -> Result<Option<Outcome>, FrameworkError> {
        let flags = self.flags;
        let iterations = || flags.number("--train-iters");
        let set = |key: &str| Outcome::set(key, value);
        Ok(Some(match flag {
            "--micro-batch-size" if !flags.has("--global-batch-size") => self.batch()?,
            "--micro-batch-size" => Outcome::set(
                "training.local_batch_size",
                flags.needed("--micro-batch-size")?,
            ),
            "--global-batch-size" => set("training.global_batch_size"),
            "--seq-length" => set("training.seq_len"),
            "--train-iters" => set("training.steps"),
            "--train-samples" => {
                match (flags.number(flag)?, flags.number("--global-batch-size")?) {
                    (Some(samples), Some(batch)) if batch > 0 => {
                        Outcome::set("training.steps", samples / batch)
                    }
                    _ => Outcome::rejected(
                        "the number of steps follows from the batch size",
                        "give --global-batch-size, or --train-iters",
                    ),
                }
            }
            "--lr" => set("optimizer.lr"),
            "--min-lr" => match (value.parse::<f64>(), self.number("--lr")?) {
                (Ok(least), Some(peak)) if peak > 0.0 => {
                    Outcome::set("lr_scheduler.min_lr_factor", least / peak)
                }
                _ => Outcome::rejected("it is relative to --lr", "give --lr"),
            },
            "--lr-decay-style" => match value {
                "constant" | "linear" | "cosine" => set("lr_scheduler.decay_type"),
                _ => Outcome::rejected(
                    "Trainyard has no such decay",
                    "use constant, linear or cosine",
                ),
            },
            "--lr-decay-iters" if flags.number(flag)? == iterations()? => {
                Outcome::left("the schedule ends with training.steps")
            }
            "--lr-decay-iters" | "--lr-decay-samples" => Outcome::rejected(
                "the schedule ends with training.steps",
                "use --lr-decay-iters of --train-iters",
            ),
            "--lr-warmup-iters" => set("lr_scheduler.warmup_steps"),
            "--lr-warmup-fraction" => match (self.number(flag)?, iterations()?) {
                (Some(share), Some(steps)) => {
                    Outcome::set("lr_scheduler.warmup_steps", (share * steps as f64) as u64)
                }
                _ => Outcome::rejected("it is a share of --train-iters", "use --lr-warmup-iters"),
            },
            "--lr-warmup-samples" => {
                Outcome::rejected("warm-up is in steps", "use --lr-warmup-iters")
            }
            "--lr-warmup-init" if value.parse() != Ok(0.0) => {
                Outcome::rejected("warm-up starts at 0", "use 0")
            }
            "--rampup-batch-size" => Outcome::rejected(
                "the batch size is constant",
                "use --global-batch-size alone",
            ),
            _ => return Ok(None),
        }))
    }

    fn number(&self, flag: &str) -> Result<Option<f64>, FrameworkError> {
        let Some(value) = self.flags.get(flag) else {
            return Ok(None);
        };
        value.parse().map(Some).map_err(|_| FrameworkError::Value {
            key: flag.to_owned(),
            value,
            expected: "a number",
        })
    }

    /// Without a global batch, there is one micro-batch per data-parallel rank.
    fn batch(&self) -> Result<Outcome, FrameworkError> {
        let flags = self.flags;
        let micro = flags.needed("--micro-batch-size")?;
        let world = flags.world.or(self.options.world);
        let taken = [
            flags.degree("--tensor-model-parallel-size")?,
            flags.degree("--context-parallel-size")?,
            flags.degree("--pipeline-model-parallel-size")?,
        ];
        let ranks = match world {
            Some(_) => FRAMEWORK.left_of(world, &taken)?,
            None => 1,
        };
        Ok(Outcome::set_all([
            ("training.local_batch_size", micro.to_string()),
            (
                "training.global_batch_size",
                micro.saturating_mul(ranks).to_string(),
            ),
        ]))
    }
}
