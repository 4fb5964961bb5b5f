//! The operations of a step, for the throughput that a job reports.

use trainyard_config::ModelSpec;

/// FLOPs per target token as torchtitan counts them: 6 per parameter of a matrix product, plus attention.
pub(crate) fn flops_per_target(spec: &ModelSpec, seq_len: usize) -> f64 {
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
            // A convolution uses each weight once per pixel.
            let convolutions = (9 * 32 + 9 * 32 * 64) * 28 * 28;
            6.0 * f64::from(convolutions + 64 * 28 * 28 * 128 + 128 * 10)
        }
    }
}
