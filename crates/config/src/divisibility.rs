//! Whether tensor-, context- and pipeline-parallel degrees divide the dimensions of the model.

use trainyard_arch::{DecoderConfig, QkNorm};
use trainyard_mesh::chunk;

use crate::{Config, ConfigError, ContextMethod, ModelSpec, Offload};

/// The outputs of the first linear layer of the CNN, which tensor-parallel ranks share.
const CNN_HIDDEN_SIZE: usize = 128;

impl Config {
    /// Rejects degrees of `tp` and `cp` that do not divide the model. Expects validated degrees.
    pub(crate) fn check_sharing(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        self.check_pipeline(model)?;
        let (tp, cp) = (self.num_tensor_ranks(), self.num_context_ranks());
        if tp == 1 && cp == 1 {
            return Ok(());
        }
        let sizes = match model {
            ModelSpec::Decoder(sizes) => sizes,
            // Only the program knows its dimensions; its layers check them.
            ModelSpec::Custom(_) => return Ok(()),
            ModelSpec::Cnn | ModelSpec::Vit(_) => return self.check_images(model),
        };
        let is_ring = cp > 1 && self.parallelism.context_parallel_method == ContextMethod::Ring;
        if is_ring && !sizes.is_causal {
            return Err(ConfigError::not_built(
                "an encoder with ring attention",
                "parallelism.context_parallel_method = \"ulysses\"",
            ));
        }
        let window = sizes.sliding_window.map(|window| window.sliding_window);
        if is_ring && window.is_some_and(|window| window < self.training.seq_len) {
            return Err(ConfigError::not_built(
                "a model with sliding windows with ring attention",
                "parallelism.context_parallel_method = \"ulysses\"",
            ));
        }
        for requirement in self.requirements(sizes) {
            requirement.check()?;
        }
        check_words(sizes.vocab_size, tp)
    }

    /// Rejects degrees that do not divide a model of images.
    fn check_images(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        if self.num_context_ranks() > 1 {
            return Err(ConfigError::contradiction(
                "parallelism.context_parallel_degree shards sequences, but the model reads images",
                "use parallelism.data_parallel_replicate_degree",
            ));
        }
        let by_tp = ("tensor_parallel_degree", self.num_tensor_ranks());
        let requirements = match model {
            ModelSpec::Vit(vit) => vec![
                ("model.num_attention_heads", vit.encoder.num_attention_heads),
                ("model.intermediate_size", vit.encoder.intermediate_size),
            ],
            _ => vec![("the hidden layer of the CNN", CNN_HIDDEN_SIZE)],
        };
        let mut requirements = requirements.into_iter();
        requirements
            .try_for_each(|(what, length)| Requirement::divides(what, length, by_tp).check())
    }

    /// Validates settings that a pipeline excludes.
    fn check_pipeline(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        let degree = self.parallelism.pipeline_parallel_degree;
        if degree <= 1 {
            return Ok(());
        }
        let key = format!("parallelism.pipeline_parallel_degree = {degree}");
        let kind = self.parallelism.schedule_kind()?;
        let Some(num_units) = model.num_units() else {
            return Ok(());
        };
        let num_units = num_units as i64;
        let is_tied = model
            .decoder()
            .is_some_and(|sizes| sizes.tie_word_embeddings);
        let is_offloaded = self.parallelism.offload != Offload::None;
        if is_tied && (is_offloaded || self.parallelism.data_parallel_shard_degree != 1) {
            return Err(ConfigError::not_built(
                format!("{key} with model.tie_word_embeddings and sharded or offloaded states"),
                "parallelism.data_parallel_shard_degree = 1 and parallelism.offload = \"none\"",
            ));
        }
        let chunks = self.parallelism.pipeline_parallel_stages_per_rank;
        let chunks = kind.num_chunks().unwrap_or(chunks);
        let num_stages = degree.saturating_mul(chunks as i64);
        let num_blocks = (num_units - 2).max(0) as usize;
        if let Some(points) = self.parallelism.split_points()? {
            let last = points.last().copied().unwrap_or(0);
            let is_right = points.len() as i64 + 1 == num_stages && last < num_blocks;
            if !is_right {
                return Err(ConfigError::contradiction(
                    format!(
                        "parallelism.pipeline_parallel_split_points cut {num_blocks} blocks {} times, for \
                         {num_stages} stages",
                        points.len()
                    ),
                    format!("name the first blocks of {} stages", num_stages - 1),
                ));
            }
        }
        if num_stages > num_units {
            return Err(ConfigError::contradiction(
                format!(
                    "{key} x {chunks} per rank = {num_stages} stages, but the model has {num_units} units"
                ),
                format!("use at most {num_units} stages"),
            ));
        }
        Ok(())
    }

    /// The tensor-parallel degree.
    pub(crate) fn num_tensor_ranks(&self) -> usize {
        usize::try_from(self.parallelism.tensor_parallel_degree).unwrap_or(1)
    }

    /// The context-parallel degree.
    pub(crate) fn num_context_ranks(&self) -> usize {
        usize::try_from(self.parallelism.context_parallel_degree).unwrap_or(1)
    }

