//! Validation across sections.

use crate::section::within;
use crate::{
    AttentionMask, Choice, Config, ConfigError, ContextMethod, Dataset, Dtype, GradientCompression,
    GuardPolicy, LocalUpdateMethod, ModelSpec, Offload, ParameterCompression,
};

impl Config {
    /// The type in which gradients are reduced, including compression.
    pub fn reduce_dtype(&self) -> Dtype {
        match self.parallelism.gradient_compression {
            GradientCompression::Bf16 => Dtype::Bfloat16,
            GradientCompression::Fp16 => Dtype::Float16,
            _ => {
                let asked = self.training.mixed_precision_reduce;
                asked.unwrap_or(self.training.dtype)
            }
        }
    }

    /// Rejects contradicting settings, as loading does. For configs that are built in code.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.training.check()?;
        self.parallelism.check()?;
        self.parallelism.check_degrees()?;
        self.optimizer.check()?;
        self.lr_scheduler.check()?;
        self.checkpoint.check()?;
        self.activation_checkpoint.check()?;
        self.metrics.check()?;
        self.profiling.check()?;
        self.validation.check()?;
        self.value_guard.check()?;
        self.check_rollback()?;
        self.comm.check()?;

        let model = self.model.resolve()?;
        if let Some(sizes) = model.decoder() {
            self.check_length(sizes.max_position_embeddings)?;
        }
        self.check_sharing(&model)?;
        self.check_loss(&model)?;
        self.check_experts(&model)?;
        within("debug.routing_skew", self.debug.routing_skew, 0.0, 1e6)?;
        self.check_documents(&model)?;
        self.check_datasets(&model)?;
        self.check_batch()?;
        self.check_schedule()?;
        self.check_compression()?;
        self.check_blocks()?;
        self.check_local_updates()?;
        self.check_sharding()
    }

    /// A registered loss gets the output of the model, of which tensor-parallel decoders have slices of the vocabulary.
    /// Only decoders have a vocabulary whose logits are worth dividing.
    fn check_loss(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        if self.training.num_loss_chunks > 1 && model.decoder().is_none() {
            return Err(ConfigError::contradiction(
                format!(
                    "training.num_loss_chunks = {} divides the logits of a decoder, but the model is not a decoder",
                    self.training.num_loss_chunks
                ),
                "remove training.num_loss_chunks",
            ));
        }
        if self.training.loss.is_some() && self.num_tensor_ranks() > 1 && model.decoder().is_some()
        {
            return Err(ConfigError::not_built(
                "training.loss with tensor-parallel decoders",
                "parallelism.tensor_parallel_degree = 1",
            ));
        }
        Ok(())
    }

    /// Validates settings that sharded states exclude.
    fn check_sharding(&self) -> Result<(), ConfigError> {
        let parallelism = &self.parallelism;
        let degree = parallelism.data_parallel_shard_degree;
        if degree == 1 || parallelism.zero_stage == 0 {
            return Ok(());
        }
        let sharded = format!("parallelism.data_parallel_shard_degree = {degree}");
        let compression = parallelism.gradient_compression;
        if compression.keeps_errors() {
            return Err(ConfigError::contradiction(
                format!(
                    "parallelism.gradient_compression = {:?} keeps an error of every gradient on every rank, but \
                         {sharded} shards gradients",
                    compression.name()
                ),
                "use parallelism.gradient_compression = \"int8\", or parallelism.zero_stage = 0",
            ));
        }
        if parallelism.find_unused_parameters {
            return Err(ConfigError::contradiction(
                format!(
                    "{sharded} needs a gradient of every parameter, so \
                         parallelism.find_unused_parameters has no meaning"
                ),
                "remove parallelism.find_unused_parameters",
            ));
        }
        Ok(())
    }

    /// Validates the requirements of document masks.
    fn check_documents(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        let end = self.training.eos_token_id;
        match (self.model.attn_mask_type, end) {
            (AttentionMask::Causal, None) => return Ok(()),
            (AttentionMask::BlockCausal, Some(_)) => {}
            (AttentionMask::BlockCausal, None) => {
                return Err(ConfigError::contradiction(
                    "model.attn_mask_type = \"block_causal\" masks documents, but \
                     training.eos_token_id is absent",
                    "set training.eos_token_id to the token that `data prepare --end-of-document` added",
                ));
            }
            (AttentionMask::Causal, Some(end)) => {
                return Err(ConfigError::contradiction(
                    format!(
                        "training.eos_token_id = {end} has a meaning only with \
                         model.attn_mask_type = \"block_causal\""
                    ),
                    "set that, or remove training.eos_token_id",
                ));
            }
        }
        let is_causal = model.decoder().is_some_and(|decoder| decoder.is_causal);
        if !is_causal && !matches!(model, ModelSpec::Custom(_)) {
            return Err(ConfigError::not_built(
                "model.attn_mask_type = \"block_causal\" in a model that is no decoder",
                "model.attn_mask_type = \"causal\"",
            ));
        }
        let method = self.parallelism.context_parallel_method;
        if self.num_context_ranks() > 1 && method == ContextMethod::Ring {
            return Err(ConfigError::not_built(
                "model.attn_mask_type = \"block_causal\" with ring attention",
                "parallelism.context_parallel_method = \"ulysses\"",
            ));
        }
        Ok(())
    }

    fn check_length(&self, longest: usize) -> Result<(), ConfigError> {
        let length = self.training.seq_len;
        if length <= longest {
            return Ok(());
        }
        Err(ConfigError::contradiction(
            format!(
                "training.seq_len = {length} exceeds model.max_position_embeddings = {longest}"
            ),
            format!("the nearest valid choice is training.seq_len = {longest}"),
        ))
    }

    fn check_datasets(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        self.check_dataset(model, "training.dataset", &self.training.dataset)?;
        let Some(dataset) = &self.validation.dataset else {
            return Ok(());
        };
        self.check_dataset(model, "validation.dataset", dataset)?;
        let same = *dataset == self.training.dataset;
        let reads_files = matches!(dataset, Choice::Builtin(Dataset::Mnist | Dataset::Tokens));
        if !reads_files || self.validation.dataset_path.is_some() || same {
            return Ok(());
        }
        Err(ConfigError::contradiction(
            "validation.dataset is read from disk, but validation.dataset_path is absent",
            "set validation.dataset_path",
        ))
    }

    /// A job can only go back to a checkpoint that exists.
    fn check_rollback(&self) -> Result<(), ConfigError> {
        let has_checkpoints = self.checkpoint.enable || self.checkpoint.memory_interval > 0;
        if self.value_guard.policy != GuardPolicy::Rollback || has_checkpoints {
            return Ok(());
        }
        Err(ConfigError::contradiction(
            "value_guard.policy = \"rollback\", but checkpoint.enable is false",
            "set checkpoint.enable = true, or value_guard.policy = \"skip\"",
        ))
    }

    /// Validates what does not depend on the number of ranks.
    fn check_batch(&self) -> Result<(), ConfigError> {
        self.batching(1).map(drop)
    }

    fn check_schedule(&self) -> Result<(), ConfigError> {
        if self.training.epochs.is_some() {
            return Ok(()); // checked when the dataset has given the number of steps
        }
        let (warmup, steps) = (self.lr_scheduler.warmup_steps, self.training.steps);
        if warmup > steps {
            return Err(ConfigError::contradiction(
                format!("lr_scheduler.warmup_steps = {warmup} exceeds training.steps = {steps}"),
                format!("the nearest valid choice is lr_scheduler.warmup_steps = {steps}"),
            ));
        }
        let ratio = self.lr_scheduler.decay_ratio.unwrap_or(0.0);
        let left = (steps - warmup) as f64 / steps as f64;
        if ratio > left {
            return Err(ConfigError::contradiction(
                format!(
                    "lr_scheduler.decay_ratio = {ratio} of training.steps = {steps} begins before \
                     lr_scheduler.warmup_steps = {warmup} are over"
                ),
                format!("the nearest valid choice is lr_scheduler.decay_ratio = {left}"),
            ));
        }
        Ok(())
    }

    /// Parameters that tensor-parallel ranks replicate would share blocks with parameters that they shard, and be rounded
    /// differently on every rank.
    fn check_blocks(&self) -> Result<(), ConfigError> {
        let parallelism = &self.parallelism;
        let key = if parallelism.gradient_compression.encodes_blocks() {
            "parallelism.gradient_compression"
        } else if parallelism.parameter_compression != ParameterCompression::None {
            "parallelism.parameter_compression"
        } else {
            return Ok(());
        };
        match self.num_tensor_ranks() {
            1 => Ok(()),
            _ => Err(ConfigError::not_built(
                format!("{key} in blocks with tensor parallelism"),
                "parallelism.tensor_parallel_degree = 1",
            )),
        }
    }

    /// Validates what local updates cannot be combined with.
    fn check_combinations_of_local_updates(&self) -> Result<(), ConfigError> {
        let (section, parallelism) = (&self.local_updates, &self.parallelism);
        let is_sharded = parallelism.data_parallel_shard_degree != 1;
        let is_split = parallelism.pipeline_parallel_degree > 1 || self.num_tensor_ranks() > 1;
        let encodes_blocks =
            section.compression.encodes_blocks() || section.method == LocalUpdateMethod::SparseLoco;
        let limits = [
            (
                parallelism.offload != Offload::None,
                "local_updates with offloaded states",
                "parallelism.offload = \"none\"",
            ),
            (
                is_sharded && [1, 2].contains(&parallelism.zero_stage),
                "local_updates with ZeRO stages 1 and 2",
                "parallelism.zero_stage = 3, or 0",
            ),
            (
                encodes_blocks && is_split,
                "compressed local_updates with tensor or pipeline parallelism",
                "local_updates.compression = \"bf16\"",
            ),
            (
                section.num_fragments > 1 && parallelism.pipeline_parallel_degree > 1,
                "fragments of local_updates with pipeline parallelism",
                "local_updates.num_fragments = 1",
            ),
            (
                section.num_fragments > 1 && !parallelism.shard_experts,
                "fragments of local_updates with experts that are not sharded",
                "local_updates.num_fragments = 1",
            ),
            (
                section.compression == GradientCompression::PowerSgd,
                "local_updates.compression = \"power_sgd\"",
                "local_updates.compression = \"int8\"",
            ),
            (
                parallelism.find_unused_parameters,
                "local_updates with parallelism.find_unused_parameters",
                "parallelism.find_unused_parameters = false",
            ),
            (
                self.value_guard.spike_threshold > 0.0,
                "local_updates with value_guard.spike_threshold",
                "value_guard.spike_threshold = 0",
            ),
        ];
        match limits.into_iter().find(|(is_met, _, _)| *is_met) {
            Some((_, what, instead)) => Err(ConfigError::not_built(what, instead)),
            None => Ok(()),
        }
    }

    fn check_local_updates(&self) -> Result<(), ConfigError> {
        let section = &self.local_updates;
        section.check()?;
        let degree = self.parallelism.data_parallel_outer_degree;
        if section.method == LocalUpdateMethod::None {
            return match degree {
                1 => Ok(()),
                _ => Err(ConfigError::contradiction(
                    format!(
                        "parallelism.data_parallel_outer_degree = {degree}, but local_updates.method = \"none\" joins no \
                         replicas"
                    ),
                    "use local_updates.method = \"diloco\", or parallelism.data_parallel_replicate_degree",
                )),
            };
        }
        self.check_combinations_of_local_updates()?;
        let is_compressed = section.method == LocalUpdateMethod::SparseLoco
            || section.compression != GradientCompression::None;
        if is_compressed && self.training.dtype == Dtype::Float64 {
            return Err(ConfigError::contradiction(
                "the compression of [local_updates] loses the precision of training.dtype = \"float64\"",
                "use another local_updates.method, or local_updates.compression = \"none\"",
            ));
        }
        Ok(())
    }

    fn check_compression(&self) -> Result<(), ConfigError> {
        let name = match self.parallelism.gradient_compression {
            GradientCompression::None => return Ok(()),
            compression => compression.name(),
        };
        let asked = self.training.mixed_precision_reduce;
        if let Some(dtype) = asked.filter(|&dtype| dtype != self.reduce_dtype()) {
            return Err(ConfigError::contradiction(
                format!(
                    "parallelism.gradient_compression = {name:?} sends what \
                     training.mixed_precision_reduce = {:?} forbids",
                    dtype.name()
                ),
                "remove one of them",
            ));
        }
        let is_scaled =
            [self.training.compute_dtype(), self.reduce_dtype()].contains(&Dtype::Float16);
        if self.parallelism.gradient_compression.keeps_errors() && is_scaled {
            return Err(ConfigError::contradiction(
                format!(
                    "parallelism.gradient_compression = {name:?} keeps errors of gradients, which float16 multiplies by a \
                     loss scale that changes"
                ),
                "use training.mixed_precision_param = \"bfloat16\"",
            ));
        }
        if self.parallelism.gradient_compression.keeps_errors()
            && self.parallelism.offload != Offload::None
        {
            return Err(ConfigError::contradiction(
                format!(
                    "parallelism.gradient_compression = {name:?} is for gradients that are not sharded, but parallelism.offload \
                     shards states"
                ),
                "use parallelism.offload = \"none\"",
            ));
        }
        within(
            "parallelism.gradient_compression_ratio",
            self.parallelism.gradient_compression_ratio,
            1.0 / 4096.0,
            1.0,
        )?;
        if self.training.dtype == Dtype::Float64 {
            return Err(ConfigError::contradiction(
                format!(
                    "parallelism.gradient_compression = {name:?} loses the precision of training.dtype = \
                     \"float64\""
                ),
                "use parallelism.gradient_compression = \"none\"",
            ));
        }
        Ok(())
    }

    fn check_dataset(
        &self,
        model: &ModelSpec,
        key: &str,
        dataset: &Choice<Dataset>,
    ) -> Result<(), ConfigError> {
        let Choice::Builtin(dataset) = dataset else {
            return Ok(());
        };
        match (model, dataset) {
            (ModelSpec::Decoder(_), Dataset::Mnist) => Err(ConfigError::contradiction(
                format!("the model reads tokens, but {key} = \"mnist\" has images"),
                format!("use {key} = \"synthetic\" or \"tokens\""),
            )),
            (ModelSpec::Cnn | ModelSpec::Vit(_), Dataset::Tokens) => {
                Err(ConfigError::contradiction(
                    format!("the model reads images, but {key} = \"tokens\" has none"),
                    format!("use {key} = \"synthetic\" or \"mnist\""),
                ))
            }
            (ModelSpec::Custom(name), Dataset::Synthetic | Dataset::Tokens)
                if self.model.vocab_size.is_none() =>
            {
                Err(ConfigError::contradiction(
                    format!(
                        "{key} has tokens, but the vocabulary of model.name = {name:?} is unknown"
                    ),
                    "set model.vocab_size, or use a dataset that the program registers",
                ))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rejection(text: &str) -> String {
        Config::parse(text, &[]).unwrap_err().to_string()
    }

    #[test]
    fn contradictions_name_both_sides_and_a_way_out() {
        for (text, conflict, remedy) in [
            (
                "training.seq_len = 4096",
                "max_position_embeddings = 2048",
                "seq_len = 2048",
            ),
            (
                "training.steps = 5\nlr_scheduler.warmup_steps = 6",
                "training.steps = 5",
                "warmup_steps = 5",
            ),
            (
                "training.steps = 10\nlr_scheduler.warmup_steps = 5\nlr_scheduler.decay_ratio = 0.9",
                "decay_ratio = 0.9",
                "decay_ratio = 0.5",
            ),
            (
                "training.local_batch_size = 4\ntraining.global_batch_size = 6",
                "not a multiple",
                "global_batch_size = 8",
            ),
            (
                "model.num_key_value_heads = 3",
                "num_attention_heads = 4",
                "num_key_value_heads = 2",
            ),
            (
                "training.dtype = \"float64\"\ntraining.mixed_precision_param = \"bfloat16\"",
                "cannot be mixed",
                "remove training.mixed_precision_param",
            ),
            (
                "model.name = \"cnn\"\nmodel.vocab_size = 3",
                "fixed dimensions",
                "remove them",
            ),
            (
                "training.dataset = \"mnist\"\ntraining.dataset_path = \"x\"",
                "has images",
                "\"tokens\"",
            ),
            (
                "training.dataset = \"tokens\"",
                "dataset_path is absent",
                "set training.dataset_path",
            ),
            (
                "lr_scheduler.decay_type = \"constant\"\nlr_scheduler.decay_ratio = 0.1",
                "never falls",
                "remove decay_ratio",
            ),
            (
                "training.mixed_precision_reduce = \"float32\"\nparallelism.gradient_compression = \"bf16\"",
                "forbids",
                "remove one",
            ),
            (
                "activation_checkpoint.mode = \"memory_budget\"",
                "memory_budget_bytes is absent",
                "set activation_checkpoint.memory_budget_bytes",
            ),
            (
                "activation_checkpoint.selective_ac_option = \"op\"",
                "is not valid",
                "\"attention\"",
            ),
            ("optimizer.lr = nan", "optimizer.lr expects", "a number"),
            ("optimizer.lr = -1", "optimizer.lr = -1", "choice is 0"),
            ("optimizer.lr = inf", "finite", "finite number"),
            (
                "training.local_batch_size = 0",
                "local_batch_size = 0",
                "1 or more",
            ),
        ] {
            let message = rejection(text);
            assert!(message.contains(conflict), "{text}: {message}");
            assert!(message.contains(remedy), "{text}: {message}");
        }
    }

    #[test]
    fn gradients_are_reduced_in_the_configured_type() {
        let dtype = |text| Config::parse(text, &[]).unwrap().reduce_dtype();
        assert_eq!(dtype(""), Dtype::Float32);
        assert_eq!(dtype("training.dtype = \"float64\""), Dtype::Float64);
        assert_eq!(
            dtype("training.mixed_precision_reduce = \"bfloat16\""),
            Dtype::Bfloat16
        );
        assert_eq!(
            dtype("parallelism.gradient_compression = \"bf16\""),
            Dtype::Bfloat16
        );
    }
}
