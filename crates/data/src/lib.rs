//! Sources of samples, the sampler, the loader.
//!
//! Which samples a job sees, and in which order, depends on the seed and on how many samples came
//! before; never on the number of ranks. A [`Source`] answers "sample number i". The [`Sampler`]
//! says which numbers a rank computes in a micro-batch of a step, as a pure function, so a run can
//! start anywhere and continue on another number of ranks. The [`Loader`] walks along that
//! function in threads, ahead of the training loop.

mod collate;
mod error;
mod loader;
mod mixture;
mod mnist;
mod order;
mod sampler;
mod source;
mod step;
mod synthetic;
mod tokens;

pub use collate::{Batch, collate};
pub use error::DataError;
pub use loader::{Loader, LoaderOptions};
pub use mixture::Mixture;
pub use mnist::{Mnist, Split};
pub use order::Order;
pub use sampler::Sampler;
pub use source::{IMAGE_SIDE, Sample, Source};
pub use step::step_batches;
pub use synthetic::{SyntheticImages, SyntheticTokens};
pub use tokens::{TokenFile, write_tokens};
