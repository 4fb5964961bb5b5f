//! Datasets, the distributed sampler and the data loader.
//!
//! The samples of a job and their order depend on the seed and on the number of samples before, never on
//! the number of ranks. A [`Source`] is a map-style dataset: it returns sample `i`. The [`Sampler`] is a pure
//! function from step, micro-batch and rank to sample positions, so that a run can start anywhere and
//! continue on another number of ranks. The [`Loader`] prefetches micro-batches in threads.

mod collate;
mod error;
mod loader;
mod masked_tokens;
mod mixture;
mod mnist;
mod order;
mod placeholder;
mod sample_stream;
mod sampler;
mod source;
mod step;
mod synthetic;
mod tokens;

pub use collate::{Batch, collate};
pub use error::DataError;
pub use loader::{Loader, LoaderOptions};
pub use masked_tokens::MaskedTokens;
pub use mixture::Mixture;
pub use mnist::{Mnist, Split};
pub use order::Order;
pub use placeholder::Placeholder;
pub use sample_stream::SampleStream;
pub use sampler::Sampler;
pub use source::{Array, IMAGE_SIDE, Sample, Source, Values};
pub use step::step_batches;
pub use synthetic::{SyntheticImages, SyntheticTokens};
pub use tokens::{TokenFile, write_tokens};
pub use trainyard_torch::IGNORE_INDEX;