    fn requirements(&self, shape: &DecoderConfig) -> Vec<Requirement> {
        let (tp, cp) = (self.num_tensor_ranks(), self.num_context_ranks());
        let (by_tp, by_cp) = (
            ("tensor_parallel_degree", tp),
            ("context_parallel_degree", cp),
        );
        let length = self.training.seq_len;
        let mut all = vec![
            Requirement::divides(
                "model.num_attention_heads",
                shape.num_attention_heads,
                by_tp,
            ),
            Requirement::fits(
                "model.num_key_value_heads",
                shape.num_key_value_heads,
                by_tp,
            ),
            Requirement::divides("model.intermediate_size", shape.intermediate_size, by_tp),
        ];
        if shape.qk_norm == Some(QkNorm::AllHeads) {
            let heads = shape.num_key_value_heads;
            all.push(Requirement::divides(
                "model.num_key_value_heads",
                heads,
                by_tp,
            ));
        }
        match self.parallelism.context_parallel_method {
            _ if cp == 1 => {}
            ContextMethod::Ring => {
                let twice = (
                    "context_parallel_degree (two chunks each)",
                    cp.saturating_mul(2),
                );
                all.push(Requirement::divides("training.seq_len", length, twice));
            }
            ContextMethod::Ulysses => {
                let heads = shape.num_attention_heads / tp.max(1);
                let kv_heads = (shape.num_key_value_heads / tp.max(1)).max(1);
                let (of_tp, of_kv) = (
                    "model.num_attention_heads of one tensor-parallel rank",
                    "model.num_key_value_heads of one tensor-parallel rank",
                );
                all.push(Requirement::divides("training.seq_len", length, by_cp));
                all.push(Requirement::divides(of_tp, heads, by_cp));
                all.push(Requirement::fits(of_kv, kv_heads, by_cp));
            }
        }
        if self.parallelism.enable_sequence_parallel {
            let part = length / cp.max(1);
            all.push(Requirement::divides(
                "training.seq_len of one rank",
                part,
                by_tp,
            ));
        }
        all
    }
}

/// The vocabulary need not be divisible, but each rank needs at least one row.
fn check_words(vocab_size: usize, tp: usize) -> Result<(), ConfigError> {
    if chunk(vocab_size, tp, tp.saturating_sub(1)).is_empty() {
        Err(ConfigError::contradiction(
            format!(
                "model.vocab_size = {vocab_size} leaves the last of \
                 parallelism.tensor_parallel_degree = {tp} ranks without a word"
            ),
            "use fewer ranks",
        ))
    } else {
        Ok(())
    }
}

/// A dimension that a degree must divide.
struct Requirement {
    what: &'static str,
    length: usize,
    degree: (&'static str, usize),
    /// Whether a multiple is valid too: then each element is replicated on several ranks.
    may_repeat: bool,
}

impl Requirement {
    fn divides(what: &'static str, length: usize, degree: (&'static str, usize)) -> Requirement {
        Requirement {
            what,
            length,
            degree,
            may_repeat: false,
        }
    }

    fn fits(what: &'static str, length: usize, degree: (&'static str, usize)) -> Requirement {
        Requirement {
            may_repeat: true,
            ..Requirement::divides(what, length, degree)
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        let (key, ranks) = self.degree;
        let is_even = self.length.is_multiple_of(ranks);
        if is_even || (self.may_repeat && self.length > 0 && ranks.is_multiple_of(self.length)) {
            return Ok(());
        }
        // No job has more ranks, and counting down from any number would take forever.
        let most = ranks.min(self.length).min(1 << 16);
        let nearest = (1..=most).rev().find(|&n| self.length.is_multiple_of(n));
        Err(ConfigError::contradiction(
            format!(
                "{} = {} is not divisible by parallelism.{key} = {ranks}",
                self.what, self.length
            ),
            format!(
                "the nearest number that divides it is {}",
                nearest.unwrap_or(1)
            ),
        ))
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    fn rejection(parallelism: &str) -> String {
        let text = format!(
            "[model]\nflavor = \"tiny\"\nnum_attention_heads = 6\nnum_key_value_heads = 2\n\
             hidden_size = 96\nintermediate_size = 96\nvocab_size = 96\n\
             [training]\nseq_len = 24\n[parallelism]\n{parallelism}"
        );
        match Config::parse(&text, &[]) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn indivisible_degrees_are_rejected_with_a_suggestion() {
        assert_eq!(rejection("tensor_parallel_degree = 2"), "");
        let message = rejection("tensor_parallel_degree = 4");
        assert!(
            message.contains("num_attention_heads = 6") && message.contains("divides it is 3"),
            "{message}"
        );
        // Three divides six heads, but neither divides nor is a multiple of two.
        let message = rejection("tensor_parallel_degree = 3");
        assert!(message.contains("num_key_value_heads = 2"), "{message}");
        assert_eq!(rejection("tensor_parallel_degree = 6"), "");
        assert_eq!(rejection("context_parallel_degree = 3"), "");
        let message = rejection("context_parallel_degree = 8");
        assert!(message.contains("seq_len = 24"), "{message}");
        let ulysses = "context_parallel_method = \"ulysses\"\ncontext_parallel_degree =";
        assert_eq!(rejection(&format!("{ulysses} 2")), "");
        let message = rejection(&format!("{ulysses} 8"));
        assert!(message.contains("num_attention_heads"), "{message}");
    }
}
